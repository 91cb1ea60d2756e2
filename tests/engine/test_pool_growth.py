"""When the step loop grows the pool: before anything is given up for want of blocks, and as far as there is memory."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable

import pytest
from pools import make_holdings, make_limits, make_request

from decode_svc.scheduler import DecodeScheduler
from engine.batch import Batch
from engine.planning import Plan
from engine.request import Priority, Sample
from engine.scheduling import NewToken
from engine.sequence import DECODE_MOVES, Sequence, State
from engine.step_loop import MEMORY_RETRY_S, StepLoop
from kvstore.memory import PoolMemoryFull

DEADLINE_S = 20.0


class MemoryOf:
    """A system with memory for so many blocks; `meanwhile` happens while pages are being cleared."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.num_blocks = 0
        self.num_ahead = 0
        self.num_refused = 0
        self.meanwhile: Callable[[], None] | None = None

    def commit(self, num_blocks: int) -> None:
        if self.meanwhile is not None:
            self.meanwhile()
        if num_blocks > self.capacity:
            self.num_refused += 1
            raise PoolMemoryFull("no room")
        self.num_blocks = num_blocks


class OnesRunner:
    """Every token is 1."""

    def run(self, batch: Batch) -> list[Sample]:
        return [Sample(1) for _ in batch.sample_rows]


class Worker:
    """A step loop over a decode scheduler, and who waits for its sequences to end."""

    def __init__(self, num_blocks: int, ceiling: int, memory: MemoryOf, **changes: object) -> None:
        self.holdings = make_holdings(num_blocks, ceiling)
        memory.num_blocks = num_blocks
        defaults = {"max_model_len": 4 * ceiling, "max_num_tokens": 512, "chunk_size": 512, "max_num_seqs": 8}
        self.scheduler = DecodeScheduler(self.holdings, make_limits(**{**defaults, **changes}), 99)
        self.now_s = 1000.0
        self.loop = StepLoop(self.scheduler, OnesRunner(), memory, self, clock=lambda: self.now_s)
        self._changed = asyncio.Event()

    def planned(self, plan: Plan) -> None:
        self._changed.set()

    def committed(self, plan: Plan, new_tokens: list[NewToken]) -> None:
        self._changed.set()

    def add(self, length: int, first: int, max_tokens: int = 2, priority: Priority = Priority.NORMAL) -> Sequence:
        request = make_request(range(first, first + length), priority=priority, max_tokens=max_tokens)
        sequence = Sequence(request, DECODE_MOVES, 0.0)
        self.scheduler.add(sequence, None)
        self.loop.wake()
        return sequence

    async def until(self, is_reached: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not is_reached():
                self._changed.clear()
                await self._changed.wait()

    @contextlib.asynccontextmanager
    async def running(self):
        task = asyncio.create_task(self.loop.run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])
        assert task.cancelled(), "the loop ended by itself"


async def test_the_pool_grows_before_cached_content_is_given_up():
    worker = Worker(8, 200, MemoryOf(200))
    async with worker.running():
        first = worker.add(20, first=100)
        await worker.until(lambda: first.is_over)
        second = worker.add(20, first=200)
        await worker.until(lambda: second.is_over)
        again = worker.add(20, first=100)
        await worker.until(lambda: again.is_over)
    assert again.num_cached == 16 and worker.holdings.pool.num_total > 8


async def test_cached_content_is_given_up_when_there_is_no_memory():
    worker = Worker(8, 200, MemoryOf(8))
    async with worker.running():
        for first in (100, 200, 300):
            sequence = worker.add(20, first=first)
            await worker.until(lambda sequence=sequence: sequence.is_over)
            assert sequence.state is State.FINISHED
    assert worker.holdings.pool.num_total == worker.holdings.max_blocks == 8


async def test_what_is_needed_is_taken_where_more_cannot_be_had():
    worker = Worker(2, 200, MemoryOf(40))
    async with worker.running():
        sequence = worker.add(100, first=100)
        await worker.until(lambda: sequence.is_over)
    assert sequence.state is State.FINISHED


async def test_the_last_blocks_of_the_memory_are_used():
    memory = MemoryOf(21)
    worker = Worker(2, 200, memory)
    async with worker.running():
        large, small = worker.add(100, first=100), worker.add(60, first=300)
        await worker.until(lambda: large.is_over and small.is_over)
    assert (large.state, small.state) == (State.FAILED, State.FINISHED)
    assert worker.holdings.max_blocks == worker.holdings.pool.num_total == 21
    assert memory.num_refused < 20, "a search by halves"


async def test_memory_that_was_refused_is_asked_for_again_after_a_while():
    memory = MemoryOf(8)
    worker = Worker(8, 200, memory)
    async with worker.running():
        first = worker.add(60, first=100)
        await worker.until(lambda: first.is_over)
        num_refused, memory.capacity = memory.num_refused, 200
        worker.now_s += MEMORY_RETRY_S - 1
        second = worker.add(60, first=200)
        await worker.until(lambda: second.is_over)
        assert memory.num_refused == num_refused, "not asked again so soon"
        worker.now_s += 1
        third = worker.add(60, first=300)
        await worker.until(lambda: third.is_over)
    assert [each.state for each in (first, second, third)] == [State.FAILED, State.FAILED, State.FINISHED]
    assert worker.holdings.max_blocks == 200


