"""How many drafts each sequence computes in a step: as many as are expected to pay, none where they would not.

A step with drafts takes longer and yields more tokens. What it takes is learned from steps (`engine.step_time`), what
it yields from how many drafts of each sequence came true. Rows are added, the likeliest first, while they raise the
tokens a millisecond; so one sequence alone drafts far and a full batch hardly. Small gains neither begin nor end
drafting: what was not drafted last time must pay by a margin. Where no sequence drafts, one tries a single draft now
and then, ever more rarely while they are wrong, because times and texts change; else the drafter is not even asked.

Decides only: the tokens a request gets follow from the samples after each row (`DecodeScheduler.commit`). Drafts never
evict anyone, take no part of a step from prompts, and are not longer than half of what is expected to come.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace

from decode_svc.draft_totals import DraftTotals
from engine.drafters import Drafter
from engine.holdings import Holdings
from engine.lengths import OutputLengths
from engine.planning import Plan
from engine.request import Sample
from engine.scheduling import Limits, NewToken
from engine.sequence import Sequence
from engine.step_time import StepLoad, StepTimes

PRIOR_RATE = 0.5
"""Part of drafts that come true where nothing is known."""
PRIOR_DRAFTS = 8.0
"""Drafts of a sequence's own that weigh as much as what is known of others."""
KEPT = 0.95
"""Weight of what was known of a sequence, at each step with drafts."""
KEPT_IDLE = 0.99
"""The same at each step without: what is known of others takes its place."""
KEPT_OF_ALL = 0.99
"""The same of all sequences together."""
FIRST_DRAFTS = 4
"""Drafts of a step with which one begins; each may have twice as many as were usual, because of larger steps nothing is
known."""
USUAL_KEPT = 0.98
"""Weight of what was usual, at each step."""
MARGIN = 0.95
"""What a draft beyond those of the last time counts, by its chance to come true."""
MIN_TRY_STEPS = 8
"""Steps without drafts after which a sequence tries one, alone in its step."""
MAX_TRY_STEPS = 256
"""The same after many that were wrong."""


@dataclass(slots=True)
class Rate:
    """How often drafts come true: a draft counts if all before it did."""

    num_right: float = 0.0
    """Of those counted, later ones more."""
    num_counted: float = 0.0
    """Drafts that were right, and each step's first wrong one."""

    def count(self, num_drafts: int, num_right: int, kept: float) -> None:
        """A step had drafts."""
        self.num_right = kept * self.num_right + num_right
        self.num_counted = kept * self.num_counted + min(num_drafts, num_right + 1)

    def fade(self, kept: float) -> None:
        """A step had none."""
        self.num_right *= kept
        self.num_counted *= kept

    def value(self, prior: float) -> float:
        """The rate, between 0 and 1."""
        return (self.num_right + PRIOR_DRAFTS * prior) / (self.num_counted + PRIOR_DRAFTS)


