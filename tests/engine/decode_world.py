"""A decode pool for exhaustive exploration: requests that come, are evicted and come again as a router sends them.

A step, a transfer and a copy to host memory take time: between their begin and end anything else may happen, but that
copies are made before the step. A transfer that was told to stop still writes once. What comes again has its outputs,
its age and one eviction more.
"""

from __future__ import annotations

import pickle
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from drafting import Scripted, samples_of, take_no_time
from exploring import Event, Names, World, check_accounts, describe
from pools import BLOCK_SIZE, Memory, Step, check_plan, make_holdings, make_limits, make_request

from decode_svc.scheduler import DecodeScheduler
from engine.lengths import OutputLengths
from engine.planning import Plan
from engine.ranking import by_class_when_served, oldest
from engine.request import Priority, Sample
from engine.sequence import DECODE_MOVES, Sequence, State

GOES_ON = (State.EVICTED, State.FAILED)


def true_token(sequence: Sequence, position: int) -> int:
    """What is sampled at a position, if all before it was sampled, too."""
    return 1000 + 100 * sequence.token_ids[0] + position


@dataclass(frozen=True, slots=True)
class Asked:
    """A request."""

    length: int
    """Prompt tokens."""
    since_s: float
    """When the client asked."""
    priority: Priority = Priority.NORMAL
    """Class."""
    max_tokens: int = 2
    """Output tokens at which it is complete."""
    source: str | None = None
    """Who prefills; None: this pool."""
    first: int = 0
    """First token of the prompt: those with the same one share a prefix."""


