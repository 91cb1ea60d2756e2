"""The step loop: plan, run, commit, for ever.

One asyncio loop owns all scheduling state, so there are no locks: `plan` and `commit` run in it, `run` alone leaves it,
for one worker thread. Between them the loop serves calls, which may end sequences; their blocks stay until the commit.
The loop sleeps on an event when a plan is empty, audits the pool then, within a small part of its time, and grows it
before a plan that needs more.
Copies of KV to host memory and back, which a plan may order, are made before its step; if that fails, those whose KV it
is are evicted.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import NamedTuple, Protocol

from engine.batch import Answer, Batch, Runner
from engine.planning import Plan, build_batch, take_drafts
from engine.rates import PromptTimes
from engine.request import Sample
from engine.scheduling import NewToken, Scheduler
from engine.sequence import State
from engine.step_stalls import StepClock
from engine.step_time import load_of
from kvstore.memory import BlockMemory, PoolMemoryFull
from kvstore.swap import DIRECTIONS, SwapCopy, SwapSpace
from runtime.metrics import ENGINE, TIME_BOUNDS_S, Family, Histogram, counter, gauge

LOG = logging.getLogger(__name__)
MIN_GROWTH_BLOCKS = 64
MAX_USUAL_GROWTH_BLOCKS = 256
"""Most blocks to grow by where fewer are missing: no step should wait long for pages to be cleared."""
IDLE_SEQUENCE_TOKENS = 512
"""For every sequence of a step so many tokens' memory is taken while there is nothing to compute, unless it is known
how many a sequence usually has."""
SIZE_BOUNDS = tuple(2.0**power for power in range(16))
"""Of tokens and of sequences in a step."""
AUDIT_PAUSE_S = 1e-4
"""Between audits of the pool, for each of its blocks: a hundred times what an audit takes."""
MEMORY_RETRY_S = 30.0
"""How long after memory was refused it is asked for again."""


class StepTime(NamedTuple):
    """When a step was computed, by the loop's clock, as the thread that computed it saw it: the loop may hear of it
    much later."""

    began_s: float
    ended_s: float

    @property
    def duration_ms(self) -> float:
        """How long it took."""
        return 1000 * (self.ended_s - self.began_s)


class StepObserver(Protocol):
    """Who is told of steps, in the event loop."""

    def planned(self, plan: Plan) -> None:
        """A plan was made, also an empty one, and is about to run."""
        ...

    def committed(self, plan: Plan, new_tokens: list[NewToken]) -> None:
        """A plan has run."""
        ...


class StepLoop:
    """Drives one scheduler and one runner."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        memory: BlockMemory,
        observer: StepObserver,
        clock: Callable[[], float] = time.monotonic,
        stall_limit_s: float = 0.0,
        swap_space: SwapSpace | None = None,
    ) -> None:
        self.runner = runner
        """Computes the batches."""
        self.step_clock = StepClock(stall_limit_s)
        """Whether the step of this moment stands still."""
        self.prompt_times = PromptTimes(clock)
        """How fast it computes prompts."""
        self._scheduler = scheduler
        self._memory = memory
        self._swap_space = swap_space
        self._observer = observer
        self._clock = clock
        self._refused_s = 0.0  # when memory was, last
        self._growing: asyncio.Task[None] | None = None  # the pool, while steps go on
        self._wanted = asyncio.Event()
        self._next_audit_s = 0.0
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="step")
        self.num_steps = 0
        """Steps committed so far."""
        self.recorders: list[Callable[[Batch, StepTime], None]] = []
        """Are called with each step that ran and when; mostly there are none."""
        self._durations_s, self._sizes = Histogram(TIME_BOUNDS_S), Histogram(SIZE_BOUNDS)
        self._batch_sizes = Histogram(SIZE_BOUNDS)
        self._num_swapped_blocks: dict[str, int] = dict.fromkeys(DIRECTIONS, 0)
        self._swap_s: dict[str, float] = dict.fromkeys(DIRECTIONS, 0.0)

    def wake(self) -> None:
        """Something changed: plan again."""
        self._wanted.set()

    async def run(self) -> None:
        """Runs until cancelled. Raises PoolCorrupted when the accounts are broken: the process must end then."""
        try:
            while True:
                self._wanted.clear()
                await self._grow_pool()
                self._grow_ahead()
                plan = self._scheduler.plan(self._clock())
                self._observer.planned(plan)
                if plan.slices:
                    await self._step(plan)
                elif not await self._swap():
                    self._grow_idle()
                    await self._idle()
        finally:
            self.step_clock.close()
            self._executor.shutdown(wait=True)
            if self._growing is not None:
                await asyncio.wait([self._growing])  # a thread cannot be stopped

    async def _idle(self) -> None:
        """Audits the pool when that is due, and waits for something to do."""
        loop_time_s = asyncio.get_running_loop().time
        rest_s = self._next_audit_s - loop_time_s()
        if rest_s > 0:
            try:
                async with asyncio.timeout(rest_s):
                    await self._wanted.wait()
            except TimeoutError:
                pass
            else:
                return
        holdings = self._scheduler.holdings
        holdings.check()
        self._next_audit_s = loop_time_s() + AUDIT_PAUSE_S * holdings.pool.num_total
        await self._wanted.wait()

    async def _step(self, plan: Plan) -> None:
        """Runs and commits a plan. If that fails its sequences run again, each alone and without drafts, so that the
        one that is the cause fails alone; writing KV twice does no harm."""
        holdings, eos_token_ids = self._scheduler.holdings, self._scheduler.limits.eos_token_ids
        batch = build_batch(plan, holdings.block_size, eos_token_ids)
        num_prompt_tokens, num_prompts = _prompts(plan)
        await self._swap()  # what ends sequences meanwhile changes nothing of the batch
        self.step_clock.begin(plan.num_tokens)
        try:
            running = asyncio.get_running_loop().run_in_executor(self._executor, self._run, batch)
            samples, step_time = await running
        except Exception as error:
            self.step_clock.end()
            LOG.exception("a step of %d sequences, %d tokens, failed", len(plan.slices), plan.num_tokens)
            if len(plan.slices) == 1 and not plan.slices[0].drafts:
                self._scheduler.abandon(plan, f"the step failed: {error}")
            else:
                for part in plan.slices:
                    if part.drafts and not part.sequence.is_over:
                        holdings.shrink(part.sequence, part.sequence.num_tokens)
                    await self._step(Plan([part._replace(drafts=())], part.num_tokens))
            return
        self.step_clock.end()
        self.num_steps += 1
        duration_ms = step_time.duration_ms
        self._durations_s.observe(duration_ms / 1000)
        self._sizes.observe(plan.num_tokens)
        self._batch_sizes.observe(len(plan.slices))
        num_rows = len(plan.slices) - num_prompts
        self.prompt_times.observe(num_prompt_tokens, num_rows, duration_ms / 1000)
        for record in self.recorders:
            record(batch, step_time)
        take_drafts(plan, batch, duration_ms / 1000)
        if self._scheduler.step_times is not None:
            self._scheduler.step_times.observe(load_of(batch), duration_ms)
        self._observer.committed(plan, self._scheduler.commit(plan, samples, self._clock()))

    def _run(self, batch: Batch) -> tuple[list[Sample], StepTime]:
        began_s = self._clock()
        samples = self.runner.run(batch)
        return samples, StepTime(began_s, self._clock())

    async def _swap(self) -> bool:
        """Makes the copies of KV that the plan has ordered; answers whether there were any."""
        holdings = self._scheduler.holdings
        if not holdings.swaps:
            return False
        assert self._swap_space is not None, "whose blocks are accounted for"
        copies = [swap.copy for swap in holdings.swaps]
        self.step_clock.begin(0)
        try:
            running = asyncio.get_running_loop().run_in_executor(self._executor, self._copy, self._swap_space, copies)
            durations_s = await running
        except Exception as error:
            LOG.exception("copying %d sequences between device and host failed", len(copies))
            for swap in holdings.swaps:
                self._scheduler.end(swap.sequence, State.EVICTED, f"its KV could not be copied: {error}")
        else:
            for copy, duration_s in zip(copies, durations_s, strict=True):
                self._num_swapped_blocks[copy.direction] += len(copy.block_ids)
                self._swap_s[copy.direction] += duration_s
        self.step_clock.end()
        holdings.copied()
        return True

    def _copy(self, swap_space: SwapSpace, copies: list[SwapCopy]) -> list[float]:
        """Makes copies; answers how many seconds each took."""
        ends_s = [self._clock()]
        for copy in copies:
            swap_space.copy(copy)
            ends_s.append(self._clock())
        return [end_s - begin_s for begin_s, end_s in pairwise(ends_s)]

    async def call_aside(self, call: Callable[[], Answer]) -> Answer:
        """Calls something in the thread that runs steps, on the cores of a step, while none runs."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, self.runner.call_aside, call)

    def families(self) -> Iterator[Family]:
        """The steps so far, for a scrape."""
        duration = Family("baton_step_duration_seconds", "histogram", "Computing of a step, without its planning.")
        yield self._durations_s.add_to(duration)
        yield self._batch_sizes.add_to(Family("baton_step_sequences", "histogram", "Sequences in a step."))
        tokens = Family("vllm:iteration_tokens_total", "histogram", "Tokens computed in a step.")
        yield self._sizes.add_to(tokens, **ENGINE)
        yield counter("baton_swapped_blocks_total", "KV blocks copied to host memory (out) and back (in).").add_each(
            self._num_swapped_blocks, "direction"
        )
        yield counter("baton_swap_seconds_total", "Time that these copies took; steps waited for it.").add_each(
            self._swap_s, "direction"
        )
        host_pool = self._scheduler.holdings.host_pool
        by_state = {"free": host_pool.num_free, "used": host_pool.num_used}
        yield gauge("baton_swap_space_blocks", "KV blocks that host memory has room for.").add_each(by_state, "state")

    async def _grow_pool(self) -> None:
        """Makes room for what waits, up to the ceiling; in a thread, since the system clears new pages. More may have
        come to wait meanwhile: nobody is evicted for want of blocks that could be had."""
        holdings, pool = self._scheduler.holdings, self._scheduler.holdings.pool
        if holdings.max_blocks < pool.ceiling and self._clock() >= self._refused_s + MEMORY_RETRY_S:
            holdings.max_blocks = pool.ceiling
        while True:
            # Cached blocks are counted as taken: while memory may be had, reuse is not given up for it.
            num_missing = self._scheduler.num_wanted_blocks() - pool.num_free
            num_growable = holdings.max_blocks - pool.num_total
            if num_missing <= 0 or num_growable <= 0:
                return
            if self._growing is not None:
                await asyncio.shield(self._growing)
                continue
            num_more = min(num_growable, max(num_missing, self._num_usual_more()))
            while num_more > 0 and not await self._commit_memory(pool.num_total + num_more):
                # What was refused is not asked for again so soon; half of it may be had.
                holdings.max_blocks, self._refused_s = pool.num_total + num_more - 1, self._clock()
                num_more //= 2
            pool.grow(self._memory.num_blocks - pool.num_total)  # may be more than was asked for

    def _grow_ahead(self) -> None:
        """Begins to make the next huge pages usable while there are free blocks left: the system clears megabytes in
        every plane, which would hold up a step for some tenths of a second."""
        if 2 * self._scheduler.holdings.pool.num_free < self._memory.num_ahead:
            self._begin_growing()

    def _grow_idle(self) -> None:
        """While nothing is computed, takes what full steps of usual sequences need: then no stream will wait for it."""
        holdings, limits = self._scheduler.holdings, self._scheduler.limits
        usual = limits.batch_size * holdings.num_blocks(limits.expected_sequence_tokens or IDLE_SEQUENCE_TOKENS)
        if self._memory.num_ahead and holdings.pool.num_total < usual:
            self._begin_growing()

    def _begin_growing(self) -> None:
        holdings = self._scheduler.holdings
        if self._growing is None and holdings.pool.num_total < holdings.max_blocks:
            self._growing = asyncio.create_task(self._grow_beside_steps())

    async def _grow_beside_steps(self) -> None:
        holdings, pool = self._scheduler.holdings, self._scheduler.holdings.pool
        try:
            await asyncio.to_thread(self._memory.commit, pool.num_total + 1)
            pool.grow(self._memory.num_blocks - pool.num_total)
        except PoolMemoryFull as error:
            LOG.warning("no memory for more KV: %s", error.message)
            holdings.max_blocks, self._refused_s = pool.num_total, self._clock()
        finally:
            self._growing = None
            self.wake()

    def _num_usual_more(self) -> int:
        """Blocks to grow by where fewer are missing: half as many again, until all seats have what is usual."""
        holdings, limits = self._scheduler.holdings, self._scheduler.limits
        usual = holdings.usual_blocks
        if limits.expected_sequence_tokens is not None:
            usual = holdings.num_blocks(limits.expected_sequence_tokens)
        num_total = holdings.pool.num_total
        num_usual_more = int(limits.max_num_seqs * usual) - num_total
        return max(MIN_GROWTH_BLOCKS, min(num_total // 2, num_usual_more, MAX_USUAL_GROWTH_BLOCKS))

    async def _commit_memory(self, num_blocks: int) -> bool:
        try:
            await asyncio.get_running_loop().run_in_executor(self._executor, self._memory.commit, num_blocks)
        except PoolMemoryFull as error:
            LOG.warning("no memory for %d blocks of KV: %s", num_blocks, error.message)
            return False
        return True


def _prompts(plan: Plan) -> tuple[int, int]:
    """Tokens of the slices that are part of a prompt, and how many these are."""
    if plan.num_tokens == len(plan.slices):
        return 0, 0  # one token each: as good as all of them decode
    prompts = [part.num_tokens for part in plan.slices if part.sequence.first_token is None]
    return sum(prompts), len(prompts)
