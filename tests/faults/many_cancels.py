"""Clients that go away by the thousand, in every phase of a request; afterwards nobody may hold anything.

The whole system runs in this process, on real sockets, so that what a request was doing when its client went can be
looked up: the report says how often each phase was met.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import grpc.aio
from cluster import Cluster, cluster, request_of

from engine.sequence import State

NUM_AT_ONCE = 12
NUM_TOKENS = 400
LONGEST_PATIENCE_S = 10.0
LIMIT_S = 1.0
"""How long after the last of them workers may hold anything; two chunks of the tracer take far less."""


@dataclass(slots=True)
class Cancels:
    """What was cancelled."""

    phases: Counter[str] = field(default_factory=Counter)
    """By what the request was at its prefill and decode worker."""
    num_finished: int = 0
    """Answers that ended before their client went."""
    empty_after_s: float = 0.0
    """From the last cancel until no worker held anything."""


async def cancel_many(num_cancels: int, seed: int) -> Cancels:
    """Raises AssertionError if anything is held in the end."""
    cancels, draws = Cancels(), random.Random(seed)
    # Short of seats and blocks, so that some wait at either pool and some are evicted.
    sizes = {"num_kv_blocks": 512, "max_num_seqs": 4}
    chunks = {"chunk_size": 16, "max_num_tokens": 32}
    async with cluster(2, 2, worker=sizes, prefill=chunks, max_queue_wait_s=0.0) as c:

        async def leave_again_and_again() -> None:
            while cancels.phases.total() < num_cancels:
                await _ask_and_leave(c, draws, cancels)

        async with asyncio.TaskGroup() as group:
            for _ in range(NUM_AT_ONCE):
                group.create_task(leave_again_and_again())
        began_s = time.monotonic()
        await c.balanced(LIMIT_S)
        cancels.empty_after_s = time.monotonic() - began_s
        assert c.router.service.num_requests == 0
    return cancels


async def _ask_and_leave(c: Cluster, draws: random.Random, cancels: Cancels) -> None:
    request_id = draws.randbytes(8).hex()
    # In the midst of prefill patience ends by chance on an idle machine alone; so some wait for that.
    leaves_in_prefill = draws.random() < 0.1
    lengths = (2500,) if leaves_in_prefill else (1, 40, 300, 2500)
    prompt = [*draws.randbytes(8), *(i % 251 for i in range(draws.choice(lengths)))]
    num_tokens_seen = draws.choice((None, None, None, 0, 1, 3, 30))
    patience_s = 0.0005 * 2 ** draws.uniform(0, 10) if num_tokens_seen is None else LONGEST_PATIENCE_S
    call = c.stub.Generate(request_of(NUM_TOKENS, prompt, request_id=request_id))
    is_finished = False
    with contextlib.suppress(TimeoutError):
        if leaves_in_prefill:
            async with asyncio.timeout(LONGEST_PATIENCE_S):
                await _in_prefill(c, request_id)
        else:
            async with asyncio.timeout(patience_s):
                is_finished = await _read(aiter(call), num_tokens_seen)
    if is_finished:
        cancels.num_finished += 1
    else:
        cancels.phases[_phase(c, request_id)] += 1
        call.cancel()


async def _in_prefill(c: Cluster, request_id: str) -> None:
    """Returns after a step in whose midst a prompt's computation is."""
    seen = asyncio.Event()

    def look(*_: object) -> None:
        if _phase(c, request_id).startswith(State.PREFILLING.value):
            seen.set()

    for worker in c.prefills:
        worker.step_loop.recorders.append(look)
    try:
        await seen.wait()
    finally:
        for worker in c.prefills:
            worker.step_loop.recorders.remove(look)


async def _read(messages: AsyncIterator[object], num_tokens: int | None) -> bool:
    """Whether the answer came to its end before it had so many tokens."""
    num_seen = 0
    try:
        async for message in messages:
            num_seen += len(message.tokens)  # type: ignore[attr-defined]
            if num_tokens is not None and num_seen >= num_tokens:
                return False
    except grpc.aio.AioRpcError as error:
        raise AssertionError(f"nobody cancelled this: {error.code()} {error.details()}") from error
    return True


def _phase(c: Cluster, request_id: str) -> str:
    """What workers do for a request."""
    states = []
    for workers in (c.prefills, c.decodes):
        live = [sequence for worker in workers for sequence in worker.role.scheduler.live()]  # type: ignore[attr-defined]
        states += [sequence.state.value for sequence in live if sequence.request.request_id == request_id] or ["-"]
    return "/".join(states)
