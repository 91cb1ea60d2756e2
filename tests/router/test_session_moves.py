"""A decode worker that drains: its idle sessions go to others, and their next turns find their KV there."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest import mock

import grpc
import grpc.aio
import pytest
from cluster import LIMIT_S, PROMPT, Cluster, another_router, cluster, collect, expected, load_of, request_of
from redis_process import RedisServer
from transports_here import TRANSPORTS

from engine import session_handoff
from engine.worker import RunningWorker
from kvstore.hashing import session_key
from kvstore.metadata import open_store
from protos import worker_pb2, worker_pb2_grpc
from runtime.rpc import create_channel

BLOCK = 16
NUM_TOKENS = 40
MORE = [*b" And then?"]


async def say(stub: Any, name: str, said: list[int], new: list[int], **fields: Any) -> tuple[list[int], Any]:
    """A turn of session `name`; answers the whole conversation so far and how the turn ended."""
    prompt = [*said, *new]
    async with asyncio.timeout(LIMIT_S):
        reply = await collect(stub.Generate(request_of(NUM_TOKENS, prompt, session_id=name, **fields)))
    assert reply.tokens == expected(prompt, NUM_TOKENS)
    return [*prompt, *reply.tokens], reply.finish


async def begun(c: Cluster, num_sessions: int, **fields: Any) -> dict[str, tuple[list[int], str]]:
    """First turns of so many sessions: what was said, and who holds it."""
    talks = {}
    for i in range(num_sessions):
        said, finish = await say(c.stub, f"s{i}", [], [i, *PROMPT], **fields)
        talks[f"s{i}"] = said, finish.served_by.decode_worker_id
    return talks


def named(c: Cluster, name: str) -> RunningWorker:
    (found,) = [worker for worker in c.decodes if worker.parts.identity.worker_id == name]
    return found


def num_kept(said: list[int]) -> int:
    return (len(said) - 1) // BLOCK * BLOCK


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_sessions_of_a_drained_worker_go_on_where_their_kv_went(transport: str, own_valkey: RedisServer) -> None:
    async with cluster(0, 3, redis_url=own_valkey.url, worker={"kv_transports": (transport,)}) as c:
        talks = await begun(c, 9)
        holder = talks["s0"][1]
        await named(c, holder).service.drain(LIMIT_S)
        await c.balanced()
        for name, (said, before) in talks.items():
            said, finish = await say(c.stub, name, said, MORE)
            assert finish.usage.cached_tokens == num_kept(talks[name][0])
            assert (finish.served_by.decode_worker_id == before) == (before != holder)
            said, finish = await say(c.stub, name, said, MORE, append=False)
            assert finish.usage.cached_tokens > num_kept(talks[name][0]), "its record has the new holder"
        store = open_store(own_valkey.url)
        record = await store.read_session(session_key("", "s0"))
        await store.close()
        assert record is not None and record.holder != holder
        assert all(not worker.role.load().num_handoffs_lost for worker in c.decodes)


async def test_appended_turns_find_their_session_without_a_store() -> None:
    async with cluster(0, 2) as c, another_router(c) as other:
        talks = await begun(c, 4)
        holder = talks["s0"][1]
        await named(c, holder).service.drain(LIMIT_S)
        for name, (said, _) in talks.items():
            reply = await collect(other.Generate(request_of(NUM_TOKENS, MORE, session_id=name, append=True)))
            assert reply.tokens == expected([*said, *MORE], NUM_TOKENS)
            assert reply.finish.usage.cached_tokens == num_kept(said)


async def test_two_routers_share_the_sessions_and_each_moves_once() -> None:
    async with cluster(0, 2) as c, another_router(c):
        talks = await begun(c, 12)
        holder = talks["s0"][1]
        num_held = sum(each == holder for _, each in talks.values())
        (other,) = [worker for worker in c.decodes if worker.parts.identity.worker_id != holder]
        num_before = len(other.parts.holdings.sessions)
        with mock.patch.object(
            type(other.role), "_to_keep", autospec=True, side_effect=type(other.role)._to_keep
        ) as keep:
            await named(c, holder).service.drain(LIMIT_S)
            await c.balanced()
        assert keep.call_count == num_held
        assert len(other.parts.holdings.sessions) == num_before + num_held == 12


async def test_a_tenants_session_stays_its_own() -> None:
    async with cluster(0, 2) as c:
        said, finish = await say(c.stub, "s", [], list(PROMPT))
        holder = named(c, finish.served_by.decode_worker_id)
        kept = holder.parts.holdings.sessions.find(session_key("", "s"))
        assert kept is not None and kept.tenant == ""
        with mock.patch.object(type(kept), "tenant", "another"):
            await holder.service.drain(LIMIT_S)
        _, finish = await say(c.stub, "s", said, MORE)
        assert finish.usage.cached_tokens == 0, "its blocks are under another name"


async def test_a_turn_that_runs_while_its_worker_drains_is_handed_off_after_it() -> None:
    async with cluster(0, 2) as c:
        said, finish = await say(c.stub, "s", [], list(PROMPT))
        holder = named(c, finish.served_by.decode_worker_id)
        answering = asyncio.create_task(collect(c.stub.Generate(request_of(400, [*said, *MORE], session_id="s"))))
        await load_of(holder.address, lambda load: load.num_running > 0, LIMIT_S)
        await holder.service.drain(LIMIT_S)
        reply = await answering
        assert reply.finish.served_by.num_attempts == 1, "it was not given back"
        said = [*said, *MORE, *reply.tokens]
        _, finish = await say(c.stub, "s", said, MORE)
        assert finish.usage.cached_tokens == num_kept(said)


async def test_a_session_that_does_not_get_across_is_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its blocks are given to others before they are fetched: the copy is not attested, and the turn is right."""
    async with cluster(0, 2) as c:
        talks = await begun(c, 3)
        holder = named(c, talks["s0"][1])
        lend = type(holder.parts.leases).lend

        def lend_and_break(leases: Any, *arguments: Any) -> Any:
            lease = lend(leases, *arguments)
            leases.break_(lease)
            return lease

        monkeypatch.setattr(type(holder.parts.leases), "lend", lend_and_break)
        await holder.service.drain(LIMIT_S)
        for name, (said, before) in talks.items():
            _, finish = await say(c.stub, name, said, MORE)
            is_moved = before == holder.parts.identity.worker_id
            assert finish.usage.cached_tokens == (0 if is_moved else num_kept(said))
        (other,) = [worker for worker in c.decodes if worker is not holder]
        assert other.role.load().handoffs_lost["lease"] == sum(
            before == holder.parts.identity.worker_id for _, before in talks.values()
        )
        await c.balanced()


