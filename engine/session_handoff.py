"""What a draining worker does with its sessions: it leases them, one by one, to whoever has another worker keep them.

1. `next` names the session whose turn ended last of those not yet handed off, and leases its cached blocks under a
   fresh attempt id. Routers ask for it and have another decode worker fetch them, like any KV.
2. The lease ends: released, expired, or given up. Its blocks are cache again, here.
3. `finish` waits until all are handed off, unless nobody asks any more.

Nothing is lost but reuse when any of this fails: a session that was not handed off is computed again.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable
from functools import partial

from engine.holdings import Holdings, Loan
from engine.wire import ATTEMPT_ID_BYTES
from kvstore.hashing import unpack_token_ids
from kvstore.leases import LeaseTable
from kvstore.sessions import KeptSession
from protos import inference_pb2, worker_pb2
from runtime.errors import NotFound

PATIENCE_S = 1.0
"""How long a worker that could end waits for the next router to ask; they learn within a tenth of that."""


class SessionHandoff:
    """The sessions of one worker on their way to others."""

    def __init__(
        self, holdings: Holdings, leases: LeaseTable, fingerprint: str, hands_off: bool, on_return: Callable[[], None]
    ) -> None:
        """`fingerprint` is the model's; without `hands_off` there is nothing to give: prompts stay where they are
        computed. `on_return` is called when blocks are cache again: somebody may wait for some."""
        self._holdings = holdings
        self._leases = leases
        self._fingerprint = fingerprint
        self._hands_off = hands_off
        self._on_return = on_return
        self._waiting: list[tuple[bytes, int]] = []  # session, fence; the one that was used last is the last
        self._given: dict[bytes, int] = {}  # by session: the fence of what was handed off, or is being
        self._num_leased = 0
        self._changed = asyncio.Event()

    def next(self, now_s: float) -> worker_pb2.HandOffSessionResponse:
        """Leases the next session; an empty answer where there is none now."""
        self._changed.set()
        while self._has_more():
            key, fence = self._waiting.pop()
            self._given[key] = fence
            kept = self._holdings.sessions.find(key)
            if kept is None or kept.fence != fence:
                continue  # it was ended, or went on since
            loan = self._holdings.lend(kept.block_hashes)
            if not loan.block_table:
                self._holdings.end_loan(loan)
                continue
            attempt = _attempt(key, kept, self._fingerprint, now_s)
            keep_tokens = len(loan.block_table) * self._holdings.block_size
            self._num_leased += 1
            self._leases.lend(attempt.attempt_id, loan.block_table, keep_tokens, partial(self._on_end, loan), now_s)
            return worker_pb2.HandOffSessionResponse(attempt=attempt, keep_tokens=keep_tokens)
        return worker_pb2.HandOffSessionResponse()

    def give_up(self, attempt_id: bytes) -> None:
        """Nobody will fetch that one."""
        with contextlib.suppress(NotFound):  # its reader has given it up
            self._leases.break_(self._leases.find(attempt_id, self._leases.epoch))

    async def finish(self, ends_s: float | None) -> None:
        """Returns when nothing is left to hand off, when nobody has asked for PATIENCE_S, or at `ends_s`."""
        while self._num_leased or self._has_more():
            now_s = time.monotonic()
            limits_s = [] if ends_s is None else [ends_s - now_s]
            limits_s += [] if self._num_leased else [PATIENCE_S]
            self._changed.clear()
            try:
                async with asyncio.timeout(min(limits_s, default=None)):
                    await self._changed.wait()
            except TimeoutError:
                return

    def _has_more(self) -> bool:
        if not self._waiting and self._hands_off:
            kept = self._holdings.sessions.items()
            self._waiting = [(key, each.fence) for key, each in kept if self._given.get(key) != each.fence]
        return bool(self._waiting)

    def _on_end(self, loan: Loan) -> None:
        self._num_leased -= 1
        self._holdings.end_loan(loan)
        self._changed.set()
        self._on_return()


def _attempt(key: bytes, kept: KeptSession, fingerprint: str, now_s: float) -> worker_pb2.Attempt:
    """What another worker runs to keep a session."""
    return worker_pb2.Attempt(
        attempt_id=secrets.token_bytes(ATTEMPT_ID_BYTES),
        request_id=f"session-{key.hex()[:8]}",
        prompt_token_ids=unpack_token_ids(kept.token_ids),
        sampling=inference_pb2.SamplingParams(max_tokens=1, top_p=1, repetition_penalty=1),
        priority=inference_pb2.Priority.Name(kept.level),
        fingerprint=fingerprint,
        tenant=kept.tenant,
        session=worker_pb2.SessionTurn(
            session_key=key, fence=kept.fence, ttl_ms=max(1, round(1000 * (kept.expires_s - now_s)))
        ),
    )
