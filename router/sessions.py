"""Sessions: turns in order, each on top of the one before it, whatever was lost between them.

1. A turn waits until no other turn of its session runs at this router.
2. It finds the session: in the store, in this router's memory, and where that is not enough, or the holder does not
   serve any more, at the workers. Of all that can be had the record with the greatest fence is the session.
3. It runs. If it ends well its record, with a greater fence, goes to memory and by compare-and-set to the store. If
   another router's turn was written meanwhile, one that was to be appended fails: it is no part of the session.

A record is a hint for a client that sends the whole conversation: losing it, or the whole store, costs reuse and
nothing else. Who appends depends on it: SessionLost when nobody knows it any more. The end of a session is a record
without tokens, so that a turn which still runs elsewhere, or an older copy, does not bring it back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvstore.hashing import session_key, unpack_token_ids
from kvstore.metadata.base import MetadataStore, SessionRecord, StoreUnavailable
from protos import worker_pb2
from router.links import Incarnation
from router.session_holders import SessionHolders, record_at
from router.session_memory import SessionMemory
from runtime.errors import SessionBusy, SessionLost

LOG = logging.getLogger(__name__)
TURN_WAIT_S = 10.0
"""How long a turn waits for the one before it; only one may wait."""
AWAY_S = 1.0
"""A store that failed is left alone for so long, so that not every request waits for it."""
SETTLE_S = 5.0
"""For so long after its last failure the store may lack what routers could not write meanwhile."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn, from the moment the session is its own."""

    tenant: str
    """Whose session."""
    session_id: str
    """The client's name for it."""
    key: bytes
    """Its key in the store and at workers."""
    previous: SessionRecord | None
    """The session before this turn; None for a new one, or one that was ended."""
    fence: int
    """Of the record that this turn will leave behind."""
    stored_fence: int
    """Of the record that the store had; 0 for none."""
    ttl_s: float
    """How long the session is remembered after this turn."""
    is_append: bool = False
    """Whether the turn goes on from `previous`, which is there then."""

    def previous_token_ids(self) -> tuple[int, ...]:
        """The conversation before this turn, as far as it is known."""
        return () if self.previous is None else unpack_token_ids(self.previous.token_ids)

    def is_held_by(self, worker: Incarnation) -> bool:
        """Whether that incarnation generated the last turn, and so has its KV unless it needed the blocks."""
        last = self.previous
        return last is not None and (last.holder, last.epoch) == (worker.worker_id, worker.description.epoch)

    def num_held(self, token_ids: Sequence[int]) -> int:
        """Leading tokens of an input whose KV the holder should have."""
        if self.previous is None:
            return 0
        held = np.frombuffer(self.previous.token_ids, dtype="<u4")[: self.previous.num_tokens]
        num_common = min(len(held), len(token_ids))
        differs = held[:num_common] != np.asarray(token_ids[:num_common], dtype="<u4")
        return int(differs.argmax()) if differs.any() else num_common

    def to_proto(self) -> worker_pb2.SessionTurn:
        """What workers are told, so that they keep the KV of this turn for the next one."""
        return worker_pb2.SessionTurn(session_key=self.key, fence=self.fence, ttl_ms=round(1000 * self.ttl_s))


