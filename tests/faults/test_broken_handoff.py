"""Rows of the failure table that need a hand inside: KV that cannot be trusted is never answered from."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from cluster import LIMIT_S, PROMPT, Cluster, Reply, cluster, expected, held

from engine import kv_reader
from engine.worker_service import WorkerService
from prefill_svc.service import PrefillService


async def answered_again(c: Cluster, reply: Reply, num_tokens: int) -> None:
    """The answer is right and took a second attempt; nothing is left behind."""
    assert reply.tokens == expected(PROMPT, num_tokens)
    assert reply.finish.served_by.num_attempts == 2
    await c.balanced()


async def test_lease_is_broken() -> None:
    async with cluster(2, 1) as c:
        with held(c.prefills[0]), held(c.prefills[1]):
            serving = asyncio.create_task(c.generate(num_tokens=20))
            async with asyncio.timeout(LIMIT_S):
                while not (leases := [(w, lease) for w in c.prefills for lease in w.parts.leases if lease.claimed]):
                    await c.router.fleet.change.wait()
            ((owner, lease),) = leases
            owner.parts.leases.break_(lease)
        reply = await serving
        assert reply.finish.served_by.prefill_worker_id != owner.parts.identity.worker_id
        await answered_again(c, reply, 20)


async def test_checksum_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    async with cluster(2, 1, worker={"kv_transports": ("grpc",)}) as c:
        right, num_calls = kv_reader.add_to_checksum, 0

        def wrong_once(frame: Any, checksum: int) -> int:
            nonlocal num_calls
            num_calls += 1
            return right(frame, checksum) ^ (num_calls == 1)

        monkeypatch.setattr(kv_reader, "add_to_checksum", wrong_once)
        await answered_again(c, await c.generate(num_tokens=20), 20)


async def test_epoch_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode is told of an incarnation that is not the one that answers."""
    right, num_calls = PrefillService._accepted, 0

    async with cluster(2, 1) as c:

        def wrong_once(self: PrefillService, sequence: Any) -> Any:
            nonlocal num_calls
            num_calls += 1
            accepted = right(self, sequence)
            accepted.epoch ^= num_calls == 1
            return accepted

        monkeypatch.setattr(PrefillService, "_accepted", wrong_once)
        await answered_again(c, await c.generate(num_tokens=20), 20)


async def test_count_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner attests fewer tokens than decode asked for."""
    right, may_lie = WorkerService.Release, False

    async def wrong_once(self: WorkerService, request: Any, context: Any) -> Any:
        nonlocal may_lie
        answer = await right(self, request, context)
        answer.num_tokens -= may_lie
        may_lie = False
        return answer

    monkeypatch.setattr(WorkerService, "Release", wrong_once)
    async with cluster(2, 1) as c:
        may_lie = True
        await answered_again(c, await c.generate(num_tokens=20), 20)
