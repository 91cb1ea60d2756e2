"""A dispatcher over scripted workers; its policy takes the first by name, so that tests know where a request goes."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fake_workers import (
    DECODE,
    LIMIT_S,
    PREFILL,
    FakeWorker,
    Seen,
    fleet_over,
    good_decode,
    next_tokens,
)

from kvstore.hashing import pack_token_ids
from kvstore.metadata.base import SessionRecord
from protos import inference_pb2
from router.answer import Answer
from router.dispatch import Dispatcher
from router.links import Incarnation
from router.policies.base import Policy, Wanted
from router.request_trace import RequestTrace
from router.sessions import Turn

Served = tuple[inference_pb2.Finish, Incarnation]
LONG = tuple(range(40))


class InOrder(Policy):
    """The first by name: tests know where a request goes."""

    def pick_prefill(self, candidates: Any, wanted: Wanted) -> Incarnation:
        return min(candidates, key=lambda worker: worker.worker_id)

    def pick_decode(self, candidates: Any, wanted: Wanted) -> Incarnation:
        """The holder before all others."""
        return min(candidates, key=lambda worker: (worker is not wanted.holder, worker.worker_id))


class System(Seen):
    """A dispatcher over a fleet."""

    dispatcher: Dispatcher

    async def serve(self, answer: Answer, turn: Turn | None = None) -> Served:
        async with asyncio.timeout(LIMIT_S):
            return await self.dispatcher.serve(answer, turn, RequestTrace(time.monotonic()))


@contextlib.asynccontextmanager
async def system(
    *workers: FakeWorker,
    local_prefill_max_tokens: int = 0,
    local_turn_max_tokens: int = 0,
    worker_wait_s: float = 5.0,
    silence_s: float = 2.0,
    turn_placement: str = "fixed",
) -> AsyncIterator[System]:
    async with fleet_over(*workers, silence_s=silence_s) as seen:
        seen.__class__ = System
        assert isinstance(seen, System)
        seen.dispatcher = Dispatcher(
            seen.fleet,
            InOrder(),
            "router-under-test",
            local_prefill_max_tokens,
            local_turn_max_tokens,
            worker_wait_s,
            turn_placement,
        )
        await seen.until(lambda _: seen.usable_ids() == {worker.description.worker_id for worker in workers})
        yield seen
        for worker in workers:
            async with asyncio.timeout(LIMIT_S):
                await worker.idle.wait()


def turn_of(holder: str, epoch: int, token_ids: Sequence[int] = (), num_tokens: int = 0) -> Turn:
    """A turn of a session whose last one ended at `holder`."""
    record = SessionRecord(b"k" * 16, pack_token_ids(token_ids), holder, epoch, num_tokens, b"", (), 1)
    return Turn("", "s", record.key, record, fence=2, stored_fence=1, ttl_s=60.0)


def p(name: str = "p", script: Any = None) -> FakeWorker:
    return FakeWorker(PREFILL, name, prefill=script)


def d(name: str = "d", script: Any = None) -> FakeWorker:
    return FakeWorker(DECODE, name, decode=script)


def failing(num_times: int, error: Exception, num_tokens: int = 0) -> Any:
    """A decode script that fails so many times, each time after some tokens."""
    num_calls = 0

    async def script(worker: FakeWorker, request: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls > num_times:
            return await good_decode(worker, request)
        worker.emit(request, *next_tokens(request)[:num_tokens])
        raise error

    return script
