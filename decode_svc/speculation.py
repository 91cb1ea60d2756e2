"""How many drafts each sequence computes in a step: as many as are expected to pay, none where they would not.

A step with drafts takes longer and yields more tokens. What it takes is learned from steps (`engine.step_time`), what
it yields from drafts that came true (`decode_svc.acceptance`). Rows are added, the likeliest first, while they raise
the tokens a millisecond; so one sequence alone drafts far and a full batch hardly. Small gains neither begin nor end
drafting: what was not drafted last time must pay by a margin. Of whom not even the likeliest draft would pay, the
drafter is not asked.

Decides only: the tokens a request gets follow from the samples after each row (`DecodeScheduler.commit`). Drafts never
evict anyone, take no part of a step from prompts, and are not longer than half of what is expected to come.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace

from decode_svc.acceptance import Acceptance, Own
from decode_svc.draft_totals import DraftTotals
from engine.drafters import Drafter
from engine.holdings import Holdings
from engine.lengths import OutputLengths
from engine.planning import Plan
from engine.request import Sample
from engine.scheduling import Limits, NewToken
from engine.sequence import Sequence
from engine.step_time import StepLoad, StepTimes

FIRST_DRAFTS = 4
"""Drafts of a step with which one begins, or as many as it has sequences; each may have twice as many more as were
usual, because of larger steps nothing is known."""
FIRST_LENGTH = 16
"""The same of one sequence, shared among those of the step: each may have so many more than was usual, at least one.
Where each further draft takes another run of a model, it is one. While times are not known nothing is usual."""
USUAL_KEPT = 0.98
"""Weight of what was usual, at each step."""
MARGIN = 0.95
"""What a draft beyond those of the last time counts, by its chance to come true."""
PLAIN_EVERY = 128
"""Steps with drafts after which one has none; while times are not known, every other one. Steps that all have as many
drafts do not show what these cost."""
RETRY_STEPS = 64
"""Steps after which a sequence that `acceptance_threshold` has brought to no drafts gets one."""


@dataclass(slots=True)
class _Record:
    """What is known of one sequence."""

    longest: int
    """Most drafts by `acceptance_threshold`."""
    own: Own = field(default_factory=Own)
    """How its drafts fared."""
    evidence: int = 0
    """What spoke for its last drafts."""
    last: int = 0
    """Drafts that were decided on the last time."""
    num_idle: int = 0
    """Steps in which it was allowed none."""


@dataclass(frozen=True, slots=True)
class _Offer:
    """Drafts that a sequence could have."""

    record: _Record
    """Whose."""
    drafts: tuple[int, ...]
    """In order."""


class Speculation:
    """Drafts of the sequences of one decode pool."""

    def __init__(
        self, drafter: Drafter, holdings: Holdings, limits: Limits, lengths: OutputLengths, step_times: StepTimes
    ) -> None:
        self._drafter = drafter
        self._holdings = holdings
        self._limits = limits
        self._lengths = lengths
        self._step_times = step_times
        self._records: dict[Sequence, _Record] = {}
        self._acceptance = Acceptance(drafter.first_rate, drafter.most_evidence)
        self._usual_drafts = 0.0  # of a step, lately at most: what is known of times goes little further
        self._usual_length = 0.0  # the same of one sequence
        self._num_drafting = 0  # steps with drafts since one without
        self.num_drafts = 0
        """Drafts computed so far."""
        self.num_accepted = 0
        """Of them those that came true."""
        self.totals = DraftTotals()
        """What else is counted."""

    def add_to(self, plan: Plan) -> None:
        """Adds drafts to a plan of sequences that get one token each."""
        started_s = time.perf_counter()
        self._add_to(plan)
        self.totals.planned(plan, time.perf_counter() - started_s)

    def _add_to(self, plan: Plan) -> None:
        sequences = [part.sequence for part in plan.slices]
        if not sequences:
            return
        load = StepLoad(len(sequences), sum(sequence.num_tokens for sequence in sequences))
        if self._num_drafting >= (PLAIN_EVERY if self._step_times.is_known else 1):
            self._num_drafting = 0
            return
        self._acceptance.fade(len(sequences))
        usual = int(self._usual_length) if self._step_times.is_known else 0
        longest = usual + (1 if self._drafter.has_passes else max(1, FIRST_LENGTH // len(sequences)))
        duration_ms = self._step_times.with_drafts(load)
        # Of a draft that pays, were it the only one and had for nothing.
        least_chance = load.num_sequences * (duration_ms(1, 0) / duration_ms(0, 0) - 1)
        offers = [self._offer(sequence, longest, least_chance) for sequence in sequences]
        room = int(2 * self._usual_drafts) + max(FIRST_DRAFTS, len(sequences))
        lengths = self._paying_lengths(offers, duration_ms, min(room, self._limits.max_num_tokens - plan.num_tokens))
        for index, offer in enumerate(offers):
            length = offer.record.last = lengths[index]
            if length < len(offer.drafts):
                self._holdings.shrink(sequences[index], sequences[index].num_tokens + length)
            if length:
                plan.draft(index, offer.drafts[:length])
            elif offer.drafts:
                self._drafter.judge(sequences[index], 0, 0)
        self._usual_drafts = max(USUAL_KEPT * self._usual_drafts, lengths.total())
        self._usual_length = max(USUAL_KEPT * self._usual_length, *lengths.values(), 0)
        self._num_drafting = self._num_drafting + 1 if lengths else 0

    def accept(
        self,
        sequence: Sequence,
        drafts: Iterable[int],
        samples: list[Sample],
        append: Callable[[Sequence, Sample], NewToken],
    ) -> list[NewToken]:
        """Appends the samples after drafts that came true: those that equal the token sampled in their place. Of the
        others nothing stays: their blocks are given back, and what they wrote is written over."""
        new_tokens: list[NewToken] = []
        for draft, sample in zip(drafts, samples, strict=True):
            if sequence.is_over or draft != sequence.token_ids[-1]:
                break
            sequence.num_computed += 1
            new_tokens.append(append(sequence, sample))
        self.judge(sequence, len(samples), len(new_tokens))
        self._holdings.register_computed(sequence)
        self._holdings.shrink(sequence, sequence.num_computed)
        return new_tokens

    def judge(self, sequence: Sequence, num_drafts: int, num_accepted: int) -> None:
        """A step has computed drafts, of which the first ones came true."""
        self.num_drafts += num_drafts
        self.num_accepted += num_accepted
        sequence.num_drafts += num_drafts
        sequence.num_accepted_drafts += num_accepted
        self._drafter.judge(sequence, num_drafts, num_accepted)
        record = self._records.get(sequence)
        if record is None:
            return  # it is over, and the draft after its end was neither right nor wrong
        self._acceptance.count(record.own, record.evidence, num_drafts, num_accepted)
        if record.own.rate >= self._limits.acceptance_threshold:
            record.longest = min(record.longest + 1, self._limits.draft_length)
        else:
            record.longest = max(record.longest - 1, 0)

    def forget(self, sequence: Sequence) -> None:
        """The sequence is over."""
        self._records.pop(sequence, None)
        self._drafter.forget(sequence)

    def _offer(self, sequence: Sequence, longest: int, least_chance: float) -> _Offer:
        """What a sequence could have, at most so many; its drafter is not asked if no draft of it would pay."""
        record = self._records.get(sequence)
        if record is None:
            record = self._records[sequence] = _Record(self._limits.draft_length)
        self._acceptance.fade_own(record.own)
        if record.longest == 0:
            record.num_idle += 1
            if record.num_idle < RETRY_STEPS:
                return _Offer(record, ())
            record.longest, record.num_idle = 1, 0
        if self._acceptance.best_chance(record.own) * (1 if record.last else MARGIN) <= least_chance:
            return _Offer(record, ())
        drafts = self._drafts(sequence, min(record.longest, longest, self._most(sequence)))
        if drafts:
            record.evidence = self._drafter.evidence(sequence)
        return _Offer(record, drafts)

    def _drafts(self, sequence: Sequence, most: int) -> tuple[int, ...]:
        """Guesses for which there are blocks; none beyond one that would end the sequence."""
        holdings, num_tokens = self._holdings, sequence.num_tokens
        if most > 0 and not holdings.grow(sequence, num_tokens + most):
            most = min(most, len(sequence.block_table) * holdings.block_size - num_tokens)
        if most < 1:
            return ()
        drafts = self._drafter.propose(sequence, most)
        endings = sequence.ending_token_ids(self._limits.eos_token_ids)
        length = next((index + 1 for index, token_id in enumerate(drafts) if token_id in endings), len(drafts))
        if length < most:
            holdings.shrink(sequence, num_tokens + length)
        return drafts[:length]

    def _paying_lengths(self, offers: list[_Offer], step_ms: Callable[[int, int], float], room: int) -> Counter[int]:
        """How many drafts of each offer to take: the likeliest first, as many as make the most tokens a millisecond."""
        chances, lengths, taken = self._acceptance, [0] * len(offers), list[int]()
        # The next draft of each sequence, by minus the chance that it and all before it come true.
        candidates = [
            (-chances.chance(offer.record.own, offer.record.evidence), index)
            for index, offer in enumerate(offers)
            if offer.drafts
        ]
        heapify(candidates)
        num_tokens, duration_ms, num_passes = float(len(offers)), step_ms(0, 0), 0
        row_ms = step_ms(1, 0) - duration_ms
        best_rate, num_best = num_tokens / duration_ms, 0
        # Further rows cost no less than the first: once one does not pay for that, none does.
        while candidates and len(taken) < room and -candidates[0][0] > best_rate * row_ms:
            chance, index = -candidates[0][0], candidates[0][1]
            record, drafts = offers[index].record, offers[index].drafts
            lengths[index] += 1
            if self._drafter.has_passes:
                num_passes = max(num_passes, lengths[index])
            duration_ms = step_ms(len(taken) + 1, num_passes)
            if self._limits.target_step_ms is not None and duration_ms > self._limits.target_step_ms:
                break
            taken.append(index)
            num_tokens += chance if lengths[index] <= record.last else MARGIN * chance
            if num_tokens / duration_ms > best_rate:
                best_rate, num_best = num_tokens / duration_ms, len(taken)
            if lengths[index] < len(drafts):
                next_chance = chance * chances.chance(record.own, record.evidence + lengths[index])
                heapreplace(candidates, (-next_chance, index))
            else:
                heappop(candidates)
        return Counter(taken[:num_best])

    def _most(self, sequence: Sequence) -> int:
        """Most drafts of a sequence, whatever they cost: the step may yield one token more."""
        num_outputs = sequence.num_outputs
        most = min(sequence.request.sampling.max_tokens - num_outputs, self._limits.max_model_len - sequence.num_tokens)
        expected = self._lengths.expected_more(num_outputs, most)
        return min(self._limits.draft_length, expected // 2, most - 1)