@dataclass(slots=True)
class _Record:
    """What is known of one sequence."""

    rate: Rate
    longest: int
    """Most drafts by `acceptance_threshold`."""
    last: int = 0
    """Drafts that were decided on the last time."""
    idle_steps: int = 0
    """Steps without drafts since."""
    try_steps: int = MIN_TRY_STEPS
    """Such steps after which one is tried."""


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
        self._rate = Rate()
        self._usual_drafts = 0.0  # of a step, lately at most: what is known of times goes little further
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
        load = StepLoad(len(sequences), sum(sequence.num_tokens for sequence in sequences))
        if not sequences or self._step_times.predict_ms(load) is None:
            return
        records = [self._record(sequence) for sequence in sequences]
        asked = self._whom_to_ask(records, load)
        if asked:
            drafts = [
                self._drafts(each, self._longest(each)) if index in asked else ()
                for index, each in enumerate(sequences)
            ]
            room = min(self._limits.max_num_tokens - plan.num_tokens, int(2 * self._usual_drafts) + FIRST_DRAFTS)
            lengths = self._paying_lengths(records, [len(each) for each in drafts], load, room)
        else:
            drafts = self._tried(sequences, records)
            lengths = [len(each) for each in drafts]
        for index, length in enumerate(lengths):
            if length < len(drafts[index]):
                self._holdings.shrink(sequences[index], sequences[index].num_tokens + length)
            if length:
                plan.draft(index, drafts[index][:length])
            elif drafts[index]:
                self._drafter.judge(sequences[index], 0, 0)
            records[index].last = length
        self._usual_drafts = max(USUAL_KEPT * self._usual_drafts, sum(lengths))

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
        self._rate.count(num_drafts, num_accepted, KEPT_OF_ALL)
        record = self._records.get(sequence)
        if record is None:
            return  # it is over
        record.rate.count(num_drafts, num_accepted, KEPT)
        record.try_steps = MIN_TRY_STEPS if num_accepted else min(2 * record.try_steps, MAX_TRY_STEPS)
        if record.rate.value(self._rate.value(PRIOR_RATE)) >= self._limits.acceptance_threshold:
            record.longest = min(record.longest + 1, self._limits.draft_length)
        else:
            record.longest = max(record.longest - 1, 0)

    def forget(self, sequence: Sequence) -> None:
        """The sequence is over."""
        self._records.pop(sequence, None)
        self._drafter.forget(sequence)

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

    def _whom_to_ask(self, records: list[_Record], load: StepLoad) -> set[int]:
        """Those of whom one draft would pay, were it the only one. Of the others less is known with each step."""
        prior, num_tokens = self._rate.value(PRIOR_RATE), load.num_sequences
        duration_ms, longer_ms = self._duration_ms(load, 0), self._duration_ms(load, 1)
        asked = set()
        for index, record in enumerate(records):
            counted = record.rate.value(prior) * (1 if record.last else MARGIN)
            if (num_tokens + counted) * duration_ms > num_tokens * longer_ms and not self._is_too_long(longer_ms):
                asked.add(index)
                record.idle_steps = 0
            else:
                record.rate.fade(KEPT_IDLE)
                record.idle_steps += 1
        return asked

    def _tried(self, sequences: list[Sequence], records: list[_Record]) -> list[tuple[int, ...]]:
        """A draft of one whose turn it is to try, whatever it costs. Beside others that draft nobody tries: what is
        known of those takes the place of what is known of one."""
        drafts: list[tuple[int, ...]] = [()] * len(sequences)
        for index, record in enumerate(records):
            if record.idle_steps > record.try_steps:
                record.idle_steps = 0
                drafts[index] = self._drafts(sequences[index], min(1, self._most(sequences[index])))
                break
        return drafts

    def _paying_lengths(self, records: list[_Record], most: list[int], load: StepLoad, room: int) -> list[int]:
        """How many of the drafts of each to take."""
        lengths, prior = [0] * len(records), self._rate.value(PRIOR_RATE)
        # The next draft of each sequence, by minus the chance that it and all before it come true.
        candidates = [(-record.rate.value(prior), index) for index, record in enumerate(records) if most[index]]
        heapify(candidates)
        num_tokens, num_drafts, duration_ms = float(len(records)), 0, self._duration_ms(load, 0)
        while candidates and num_drafts < room:
            index, chance = candidates[0][1], -candidates[0][0]
            record, length = records[index], lengths[index] + 1
            longer_ms = self._duration_ms(load, num_drafts + 1)
            counted = chance if length <= record.last else MARGIN * chance
            if (num_tokens + counted) * duration_ms <= num_tokens * longer_ms or self._is_too_long(longer_ms):
                break
            lengths[index], num_tokens, num_drafts, duration_ms = length, num_tokens + chance, num_drafts + 1, longer_ms
            if length < most[index]:
                heapreplace(candidates, (-chance * record.rate.value(prior), index))
            else:
                heappop(candidates)
        return lengths

    def _record(self, sequence: Sequence) -> _Record:
        record = self._records.get(sequence)
        if record is None:
            record = self._records[sequence] = _Record(Rate(), self._limits.draft_length)
        return record

    def _longest(self, sequence: Sequence) -> int:
        """Most drafts of a sequence, whatever they cost."""
        return min(self._records[sequence].longest, self._most(sequence))

    def _most(self, sequence: Sequence) -> int:
        """The same, also of one whose drafts were mostly wrong: the step may yield one token more."""
        num_outputs = sequence.num_outputs
        most = min(sequence.request.sampling.max_tokens - num_outputs, self._limits.max_model_len - sequence.num_tokens)
        expected = self._lengths.expected_more(num_outputs, most)
        return min(self._limits.draft_length, expected // 2, most - 1)

    def _duration_ms(self, load: StepLoad, num_drafts: int) -> float:
        predicted_ms = self._step_times.predict_ms(
            StepLoad(load.num_sequences, load.num_context_tokens, num_draft_rows=num_drafts)
        )
        assert predicted_ms is not None, "it was known just now"
        return predicted_ms

    def _is_too_long(self, duration_ms: float) -> bool:
        target_ms = self._limits.target_step_ms
        return target_ms is not None and duration_ms > target_ms
