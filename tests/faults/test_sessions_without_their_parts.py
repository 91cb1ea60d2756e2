"""Sessions on real processes, two routers, while Redis, a router or the worker with the KV goes: no turn fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from processes import System
from talking import Talker, all_have, talking

from baton.topology import choose_ports
from protos import inference_pb2, inference_pb2_grpc
from runtime.rpc import create_channel

NUM_TALKERS = 4


@pytest.fixture
async def stubs(system: System, stub: Any) -> AsyncIterator[list[Any]]:
    """Two routers."""
    (port,) = choose_ports(1)
    router = system.new_router("r1", port)
    router.start()
    try:
        router.until("ready")
        async with create_channel(router.address) as channel:
            yield [stub, inference_pb2_grpc.InferenceStub(channel)]
    finally:
        router.kill()


@pytest.fixture
async def talkers(stubs: list[Any]) -> AsyncIterator[list[Talker]]:
    """Some who have begun to talk; in the end what is kept of them is freed."""
    everyone = [Talker(stubs, f"talker-{i}") for i in range(NUM_TALKERS)]
    for each in everyone:
        await each.turn()
    yield everyone
    for each in everyone:
        await stubs[0].EndSession(inference_pb2.EndSessionRequest(session_id=each.name), wait_for_ready=True)


async def reuse_is_back(talkers: list[Talker]) -> None:
    """Two turns later every conversation finds all of its KV again, at either router."""
    for each in talkers:
        for _ in range(3):
            await each.turn()
        assert each.last.finish.usage.cached_tokens == each.num_reusable > 0
        assert each.last.finish.served_by.num_attempts == 1


@pytest.mark.parametrize("fault", ["killed", "flushed", "paused"])
async def test_redis_is(fault: str, system: System, talkers: list[Talker]) -> None:
    async with talking(talkers):
        await all_have(talkers, 2)
        if fault == "killed":
            system.redis.kill()
            await all_have(talkers, 6)
            system.redis.start()
        elif fault == "paused":
            system.redis.freeze()
            await all_have(talkers, 6)
            system.redis.thaw()
        for _ in range(2):
            if fault == "flushed":
                system.redis.flush()
            await all_have(talkers, 2)
    assert sum(each.num_lost for each in talkers) == 0
    await reuse_is_back(talkers)


async def test_the_worker_with_the_kv_dies(system: System, talkers: list[Talker]) -> None:
    """Its sessions are computed again elsewhere, from the tokens that are remembered."""
    async with talking(talkers):
        await all_have(talkers, 1)
        system.decodes[0].kill()
        await all_have(talkers, 3)
        system.decodes[0].start()
        await asyncio.to_thread(system.decodes[0].until, "listening")
        await all_have(talkers, 3)
    assert sum(each.num_lost for each in talkers) == 0
    await reuse_is_back(talkers)


async def test_a_router_is_started_again(system: System, talkers: list[Talker]) -> None:
    """It knows the sessions from the store."""
    for each in talkers:
        await each.turn()
        await each.turn()
    system.router.kill()
    system.router.start()
    system.router.until("ready")
    await reuse_is_back(talkers)
    assert sum(each.num_lost for each in talkers) == 0


async def test_redis_and_a_router_are_gone_at_once(system: System, talkers: list[Talker]) -> None:
    """What the workers remember is enough."""
    for each in talkers:
        await each.turn()
    system.redis.kill()
    system.router.kill()
    system.router.start()
    system.router.until("ready")
    for each in talkers:
        await each.turn()
    system.redis.start()
    await reuse_is_back(talkers)
    assert sum(each.num_lost for each in talkers) == 0


async def test_everything_that_knew_a_session_is_gone(system: System, stub: Any) -> None:
    """Then it is lost, once, with a reason, and the whole conversation begins it anew."""
    talker = Talker([stub], "alone")
    await talker.turn()
    system.redis.kill()
    for process in (*system.decodes, system.router):
        process.kill()
        process.start()
    system.router.until("ready")
    for process in system.decodes:
        process.until("listening")
    system.redis.start()
    await talker.turn()
    assert talker.num_lost == 1
    await reuse_is_back([talker])
    assert talker.num_lost == 1