@pytest.mark.parametrize(
    "start, limits, num_blocks",
    [
        (300, {"max_num_seqs": 100, "expected_sequence_tokens": 40}, 450),  # half of 300 more, of 1000 expected
        (600, {"max_num_seqs": 100, "expected_sequence_tokens": 40}, 856),  # as many as take no long time
        (300, {"max_num_seqs": 100, "expected_sequence_tokens": 16}, 400),  # all that is expected
        (300, {"max_num_seqs": 100, "expected_sequence_tokens": 12}, 364),  # more than expected: the least growth
        (300, {"max_num_seqs": 40}, 364),  # nothing is known
    ],
)
async def test_the_pool_grows_in_large_steps_up_to_what_is_usual(start, limits, num_blocks):
    worker = Worker(start, 5000, MemoryOf(5000), **limits)
    async with worker.running():
        sequence = worker.add(4 * start + 4, first=100, max_tokens=1)
        await worker.until(lambda: sequence.is_over)
    assert worker.holdings.pool.num_total == num_blocks


async def test_what_sequences_usually_hold_is_learned():
    worker = Worker(40, 5000, MemoryOf(5000), max_num_seqs=100)
    async with worker.running():
        for first in (100, 200):
            sequence = worker.add(38, first=first, max_tokens=2)
            await worker.until(lambda sequence=sequence: sequence.is_over)
        assert worker.holdings.usual_blocks == 10
        cancelled = worker.add(200, first=1000, max_tokens=50)
        await worker.until(lambda: cancelled.num_outputs > 0)
        worker.scheduler.end(cancelled, State.CANCELLED)
    assert worker.holdings.usual_blocks == 10, "what was given up is not usual"


async def test_nothing_hangs_where_memory_cannot_grow():
    worker = Worker(4, 200, MemoryOf(4))
    async with worker.running():
        fits = [worker.add(5, first=100 * index, max_tokens=4) for index in range(1, 6)]
        outgrows, never = worker.add(10, first=700, max_tokens=30), worker.add(30, first=800)
        await worker.until(lambda: all(each.is_over for each in (*fits, outgrows, never)))
    assert {each.state for each in fits} <= {State.FINISHED, State.EVICTED} and fits[0].state is State.FINISHED
    assert (outgrows.state, never.state) == (State.EVICTED, State.FAILED)
    assert worker.holdings.pool.num_used == 0


async def test_nobody_is_preempted_for_blocks_that_memory_can_give():
    memory, event_loop = MemoryOf(400), asyncio.get_running_loop()
    worker = Worker(2, 400, memory)
    arrived: list[Sequence] = []

    async def arrive() -> None:
        arrived.append(worker.add(250, first=300, priority=Priority.HIGH))

    def while_pages_are_cleared() -> None:
        memory.meanwhile = None
        asyncio.run_coroutine_threadsafe(arrive(), event_loop).result(DEADLINE_S)

    async with worker.running():
        oldest, low = worker.add(3, first=100, max_tokens=12), worker.add(3, 200, 12, Priority.LOW)
        await worker.until(lambda: low.num_outputs > 0)
        memory.meanwhile = while_pages_are_cleared
        more = worker.add(250, first=600)
        await worker.until(lambda: all(each.is_over for each in (oldest, low, more, *arrived)))
    assert arrived and {each.state for each in (oldest, low, more, *arrived)} == {State.FINISHED}


async def test_steps_go_on_while_the_next_pages_are_cleared():
    memory, may_end = MemoryOf(200), threading.Event()
    memory.num_ahead = 40
    worker = Worker(24, 200, memory)
    memory.meanwhile = lambda: may_end.wait(DEADLINE_S)
    async with worker.running():
        sequence = worker.add(40, first=100, max_tokens=12)  # leaves less than half of 40 blocks free
        await worker.until(lambda: sequence.is_over)
        assert worker.holdings.pool.num_total == 24, "the thread still waits"
        may_end.set()
        await worker.until(lambda: worker.holdings.pool.num_total > 24)
    assert sequence.state is State.FINISHED


async def test_what_is_missing_waits_for_pages_that_are_being_cleared():
    memory = MemoryOf(200)
    memory.num_ahead = 40
    worker = Worker(12, 200, memory)
    async with worker.running():
        first, second = worker.add(20, first=100), worker.add(60, first=300)
        await worker.until(lambda: first.is_over and second.is_over)
    assert (first.state, second.state) == (State.FINISHED, State.FINISHED)


async def test_pages_that_are_refused_ahead_of_need_harm_nobody():
    memory = MemoryOf(12)
    memory.num_ahead = 40
    worker = Worker(12, 200, memory)
    async with worker.running():
        sequence = worker.add(20, first=100)
        await worker.until(lambda: sequence.is_over)
        await worker.until(lambda: worker.loop._growing is None)
    assert sequence.state is State.FINISHED
    assert memory.num_refused == 1, "not asked again so soon"


async def test_while_nothing_is_computed_memory_for_full_steps_is_taken_and_no_more():
    memory = MemoryOf(400)
    memory.num_ahead = 1
    worker = Worker(2, 400, memory, max_num_seqs=2, max_batch_size=1)
    async with worker.running():
        await worker.until(lambda: worker.holdings.pool.num_total >= 128)
        sequence = worker.add(3, first=100)
        await worker.until(lambda: sequence.is_over)
    assert worker.holdings.pool.num_total == memory.num_blocks == 128, "of 512 tokens, 4 a block"
