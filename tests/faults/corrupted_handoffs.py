"""Handoffs that are tampered with on their way, by the thousand: no wrong token may come of it, and each is counted,
by the check that found it.

A hand inside the owners (`Tampering`) flips bits of what passes, breaks leases, and gives blocks to others and fills
them with rubbish before their reader comes. Everything else is the real system, in this process, on real sockets.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from cluster import Cluster, cluster, expected

from engine.worker import RunningWorker
from engine.worker_service import WorkerService
from kvstore.leases import Lease
from protos import inference_pb2, worker_pb2
from router import breakers

NUM_AT_ONCE = 24
SHARE = 0.8
"""Of the handoffs, that are tampered with, if they have as many frames as it takes."""
RUBBISH = 0xEE
EVERYWHERE = {
    "broken lease": "lease",
    "late read": "lease",
    "reused blocks": "lease",
    "another count": "count",
    "another epoch": "epoch",
}
"""What may be done, and the check that must find it."""
BY_MESSAGE = {"flipped bit": "checksum", "bytes cut off": "blocks"}
"""The same where bytes pass in messages."""


@dataclass(slots=True)
class Tampering:
    """What is done to handoffs."""

    draws: random.Random
    """Decides."""
    kinds: dict[str, str]
    """What may be done, and the check that must find it."""
    owners: dict[int, RunningWorker] = field(default_factory=dict)
    """By epoch; with others nothing is done."""
    num_handoffs: int = 0
    """Fetches so far, of which each ends well or is counted as lost."""
    done: Counter[str] = field(default_factory=Counter)
    """What was done."""
    _false_answers: dict[bytes, str] = field(default_factory=dict)

    @property
    def checks(self) -> Counter[str]:
        """How often each check must have failed."""
        checks: Counter[str] = Counter()
        for kind, num_done in self.done.items():
            checks[self.kinds[kind]] += num_done
        return checks

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """For the block."""
        fetch, release = WorkerService.Fetch, WorkerService.Release

        async def tampered_fetch(
            service: WorkerService, request: worker_pb2.FetchRequest, context: Any
        ) -> AsyncIterator[worker_pb2.FetchResponse]:
            is_on = request.epoch in self.owners
            self.num_handoffs += is_on
            kind = self.draws.choice(list(self.kinds)) if is_on and self.draws.random() < SHARE else ""
            countdown = self.draws.randrange(3)
            lease = service.leases.find(request.attempt_id, request.epoch)
            async with contextlib.aclosing(fetch(service, request, context)) as frames:  # type: ignore[type-var]
                async for frame in frames:
                    if kind and frame.block_ids and countdown == 0:
                        await self._tamper(kind, self.owners[request.epoch], lease, frame)
                    countdown -= 1
                    yield frame

        async def tampered_release(service: WorkerService, request: worker_pb2.ReleaseRequest, context: Any) -> Any:
            answer = await release(service, request, context)
            kind = self._false_answers.pop(request.attempt_id, "")
            answer.num_tokens -= kind == "another count"
            answer.epoch ^= kind == "another epoch"
            return answer

        with (
            mock.patch.object(WorkerService, "Fetch", tampered_fetch),
            mock.patch.object(WorkerService, "Release", tampered_release),
            # Handoffs are wanted: nobody is left alone for failing.
            mock.patch.object(breakers, "NUM_REQUESTS", 10**9),
        ):
            yield

    async def _tamper(self, kind: str, owner: RunningWorker, lease: Lease, frame: worker_pb2.FetchResponse) -> None:
        self.done[kind] += 1
        if kind == "flipped bit":
            data = bytearray(frame.data)
            data[self.draws.randrange(len(data))] ^= 1 << self.draws.randrange(8)
            frame.data = bytes(data)
        elif kind == "bytes cut off":
            frame.data = frame.data[:-1]
        elif kind.startswith("another"):
            self._false_answers[lease.attempt_id] = kind
        else:
            blocks = list(lease.block_table)
            owner.parts.leases.break_(lease)
            if kind != "broken lease":
                await _given_back(owner, blocks)
            if kind == "reused blocks":
                _reuse(owner)


async def _given_back(owner: RunningWorker, blocks: list[int]) -> None:
    """Waits until the owner has let go of blocks that no other attempt shares."""
    pool = owner.parts.holdings.pool
    while any(pool.ref_count(block) for block in blocks):
        change = owner.service._changed
        await change.wait()


def _reuse(owner: RunningWorker) -> None:
    """Others get all that is free, and write into it."""
    pool = owner.parts.holdings.pool
    pool.drop_cached()
    taken = pool.allocate(pool.num_available)
    owner.parts.memory.planes[:, taken] = RUBBISH
    pool.release(taken)


async def corrupt_many(num_tampered: int, seed: int, transport: str) -> Tampering:
    """Raises AssertionError for a wrong token, a request that failed, or a handoff that was lost and not counted."""
    draws = random.Random(seed)
    kinds = EVERYWHERE | (BY_MESSAGE if transport == "grpc" else {})
    tampering = Tampering(draws, kinds)
    with tampering.at_work():
        async with cluster(2, 2, worker={"kv_transports": (transport,), "num_kv_blocks": 512}) as c:
            tampering.owners |= {worker.parts.identity.epoch: worker for worker in c.prefills}

            async def ask_again_and_again() -> None:
                while tampering.done.total() < num_tampered:
                    await _ask(c, draws)

            async with asyncio.TaskGroup() as group:
                for _ in range(NUM_AT_ONCE):
                    group.create_task(ask_again_and_again())
            await c.balanced()
            lost: Counter[str] = Counter()
            for worker in c.decodes:
                lost.update(_load(worker).handoffs_lost)
            assert lost == tampering.checks, f"counted as lost were {lost}, done was {tampering.done}"
    return tampering


async def _ask(c: Cluster, draws: random.Random) -> None:
    prompt = [*draws.randbytes(8), *(i % 251 for i in range(draws.choice((10, 60, 200))))]
    reply = await c.generate(num_tokens=4, prompt=prompt)
    assert reply.tokens == expected(prompt, 4), "tokens from KV that was tampered with"


def _load(worker: RunningWorker) -> inference_pb2.WorkerLoad:
    load: Callable[[], inference_pb2.WorkerLoad] = worker.role.load
    return load()
