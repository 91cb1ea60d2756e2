"""What every store promises, over memory and a real server; then what only a server can do: go away and come back."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio as redis_client

from kvstore import metadata
from kvstore.hashing import pack_token_ids, session_key
from kvstore.metadata.base import MetadataStore, SessionRecord, StoreUnavailable, WorkerRecord
from kvstore.metadata.memory import Store as MemoryStore
from runtime.errors import ConfigError

WORKER = WorkerRecord("decode-1", "decode", "127.0.0.1:7001", 2**64 - 1)
KEY = session_key("tenant", "session")
RECORD = SessionRecord(
    key=KEY,
    token_ids=pack_token_ids(range(1000)),
    holder="decode-1",
    epoch=2**64 - 1,
    num_tokens=992,
    tail_hash=b"\x00\xff" * 8,
    block_ids=(5, 0, 2**32 - 1),
    fence=1,
)


@pytest.fixture(params=metadata.available())
async def store(request: pytest.FixtureRequest) -> AsyncIterator[MetadataStore]:
    """Each store, empty."""
    url = "memory://"
    if request.param == "redis":
        url = request.getfixturevalue("shared_redis").url
        async with redis_client.Redis.from_url(url) as client:
            await client.flushall()
    opened = metadata.open_store(url, op_timeout_s=5)
    yield opened
    await opened.close()


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Asks again and again, for a time to live of milliseconds to run out."""
    async with asyncio.timeout(10):
        while True:
            if await condition():
                return
            await asyncio.sleep(0)  # the memory store alone would never let the timeout act


def test_the_files_are_the_stores() -> None:
    folder = Path(metadata.__file__).parent
    stems = {path.stem for path in folder.glob("*.py")} - {"__init__", "base"}
    assert set(metadata.available()) == stems == {"memory", "redis"}
    for name in stems:
        assert isinstance(metadata.open_store(f"{name}://localhost"), MetadataStore)
    assert isinstance(metadata.open_store("rediss://localhost"), MetadataStore)


@pytest.mark.parametrize("url", ["", "redis", "localhost:6379", "mongo://user:hunter2@host/0", "Redis://", "base://x"])
def test_urls_that_no_store_takes(url: str) -> None:
    with pytest.raises(ConfigError, match=r"memory://, redis://, rediss://") as caught:
        metadata.open_store(url)
    assert "hunter2" not in caught.value.message


def test_redis_url_that_cannot_be_read() -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        metadata.open_store("redis://host:port/0")


async def test_workers_are_listed_by_id(store: MetadataStore) -> None:
    assert await store.list_workers() == []
    prefill = WorkerRecord("a-prefill", "prefill", "[::1]:1", 0)
    await store.register_worker(WORKER, ttl_s=60)
    await store.register_worker(prefill, ttl_s=60)
    assert await store.list_workers() == [prefill, WORKER]


async def test_registering_again_replaces(store: MetadataStore) -> None:
    moved = replace(WORKER, address="127.0.0.1:7002", epoch=5)
    await store.register_worker(WORKER, ttl_s=60)
    await store.register_worker(moved, ttl_s=60)
    assert await store.list_workers() == [moved]


async def test_a_worker_leaves_the_list_when_its_time_is_up(store: MetadataStore) -> None:
    other = replace(WORKER, worker_id="other")
    await store.register_worker(other, ttl_s=60)
    await store.register_worker(WORKER, ttl_s=0.005)

    async def gone() -> bool:
        return await store.list_workers() == [other]

    await until(gone)


async def test_registering_again_renews_the_time(store: MetadataStore) -> None:
    await store.register_worker(WORKER, ttl_s=0.05)
    await store.register_worker(WORKER, ttl_s=60)
    await store.register_worker(replace(WORKER, worker_id="short"), ttl_s=0.05)

    async def short_gone() -> bool:
        return len(await store.list_workers()) < 2

    await until(short_gone)
    assert await store.list_workers() == [WORKER]


