"""A prefill pool for exhaustive exploration: credit, chunks, readers that lend, release or give up, steps that fail."""

from __future__ import annotations

import pickle
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from exploring import Event, Names, World, check_accounts, describe
from pools import BLOCK_SIZE, Memory, Step, check_plan, make_holdings, make_limits, make_request

from engine.request import Priority, Sample
from engine.sequence import PREFILL_MOVES, Sequence, State
from prefill_svc.scheduler import PrefillScheduler


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt to compute."""

    length: int
    """Tokens."""
    since_s: float
    """When the client asked."""
    priority: Priority = Priority.NORMAL
    """Class."""
    first: int = 0
    """First token; those with the same one share a prefix."""
    lent: int = 0
    """Tokens whose KV its reader lends."""


class PrefillWorld(World):
    """The scheduler, its readers and its device."""

    def __init__(self, num_blocks: int, prompts: list[Prompt], num_faults: int = 1, **limits: Any) -> None:
        self.holdings = make_holdings(num_blocks)
        self.limits = make_limits(**{"max_model_len": num_blocks * BLOCK_SIZE, "max_num_seqs": 3, **limits})
        self.scheduler = PrefillScheduler(self.holdings, self.limits)
        self.prompts = prompts
        self.num_faults_left = num_faults
        self.sequences: list[Sequence | None] = [None] * len(prompts)
        self.credited: set[int] = set()
        self.fetches: dict[int, Sequence] = {}
        self.step: Step | None = None
        self.memory = Memory()

    def events(self) -> list[Event]:
        events: list[Event] = [("plan",)] if self.step is None else [("commit",)]
        if self.step is not None and self.num_faults_left:
            events.append(("fail",))
        for index, sequence in enumerate(self.sequences):
            if sequence is None:
                events.append(("arrive", index))
            elif not sequence.is_over:
                if index not in self.credited:
                    events.append(("credit", index))
                if sequence.state is State.LEASED:
                    events.append(("release", index))
                if self.num_faults_left:
                    events.append(("cancel", index))
        for index in self.fetches:
            events.append(("bring", index))
            if self.num_faults_left:
                events.append(("lose", index))
        return events

    def is_own(self, event: Event) -> bool:
        """Readers give credit and release by themselves."""
        return event[0] in ("plan", "commit", "credit", "release", "bring")

    def has_work(self) -> bool:
        return bool(self.scheduler.live() or self.step or self.fetches)

    def arrive(self, index: int) -> None:
        prompt = self.prompts[index]
        request = make_request(range(prompt.first, prompt.first + prompt.length), priority=prompt.priority)
        sequence = self.sequences[index] = Sequence(request, PREFILL_MOVES, prompt.since_s)
        self.scheduler.add(sequence)

    def credit(self, index: int) -> None:
        self.credited.add(index)
        self.scheduler.credit(self._live(index), self.prompts[index].lent)

    def plan(self) -> None:
        owed = {
            each: each.num_computed - each.num_cached - each.num_yielded
            for each in self.scheduler.live()
            if each.state is State.PREFILLING
        }
        plan = self.scheduler.plan(0.0)
        for sequence in self.scheduler.take_fetches():
            sequence.num_pins += 1
            self.fetches[self.sequences.index(sequence)] = sequence
        holding = [each for each in self.scheduler.live() if each.state is not State.QUEUED]
        check_plan(plan, self.limits, len(holding))
        if plan.slices:
            self.step = Step(plan, self.holdings)
            self.step.check_writers()
        self._check_share(owed)
        self._check_classes()

    def commit(self) -> None:
        step, self.step = self.step, None
        assert step is not None
        step.run(self.memory)
        self.scheduler.commit(step.plan, [Sample(1) for part in step.plan.slices if part.samples], 0.0)

    def fail(self) -> None:
        self.num_faults_left -= 1
        step, self.step = self.step, None
        assert step is not None
        self.scheduler.abandon(step.plan, "the device is gone")

    def bring(self, index: int) -> None:
        """What was lent has come, whether it is wanted still or not."""
        sequence, lent = self.fetches.pop(index), self.prompts[index].lent
        for block in range(sequence.num_cached // BLOCK_SIZE, lent // BLOCK_SIZE):
            assert self.holdings.pool.ref_count(sequence.block_table[block]) == 1, "a transfer writes where others read"
            assert self.holdings.pool.block_hash(sequence.block_table[block]) is None
            self.memory.write_block(sequence, block, lent)
        self.holdings.unpin(sequence)
        if not sequence.is_over:
            self.scheduler.fetched(sequence, lent)

    def lose(self, index: int) -> None:
        """What was lent does not come, or is not attested."""
        self.num_faults_left -= 1
        sequence = self.fetches.pop(index)
        self.holdings.unpin(sequence)
        if not sequence.is_over:
            self.scheduler.fetched(sequence, 0)

    def release(self, index: int) -> None:
        self.scheduler.end(self._live(index), State.FINISHED)

    def cancel(self, index: int) -> None:
        self.num_faults_left -= 1
        self.scheduler.end(self._live(index), State.CANCELLED)

    def _live(self, index: int) -> Sequence:
        sequence = self.sequences[index]
        assert sequence is not None
        return sequence

    def _check_share(self, owed: dict[Sequence, int]) -> None:
        """A step is full or computes all there is; its first by rank has half, or has had no less than others had
        beside it; nobody of a lower class has the rest
        before one of a higher class that is shorter than the first."""
        running = [each for each in self.scheduler.live() if each.state is State.PREFILLING]
        if not running:
            return
        assert self.step is not None, "there was something to compute"
        took = {part.sequence: part.num_tokens for part in self.step.plan.slices}
        budget, chunk_size = self.limits.max_num_tokens, self.limits.chunk_size
        wanted = {each: min(each.num_pending, chunk_size) for each in running}
        assert sum(took.values()) == min(budget, sum(wanted.values())), "a part of the step is idle"
        first = min(running, key=self._rank)
        num_open = max(budget // 2, min(budget, owed.get(first, 0)))
        assert took.get(first, 0) >= min(wanted[first], budget - num_open)
        num_done = first.num_computed - first.num_cached + took.get(first, 0)
        assert first.num_yielded <= num_done, "it takes more than twice its time"
        for each in running:
            behind = [other for other in running if other.request.priority < each.request.priority]
            is_before = self._rank(each) == self._rank(first) or each.num_pending < first.num_pending
            if is_before and took.get(each, 0) < wanted[each]:
                assert not any(took.get(other) for other in behind if other is not first)

    def _check_classes(self) -> None:
        """Nothing that has not begun holds what the first that waits, of a higher class and rank, could have."""
        waiting = sorted((self._live(index) for index in self.credited), key=self._rank)
        waiting = [each for each in waiting if each.state is State.QUEUED]
        if not waiting:
            return
        scheduler, first = pickle.loads(pickle.dumps((self.scheduler, waiting[0]), -1))
        idle = [
            each
            for each in scheduler.live()
            if each.state is State.PREFILLING
            and each.num_computed == each.num_cached
            and each.request.priority < first.request.priority
            and self._rank(each) > self._rank(first)
        ]
        for each in idle:
            each.num_pins = 0
            scheduler.end(each, State.CANCELLED)
        if idle:
            scheduler.plan(0.0)
        assert first.state is State.QUEUED, "a lower class has not begun and holds what a higher one waits for"

    def _rank(self, sequence: Sequence) -> float:
        return sequence.since_s - self.limits.ageing_s * sequence.request.priority

    def key(self) -> Hashable:
        names = Names(self.holdings)
        sequences = tuple(None if each is None else (describe(each, names), each.num_cached) for each in self.sequences)
        parts = () if self.step is None else self.step.plan.slices
        slices = tuple((describe(part.sequence, names), part.num_tokens) for part in parts)
        fetches = frozenset(self.fetches)
        return sequences, frozenset(self.credited), fetches, slices, names.pool(), self.num_faults_left

    def check(self) -> None:
        live = self.scheduler.live()
        check_accounts(self.holdings, live)
        assert set(live) == {each for each in self.sequences if each is not None and not each.is_over}
        for each in live:
            needed = 0 if each.state is State.QUEUED else self.holdings.num_blocks(each.num_tokens)
            assert len(each.block_table) == needed, "a prompt has all its blocks or none"
