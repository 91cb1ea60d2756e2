"""The last sessions that this router served, in its own memory: what is left when the store loses them.

Owns a bounded, ageing copy of session records, and which of them the store has yet to get. A copy may be older than
what another router has written since: who reads it takes the record with the greatest fence of all that can be had.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

from kvstore.metadata.base import SessionRecord

MAX_BYTES = 64 << 20
"""Of tokens that are remembered by default; beyond it the sessions that were written first are forgotten."""


class SessionMemory:
    """Records by session key."""

    def __init__(self, ttl_s: float, max_bytes: int = MAX_BYTES, clock: Callable[[], float] = time.monotonic) -> None:
        """A record is remembered for `ttl_s` after it was put; `clock` is in seconds."""
        self._ttl_s = ttl_s
        self._max_bytes = max_bytes
        self._clock = clock
        self._records: OrderedDict[bytes, tuple[float, SessionRecord]] = OrderedDict()  # put first is first
        self._unsaved: dict[bytes, None] = {}
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._records)

    def get(self, key: bytes) -> SessionRecord | None:
        """The record, unless its time has run out."""
        self._forget_expired()
        entry = self._records.get(key)
        return None if entry is None else entry[1]

    def put(self, record: SessionRecord, is_saved: bool) -> None:
        """Remembers a record in place of what was known of its session."""
        self._drop(record.key)
        self._records[record.key] = (self._clock() + self._ttl_s, record)
        self._num_bytes += len(record.token_ids)
        if not is_saved:
            self._unsaved[record.key] = None
        while self._num_bytes > self._max_bytes:
            self._drop(next(iter(self._records)))

    def unsaved(self) -> list[SessionRecord]:
        """The records that the store does not have, as far as this router knows."""
        self._forget_expired()
        return [self._records[key][1] for key in self._unsaved]

    def _forget_expired(self) -> None:
        now_s = self._clock()
        while self._records and next(iter(self._records.values()))[0] <= now_s:
            self._drop(next(iter(self._records)))

    def _drop(self, key: bytes) -> None:
        self._unsaved.pop(key, None)
        entry = self._records.pop(key, None)
        if entry is not None:
            self._num_bytes -= len(entry[1].token_ids)