async def test_only_the_same_epoch_unregisters(store: MetadataStore) -> None:
    """2**64 - 2 and 2**64 - 1 are one number to whoever counts in doubles."""
    await store.register_worker(WORKER, ttl_s=60)
    await store.unregister_worker(WORKER.worker_id, WORKER.epoch - 1)
    await store.unregister_worker("somebody", WORKER.epoch)
    assert await store.list_workers() == [WORKER]
    await store.unregister_worker(WORKER.worker_id, WORKER.epoch)
    await store.unregister_worker(WORKER.worker_id, WORKER.epoch)
    assert await store.list_workers() == []


async def test_session_round_trip(store: MetadataStore) -> None:
    assert await store.read_session(KEY) is None
    assert await store.write_session(RECORD, expected_fence=0, ttl_s=60)
    assert await store.read_session(KEY) == RECORD
    assert await store.read_session(session_key("tenant", "other")) is None


async def test_session_with_empty_fields(store: MetadataStore) -> None:
    empty = replace(RECORD, token_ids=b"", tail_hash=b"", block_ids=(), holder="", num_tokens=0)
    assert await store.write_session(empty, expected_fence=0, ttl_s=60)
    assert await store.read_session(KEY) == empty


async def test_write_needs_the_stored_fence(store: MetadataStore) -> None:
    second = replace(RECORD, holder="decode-2", fence=2)
    assert not await store.write_session(second, expected_fence=1, ttl_s=60)
    assert await store.write_session(RECORD, expected_fence=0, ttl_s=60)
    assert not await store.write_session(replace(second, fence=9), expected_fence=0, ttl_s=60)
    assert not await store.write_session(replace(second, fence=9), expected_fence=2, ttl_s=60)
    assert await store.read_session(KEY) == RECORD
    assert await store.write_session(second, expected_fence=1, ttl_s=60)
    assert await store.read_session(KEY) == second


async def test_a_shorter_record_replaces_a_longer_one(store: MetadataStore) -> None:
    assert await store.write_session(RECORD, expected_fence=0, ttl_s=60)
    shorter = replace(RECORD, token_ids=b"", block_ids=(), fence=2)
    assert await store.write_session(shorter, expected_fence=1, ttl_s=60)
    assert await store.read_session(KEY) == shorter


async def test_a_repeated_write_stands_until_another(store: MetadataStore) -> None:
    assert await store.write_session(RECORD, expected_fence=0, ttl_s=60)
    assert await store.write_session(RECORD, expected_fence=0, ttl_s=60)
    impostor = replace(RECORD, holder="decode-2")  # the same fence, not the same write
    assert not await store.write_session(impostor, expected_fence=0, ttl_s=60)
    assert await store.write_session(replace(RECORD, fence=2), expected_fence=1, ttl_s=60)
    assert not await store.write_session(RECORD, expected_fence=0, ttl_s=60)


async def test_fences_are_whole_64_bit_numbers(store: MetadataStore) -> None:
    high = replace(RECORD, fence=2**63 + 1)
    assert await store.write_session(high, expected_fence=0, ttl_s=60)
    assert not await store.write_session(replace(RECORD, fence=2**64 - 1), expected_fence=2**63, ttl_s=60)
    assert await store.write_session(replace(RECORD, fence=2**64 - 1), expected_fence=2**63 + 1, ttl_s=60)


async def test_one_of_many_writers_wins(store: MetadataStore) -> None:
    records = [replace(RECORD, holder=f"decode-{number}") for number in range(50)]
    won = await asyncio.gather(*(store.write_session(record, expected_fence=0, ttl_s=60) for record in records))
    assert won.count(True) == 1
    assert await store.read_session(KEY) == records[won.index(True)]


async def test_a_session_is_forgotten_in_time(store: MetadataStore) -> None:
    assert await store.write_session(RECORD, expected_fence=0, ttl_s=0.005)

    async def gone() -> bool:
        return await store.read_session(KEY) is None

    await until(gone)
    assert await store.write_session(RECORD, expected_fence=0, ttl_s=60)


@pytest.mark.parametrize(
    ("fence", "expected", "ttl_s"), [(1, 1, 9), (1, 2, 9), (0, 0, 9), (1, -1, 9), (2**64, 1, 9), (1, 0, 0), (1, 0, 1e9)]
)
async def test_writes_that_could_never_be_right(store: MetadataStore, fence: int, expected: int, ttl_s: float) -> None:
    with pytest.raises(ValueError, match=r"fence|ttl_s"):
        await store.write_session(replace(RECORD, fence=fence), expected, ttl_s)
    assert await store.read_session(KEY) is None


