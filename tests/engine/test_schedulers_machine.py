"""Both schedulers under everything that services do to them, at any moment, over a real pool and a pretended device.

After every act the pool's accounts balance against the block tables; what a step reads is what its sequence wrote; and
when nothing arrives any more, everything that was not given up finishes within a bounded number of steps.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from pools import BLOCK_SIZE, EOS, Memory, Step, check_plan, make_holdings, make_limits, make_request

from decode_svc.scheduler import DecodeScheduler
from engine.lengths import OutputLengths
from engine.request import Priority, Sample
from engine.sequence import DECODE_MOVES, PREFILL_MOVES, TERMINAL, Sequence, State
from prefill_svc.scheduler import PrefillScheduler

# Few different tokens and long common beginnings, so that prefixes are found and blocks are shared.
PROMPTS = st.tuples(
    st.sampled_from([(1, 2, 3, 4, 5, 6, 7, 8) * 3, (1, 2, 3, 4, 4, 3, 2, 1) * 3]), st.integers(1, 24)
).map(lambda pair: pair[0][: pair[1]])
TOKENS = st.sampled_from([1, 2, 3, EOS])
PRIORITIES = st.sampled_from(list(Priority))
PICKS = st.integers(0, 99)
MAX_STEPS = 400


class SchedulerMachine(RuleBasedStateMachine):
    """What the two have in common: steps that take time, endings at any moment, the accounts."""

    moves = PREFILL_MOVES

    def __init__(self) -> None:
        super().__init__()
        self.memory = Memory()
        self.step: Step | None = None
        self.sequences: list[Sequence] = []
        self.num_endings: Counter[Sequence] = Counter()
        self.now_s = 0.0
        self.scheduler: Any = None

    @initialize(
        num_blocks=st.integers(1, 14),
        ceiling=st.integers(7, 14),
        max_num_seqs=st.integers(1, 5),
        extra_tokens=st.integers(0, 8),
        chunk_size=st.integers(1, 8),
        reserved=st.integers(1, 24),
        max_batch_size=st.none() | st.integers(1, 4),
        max_preemptions=st.integers(0, 2),
        is_static=st.booleans(),
        expected=st.sampled_from([1, 3, 99]),
        num_host_blocks=st.sampled_from([0, 3, 14]),
    )
    def create(
        self,
        num_blocks: int,
        ceiling: int,
        max_num_seqs: int,
        extra_tokens: int,
        chunk_size: int,
        reserved: int,
        max_batch_size: int | None,
        max_preemptions: int,
        is_static: bool,
        expected: int,
        num_host_blocks: int,
    ) -> None:
        self.lengths = OutputLengths(prior_tokens=expected)
        self.holdings = make_holdings(min(num_blocks, ceiling), ceiling, num_host_blocks)
        budget = max_num_seqs + extra_tokens
        self.limits = make_limits(
            max_num_seqs=max_num_seqs,
            max_num_tokens=budget,
            chunk_size=min(chunk_size, budget),
            max_batch_size=max_batch_size,
            max_preemptions=max_preemptions,
            is_static=is_static,
        )
        self.scheduler = self.make_scheduler(reserved)

    def make_scheduler(self, reserved: int) -> Any:
        raise NotImplementedError

    def make_sequence(self, prompt: Any, outputs: Any, priority: Priority, waited_ms: int, max_tokens: int) -> Sequence:
        request = make_request(prompt, outputs, priority, waited_ms, max_tokens=max_tokens)
        self.now_s += 1
        sequence = Sequence(request, self.moves, self.now_s, self.observe)
        self.sequences.append(sequence)
        return sequence

    def observe(self, sequence: Sequence, source: State, target: State) -> None:
        assert source not in TERMINAL
        if target in TERMINAL:
            self.num_endings[sequence] += 1

    def live(self) -> list[Sequence]:
        return [sequence for sequence in self.sequences if not sequence.is_over]

    def holding(self) -> list[Sequence]:
        """Those with a seat."""
        return [
            sequence
            for sequence in self.live()
            if sequence.state is not State.QUEUED and sequence not in self.scheduler._waiting
        ]

    def keeping(self) -> list[Sequence]:
        """Those that no plan may take a seat from: the oldest."""
        return sorted(self.holding(), key=lambda sequence: sequence.since_s)[:1]

    # Steps: what happens between `plan_step` and its end happens while the device runs.

    @precondition(lambda self: self.scheduler is not None and self.step is None)
    @rule()
    def plan_step(self) -> None:
        self.memory.swap(self.holdings)
        pool = self.holdings.pool
        pool.grow(max(0, self.scheduler.num_wanted_blocks() - pool.num_available))
        keeping = self.keeping()
        plan = self.scheduler.plan(self.now_s)
        assert set(keeping) <= set(self.holding()), "one was displaced that never is"
        check_plan(plan, self.limits, len(self.holding()))
        self.planned()
        if plan.slices:
            self.step = Step(plan, self.holdings)
            self.step.check_writers()

    def planned(self) -> None:
        """What a role does after a plan."""

    @precondition(lambda self: self.scheduler is not None and self.holdings.swaps)
    @rule()
    def copies_end(self) -> None:
        self.memory.swap(self.holdings)

    @precondition(lambda self: self.step is not None)
    @rule(data=st.data())
    def end_step(self, data: st.DataObject) -> None:
        self.commit([data.draw(TOKENS) for _ in self.step.batch.sample_rows])

    @precondition(lambda self: self.step is not None)
    @rule(data=st.data())
    def end_step_again(self, data: st.DataObject) -> None:
        """More likely than other rules, so that sequences come far."""
        self.commit([data.draw(TOKENS) for _ in self.step.batch.sample_rows])

    @precondition(lambda self: self.scheduler is not None)
    @rule(num_steps=st.integers(2, 9))
    def run_on(self, num_steps: int) -> None:
        """Nothing else happens for a while, so that sequences outgrow their blocks."""
        for _ in range(num_steps):
            if self.step is not None:
                self.commit([1] * len(self.step.batch.sample_rows))
            self.plan_step()

    def commit(self, tokens: list[int]) -> None:
        step, self.step = self.step, None
        self.memory.swap(self.holdings)
        step.run(self.memory)
        sampling = [part.sequence for part in step.plan.slices if part.samples and not part.sequence.is_over]
        new_tokens = self.scheduler.commit(step.plan, [Sample(token) for token in tokens], self.now_s)
        assert [token.sequence for token in new_tokens] == sampling

    @precondition(lambda self: self.step is not None)
    @rule(sometimes=PICKS)
    def step_fails(self, sometimes: int) -> None:
        if sometimes > 10:
            return
        step, self.step = self.step, None
        self.scheduler.abandon(step.plan, "the device is gone")
        assert all(part.sequence.is_over for part in step.plan.slices)

    @precondition(lambda self: self.live())
    @rule(pick=PICKS, state=st.sampled_from([State.CANCELLED, State.EVICTED, State.FAILED]))
    def end_one(self, pick: int, state: State) -> None:
        live = self.live()
        self.scheduler.end(live[pick % len(live)], state, "by hand")

    @precondition(lambda self: self.sequences)
    @rule(pick=PICKS)
    def end_one_that_is_over(self, pick: int) -> None:
        sequence = self.sequences[pick % len(self.sequences)]
        if sequence.is_over:
            state = sequence.state
            self.scheduler.end(sequence, State.CANCELLED)
            assert sequence.state is state

    @invariant()
    def balanced(self) -> None:
        if self.scheduler is None:
            return
        pool = self.holdings.pool
        self.holdings.check()
        host_blocks = [block for sequence in self.sequences for block in sequence.host_table or ()]
        assert self.holdings.host_pool.num_used == len(host_blocks)
        assert pool.num_free + pool.num_used + pool.num_cached == pool.num_total
        assert self.holdings.num_accounted == pool.num_used
        assert sorted(map(id, self.scheduler.live())) == sorted(map(id, self.live()))
        for sequence in self.sequences:
            assert self.num_endings[sequence] == sequence.is_over
            assert 0 <= sequence.num_computed <= sequence.num_tokens
            if sequence.is_over:
                is_freed = not sequence.block_table and sequence.host_table is None
                assert is_freed or sequence.num_pins > 0, "over, untouched and not freed"
            elif sequence.host_table is None:
                assert sequence.num_computed <= len(sequence.block_table) * BLOCK_SIZE
                assert bool(sequence.block_table) == (sequence.state is not State.QUEUED)
            else:
                assert sequence.state in (State.PAUSED, State.PREFILLING)
                table = sequence.block_table or sequence.host_table
                assert sequence.num_computed <= len(table) * BLOCK_SIZE
                assert bool(sequence.block_table) == any(swap.sequence is sequence for swap in self.holdings.swaps)

    def teardown(self) -> None:
        """Nothing arrives any more: everything that lives finishes."""
        if self.scheduler is None:
            return
        for _ in range(MAX_STEPS):
            if self.step is not None:
                self.commit([1] * len(self.step.batch.sample_rows))
            self.serve_waiters()
            self.balanced()
            if not self.live():
                break
            self.plan_step()
        assert not self.live(), f"stuck: {[(s.state, s.num_tokens, s.num_pending) for s in self.live()]}"
        pool = self.holdings.pool
        pool.check({})
        assert pool.num_used == self.holdings.host_pool.num_used == 0

    def serve_waiters(self) -> None:
        """Gives the scheduler whatever it waits for."""
        raise NotImplementedError


class PrefillMachine(SchedulerMachine):
    """Credit and release come from readers."""

    def make_scheduler(self, reserved: int) -> PrefillScheduler:
        return PrefillScheduler(self.holdings, self.limits)

    @rule(prompt=PROMPTS, outputs=st.lists(TOKENS, max_size=3), priority=PRIORITIES, waited_ms=st.integers(0, 5000))
    def add(self, prompt: Any, outputs: Any, priority: Priority, waited_ms: int) -> None:
        self.scheduler.add(self.make_sequence(prompt, outputs, priority, waited_ms, 8))

    @precondition(lambda self: self.live())
    @rule(pick=PICKS)
    def credit(self, pick: int) -> None:
        waiting = [sequence for sequence in self.live() if sequence.state is State.QUEUED]
        if waiting:
            self.scheduler.credit(waiting[pick % len(waiting)])

    @precondition(lambda self: any(sequence.state is State.LEASED for sequence in self.sequences))
    @rule(pick=PICKS, intact=st.booleans())
    def release(self, pick: int, intact: bool) -> None:
        leased = [sequence for sequence in self.sequences if sequence.state is State.LEASED]
        self.scheduler.end(leased[pick % len(leased)], State.FINISHED if intact else State.CANCELLED)

    @invariant()
    def all_blocks_or_none(self) -> None:
        for sequence in self.live() if self.scheduler is not None else ():
            needed = self.holdings.num_blocks(sequence.num_tokens)
            assert len(sequence.block_table) == (0 if sequence.state is State.QUEUED else needed)
            if sequence.state is State.LEASED:
                assert sequence.num_computed == sequence.num_tokens

    def keeping(self) -> list[Sequence]:
        """All that have begun. The oldest loses nothing where it has not."""
        return [each for each in self.holding() if each.num_computed > each.num_cached]

    def serve_waiters(self) -> None:
        for sequence in self.live():
            if sequence.state is State.LEASED:
                self.scheduler.end(sequence, State.FINISHED)
            elif sequence.state is State.QUEUED:
                self.scheduler.credit(sequence)


class DecodeMachine(SchedulerMachine):
    """Fetches write into blocks of their own accord, also for a while after their sequence is over."""

    moves = DECODE_MOVES

    def __init__(self) -> None:
        super().__init__()
        self.fetches: dict[Sequence, int] = {}  # blocks written
        self.num_pinned_by_steps = 0

    def make_scheduler(self, reserved: int) -> DecodeScheduler:
        return DecodeScheduler(self.holdings, self.limits, reserved, self.lengths)

    @rule(
        prompt=PROMPTS,
        outputs=st.lists(TOKENS, max_size=3),
        priority=PRIORITIES,
        waited_ms=st.integers(0, 5000),
        max_tokens=st.integers(1, 8),
        source=st.sampled_from([None, "p1", "p2"]),
    )
    def add(
        self, prompt: Any, outputs: Any, priority: Priority, waited_ms: int, max_tokens: int, source: str | None
    ) -> None:
        sequence = self.make_sequence(prompt, outputs, priority, waited_ms, max_tokens)
        self.scheduler.add(sequence, source)
        ended = bool(outputs) and (outputs[-1] == EOS or len(outputs) >= max_tokens)
        assert sequence.is_over == ended

    def planned(self) -> None:
        for sequence in self.scheduler.take_fetches():
            assert sequence.state is State.FETCHING
            assert len(sequence.block_table) == self.holdings.num_blocks(sequence.num_tokens + 1)
            sequence.num_pins += 1
            self.fetches[sequence] = sequence.num_cached // BLOCK_SIZE
        for sequence in self.live():
            assert (sequence.state is State.FETCHING) == (sequence in self.fetches)

    def write(self, sequence: Sequence, num_tokens: int) -> None:
        index = self.fetches[sequence]
        if index < self.holdings.num_blocks(num_tokens):
            pool = self.holdings.pool
            assert pool.ref_count(sequence.block_table[index]) == 1, "a fetch writes where others read"
            assert pool.block_hash(sequence.block_table[index]) is None
            self.memory.write_block(sequence, index, num_tokens)
            self.fetches[sequence] += 1

    @precondition(lambda self: self.fetches)
    @rule(pick=PICKS)
    def bytes_arrive(self, pick: int) -> None:
        sequence = list(self.fetches)[pick % len(self.fetches)]
        self.write(sequence, sequence.num_tokens)
        if not sequence.is_over:
            self.scheduler.received(sequence)

    @precondition(lambda self: self.fetches)
    @rule(pick=PICKS, token=TOKENS, good=st.integers(0, 3))
    def fetch_ends(self, pick: int, token: int, good: int) -> None:
        self.end_fetch(list(self.fetches)[pick % len(self.fetches)], token if good else None)

    def end_fetch(self, sequence: Sequence, token: int | None) -> None:
        if not sequence.is_over and token is not None:
            while self.fetches[sequence] < self.holdings.num_blocks(sequence.num_tokens):
                self.write(sequence, sequence.num_tokens)
            position = sequence.num_tokens
            new_token = self.scheduler.fetched(sequence, Sample(token), self.now_s)
            assert (new_token.position, new_token.sample.token_id) == (position, token)
        elif not sequence.is_over:
            self.scheduler.end(sequence, State.FAILED, "lost")
        del self.fetches[sequence]
        self.holdings.unpin(sequence)

    @precondition(lambda self: self.live())
    @rule(pick=PICKS, keep=PICKS)
    def finish(self, pick: int, keep: int) -> None:
        sequence = self.live()[pick % len(self.live())]
        num_outputs = keep % (sequence.num_outputs + 1)
        self.scheduler.finish(sequence, num_outputs)
        assert sequence.state is State.FINISHED and sequence.num_outputs == num_outputs

    @invariant()
    def reservations_are_bounded(self) -> None:
        for source in ("p1", "p2") if self.scheduler is not None else ():
            empty = [
                num_tokens
                for sequence, num_tokens in self.scheduler._fetching.items()
                if self.scheduler._sources[sequence] == source
            ]
            assert sum(empty) - max(empty, default=0) <= self.scheduler._max_reserved_tokens
            assert sum(empty) == self.scheduler._reserved_tokens[source]

    def serve_waiters(self) -> None:
        for sequence in list(self.fetches):
            self.end_fetch(sequence, 1)


_SETTINGS = settings(max_examples=50, stateful_step_count=50, deadline=None)
TestPrefillScheduler = PrefillMachine.TestCase
TestPrefillScheduler.settings = _SETTINGS
TestDecodeScheduler = DecodeMachine.TestCase
TestDecodeScheduler.settings = _SETTINGS
