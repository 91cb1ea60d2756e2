"""What one worker remembers of sessions: the tokens of the last turn that ended here, and which blocks they are.

Owns no blocks: those of a session are prefix cache like any other, only worth more (see `kvstore.blocks`). It knows
whose they are, so that a session's end frees them, and what they hold, so that a router that lost the session can have
its tokens back. Invariants: a turn never replaces a later one; a block that another session has too is not freed with
the first of them. Bounded by tokens and by each session's own time to live. No torch.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvstore.blocks import BlockPool
from kvstore.hashing import pack_token_ids

MAX_TOKENS = 1 << 22
"""Tokens of all sessions together that are remembered by default, some 15 bytes each with the hashes of their blocks;
beyond it the oldest are forgotten."""


@dataclass(frozen=True, slots=True)
class KeptSession:
    """A session after the last turn that ended here."""

    fence: int
    """Number of that turn's record; a later turn has a greater one."""
    token_ids: bytes
    """The conversation, packed by kvstore.hashing.pack_token_ids."""
    block_hashes: tuple[bytes, ...]
    """Of its leading whole blocks, as far as their KV was computed."""
    expires_s: float
    """When it is forgotten, monotonic clock."""
    tenant: str
    """Whose it is."""
    level: int
    """What its blocks are worth as cache; see `kvstore.blocks`."""


class SessionTable:
    """Sessions of one worker by key."""

    def __init__(
        self, pool: BlockPool, max_tokens: int = MAX_TOKENS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`clock` is in seconds."""
        self._pool = pool
        self._max_tokens = max_tokens
        self._clock = clock
        self._sessions: OrderedDict[bytes, KeptSession] = OrderedDict()  # the longest unused first
        self._num_sessions_of: Counter[bytes] = Counter()  # by block hash
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def keep(
        self,
        key: bytes,
        fence: int,
        token_ids: Sequence[int],
        block_hashes: Sequence[bytes],
        ttl_s: float,
        tenant: str = "",
        level: int = 0,
    ) -> None:
        """A turn has ended here. What it did not go on from is freed. Does nothing if a later turn has ended here."""
        known = self._sessions.get(key)
        if known is not None and known.fence > fence:
            return
        left = self._drop(key)
        packed, expires_s = pack_token_ids(token_ids), self._clock() + ttl_s
        session = KeptSession(fence, packed, tuple(block_hashes), expires_s, tenant, level)
        self._sessions[key] = session
        self._num_sessions_of.update(session.block_hashes)
        self._num_bytes += len(session.token_ids)
        if left is not None:
            self._free_blocks(left)
        while self._num_bytes > 4 * self._max_tokens:
            self._drop(next(iter(self._sessions)))
        self._forget_expired()

    def find(self, key: bytes) -> KeptSession | None:
        """What is remembered of a session; None if nothing is."""
        self._forget_expired()
        session = self._sessions.get(key)
        return None if session is None or session.expires_s <= self._clock() else session

    def items(self) -> Iterable[tuple[bytes, KeptSession]]:
        """All of them by key, the longest unused first."""
        return self._sessions.items()

    def forget(self, key: bytes) -> bool:
        """Ends a session and frees its blocks, but those that somebody uses now or another session has too. Answers
        whether anything was known."""
        session = self._drop(key)
        if session is not None:
            self._free_blocks(session)
        return session is not None

    def _free_blocks(self, session: KeptSession) -> None:
        self._pool.discard(each for each in session.block_hashes if each not in self._num_sessions_of)

    def _forget_expired(self) -> None:
        """As far as they stand at the front; with different times to live one may wait there behind another."""
        now_s = self._clock()
        while self._sessions:
            key, session = next(iter(self._sessions.items()))
            if session.expires_s > now_s:
                return
            self.forget(key)

    def _drop(self, key: bytes) -> KeptSession | None:
        session = self._sessions.pop(key, None)
        if session is not None:
            self._num_bytes -= len(session.token_ids)
            for block_hash in session.block_hashes:
                self._num_sessions_of[block_hash] -= 1
                if not self._num_sessions_of[block_hash]:
                    del self._num_sessions_of[block_hash]
        return session
