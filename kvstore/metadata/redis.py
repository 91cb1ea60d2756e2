"""Records in Redis 6.2 or later, or Valkey, by redis-py. A script touches only keys it is given, all of one tag.

Keys, all with a time to live: `baton:{workers}:records` (hash: id to JSON), `baton:{workers}:expiry` (sorted set: id by
the server's time in ms at which it ends), `baton:{<session key in hex>}:session1` (hash; the number is the format's).
64-bit numbers are decimal text, because Lua's numbers lose digits. Every operation may be repeated, ends within the
timeout, and fails as `StoreUnavailable`; the log has one line when the server goes and one when it is back.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable
from hashlib import blake2b
from typing import Any

import redis.asyncio as redis_client
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from kvstore.hashing import pack_token_ids, unpack_token_ids
from kvstore.metadata.base import (
    MetadataStore,
    SessionRecord,
    StoreUnavailable,
    WorkerRecord,
    check_ttl,
    check_write,
)
from runtime.errors import ConfigError

_MAX_CONNECTIONS = 16  # more callers than this wait their turn, within the timeout

_WORKERS = ("baton:{workers}:records", "baton:{workers}:expiry")

# KEYS: records, expiry. ARGV: worker id, record, ttl in ms.
_REGISTER = """
local now = redis.call('TIME')
local ends = now[1] * 1000 + math.floor(now[2] / 1000) + ARGV[3]
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('ZADD', KEYS[2], ends, ARGV[1])
for _, key in ipairs(KEYS) do
  if redis.call('PTTL', key) < tonumber(ARGV[3]) then redis.call('PEXPIRE', key, ARGV[3]) end
end
"""

# KEYS: records, expiry. ARGV: worker id, epoch. What cannot be read is nobody's and goes too.
_UNREGISTER = """
local record = redis.call('HGET', KEYS[1], ARGV[1])
local readable, fields = pcall(cjson.decode, record or '{}')
if not readable or type(fields) ~= 'table' or fields['epoch'] == ARGV[2] then
  redis.call('HDEL', KEYS[1], ARGV[1])
  redis.call('ZREM', KEYS[2], ARGV[1])
end
"""

# KEYS: records, expiry. Answers the records of workers whose time has not run out, and drops the others.
_LIST = """
local now = redis.call('TIME')
local ended = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now[1] * 1000 + math.floor(now[2] / 1000))
for _, id in ipairs(ended) do
  redis.call('HDEL', KEYS[1], id)
  redis.call('ZREM', KEYS[2], id)