@pytest.mark.parametrize("ttl_s", [0, -1, float("nan"), float("inf")])
async def test_workers_need_a_time_to_live(store: MetadataStore, ttl_s: float) -> None:
    with pytest.raises(ValueError, match="ttl_s"):
        await store.register_worker(WORKER, ttl_s)


async def test_memory_keeps_time_by_its_clock() -> None:
    now = [100.0]
    store = MemoryStore("memory://", 0.5, clock=lambda: now[0])
    await store.register_worker(WORKER, ttl_s=3)
    await store.write_session(RECORD, 0, ttl_s=5)
    now[0] = 103.0
    assert await store.list_workers() == []
    assert await store.read_session(KEY) == RECORD
    now[0] = 105.0
    assert await store.read_session(KEY) is None


@pytest.fixture
async def client(shared_redis: Any) -> AsyncIterator[Any]:
    """A plain connection to the shared server, emptied."""
    async with redis_client.Redis.from_url(shared_redis.url) as connection:
        await connection.flushall()
        yield connection


async def test_every_key_has_a_tag_and_a_time_to_live(shared_redis: Any, client: Any) -> None:
    store = metadata.open_store(shared_redis.url, 5)
    await store.register_worker(WORKER, ttl_s=60)
    await store.register_worker(replace(WORKER, worker_id="b"), ttl_s=1)
    await store.write_session(RECORD, 0, ttl_s=60)
    keys = await client.keys("*")
    assert {bytes(key) for key in keys} == {
        b"baton:{workers}:records",
        b"baton:{workers}:expiry",
        b"baton:{%s}:session1" % KEY.hex().encode(),
    }
    for key in keys:
        assert 50_000 < await client.pttl(key) <= 60_000, "the later, shorter time cut the longer one"
    await store.close()


async def test_damaged_session_record_is_dropped(
    shared_redis: Any, client: Any, caplog: pytest.LogCaptureFixture
) -> None:
    store = metadata.open_store(shared_redis.url, 5)
    name = f"baton:{{{KEY.hex()}}}:session1"
    for field, value in (("token_ids", b"xxxx"), ("digest", None), ("fence", b"7")):
        await store.write_session(RECORD, 0, ttl_s=60)
        await (client.hdel(name, field) if value is None else client.hset(name, field, value))
        caplog.clear()
        assert await store.read_session(KEY) is None
        assert "deleted a session record that cannot be read" in caplog.text
        assert not await client.exists(name)
    await store.close()


@pytest.mark.parametrize(
    "garbage", [b"{", b"[]", b"7", b'{"id": "x"}', b'{"id":"x","role":"","address":"","epoch":"?"}']
)
async def test_damaged_worker_record_is_left_out(shared_redis: Any, client: Any, garbage: bytes) -> None:
    store = metadata.open_store(shared_redis.url, 5)
    await store.register_worker(WORKER, ttl_s=60)
    await client.hset("baton:{workers}:records", "x", garbage)
    assert await store.list_workers() == [WORKER]
    await store.unregister_worker("x", 1)
    assert await store.list_workers() == [WORKER]
    await store.close()


async def fails_in_time(store: MetadataStore, within_s: float) -> None:
    """Every operation, one after the other."""
    operations: list[Callable[[], Awaitable[object]]] = [
        lambda: store.register_worker(WORKER, 60),
        lambda: store.unregister_worker(WORKER.worker_id, 1),
        store.list_workers,
        lambda: store.read_session(KEY),
        lambda: store.write_session(RECORD, 0, 60),
    ]
    for operation in operations:
        start = time.monotonic()
        with pytest.raises(StoreUnavailable, match=r"metadata store 127.0.0.1:\d+: ."):
            await operation()
        assert time.monotonic() - start < within_s


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage().rpartition(" is ")[2].split(",")[0] for record in caplog.records]


