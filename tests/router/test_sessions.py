"""Turns of a session: remembered after each, sent to who holds the KV, and served without the store too."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from cluster import LIMIT_S, PROMPT, Cluster, cluster, expected, request_of
from fake_workers import DECODE, FakeWorker, fleet_over
from redis_process import RedisServer

from kvstore.hashing import session_key, unpack_token_ids
from kvstore.metadata import open_store
from kvstore.metadata.base import SessionRecord, StoreUnavailable
from kvstore.metadata.memory import Store
from protos import inference_pb2
from router.links import Incarnation
from router.sessions import Sessions

BLOCK = 16


class AwayStore(Store):
    """A store that is away."""

    def __init__(self) -> None:
        super().__init__("memory://", 1.0)

    async def read_session(self, key: bytes) -> SessionRecord | None:
        raise StoreUnavailable("away")

    async def write_session(self, record: SessionRecord, expected_fence: int, ttl_s: float) -> bool:
        raise StoreUnavailable("away")

    async def delete_session(self, key: bytes) -> bool:
        raise StoreUnavailable("away")


@pytest.fixture
async def holder() -> Any:
    async with fleet_over(FakeWorker(DECODE, "holder")) as seen:
        await seen.until(lambda fleet: fleet.is_ready)
        yield seen.named("holder")


async def test_a_record_says_what_the_holder_keeps(holder: Incarnation) -> None:
    sessions = Sessions(Store("memory://", 1.0), 60)
    tokens = list(range(2 * BLOCK + 5))
    await sessions.write("", "s", None, tokens, holder)
    record = await sessions.read("", "s")
    assert record is not None
    assert (record.holder, record.epoch) == ("holder", holder.description.epoch)
    assert list(unpack_token_ids(record.token_ids)) == tokens
    assert (record.num_tokens, record.fence) == (2 * BLOCK, 1) and record.tail_hash
    assert await sessions.read("tenant", "s") is None
    assert await sessions.read("", "other") is None


async def test_the_last_token_is_not_kept_its_kv_was_never_computed(holder: Incarnation) -> None:
    sessions = Sessions(Store("memory://", 1.0), 60)
    await sessions.write("", "s", None, list(range(2 * BLOCK)), holder)
    record = await sessions.read("", "s")
    assert record is not None and record.num_tokens == BLOCK


async def test_of_two_turns_at_once_the_first_written_stays(holder: Incarnation) -> None:
    sessions = Sessions(Store("memory://", 1.0), 60)
    await sessions.write("", "s", None, [1], holder)
    before = await sessions.read("", "s")
    await sessions.write("", "s", before, [1, 2], holder)
    await sessions.write("", "s", before, [1, 3], holder)
    record = await sessions.read("", "s")
    assert record is not None
    assert (list(unpack_token_ids(record.token_ids)), record.fence) == ([1, 2], 2)


async def test_no_session_no_store_and_no_answer_are_all_no_record(holder: Incarnation) -> None:
    for sessions in (Sessions(None, 60), Sessions(AwayStore(), 60)):
        await sessions.write("", "s", None, [1], holder)
        assert await sessions.read("", "s") is None
        assert not await sessions.end("", "s")
    store = Store("memory://", 1.0)
    await Sessions(store, 60).write("", "", None, [1], holder)
    assert await store.read_session(session_key("", "")) is None


async def turn(c: Cluster, prompt: list[int], num_tokens: int = 40) -> tuple[list[int], inference_pb2.Finish]:
    """One turn; answers the whole conversation so far."""
    reply = await c.generate(request_of(num_tokens, prompt, session_id="chat"))
    assert reply.tokens == expected(prompt, num_tokens)
    return prompt + reply.tokens, reply.finish


async def test_the_next_turn_goes_to_the_holder_which_reuses_its_kv(own_valkey: RedisServer) -> None:
    async with cluster(0, 3, redis_url=own_valkey.url) as c:
        conversation, first = await turn(c, list(PROMPT))
        assert first.usage.cached_tokens == 0
        for _ in range(4):
            num_kept = (len(conversation) - 1) // BLOCK * BLOCK
            conversation, finish = await turn(c, [*conversation, *b" And then?"])
            assert finish.served_by.decode_worker_id == first.served_by.decode_worker_id
            assert finish.usage.cached_tokens == num_kept
        await c.balanced()


async def test_of_a_next_turn_only_what_is_new_is_handed_over(own_valkey: RedisServer) -> None:
    async with cluster(1, 3, redis_url=own_valkey.url) as c:
        block_bytes = c.decodes[0].parts.identity.layout.block_bytes
        conversation, first = await turn(c, list(PROMPT))
        num_kept = (len(conversation) - 1) // BLOCK
        prompt = [*conversation, *b" And then?"]
        _, finish = await turn(c, prompt)
        assert finish.served_by.decode_worker_id == first.served_by.decode_worker_id
        assert finish.served_by.kv_bytes == (-(-len(prompt) // BLOCK) - num_kept) * block_bytes
        # Prefill knows the first prompt; decode's own output it computes again.
        assert finish.usage.cached_tokens == len(PROMPT) // BLOCK * BLOCK


async def test_a_cold_prompt_reports_no_cached_tokens_and_a_repeated_one_its_blocks() -> None:
    async with cluster() as c:
        prompt = list(range(100))
        assert (await c.generate(prompt=prompt)).finish.usage.cached_tokens == 0
        assert (await c.generate(prompt=prompt)).finish.usage.cached_tokens == 96


async def test_a_session_that_ended_is_forgotten(own_valkey: RedisServer) -> None:
    async with cluster(redis_url=own_valkey.url) as c:
        await turn(c, list(PROMPT))
        request = inference_pb2.EndSessionRequest(session_id="chat")
        assert (await c.stub.EndSession(request)).existed
        assert not (await c.stub.EndSession(request)).existed


async def test_a_cancelled_turn_leaves_the_record_as_it_was(own_valkey: RedisServer) -> None:
    store = open_store(own_valkey.url)
    async with cluster(redis_url=own_valkey.url) as c:
        conversation, _ = await turn(c, list(PROMPT))
        before = await store.read_session(session_key("", "chat"))
        call = c.stub.Generate(request_of(3000, conversation, session_id="chat"))
        await call.read()
        call.cancel()
        await c.balanced()
        assert await store.read_session(session_key("", "chat")) == before is not None
    await store.close()


async def test_requests_go_on_while_the_store_is_away_and_reuse_comes_back(own_valkey: RedisServer) -> None:
    async with cluster(0, 2, redis_url=own_valkey.url) as c:
        conversation, _ = await turn(c, list(PROMPT))
        own_valkey.kill()
        conversation, _ = await turn(c, conversation)
        own_valkey.start()
        conversation, third = await turn(c, conversation)
        async with asyncio.timeout(LIMIT_S):
            _, fourth = await turn(c, conversation)
        assert fourth.served_by.decode_worker_id == third.served_by.decode_worker_id
        assert fourth.usage.cached_tokens == (len(conversation) - 1) // BLOCK * BLOCK