end
return redis.call('HVALS', KEYS[1])
"""

# KEYS: session. ARGV: expected fence, ttl in ms, then the record's fields and values.
# A write that took effect and is repeated finds its own digest, which covers the fence. HSET is the first command that
# writes: after any other a server without room would let it through.
_WRITE = """
local stored = redis.call('HMGET', KEYS[1], 'fence', 'digest')
local digest = ARGV[4]
if stored[2] ~= digest and (stored[1] or '0') ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[1], unpack(ARGV, 3))
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return 1
"""

logger = logging.getLogger(__name__)


class Store(MetadataStore):
    """Records in one Redis or Valkey server, or whatever stands behind one address."""

    def __init__(self, url: str, op_timeout_s: float) -> None:
        """Connects on first use. Raises ConfigError for a URL that redis-py cannot read."""
        self._op_timeout_s = op_timeout_s
        self._away = False
        try:
            pool = redis_client.BlockingConnectionPool.from_url(
                url,
                max_connections=_MAX_CONNECTIONS,
                timeout=op_timeout_s,
                socket_timeout=op_timeout_s,
                socket_connect_timeout=op_timeout_s,
                retry=Retry(NoBackoff(), 1),  # once more at once: a pooled connection may be of a server that restarted
                protocol=2,
            )
        except ValueError as error:
            raise ConfigError(f"metadata store: the Redis URL cannot be read: {error}") from error
        self._redis = redis_client.Redis.from_pool(pool)
        parameters = pool.connection_kwargs
        self._server = f"{parameters.get('host', 'localhost')}:{parameters.get('port', 6379)}"

    async def register_worker(self, record: WorkerRecord, ttl_s: float) -> None:
        """As the base says."""
        check_ttl(ttl_s)
        await self._run(_REGISTER, _WORKERS, record.worker_id, _encode_worker(record), _milliseconds(ttl_s))

    async def unregister_worker(self, worker_id: str, epoch: int) -> None:
        """As the base says."""
        await self._run(_UNREGISTER, _WORKERS, worker_id, str(epoch))

    async def list_workers(self) -> list[WorkerRecord]:
        """As the base says. A record that cannot be read is left out and logged."""
        encoded: list[bytes] = await self._run(_LIST, _WORKERS)
        records: list[WorkerRecord] = []
        for each in encoded:
            try:
                records.append(_decode_worker(each))
            except (ValueError, KeyError, TypeError) as error:
                logger.warning("ignored a worker record that cannot be read: %r", error)
        return sorted(records, key=lambda record: record.worker_id)

    async def read_session(self, key: bytes) -> SessionRecord | None:
        """As the base says. A record that cannot be read is deleted and logged: nobody could ever replace it."""
        name = _session_name(key)
        fields: dict[bytes, bytes] = await self._bounded(lambda: self._redis.hgetall(name))
        if not fields:
            return None
        try:
            return _decode_session(key, fields)
        except (ValueError, KeyError) as error:
            logger.warning("deleted a session record that cannot be read: %r", error)
            await self._bounded(lambda: self._redis.delete(name))
            return None

    async def write_session(self, record: SessionRecord, expected_fence: int, ttl_s: float) -> bool:
        """As the base says."""
        check_write(record, expected_fence, ttl_s)
        fields = _encode_session(record)
        flat = [part for pair in fields.items() for part in pair]
        name = _session_name(record.key)
        return bool(await self._run(_WRITE, (name,), str(expected_fence), _milliseconds(ttl_s), *flat))

    async def close(self) -> None:
        """As the base says."""
        try:
            async with asyncio.timeout(self._op_timeout_s):
                await self._redis.aclose()
        except (RedisError, OSError, TimeoutError) as error:
            logger.debug("closing connections to %s: %s", self._server, error)

    async def _run(self, script: str, keys: tuple[str, ...], *arguments: str | bytes | int) -> Any:
        # redis-py's types know text arguments only; it sends bytes and numbers as they are.
        parts: tuple[Any, ...] = (*keys, *arguments)
        return await self._bounded(lambda: self._redis.eval(script, len(keys), *parts))

    async def _bounded(self, operation: Callable[[], Awaitable[Any] | Any]) -> Any:
        try:
            async with asyncio.timeout(self._op_timeout_s):
                answer = await operation()
        except (RedisError, OSError, TimeoutError) as error:
            cause = str(error) or f"no answer within {self._op_timeout_s:g} s"
            if not self._away:
                logger.warning("metadata store %s is away, going on without: %s", self._server, cause)
            self._away, self.failed_s = True, time.monotonic()
            raise StoreUnavailable(f"metadata store {self._server}: {cause}") from error
        if self._away:
            logger.warning("metadata store %s is back", self._server)
        self._away = False
        return answer


def _milliseconds(duration_s: float) -> int:
    return max(1, round(duration_s * 1000))


def _session_name(key: bytes) -> str:
    return f"baton:{{{key.hex()}}}:session1"


def _encode_worker(record: WorkerRecord) -> str:
    fields = {"id": record.worker_id, "role": record.role, "address": record.address, "epoch": str(record.epoch)}
    return json.dumps(fields)


def _decode_worker(encoded: bytes) -> WorkerRecord:
    fields = json.loads(encoded)
    return WorkerRecord(str(fields["id"]), str(fields["role"]), str(fields["address"]), int(fields["epoch"]))


def _encode_session(record: SessionRecord) -> dict[str, bytes]:
    """Fields of the hash; the digest, over all others, comes first, where the script looks for it."""
    fields = {
        "fence": str(record.fence).encode(),
        "holder": record.holder.encode(),
        "epoch": str(record.epoch).encode(),
        "num_tokens": str(record.num_tokens).encode(),
        "tail_hash": record.tail_hash,
        "block_ids": pack_token_ids(record.block_ids),
        "token_ids": record.token_ids,
    }
    return {"digest": _digest(fields), **fields}


def _decode_session(key: bytes, stored: dict[bytes, bytes]) -> SessionRecord:
    """Raises KeyError or ValueError if the fields are not what `_encode_session` writes."""
    fields = {name.decode(): value for name, value in stored.items()}
    if fields.pop("digest") != _digest(fields):
        raise ValueError("the digest does not match")
    return SessionRecord(
        key=key,
        token_ids=fields["token_ids"],
        holder=fields["holder"].decode(),
        epoch=int(fields["epoch"]),
        num_tokens=int(fields["num_tokens"]),
        tail_hash=fields["tail_hash"],
        block_ids=unpack_token_ids(fields["block_ids"]),
        fence=int(fields["fence"]),
    )


def _digest(fields: dict[str, bytes]) -> bytes:
    state = blake2b(digest_size=16, person=b"baton.record")
    for name in sorted(fields):
        for part in (name.encode(), fields[name]):
            state.update(len(part).to_bytes(8, "little"))
            state.update(part)
    return state.digest()
