"""A prefill and a decode worker that follow scripts, and attempts over them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fake_workers import (
    DECODE,
    LIMIT_S,
    PREFILL,
    FakeWorker,
    accepted,
    attempt_of,
    good_decode,
    linked,
)
from wire import Wire

from protos import worker_pb2
from router.answer import Answer
from router.attempts import Attempt, AttemptFailed, Served
from router.links import Incarnation


class Pair:
    """A prefill and a decode worker, and the wires to them."""

    def __init__(self, p: FakeWorker, d: FakeWorker) -> None:
        self.p, self.d = p, d
        self.prefill: Incarnation
        self.decode: Incarnation
        self.to_p: Wire
        self.to_d: Wire

    def attempt(self, answer: Answer, local: bool = False) -> Attempt:
        return attempt_of(answer, self.decode, None if local else self.prefill)

    async def run(self, answer: Answer, local: bool = False) -> Served:
        async with asyncio.timeout(LIMIT_S):
            return await self.attempt(answer, local).run()

    async def failure(self, answer: Answer, local: bool = False) -> AttemptFailed:
        with pytest.raises(AttemptFailed) as caught:
            await self.run(answer, local)
        return caught.value


@contextlib.asynccontextmanager
async def pair(prefill: Any = None, decode: Any = None, silence_s: float = 2.0) -> AsyncIterator[Pair]:
    """The workers with these scripts. At the end none of their calls is open and no load is left."""
    p, d = FakeWorker(PREFILL, "p", prefill=prefill), FakeWorker(DECODE, "d", decode=decode)
    both = Pair(p, d)
    async with linked(p, silence_s) as (both.prefill, both.to_p), linked(d, silence_s) as (both.decode, both.to_d):
        yield both
        assert (both.decode.num_assigned, both.prefill.num_assigned_tokens) == (0, 0)
        async with asyncio.timeout(LIMIT_S):
            await p.idle.wait()
            await d.idle.wait()


async def wait_for_prefill(worker: FakeWorker, request: Any) -> worker_pb2.DecodeRunResponse:
    """A decode worker whose fetch hangs."""
    worker.reached.set()
    await worker.may_go_on.wait()
    return await good_decode(worker, request)


async def accept_and_hang(worker: FakeWorker, request: Any) -> AsyncIterator[Any]:
    yield accepted(worker)
    worker.reached.set()
    await worker.may_go_on.wait()
