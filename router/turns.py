"""Who writes to its client next: streams take turns, a few in each pass of the event loop.

A step brings a token to each of many streams at once. Written to one after another they would keep the loop from
reading until the last one has its own; here workers are heard between any few of them, and what they have sent
meanwhile joins what still waits: the busier the router, the fewer and larger its messages. Nothing is held back while
nobody else has anything to write. Invariants: turns are given in the order in which streams had something; a stream
that has more comes again after all that wait.
"""

from __future__ import annotations

import asyncio
from collections import deque

NUM_AT_ONCE = 32
"""Turns in a pass: about as many as take as long as it takes to read what a step of many streams has brought."""


class Turns:
    """The streams of one router that have something to write."""

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()

    def ask(self, waiter: asyncio.Future[None]) -> None:
        """`waiter` is set when its turn has come; one that nobody awaits any more costs no turn."""
        if not self._waiting:
            waiter.get_loop().call_soon(self._give)
        self._waiting.append(waiter)

    def _give(self) -> None:
        waiting, num_given = self._waiting, 0
        while waiting and num_given < NUM_AT_ONCE:
            waiter = waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
                num_given += 1
        if waiting:
            waiting[0].get_loop().call_soon(self._give)


class Signal:
    """Wakes its one waiter when there is something to write and it has its turn. What comes before or meanwhile counts
    for the next wait that ends; each one uses up all that came until then."""

    __slots__ = ("_is_set", "_turns", "_waiter")

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._is_set = False
        self._waiter: asyncio.Future[None] | None = None

    def set(self) -> None:
        """Something has changed."""
        if not self._is_set:
            self._is_set = True
            if self._waiter is not None:
                self._turns.ask(self._waiter)

    async def wait(self) -> None:
        """Returns when something has changed since the last wait returned, and it is this one's turn."""
        self._waiter = waiter = asyncio.get_running_loop().create_future()
        if self._is_set:
            self._turns.ask(waiter)
        try:
            await waiter
        finally:
            self._waiter = None
        self._is_set = False
