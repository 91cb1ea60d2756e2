"""Ends a stream whose client takes nothing: a limit on each write that costs a write next to nothing.

A timer for every write would be set and cancelled for every token. Here one timer a stream looks now and then how long
the write of that moment has taken. It looks again when that write is due, so
none takes longer than its limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator

from runtime.errors import Aborted


class StallClock:
    """How long the write of this moment has taken."""

    __slots__ = ("_limit_s", "_loop", "_started_s", "_timeout", "timer")

    def __init__(self, limit_s: float, timeout: asyncio.Timeout) -> None:
        self._limit_s = limit_s
        self._timeout = timeout
        self._loop = asyncio.get_running_loop()
        self._started_s = math.inf
        self.timer = self._loop.call_later(limit_s, self._look)
        """The next look."""

    def start(self) -> None:
        """A write begins."""
        self._started_s = self._loop.time()

    def stop(self) -> None:
        """It has ended."""
        self._started_s = math.inf

    def _look(self) -> None:
        now_s = self._loop.time()
        due_s = min(self._started_s, now_s) + self._limit_s
        if due_s <= now_s:
            self._timeout.reschedule(now_s)
        else:
            self.timer = self._loop.call_at(due_s, self._look)


@contextlib.asynccontextmanager
async def stall_limit(limit_s: float) -> AsyncIterator[StallClock]:
    """Inside the block no write, from `start` to `stop`, takes much longer than `limit_s`. Raises Aborted."""
    try:
        async with asyncio.timeout(None) as timeout:
            clock = StallClock(limit_s, timeout)
            try:
                yield clock
            finally:
                clock.timer.cancel()
    except TimeoutError:
        if not timeout.expired():
            raise
        raise Aborted(f"the client has taken nothing for {limit_s:g} s") from None