async def test_redis_killed_and_started_again(own_redis: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Records are lost, requests are not; a write that expects the lost record is refused, not invented."""
    caplog.set_level(logging.WARNING)
    store = metadata.open_store(own_redis.url, op_timeout_s=2)
    await store.register_worker(WORKER, ttl_s=60)
    await asyncio.gather(*(store.write_session(RECORD, 0, ttl_s=60) for _ in range(40)))
    own_redis.kill()
    await fails_in_time(store, within_s=3)
    await fails_in_time(store, within_s=3)
    assert lines(caplog) == ["away"]
    own_redis.start()
    assert await store.list_workers() == []
    assert await store.read_session(KEY) is None
    assert not await store.write_session(replace(RECORD, fence=2), expected_fence=1, ttl_s=60)
    assert await store.write_session(RECORD, expected_fence=0, ttl_s=60)
    assert lines(caplog) == ["away", "back"]
    await store.close()


async def test_redis_restarted_between_two_operations(own_redis: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Pooled connections are all dead then: the operation itself does not notice."""
    caplog.set_level(logging.WARNING)
    store = metadata.open_store(own_redis.url, op_timeout_s=2)
    await asyncio.gather(*(store.read_session(KEY) for _ in range(40)))
    own_redis.kill()
    own_redis.start()
    assert await store.list_workers() == []
    assert await asyncio.gather(*(store.read_session(KEY) for _ in range(40))) == [None] * 40
    assert lines(caplog) == []
    await store.close()


async def test_redis_frozen(own_redis: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A server that answers nothing is away too, on open connections and new ones."""
    caplog.set_level(logging.WARNING)
    store = metadata.open_store(own_redis.url, op_timeout_s=0.1)
    await store.register_worker(WORKER, ttl_s=60)
    own_redis.freeze()
    await fails_in_time(store, within_s=1)
    start = time.monotonic()
    answers = await asyncio.gather(*(store.read_session(KEY) for _ in range(50)), return_exceptions=True)
    assert {type(answer) for answer in answers} == {StoreUnavailable}
    assert time.monotonic() - start < 1
    own_redis.thaw()

    async def back() -> bool:
        try:
            return await store.read_session(KEY) is None
        except StoreUnavailable:
            return False

    await until(back)
    assert lines(caplog) == ["away", "back"]
    await store.close()


async def test_redis_flushed(shared_redis: Any, client: Any) -> None:
    store = metadata.open_store(shared_redis.url, 5)
    await store.register_worker(WORKER, ttl_s=60)
    await store.write_session(RECORD, 0, ttl_s=60)
    await client.flushall()
    assert await store.list_workers() == []
    assert await store.read_session(KEY) is None
    await store.register_worker(WORKER, ttl_s=60)
    assert await store.write_session(RECORD, 0, ttl_s=60)
    await store.close()


async def test_redis_that_refuses_writes(own_redis: Any) -> None:
    """Out of memory, or a replica after a failover: an error from the server is the store being away."""
    store = metadata.open_store(own_redis.url, op_timeout_s=2)
    async with redis_client.Redis.from_url(own_redis.url) as connection:
        await connection.config_set("maxmemory", "1")
    with pytest.raises(StoreUnavailable, match="maxmemory"):
        await store.write_session(RECORD, 0, ttl_s=60)
    assert await store.read_session(KEY) is None
    await store.close()


async def test_redis_never_there(caplog: pytest.LogCaptureFixture) -> None:
    """Opening succeeds, closing succeeds, the password stays out of messages."""
    store = metadata.open_store("redis://user:hunter2@127.0.0.1:1/0", op_timeout_s=0.5)
    with pytest.raises(StoreUnavailable) as caught:
        await store.list_workers()
    await store.close()
    assert "hunter2" not in caught.value.message + caplog.text


async def test_cancelled_operation_leaves_the_store_usable(own_redis: Any) -> None:
    """An answer that comes late must not be taken for the next question's."""
    store = metadata.open_store(own_redis.url, op_timeout_s=5)
    await store.write_session(RECORD, 0, ttl_s=60)
    own_redis.freeze()
    reading = [asyncio.create_task(store.read_session(KEY)) for _ in range(5)]
    for _ in range(100):
        await asyncio.sleep(0)
    for task in reading:
        task.cancel()
    await asyncio.gather(*reading, return_exceptions=True)
    assert all(task.cancelled() for task in reading)
    own_redis.thaw()
    assert await store.list_workers() == []
    assert await store.read_session(KEY) == RECORD
    await store.close()
