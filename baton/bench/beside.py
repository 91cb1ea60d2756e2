"""When a decode worker's steps end, as seen without a router: one attempt that asks the worker itself.

Every step of a worker brings a token to each of its sequences, so what comes here is a step's end, by the same clock as
the times of clients in this process. What a token needed longer by way of the router is what the router has added.
Owns the attempt, from its token stream to its end; it lasts as long as the block that it is opened for.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from bisect import bisect_right
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import grpc.aio

from baton.bench.load import Outcome
from protos import inference_pb2, worker_pb2, worker_pb2_grpc
from runtime.doors import Pass
from runtime.errors import Unavailable
from runtime.rpc import create_channel, error_from_call

START_S = 20.0
"""Longest wait for its first token."""


@dataclass(frozen=True, slots=True)
class Steps:
    """The steps of one decode worker."""

    address: str
    """Where it listens."""
    times_s: list[float] = field(default_factory=list)
    """When each ended, from the first one on that has the attempt in it."""
    came: asyncio.Event = field(default_factory=asyncio.Event)
    """Set whenever some were added."""

    @property
    def per_s(self) -> float:
        """How many there are in a second; 0 with fewer than two."""
        times_s = self.times_s
        return (len(times_s) - 1) / (times_s[-1] - times_s[0]) if len(times_s) > 1 else 0.0

    async def note(self, stream: Any) -> None:
        """Notes what comes on a token stream."""
        async for message in stream:
            now_s = time.monotonic()
            self.times_s.extend([now_s] * sum(len(entry.tokens) for entry in message.attempts))
            self.came.set()

    def fail(self, running: asyncio.Future[Any]) -> NoReturn:
        """Raises why there are no more."""
        if running.done():
            try:
                running.result()
            except grpc.aio.AioRpcError as error:
                raise error_from_call(error) from None
        raise Unavailable(f"the attempt beside the router brings no tokens from {self.address}")


@contextlib.asynccontextmanager
async def steps_of(address: str, fingerprint: str, shown: Pass, num_tokens: int) -> AsyncIterator[Steps]:
    """The steps of the decode worker at `address` while the block runs, which must be over before `num_tokens` are.
    Raises Unavailable, or what the worker raised, if the attempt ends before the block does."""
    steps, router_id = Steps(address), f"beside-{secrets.token_hex(8)}"
    channel = create_channel(address, shown)
    decode = worker_pb2_grpc.DecodeStub(channel)
    stream = aiter(decode.Attach(worker_pb2.AttachRequest(router_id=router_id)))
    tasks: list[asyncio.Future[Any]] = []
    try:
        await anext(stream)  # empty: it stands
        running = asyncio.ensure_future(_run(decode, router_id, fingerprint, num_tokens))
        begun = asyncio.create_task(steps.came.wait())
        tasks += [running, begun, asyncio.create_task(steps.note(stream))]
        await asyncio.wait([running, begun], timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
        if not begun.done():
            steps.fail(running)
        yield steps
        if running.done():
            steps.fail(running)
    finally:
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await channel.close()


async def _run(
    decode: worker_pb2_grpc.DecodeStub, router_id: str, fingerprint: str, num_tokens: int
) -> worker_pb2.DecodeRunResponse:
    """The attempt, without a prefill worker."""
    attempt = worker_pb2.Attempt(
        attempt_id=secrets.token_bytes(16),
        request_id=router_id,
        prompt_token_ids=[0],
        sampling=inference_pb2.SamplingParams(
            temperature=0, top_p=1, repetition_penalty=1, max_tokens=num_tokens, ignore_eos=True
        ),
        priority=inference_pb2.PRIORITY_NORMAL,
        fingerprint=fingerprint,
    )
    record = await decode.Run(worker_pb2.DecodeRunRequest(attempt=attempt, router_id=router_id))
    assert isinstance(record, worker_pb2.DecodeRunResponse)
    return record


def later_by_s(outcome: Outcome, steps_s: Sequence[float], step_s: float) -> list[float]:
    """How much later than here each of an answer's tokens came to its client, the first one aside, which is prefill's.

    They are of steps that follow one another. Which was the first is told by that no token comes before its step; half
    a step, `step_s` long, is allowed for what came here late. Empty where the steps do not reach so far back.
    """
    pairs = zip(outcome.message_times_s, outcome.message_tokens, strict=True)
    times_s = [time_s for time_s, count in pairs for _ in range(count)][1:]
    if not times_s:
        return []
    latest = bisect_right(steps_s, times_s[0] + step_s / 2) - 1
    for first in range(latest, -1, -1):
        later = [time_s - ended_s for time_s, ended_s in zip(times_s, steps_s[first:], strict=False)]
        if min(later) >= -step_s / 2:
            return later
    return []