async def test_a_worker_without_room_takes_none() -> None:
    """Nobody waits for it: the drain ends, and the next turn is computed again."""
    async with cluster(0, 2) as c:
        said, finish = await say(c.stub, "s", [], list(PROMPT))
        holder = named(c, finish.served_by.decode_worker_id)
        (other,) = [worker for worker in c.decodes if worker is not holder]
        with mock.patch.object(type(other.role.scheduler), "_seat", return_value=False):  # type: ignore[attr-defined]
            async with asyncio.timeout(LIMIT_S):
                await holder.service.drain(None)
        _, finish = await say(c.stub, "s", said, MORE)
        assert finish.usage.cached_tokens == 0
        await c.balanced()


async def test_without_another_worker_a_drain_ends_by_itself() -> None:
    async with cluster(0, 1) as c:
        await begun(c, 2)
        with mock.patch.object(session_handoff, "PATIENCE_S", 0.05):
            async with asyncio.timeout(1.0):
                await c.decodes[0].service.drain(None)


async def test_without_a_router_a_drain_ends_at_once() -> None:
    async with cluster(0, 2) as c:
        await begun(c, 2)
        with (
            mock.patch.object(session_handoff, "PATIENCE_S", 60.0),
            mock.patch.object(c.decodes[0].service, "_num_watchers", 0),
        ):
            async with asyncio.timeout(1.0):
                await c.decodes[0].service.drain(None)


async def test_who_does_not_drain_keeps_its_sessions() -> None:
    async with cluster(0, 1) as c, create_channel(c.decodes[0].address) as channel:
        await begun(c, 1)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await worker_pb2_grpc.WorkerStub(channel).HandOffSession(worker_pb2.HandOffSessionRequest())
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        await c.balanced()
