"""`Worker.Profile`: the steps that run while somebody asks, with what they had to do, and what the device can do.

1. Peaks are measured first, between two steps, where that is asked.
2. A recording hangs in the step loop until it has its steps or its time is over. Where nobody asks there is none, and
   a step pays for a look at an empty list; with one it pays for the counting of its work, in the event loop.
3. What the device itself counts is switched on before and off after the steps, and read in a thread.

Owns no step. Several recordings may run at once; the device counts for one of them. No torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Protocol

from engine.batch import Batch
from engine.step_loop import StepLoop, StepTime
from engine.step_time import load_of
from engine.work import Work
from kvstore.blocks import BlockPool
from kvstore.layout import KVLayout
from protos import worker_pb2
from runtime.errors import FailedPrecondition, InvalidArgument
from runtime.host import resident_bytes

if TYPE_CHECKING:
    from engine.measures import Peaks
    from kernels import Counted, DeviceCounter, MemoryBytes

MAX_STEPS = 4096
"""Of one profile: some hundred kilobytes of a message."""
MAX_WAIT_MS = 60_000
COUNTED: dict[int, Counted] = {worker_pb2.DEVICE_COUNTED_UNITS: "units", worker_pb2.DEVICE_COUNTED_MEMORY: "memory"}


class Measures(Protocol):
    """What is asked of a model; `engine.measures` answers."""

    device: str
    """Where it computes."""
    dtype: str
    """What its layers compute in."""

    def work(self, batch: Batch) -> Work:
        """What a step has to do; called in the event loop."""
        ...

    def peaks(self) -> Peaks:
        """Measures what the device can do; called in the place of a step."""
        ...

    def memory_bytes(self) -> MemoryBytes | None:
        """Of the device; called in the place of a step."""
        ...

    def new_counter(self, counted: Counted) -> DeviceCounter | None:
        """Has the device count; None where it cannot."""
        ...


class Profiler:
    """Makes the profiles of one worker."""

    def __init__(
        self,
        step_loop: StepLoop,
        pool: BlockPool,
        layout: KVLayout,
        measures: Measures | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`measures` is None for the tracer: its steps have times and tokens alone. `clock` is the step loop's."""
        self._step_loop = step_loop
        self._pool = pool
        self._layout = layout
        self._measures = measures
        self._clock = clock
        self._is_counting = False

    async def profile(self, request: worker_pb2.ProfileRequest) -> worker_pb2.ProfileResponse:
        """What was asked, all but who the worker is. Raises InvalidArgument or FailedPrecondition."""
        check_request(request)
        response, measures = worker_pb2.ProfileResponse(), self._measures
        if measures is not None:
            response.device, response.dtype = measures.device, measures.dtype
            if request.measure_peaks:
                peaks = await self._step_loop.call_aside(measures.peaks)
                response.peaks.flops_per_s, response.peaks.bytes_per_s = peaks.flops_per_s, peaks.bytes_per_s
                response.peaks.num_threads = peaks.num_threads
        began_s = self._clock()
        if request.num_steps:
            async with self._counting(request.device_counted, response):
                began_s = self._clock()
                await self._record(request.num_steps, request.max_wait_ms / 1000, began_s, response)
        await self._add_memory(response)
        response.age_ms = 1000 * (self._clock() - began_s)
        return response

    async def _record(
        self, num_steps: int, max_wait_s: float, began_s: float, response: worker_pb2.ProfileResponse
    ) -> None:
        is_full = asyncio.Event()

        def record(batch: Batch, step_time: StepTime) -> None:
            if is_full.is_set() or step_time.began_s < began_s:  # it had begun before
                return
            response.steps.append(self._step(batch, step_time, began_s))
            if len(response.steps) == num_steps:
                is_full.set()

        self._step_loop.recorders.append(record)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max_wait_s):
                    await is_full.wait()
        finally:
            self._step_loop.recorders.remove(record)

    def _step(self, batch: Batch, step_time: StepTime, profile_began_s: float) -> worker_pb2.ProfiledStep:
        work = Work() if self._measures is None else self._measures.work(batch)
        return worker_pb2.ProfiledStep(
            began_ms=1000 * (step_time.began_s - profile_began_s),
            duration_ms=step_time.duration_ms,
            num_tokens=batch.num_tokens,
            num_sequences=batch.num_sequences,
            num_prompt_tokens=load_of(batch).num_prompt_tokens,
            num_flops=work.num_flops,
            num_bytes=work.num_bytes,
            kv_bytes=self._pool.num_used * self._layout.block_bytes,
        )

    @contextlib.asynccontextmanager
    async def _counting(self, wanted: int, response: worker_pb2.ProfileResponse) -> AsyncIterator[None]:
        """Has the device count what runs in the block, if that is wanted."""
        if not wanted:
            yield
            return
        counter = None if self._measures is None else self._measures.new_counter(COUNTED[wanted])
        if counter is None:
            raise FailedPrecondition(f"device_counted: device {response.device or 'of the tracer'} has no counters")
        from kernels import DeviceUnavailable  # torch, which whoever has a counter has imported

        try:
            if self._is_counting:
                raise FailedPrecondition("device_counted: the device counts for another profile")
            self._is_counting = True
            try:
                await self._step_loop.call_aside(counter.start)
                try:
                    yield
                finally:
                    await self._step_loop.call_aside(counter.stop)
                use = await asyncio.to_thread(counter.read)
            finally:
                self._is_counting = False
        except DeviceUnavailable as error:
            raise FailedPrecondition(f"device_counted: {error}") from error
        finally:
            await asyncio.to_thread(counter.close)
        response.device_use.CopyFrom(
            worker_pb2.DeviceUse(
                kernels_s=use.kernels_s,
                cube_s=use.cube_s,
                vector_s=use.vector_s,
                load_s=use.load_s,
                read_bytes=use.read_bytes,
                written_bytes=use.written_bytes,
            )
        )

    async def _add_memory(self, response: worker_pb2.ProfileResponse) -> None:
        block_bytes, counts, memory = self._layout.block_bytes, self._pool.status(), response.memory
        memory.kv_used_bytes = counts.used * block_bytes
        memory.kv_cached_bytes = counts.cached * block_bytes
        memory.kv_ceiling_bytes = counts.ceiling * block_bytes
        memory.resident_bytes = resident_bytes()
        own = None if self._measures is None else await self._step_loop.call_aside(self._measures.memory_bytes)
        if own is not None:
            memory.device_used_bytes, memory.device_total_bytes = own.total - own.free, own.total


def check_request(request: worker_pb2.ProfileRequest) -> None:
    """Raises InvalidArgument for what is out of bounds."""
    if request.num_steps > MAX_STEPS:
        raise InvalidArgument("num_steps", f"at most {MAX_STEPS}, got {request.num_steps}")
    if request.num_steps and not 1 <= request.max_wait_ms <= MAX_WAIT_MS:
        raise InvalidArgument("max_wait_ms", f"1 to {MAX_WAIT_MS}, got {request.max_wait_ms}")
    if request.device_counted and request.device_counted not in COUNTED:
        raise InvalidArgument("device_counted", f"one of {sorted(COUNTED)}, got {request.device_counted}")
    if request.device_counted and not request.num_steps:
        raise InvalidArgument("device_counted", "counts steps, so num_steps must be 1 or more, got 0")
