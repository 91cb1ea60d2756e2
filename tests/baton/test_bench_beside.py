"""What a router adds to a token's time: the steps that an attempt beside it sees, and which token was of which step."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from baton.bench.beside import later_by_s, steps_of
from baton.bench.load import Outcome
from decode_svc.service import DecodeService
from engine.config import WorkerConfig
from engine.worker import RunningWorker, Worker
from runtime.doors import NO_PASS
from runtime.errors import FailedPrecondition, Unavailable
from runtime.status import StatusReporter

STEP_S = 0.05
STEPS_S = [10 + STEP_S * step for step in range(20)]


def outcome(first_s: float, *messages: tuple[float, int]) -> Outcome:
    """An answer whose first token came at one time, further ones in messages at others."""
    times, counts = (first_s, *(time_s for time_s, _ in messages)), (1, *(count for _, count in messages))
    return Outcome(64, 9.0, times, counts, times[-1], None)


def test_each_token_is_compared_with_its_step() -> None:
    messages = [(10.203, 1), (10.251, 1), (10.302, 1)]
    assert later_by_s(outcome(10.19, *messages), STEPS_S, STEP_S) == pytest.approx([0.003, 0.001, 0.002])


def test_a_message_of_several_tokens_has_waited_for_the_last_of_them() -> None:
    messages = [(10.203, 1), (10.304, 2), (10.351, 1)]
    assert later_by_s(outcome(10.19, *messages), STEPS_S, STEP_S) == pytest.approx([0.003, 0.054, 0.004, 0.001])


def test_a_stream_that_is_whole_steps_late_is_seen_to_be() -> None:
    """The second token would have come before its step if the first one had been of the step just before it."""
    messages = [(10.26, 1), (10.262, 1), (10.31, 1)]
    assert later_by_s(outcome(10.19, *messages), STEPS_S, STEP_S) == pytest.approx([0.06, 0.012, 0.01])


def test_a_token_may_be_seen_a_little_before_its_step() -> None:
    assert later_by_s(outcome(10.19, (10.198, 1), (10.251, 1)), STEPS_S, STEP_S) == pytest.approx([-0.002, 0.001])


def test_what_has_no_steps_to_compare_with_is_left_out() -> None:
    assert later_by_s(outcome(10.19), STEPS_S, STEP_S) == []
    assert later_by_s(outcome(8.0, (8.1, 1)), STEPS_S, STEP_S) == []
    assert later_by_s(outcome(10.9, (10.951, 1), (11.001, 1)), STEPS_S, STEP_S) == pytest.approx([0.001])
    assert later_by_s(replace(outcome(10.0), message_times_s=(), message_tokens=()), STEPS_S, STEP_S) == []


@contextlib.asynccontextmanager
async def decode_worker(**options: Any) -> AsyncIterator[RunningWorker]:
    config = WorkerConfig("tracer", num_kv_blocks=64, kv_shared_memory_dir="none", log_level="error", **options)
    worker = Worker(config, "decode", "decode", StatusReporter(None), DecodeService)
    async with worker.serving() as running:
        yield running


async def test_the_steps_of_a_worker_are_seen_as_they_end() -> None:
    async with decode_worker(min_step_ms=20.0) as worker, asyncio.timeout(20):
        async with steps_of(worker.address, "tracer", NO_PASS, 500) as steps:
            while len(steps.times_s) < 12:
                await steps.came.wait()
                steps.came.clear()
            assert len(steps.times_s) <= worker.step_loop.num_steps
        gaps_s = [later - earlier for earlier, later in pairwise(steps.times_s)]
        assert steps.per_s == pytest.approx(len(gaps_s) / sum(gaps_s))
        assert min(gaps_s) >= 0 and sum(gaps_s) == pytest.approx(0.02 * len(gaps_s), abs=0.03)


async def test_an_attempt_that_ends_early_is_no_measure() -> None:
    async with decode_worker() as worker, asyncio.timeout(20):
        with pytest.raises(Unavailable, match=f"brings no tokens from {worker.address}"):
            async with steps_of(worker.address, "tracer", NO_PASS, 3) as steps:
                while len(steps.times_s) < 3:
                    await steps.came.wait()
                    steps.came.clear()
                # Its record follows its last token; so does whatever else this worker is asked.
                async with steps_of(worker.address, "tracer", NO_PASS, 500):
                    pass


async def test_a_worker_that_refuses_says_why() -> None:
    async with decode_worker() as worker, asyncio.timeout(20):
        with pytest.raises(FailedPrecondition, match="this worker serves tracer, got another"):
            async with steps_of(worker.address, "another", NO_PASS, 3):
                pass
