"""Turns of a session over a whole system: what is reused, what is appended to, and what is left when parts are gone."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from cluster import (
    LIMIT_S,
    PROMPT,
    Cluster,
    Reply,
    another_router,
    cluster,
    collect,
    expected,
    held,
    load_of,
    request_of,
)
from failures import details_of, failure
from google.rpc import error_details_pb2
from redis_process import RedisServer

from kvstore.hashing import session_key
from kvstore.metadata import open_store
from protos import inference_pb2

BLOCK = 16
MORE = [*b" And then?"]


async def generate(stub: Any, num_tokens: int, new: list[int], **fields: Any) -> Reply:
    async with asyncio.timeout(LIMIT_S):
        return await collect(stub.Generate(request_of(num_tokens, new, session_id="chat", **fields)))


async def say(stub: Any, said: list[int], new: list[int], num_tokens: int = 40, append: bool = True) -> Any:
    """One turn after `said`; answers the whole conversation so far and how the turn ended."""
    reply = await generate(stub, num_tokens, new if append else [*said, *new], append=append)
    assert reply.tokens == expected([*said, *new], num_tokens)
    assert reply.finish.usage.prompt_tokens == len(said) + len(new)
    return [*said, *new, *reply.tokens], reply.finish


async def begin(c: Cluster, num_tokens: int = 40) -> Any:
    """The first turn."""
    return await say(c.stub, [], list(PROMPT), num_tokens, append=False)


def num_kept(said: list[int]) -> int:
    """Tokens of a conversation whose KV can be reused: whole blocks without the last token, which was only sampled."""
    return (len(said) - 1) // BLOCK * BLOCK


@pytest.mark.parametrize("append", [False, True], ids=["whole", "append"])
async def test_the_next_turn_goes_to_the_holder_which_reuses_its_kv(own_valkey: RedisServer, append: bool) -> None:
    async with cluster(0, 3, redis_url=own_valkey.url) as c:
        said, first = await begin(c)
        assert first.usage.cached_tokens == 0
        for _ in range(4):
            kept = num_kept(said)
            said, finish = await say(c.stub, said, MORE, append=append)
            assert finish.served_by.decode_worker_id == first.served_by.decode_worker_id
            assert finish.usage.cached_tokens == kept
        await c.balanced()


async def test_the_holder_computes_a_short_new_part_itself(own_valkey: RedisServer) -> None:
    async with cluster(1, 3, redis_url=own_valkey.url) as c:
        said, first = await begin(c)
        assert first.served_by.prefill_worker_id == "prefill-0"
        kept = num_kept(said)
        said, finish = await say(c.stub, said, MORE)
        assert finish.served_by.prefill_worker_id == finish.served_by.decode_worker_id
        assert finish.served_by.decode_worker_id == first.served_by.decode_worker_id
        assert (finish.usage.cached_tokens, finish.served_by.kv_bytes) == (kept, 0)
        await c.balanced()


async def test_of_a_long_new_part_only_what_is_new_is_handed_over(own_valkey: RedisServer) -> None:
    async with cluster(1, 3, redis_url=own_valkey.url, local_turn_max_tokens=8) as c:
        block_bytes = c.decodes[0].parts.identity.layout.block_bytes
        said, first = await begin(c)
        num_before = num_kept(said) // BLOCK
        _, finish = await say(c.stub, said, MORE)
        assert finish.served_by.decode_worker_id == first.served_by.decode_worker_id
        assert finish.served_by.kv_bytes == (-(-(len(said) + len(MORE)) // BLOCK) - num_before) * block_bytes
        # Prefill knows the first prompt; decode's own output it computes again.
        assert finish.usage.cached_tokens == len(PROMPT) // BLOCK * BLOCK


async def test_a_holder_that_gave_the_blocks_to_others_gets_the_kv_from_prefill(own_valkey: RedisServer) -> None:
    """It says so at once, and nothing is computed in its steps."""
    async with cluster(1, 1, decode={"num_kv_blocks": 24}, redis_url=own_valkey.url, local_turn_max_tokens=32) as c:
        said, _ = await begin(c)
        for i in range(3):
            await c.generate(num_tokens=8, prompt=[i] * 350)
        _, finish = await say(c.stub, said, MORE)
        assert finish.served_by.prefill_worker_id == "prefill-0" and finish.served_by.num_attempts == 2
        await c.balanced()


async def test_text_is_appended_without_a_new_beginning(own_valkey: RedisServer) -> None:
    async with cluster(redis_url=own_valkey.url) as c:
        said, _ = await begin(c)
        request = request_of(8, [], session_id="chat", append=True)
        request.prompt = "And then?"
        reply = await collect(c.stub.Generate(request))
        assert reply.tokens == expected([*said, *b"And then?"], 8)


async def test_a_session_goes_on_at_another_router(own_valkey: RedisServer) -> None:
    async with (
        cluster(1, 2, redis_url=own_valkey.url) as c,
        another_router(c, redis_url=own_valkey.url) as other,
    ):
        said, first = await begin(c)
        for stub in (other, c.stub, other):
            kept = num_kept(said)
            said, finish = await say(stub, said, MORE)
            assert finish.served_by.decode_worker_id == first.served_by.decode_worker_id
            assert finish.usage.cached_tokens == kept


async def test_two_turns_at_once_come_one_after_the_other(own_valkey: RedisServer) -> None:
    async with cluster(0, 1, redis_url=own_valkey.url) as c:
        said, _ = await begin(c)
        with held(c.decodes[0]):
            first = asyncio.create_task(generate(c.stub, 8, MORE, append=True))
            await c.until_running()
            second = asyncio.create_task(generate(c.stub, 8, MORE, append=True))
        one = (await first).tokens
        assert one == expected([*said, *MORE], 8)
        assert (await second).tokens == expected([*said, *MORE, *one, *MORE], 8)
        await c.balanced()


async def test_two_routers_turns_at_once_are_not_mixed(own_valkey: RedisServer) -> None:
    async with (
        cluster(0, 1, redis_url=own_valkey.url) as c,
        another_router(c, redis_url=own_valkey.url) as other,
    ):
        said, _ = await begin(c)
        ways = [(c.stub, MORE), (other, [*MORE, *MORE])]
        with held(c.decodes[0]):
            answers = [asyncio.create_task(generate(stub, 8, new, append=True)) for stub, new in ways]
            await load_of(c.decodes[0].address, lambda load: load.num_running + load.num_queued == 2, LIMIT_S)
        done = await asyncio.gather(*answers, return_exceptions=True)
        ((good, new),) = [(each, new) for each, (_, new) in zip(done, ways, strict=True) if isinstance(each, Reply)]
        (bad,) = [each for each in done if isinstance(each, grpc.aio.AioRpcError)]
        (info,) = details_of(bad, error_details_pb2.ErrorInfo)
        assert (bad.code(), info.reason) == (grpc.StatusCode.ABORTED, "SESSION_BUSY")
        assert good.tokens == expected([*said, *new], 8)
        await say(other, [*said, *new, *good.tokens], MORE)


async def test_a_cold_prompt_reports_no_cached_tokens_and_a_repeated_one_its_blocks() -> None:
    async with cluster() as c:
        prompt = list(range(100))
        assert (await c.generate(prompt=prompt)).finish.usage.cached_tokens == 0
        assert (await c.generate(prompt=prompt)).finish.usage.cached_tokens == 96


async def test_the_end_of_a_session_frees_its_kv_at_all_workers(own_valkey: RedisServer) -> None:
    async with cluster(1, 2, redis_url=own_valkey.url) as c:
        pools = [worker.parts.holdings.pool for worker in (*c.prefills, *c.decodes)]
        before = sum(pool.num_cached for pool in pools)
        said, _ = await begin(c)
        await say(c.stub, said, MORE)
        await c.balanced()
        assert sum(pool.num_cached for pool in pools) > before
        request = inference_pb2.EndSessionRequest(session_id="chat")
        assert (await c.stub.EndSession(request)).existed
        assert sum(pool.num_cached for pool in pools) == before
        assert not (await c.stub.EndSession(request)).existed
        error = await failure(c.stub.Generate(request_of(8, MORE, session_id="chat", append=True)))
        assert error.code() is grpc.StatusCode.NOT_FOUND
        await c.balanced()


async def test_a_cancelled_turn_leaves_the_session_as_it_was(own_valkey: RedisServer) -> None:
    store = open_store(own_valkey.url)
    async with cluster(redis_url=own_valkey.url) as c:
        said, _ = await begin(c)
        before = await store.read_session(session_key("", "chat"))
        call = c.stub.Generate(request_of(3000, MORE, session_id="chat", append=True))
        await call.read()
        call.cancel()
        await c.balanced()
        assert await store.read_session(session_key("", "chat")) == before is not None
        await say(c.stub, said, MORE)
    await store.close()


async def test_a_session_that_nobody_knows_is_lost_by_name(own_valkey: RedisServer) -> None:
    async with cluster(redis_url=own_valkey.url) as c:
        error = await failure(c.stub.Generate(request_of(8, MORE, session_id="chat", append=True)))
        info, resource = details_of(error, error_details_pb2.ErrorInfo, error_details_pb2.ResourceInfo)
        assert (error.code(), info.reason) == (grpc.StatusCode.NOT_FOUND, "SESSION_LOST")
        assert (resource.resource_type, resource.resource_name) == ("session", "chat")
        said, _ = await begin(c)
        error = await failure(
            c.stub.Generate(request_of(8, MORE, session_id="chat", append=True, session_tokens=len(said) - 1))
        )
        (info,) = details_of(error, error_details_pb2.ErrorInfo)
        assert info.reason == "SESSION_LOST" and f"has {len(said)}, got {len(said) - 1}" in error.details()
        reply = await generate(c.stub, 8, MORE, append=True, session_tokens=len(said))
        assert reply.tokens == expected([*said, *MORE], 8)


async def test_turns_go_on_while_the_store_is_away_and_at_a_router_that_never_saw_them(
    own_valkey: RedisServer,
) -> None:
    """By memory, then by asking the workers; afterwards by the store again."""
    async with (
        cluster(0, 2, redis_url=own_valkey.url) as c,
        another_router(c, redis_url=own_valkey.url) as other,
    ):
        said, first = await begin(c)
        own_valkey.kill()
        for stub in (c.stub, other, c.stub):
            kept = num_kept(said)
            said, finish = await say(stub, said, MORE)
            assert finish.usage.cached_tokens == kept
        own_valkey.start()
        for stub in (other, c.stub):
            kept = num_kept(said)
            said, finish = await say(stub, said, MORE)
            assert finish.served_by.decode_worker_id == first.served_by.decode_worker_id
            assert finish.usage.cached_tokens == kept


async def test_a_flushed_store_costs_nothing(own_valkey: RedisServer) -> None:
    async with (
        cluster(1, 2, redis_url=own_valkey.url) as c,
        another_router(c, redis_url=own_valkey.url) as other,
    ):
        said, _ = await begin(c)
        for stub in (other, c.stub):
            own_valkey.flush()
            kept = num_kept(said)
            said, finish = await say(stub, said, MORE)
            assert finish.usage.cached_tokens == kept
