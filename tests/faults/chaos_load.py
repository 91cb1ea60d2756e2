"""The clients of a chaos run: what they ask, when they go away, and what they find wrong with their answers.

A request that is refused before its first message is asked again; everything else than a right and whole answer, or
the client's own going, is a violation. `Ledger` counts it all.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from asked import Asked
from chaos_plan import Move

from baton import AsyncClient
from baton.answers import Finish
from runtime.errors import BatonError, Unavailable

NOT_ACCEPTED = "no decode worker is ready"
"""What a request is told that no router has accepted, where routers stay."""
ASK_AGAIN_S = 0.1
ANSWER_LIMIT_S = 90.0
Check = Callable[[Asked, Sequence[int]], None]


@dataclass(frozen=True, slots=True)
class Gap:
    """The longest silence in an answer that took more than one attempt."""

    began_s: float
    """Monotonic clock."""
    length_s: float
    """From one message to the next, or from the request to the first."""
    recompute_s: float
    """Of that, what the last attempt took to queue, compute and move the KV."""


@dataclass(slots=True)
class Ledger:
    """What became of all requests."""

    counts: Counter[str] = field(default_factory=Counter)
    """finished, cancelled, refused, recovered (finished after more than one attempt)."""
    violations: list[str] = field(default_factory=list)
    """What must not be."""
    gaps: list[Gap] = field(default_factory=list)
    """Of the recovered ones."""
    longest_gap_s: float = 0.0
    """Of all that finished."""


class _Answer:
    """One answer as it comes."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.finish: Finish | None = None
        self.gap_s, self.gap_began_s = 0.0, time.monotonic()
        self._last_s = self.gap_began_s

    async def read(self, asked: Asked, client: AsyncClient, leaves_after_tokens: int | None) -> bool:
        """Whether it came to its end; False: the client has left it."""
        async with contextlib.aclosing(asked.stream(client)) as stream:  # type: ignore[type-var]
            async for chunk in stream:
                now_s = time.monotonic()
                if now_s - self._last_s > self.gap_s:
                    self.gap_s, self.gap_began_s = now_s - self._last_s, self._last_s
                self._last_s = now_s
                for token in chunk.tokens:
                    assert token.index == len(self.tokens), f"token {token.index} came where {len(self.tokens)} was due"
                    self.tokens.append(token.token_id)
                self.finish = chunk.finish
                if leaves_after_tokens is not None and len(self.tokens) >= leaves_after_tokens:
                    return False
        assert self.finish is not None, "the answer ended without its last message"
        return True


class Clients:
    """Asks of the routers in turn."""

    def __init__(
        self, clients: Sequence[AsyncClient], check: Check, ledger: Ledger, refusal: str = NOT_ACCEPTED
    ) -> None:
        """`check` raises AssertionError for a wrong answer. UNAVAILABLE that says `refusal` is a refusal."""
        self._clients = clients
        self._check = check
        self._ledger = ledger
        self._refusal = refusal
        self._num_asked = 0

    async def follow(self, moves: Iterator[Move], requests: Sequence[Asked], ended: asyncio.Event) -> None:
        """One client's life; it finishes what it has begun when the event is set."""
        for move in moves:
            if ended.is_set():
                return
            await self.ask(requests[move.index], move)

    async def ask(self, asked: Asked, move: Move) -> None:
        """One request, asked again while it is refused."""
        while True:
            self._num_asked += 1
            answer, client = _Answer(), self._clients[self._num_asked % len(self._clients)]
            try:
                async with asyncio.timeout(move.leaves_after_s or ANSWER_LIMIT_S):
                    is_whole = await answer.read(asked, client, move.leaves_after_tokens)
            except TimeoutError:
                if move.leaves_after_s is None:
                    self._note_violation(asked, answer, f"no whole answer within {ANSWER_LIMIT_S:g} s")
                else:
                    self._ledger.counts["cancelled"] += 1
                return
            except Unavailable as error:
                if answer.tokens or self._refusal not in error.message:
                    self._note_violation(asked, answer, error.message)
                    return
                self._ledger.counts["refused"] += 1
                await asyncio.sleep(ASK_AGAIN_S)
                continue
            except (BatonError, AssertionError) as error:
                self._note_violation(asked, answer, f"{type(error).__name__}: {error}")
                return
            self._note_end(asked, answer, is_whole)
            return

    def _note_end(self, asked: Asked, answer: _Answer, is_whole: bool) -> None:
        if not is_whole:
            self._ledger.counts["cancelled"] += 1
            return
        assert answer.finish is not None
        try:
            self._check(asked, answer.tokens)
        except AssertionError as error:
            self._note_violation(asked, answer, f"wrong: {error}")
        self._ledger.counts["finished"] += 1
        self._ledger.longest_gap_s = max(self._ledger.longest_gap_s, answer.gap_s)
        if answer.finish.served_by.num_attempts > 1:
            self._ledger.counts["recovered"] += 1
            timing = answer.finish.timing
            # The reader asks before the owner computes, so one is part of the other.
            recompute_s = max(timing.prefill_queue_ms + timing.prefill_ms, timing.transfer_ms) / 1000
            self._ledger.gaps.append(Gap(answer.gap_began_s, answer.gap_s, recompute_s))

    def _note_violation(self, asked: Asked, answer: _Answer, text: str) -> None:
        what = f"{len(asked.prompt_token_ids)} tokens, {asked.max_tokens} wanted, {len(answer.tokens)} came"
        self._ledger.violations.append(f"request of {what}: {text}")
