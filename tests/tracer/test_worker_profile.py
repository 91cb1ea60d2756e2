"""`Worker.Profile` over sockets: which steps it reports, its bounds, and that nothing is left of it."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import grpc
import grpc.aio
import pytest
from harness import LIMIT_S, PROMPT, Cell, attempt, cell, code_of, gated

from engine.profiling import MAX_STEPS
from protos import inference_pb2, worker_pb2

WAIT_MS = 20_000


def request(num_steps: int, max_wait_ms: int = WAIT_MS, **changes: object) -> worker_pb2.ProfileRequest:
    return worker_pb2.ProfileRequest(num_steps=num_steps, max_wait_ms=max_wait_ms, **changes)  # type: ignore[arg-type]


class Recorders(list[Any]):
    """Those of a worker's steps, which say when they come and go."""

    def __init__(self, c: Cell) -> None:
        super().__init__()
        self._changed = asyncio.Event()
        c.decode.step_loop.recorders = self

    def append(self, recorder: Any) -> None:
        super().append(recorder)
        self._changed.set()

    def remove(self, recorder: Any) -> None:
        super().remove(recorder)
        self._changed.set()

    async def until(self, count: int) -> None:
        """Returns when there are so many."""
        async with asyncio.timeout(LIMIT_S):
            while len(self) != count:
                self._changed.clear()
                await self._changed.wait()


async def test_steps_are_told_as_they_ran() -> None:
    """A prompt of 96 tokens in chunks of 64, then seven tokens of one sequence."""
    async with cell(mixed=True) as c:
        recorders, profiling = Recorders(c), asyncio.ensure_future(c.d.worker.Profile(request(9)))
        await recorders.until(1)
        await c.router.generate(attempt(max_tokens=8))
        answer = await asyncio.wait_for(profiling, LIMIT_S)
        assert (answer.worker_id, answer.role) == ("mixed", inference_pb2.WORKER_ROLE_MIXED)
        assert (answer.device, answer.HasField("peaks"), answer.HasField("device_use")) == ("", False, False)
        assert len(PROMPT) == 96
        assert [step.num_tokens for step in answer.steps] == [64, 32, *[1] * 7]
        assert [step.num_prompt_tokens for step in answer.steps] == [64, 32, *[0] * 7]
        assert {step.num_sequences for step in answer.steps} == {1}
        block_bytes = c.decode.parts.identity.layout.block_bytes
        assert {step.kv_bytes // block_bytes for step in answer.steps} <= {6, 7}
        # They lie one after another within the time of the profile.
        ends = [step.began_ms + step.duration_ms for step in answer.steps]
        assert answer.steps[0].began_ms >= 0 and ends[-1] <= answer.age_ms
        assert all(end <= step.began_ms + 1e-3 for end, step in zip(ends, answer.steps[1:], strict=False))
        assert answer.memory.kv_ceiling_bytes == 256 * block_bytes and answer.memory.resident_bytes > 1 << 20


async def test_a_step_that_runs_already_is_not_told() -> None:
    """However late the worker's loop hears of its end."""
    async with cell(mixed=True) as c:
        with gated(c.decode) as gate:
            answering = asyncio.create_task(c.router.generate(attempt(PROMPT[:8], max_tokens=4)))
            await gate.arrival()
            recorders, profiling = Recorders(c), asyncio.ensure_future(c.d.worker.Profile(request(3)))
            await recorders.until(1)
            gate.open()
            time.sleep(0.1)  # noqa: ASYNC251 - the loop stands still while the step ends
            await answering
            answer = await asyncio.wait_for(profiling, LIMIT_S)
        assert [step.num_tokens for step in answer.steps] == [1, 1, 1], "the prompt's step had begun before"


async def test_time_that_is_over_ends_it_with_what_there_was() -> None:
    async with cell(mixed=True) as c:
        answer = await c.d.worker.Profile(request(5, max_wait_ms=1), timeout=LIMIT_S)
        assert not answer.steps and answer.age_ms >= 1 and not c.decode.step_loop.recorders


async def test_several_at_once_see_the_same_steps() -> None:
    async with cell(mixed=True) as c:
        recorders = Recorders(c)
        profiling = [asyncio.ensure_future(c.d.worker.Profile(request(count))) for count in (2, 4)]
        await recorders.until(2)
        await c.router.generate(attempt(PROMPT[:8], max_tokens=6))
        first, second = await asyncio.wait_for(asyncio.gather(*profiling), LIMIT_S)
        durations = [[step.duration_ms for step in answer.steps] for answer in (first, second)]
        assert durations[0] == durations[1][:2] and len(durations[1]) == 4


async def test_nothing_is_recorded_for_a_caller_that_is_gone() -> None:
    async with cell(mixed=True) as c:
        recorders, profiling = Recorders(c), c.d.worker.Profile(request(5))
        asking = asyncio.ensure_future(profiling)
        await recorders.until(1)
        profiling.cancel()
        await asyncio.wait([asking])
        await recorders.until(0)
        assert (await c.router.generate(attempt(PROMPT[:8], max_tokens=3))).record.num_tokens == 11


async def test_without_steps_it_answers_at_once() -> None:
    async with cell(mixed=True) as c:
        answer = await c.d.worker.Profile(worker_pb2.ProfileRequest(measure_peaks=True), timeout=LIMIT_S)
        assert not answer.HasField("peaks"), "the tracer computes nothing"
        assert answer.memory.kv_ceiling_bytes and answer.worker_id == "mixed"


@pytest.mark.parametrize(
    ("refused", "text"),
    [
        (request(MAX_STEPS + 1), f"num_steps: at most {MAX_STEPS}, got {MAX_STEPS + 1}"),
        (request(1, max_wait_ms=0), "max_wait_ms: 1 to 60000, got 0"),
        (request(1, max_wait_ms=60_001), "max_wait_ms: 1 to 60000, got 60001"),
        (request(1, device_counted=7), "device_counted: one of [1, 2], got 7"),
        (request(0, 0, device_counted=1), "device_counted: counts steps, so num_steps must be 1 or more, got 0"),
    ],
)
async def test_what_is_out_of_bounds_is_refused(refused: worker_pb2.ProfileRequest, text: str) -> None:
    async with cell(mixed=True) as c:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await c.d.worker.Profile(refused, timeout=LIMIT_S)
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert text in (raised.value.details() or "")


async def test_who_has_no_counters_says_so() -> None:
    async with cell(mixed=True) as c:
        counting = request(1, device_counted=worker_pb2.DEVICE_COUNTED_UNITS)
        assert await code_of(c.d.worker.Profile(counting, timeout=LIMIT_S)) is grpc.StatusCode.FAILED_PRECONDITION