class Sessions:
    """The sessions of all tenants, at one router."""

    def __init__(self, store: MetadataStore | None, holders: SessionHolders, ttl_s: float) -> None:
        self._store = store
        self._holders = holders
        self._ttl_s = ttl_s
        self._memory = SessionMemory(ttl_s)
        self._running: dict[bytes, asyncio.Event] = {}  # set when the turn is over
        self._awaited: set[bytes] = set()
        self._ended: set[bytes] = set()  # while a turn of theirs was running
        self._has_unsaved = asyncio.Event()
        self.num_lost = 0
        """Turns that were refused with SESSION_LOST."""
        self.num_turns = 0
        """Turns that began."""

    @contextlib.asynccontextmanager
    async def turn(
        self, tenant: str, session_id: str, is_append: bool = False, num_tokens: int | None = None
    ) -> AsyncIterator[Turn | None]:
        """A turn of a session, alone inside the block; None without a session. With `is_append` the session must be
        known, and have `num_tokens` tokens if that is given. Raises SessionBusy or SessionLost."""
        if not session_id:
            yield None
            return
        key = session_key(tenant, session_id)
        async with self._alone(key, session_id):
            self.num_turns += 1
            yield await self._begin(tenant, session_id, key, is_append, num_tokens)

    async def finish(self, turn: Turn, token_ids: Sequence[int], holder: Incarnation) -> None:
        """Remembers a turn that ended well, with the whole conversation. Raises SessionBusy for one that was to be
        appended while another router's turn was appended first."""
        if turn.key in self._ended:
            await self._holders.forget(turn.key)
            return
        record = record_at(holder, turn.tenant, turn.key, token_ids, turn.fence)
        other = await self._save(record, turn.stored_fence)
        if other is None:
            return
        if not other.token_ids:
            await self._holders.forget(turn.key)
        elif turn.is_append:
            raise SessionBusy(
                f"session_id: {turn.session_id!r}: another router appended a turn at the same time; it is part of the "
                "session, and this one is not"
            )
        LOG.info("a session went on, or ended, at another router; its record stays")

    async def end(self, tenant: str, session_id: str) -> bool:
        """Forgets a session everywhere, a turn that still runs included; answers whether anything was known."""
        key = session_key(tenant, session_id)
        if key in self._running:
            self._ended.add(key)
        stored, _ = await self._read(key)
        last = _latest(stored, self._memory.get(key))
        was_known = last is not None and bool(last.token_ids)
        while last is not None and last.token_ids:
            ended = replace(last, token_ids=b"", num_tokens=0, tail_hash=b"", block_ids=(), fence=last.fence + 1)
            # Another turn may have been written meanwhile: it goes, too.
            last = stored = await self._save(ended, 0 if stored is None else stored.fence)
        was_kept = await self._holders.forget(key)
        return was_known or was_kept

    async def run(self) -> None:
        """Writes what the store could not take, once it can; until cancelled."""
        while True:
            await self._has_unsaved.wait()
            self._has_unsaved.clear()
            for record in self._memory.unsaved():
                await self._save(record, 0)
            if self._memory.unsaved():
                await asyncio.sleep(AWAY_S)
                self._has_unsaved.set()

    @contextlib.asynccontextmanager
    async def _alone(self, key: bytes, session_id: str) -> AsyncIterator[None]:
        if key in self._awaited:
            raise SessionBusy(f"session_id: {session_id!r} has a turn that runs and one that waits for it")
        self._awaited.add(key)
        try:
            async with asyncio.timeout(TURN_WAIT_S):
                while (running := self._running.get(key)) is not None:
                    await running.wait()
        except TimeoutError:
            raise SessionBusy(
                f"session_id: {session_id!r} has a turn that still runs after {TURN_WAIT_S:g} s"
            ) from None
        finally:
            self._awaited.discard(key)
        over = self._running[key] = asyncio.Event()
        try:
            yield
        finally:
            del self._running[key]
            self._ended.discard(key)
            over.set()

    async def _begin(self, tenant: str, session_id: str, key: bytes, is_append: bool, num_tokens: int | None) -> Turn:
        stored, is_sure = await self._read(key)
        last = _latest(stored, self._memory.get(key))
        is_enough = last is not None and (not is_append or (is_sure and _has(last, num_tokens)))
        if last is None or not is_enough or (last.token_ids and not self._holders.is_served(last)):
            found = await self._holders.find(tenant, key)
            # A turn that lost against the recorded one may have left another conversation of the same number.
            last = _latest(*(each for each in found if last is None or _goes_before(each, last)), last)
        if is_append and (last is None or not _has(last, num_tokens)):
            self.num_lost += 1
            LOG.warning("a session is lost (%d so far): %s", self.num_lost, "unknown" if last is None else "changed")
            raise SessionLost(session_id, _why_lost(session_id, last, num_tokens))
        return Turn(
            tenant=tenant,
            session_id=session_id,
            key=key,
            previous=last if last is not None and last.token_ids else None,
            fence=1 if last is None else last.fence + 1,
            stored_fence=0 if stored is None else stored.fence,
            ttl_s=self._ttl_s,
            is_append=is_append,
        )

    async def _read(self, key: bytes) -> tuple[SessionRecord | None, bool]:
        """The stored record, and whether no router can have a later one that the store has yet to get."""
        if self._store is None:
            return None, False
        try:
            _check_reachable(self._store)
            stored = await self._store.read_session(key)
        except StoreUnavailable:
            return None, False
        return stored, stored is not None and time.monotonic() - self._store.failed_s >= SETTLE_S

    async def _save(self, record: SessionRecord, stored_fence: int) -> SessionRecord | None:
        """Keeps a record here and in the store, of which `stored_fence` was read; answers the one that is there in its
        place, because it is as late or later."""
        mine = self._memory.get(record.key)
        if mine is not None and mine != record and mine.fence >= record.fence:
            return mine
        if self._store is None:
            self._memory.put(record, is_saved=True)
            return None
        try:
            other = await self._write(self._store, record, stored_fence)
        except StoreUnavailable:
            self._memory.put(record, is_saved=False)
            self._has_unsaved.set()
            return None
        self._memory.put(other or record, is_saved=True)
        return other

    async def _write(self, store: MetadataStore, record: SessionRecord, expected: int) -> SessionRecord | None:
        _check_reachable(store)
        while not await store.write_session(record, expected, self._ttl_s):
            stored = await store.read_session(record.key)
            if stored is not None and stored.fence >= record.fence:
                return stored
            # The store was flushed, or has gone back to an earlier state: there is nothing to lose.
            expected = 0 if stored is None else stored.fence
        return None


def _check_reachable(store: MetadataStore) -> None:
    """Spares a request the wait for a store that failed a moment ago."""
    if time.monotonic() - store.failed_s < AWAY_S:
        raise StoreUnavailable("metadata store: it failed a moment ago")


def _latest(*records: SessionRecord | None) -> SessionRecord | None:
    """Of equals the first."""
    return max((record for record in records if record is not None), key=lambda record: record.fence, default=None)


def _goes_before(found: SessionRecord, last: SessionRecord) -> bool:
    """Whether a worker's record is a later one, or the same one at another holder."""
    return found.fence > last.fence or (found.fence == last.fence and found.token_ids == last.token_ids)


def _has(record: SessionRecord, num_tokens: int | None) -> bool:
    """Whether there is something to append to, and of the length that the client knows."""
    return bool(record.token_ids) and num_tokens in (None, len(record.token_ids) // 4)


def _why_lost(session_id: str, last: SessionRecord | None, num_tokens: int | None) -> str:
    if last is None:
        return f"session_id: nothing is known of {session_id!r}; send the whole conversation"
    if not last.token_ids:
        return f"session_id: {session_id!r} was ended; begin it again with a whole conversation"
    got = len(last.token_ids) // 4
    return f"session_tokens: session {session_id!r} has {got}, got {num_tokens}; send the whole conversation"