class DecodeWorld(World):
    """The scheduler, and all that may happen around it."""

    def __init__(
        self,
        num_blocks: int,
        asked: list[Asked],
        num_faults: int = 1,
        reserved: int = 99,
        expected: int = 1,
        script: tuple[int, ...] = (),
        num_host_blocks: int = 0,
        **limits: Any,
    ) -> None:
        """Every answer is expected to have `expected` tokens more, as far as its max_tokens go. With a `script` steps
        have drafts, as many as may be, of which the first ones are right: the script says how many, in turn."""
        self.holdings = make_holdings(num_blocks, num_host_blocks=num_host_blocks)
        self.limits = make_limits(**{"max_model_len": num_blocks * BLOCK_SIZE, "max_num_seqs": 2, **limits})
        drafter = Scripted(true_token, script) if script else None
        lengths = OutputLengths(prior_tokens=expected)
        self.scheduler = DecodeScheduler(self.holdings, self.limits, reserved, lengths, drafter)
        if script:
            take_no_time(self.scheduler)
        self.asked = asked
        self.num_faults_left = num_faults
        self.attempts: list[Sequence | None] = [None] * len(asked)
        self.fetches: list[Sequence] = []
        self.step: Step | None = None
        self.memory = Memory()
        self.num_preemptions = [0] * len(asked)

    # Events

    def events(self) -> list[Event]:
        events: list[Event] = [("plan",)] if self.step is None else [("commit",), *([("fail",)] * self._may_fail())]
        if self.holdings.swaps:
            events = [("copy",)]
        for index, sequence in enumerate(self.attempts):
            if sequence is None or sequence.state in GOES_ON:
                events.append(("arrive", index))
            elif not sequence.is_over and self._may_fail():
                events += [("cancel", index), ("finish", index)]
        for index, sequence in enumerate(self.fetches):
            events.append(("end_fetch", index))
            if not sequence.is_over and self.scheduler._fetching[sequence]:
                events.append(("first_bytes", index))
            if not sequence.is_over and self._may_fail():
                events.append(("lose", index))
        return events

    def is_own(self, event: Event) -> bool:
        """Steps, transfers, and the return of what has come before."""
        if event[0] == "arrive":
            return self.attempts[event[1]] is not None
        return event[0] in ("plan", "copy", "commit", "first_bytes", "end_fetch")

    def has_work(self) -> bool:
        comes_again = any(each is not None and each.state in GOES_ON for each in self.attempts)
        return comes_again or bool(self.scheduler.live() or self.fetches or self.step or self.holdings.swaps)

    def _may_fail(self) -> bool:
        return self.num_faults_left > 0

    def arrive(self, index: int) -> None:
        """A request's first attempt, or the next after an eviction or a loss."""
        asked, before = self.asked[index], self.attempts[index]
        outputs = () if before is None else before.token_ids[asked.length :]
        num_evictions = 0 if before is None else before.request.num_evictions + (before.state is State.EVICTED)
        arrived_s = 100.0  # later than since_s: attempts come with the waiting they had
        request = make_request(
            range(asked.first, asked.first + asked.length),
            outputs,
            asked.priority,
            waited_ms=round(1000 * (arrived_s - asked.since_s)),
            max_tokens=asked.max_tokens,
            num_evictions=num_evictions,
        )
        sequence = self.attempts[index] = Sequence(request, DECODE_MOVES, arrived_s)
        assert before is None or sequence.token_ids == before.token_ids, "progress was lost"
        assert sequence.since_s == asked.since_s
        self.scheduler.add(sequence, asked.source)

    def plan(self) -> None:
        live = [each for each in self.attempts if each is not None and not each.is_over]
        holders = self._seated()
        before = {each: each.num_displaced for each in holders}
        plan = self.scheduler.plan(0.0)
        holding = self._seated()
        check_plan(plan, self.limits, len(holding))
        for index, sequence in enumerate(self.attempts):
            self.num_preemptions[index] += sequence in live and sequence is not None and "higher" in sequence.detail
        assert len(holders) < 2 or oldest(holders) in holding or oldest(holders).state is State.FINISHED
        self.check_victims(before, holding)
        self.check_classes(plan)
        for sequence in self.scheduler.take_fetches():
            sequence.num_pins += 1
            self.fetches.append(sequence)
        if plan.slices:
            self.step = Step(plan, self.holdings)
            self.step.check_writers()

    def copy(self) -> None:
        self.memory.swap(self.holdings)

    def commit(self) -> None:
        step, self.step = self.step, None
        assert step is not None
        step.run(self.memory)
        samples = [sample for part in step.plan.slices for sample in samples_of(part, true_token)]
        self.scheduler.commit(step.plan, samples, 0.0)

    def fail(self) -> None:
        self.num_faults_left -= 1
        step, self.step = self.step, None
        assert step is not None
        self.scheduler.abandon(step.plan, "the device is gone")

    def first_bytes(self, index: int) -> None:
        self.scheduler.received(self.fetches[index])

    def end_fetch(self, index: int) -> None:
        """Success, or the end of a transfer that was told to stop."""
        sequence = self.fetches.pop(index)
        for block in range(sequence.num_cached // BLOCK_SIZE, self.holdings.num_blocks(sequence.num_tokens)):
            self._check_sole_writer(sequence.block_table[block])
            self.memory.write_block(sequence, block, sequence.num_tokens)
        if not sequence.is_over:
            self.scheduler.fetched(sequence, self._next(sequence), 0.0)
        self.holdings.unpin(sequence)

    def lose(self, index: int) -> None:
        self.num_faults_left -= 1
        sequence = self.fetches.pop(index)
        self.scheduler.end(sequence, State.FAILED, "lost")
        self.holdings.unpin(sequence)

    def cancel(self, index: int) -> None:
        self.num_faults_left -= 1
        self.scheduler.end(self._live(index), State.CANCELLED)

    def finish(self, index: int) -> None:
        self.num_faults_left -= 1
        self.scheduler.finish(self._live(index), max(0, self._live(index).num_outputs - 1))

    def _live(self, index: int) -> Sequence:
        sequence = self.attempts[index]
        assert sequence is not None
        return sequence

    def _seated(self) -> list[Sequence]:
        return [each for each in self.scheduler.live() if each not in self.scheduler._waiting]

    def _next(self, sequence: Sequence) -> Sample:
        return Sample(true_token(sequence, sequence.num_tokens))

    def _check_sole_writer(self, block: int) -> None:
        assert self.holdings.pool.ref_count(block) == 1, "a transfer writes where others read"
        assert self.holdings.pool.block_hash(block) is None

    # State and rules

    def key(self) -> Hashable:
        names = Names(self.holdings)
        attempts = tuple(
            None
            if each is None
            else (describe(each, names), min(each.request.num_evictions, self.limits.max_preemptions), each.num_cached)
            for each in self.attempts
        )
        fetches = tuple(
            (describe(each, names), each.is_over or self.scheduler._fetching[each]) for each in self.fetches
        )
        swaps = tuple((describe(each.sequence, names), each.copy.direction) for each in self.holdings.swaps)
        parts = () if self.step is None else self.step.plan.slices
        slices = tuple((describe(part.sequence, names), part.num_tokens, part.drafts) for part in parts)
        return (
            attempts,
            fetches,
            slices,
            swaps,
            names.pool(),
            self.num_faults_left,
            self.scheduler._num_places_given * self.limits.is_static,
            self._refused(),
        )

    def _refused(self) -> Hashable:
        """Whom the scheduler would refuse again without looking."""
        refusal = self.scheduler._refusal
        if refusal is None or refusal[1] != self.holdings.num_given_back:
            return None
        return self.attempts.index(refusal[0]) if refusal[0] in self.attempts else None

    def check(self) -> None:
        live = self.scheduler.live()
        check_accounts(self.holdings, live)
        assert set(live) == {each for each in self.attempts if each is not None and not each.is_over}
        for each in self.attempts:
            if each is not None:
                freed = not each.block_table and each.host_table is None
                assert not each.is_over or freed or each.num_pins, "over, untouched and not freed"
                assert each.num_displaced <= self.limits.max_preemptions
                assert each.state is not State.FINISHED or each.finish_reason is not None
                outputs = range(each.num_tokens - each.num_outputs, each.num_tokens)
                assert all(each.token_ids[place] == true_token(each, place) for place in outputs), "another token"
        self.check_tables(live)
        assert max(self.num_preemptions) <= self.limits.max_preemptions

    def check_tables(self, live: list[Sequence]) -> None:
        """No table is longer than its tokens and the next one need, beyond a step that computes drafts."""
        stepping = [] if self.step is None else [part.sequence for part in self.step.plan.slices if part.drafts]
        num_more = min(1, self.holdings.host_pool.num_total)  # what comes back has room for its next token
        for each in live:
            if each.state is not State.QUEUED and each not in stepping:
                most = self.holdings.num_blocks(max(each.num_tokens + num_more, each.request.num_input_tokens + 1))
                assert len(each.block_table) <= most, "blocks of drafts were kept"

    def rank(self, sequence: Sequence) -> float:
        return sequence.since_s - self.limits.ageing_s * sequence.request.priority

    def check_victims(self, before: dict[Sequence, int], after: list[Sequence]) -> None:
        """Who was evicted for growth ranks behind all that had blocks and keep them, but the oldest. Who went to host
        memory is of no higher class than the last by rank."""
        for victim, num_displaced in before.items():
            kept = [each for each in before if each in after and each is not oldest(before)]
            if victim.state is State.EVICTED and "next token" in victim.detail:
                assert all(self.rank(each) < self.rank(victim) for each in kept), "taken from one who ranks before"
            is_swapped_out = victim.host_table is not None and victim not in after and not victim.is_over
            if is_swapped_out and victim.num_displaced == num_displaced:
                last = max([*kept, victim], key=self.rank)
                assert victim.request.priority <= last.request.priority, "taken from one of a higher class"

    def check_classes(self, plan: Plan) -> None:
        """No one runs while the first that waits, of a higher class and rank, could have what it holds."""
        waiting = list(by_class_when_served(self.scheduler._waiting, 0.0, self.limits.ageing_s))
        if not waiting or self.limits.is_static or self.holdings.num_departing_blocks:
            return
        first = waiting[0]
        if not any(part.sequence in self._preemptible(first) for part in plan.slices):
            return
        other = pickle.loads(pickle.dumps((self, first), -1))
        for victim in other[0]._preemptible(other[1]):
            other[0].scheduler.end(victim, State.EVICTED)
            victim.num_pins = 0
            other[0].holdings.free(victim)
        other[0].scheduler.plan(0.0)
        assert other[1] in other[0].scheduler._waiting, "a lower class runs on what a higher one waits for"

    def _preemptible(self, waiting: Sequence) -> list[Sequence]:
        holders = self._seated()
        return [
            each
            for each in holders
            if each.request.priority < waiting.request.priority
            and self.rank(each) > self.rank(waiting)
            and each is not oldest(holders)
            and each.request.num_evictions + each.num_displaced < self.limits.max_preemptions
        ]
