"""Notices a step that stands still: a thread or a device that hangs while the rest of the worker goes on answering.

A step is overdue after `limit_s`, or FACTOR times as long as steps of its size have lately taken if that is more; the
first one ever may take as long as it likes. What counts is how often this clock has looked, not what other clocks say:
a process that was stopped, or a machine that slept, finds hours gone and no look made.
Owns no step and ends none: a thread cannot be ended. It says so (`is_stalled`), and after GIVE_UP times the limit that
the process had better end (`hopeless`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

LOOK_S = 0.25
"""Between two looks at a step."""
FACTOR = 4.0
"""Times the usual that a step may take."""
GIVE_UP = 10.0
"""Limits after which nothing more is to be hoped for."""
FORGETTING = 0.98
"""What is left of a long step in the usual at each later one of its size."""


class StepClock:
    """How long the step of this moment has stood still. Lives in one event loop."""

    def __init__(self, limit_s: float) -> None:
        """`limit_s` 0: no step is ever overdue."""
        self.is_stalled = False
        """Whether a step is overdue now."""
        self.hopeless = asyncio.Event()
        """Set when a step is overdue beyond hope."""
        self.on_change: Callable[[], None] = lambda: None
        """Called when `is_stalled` has changed."""
        self._limit_s = limit_s
        self._usual_s: dict[int, float] = {}  # the longest lately, by size
        self._size: int | None = None  # of the step of this moment, as a power of two; None: there is none
        self._began_s = 0.0
        self._num_looks = 0
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, num_tokens: int) -> None:
        """A step of so many tokens begins."""
        loop = asyncio.get_running_loop()
        self._size, self._began_s, self._num_looks = num_tokens.bit_length(), loop.time(), 0
        if self._limit_s and self._timer is None:
            self._timer = loop.call_later(LOOK_S, self._look)

    def end(self) -> None:
        """It has ended, well or not."""
        assert self._size is not None, "ended without a beginning"
        duration_s = min(asyncio.get_running_loop().time() - self._began_s, (self._num_looks + 1) * LOOK_S)
        self._usual_s[self._size] = max(duration_s, FORGETTING * self._usual_s.get(self._size, 0.0))
        self._size = None
        self._note(False)

    def close(self) -> None:
        """Looks no more."""
        if self._timer is not None:
            self._timer.cancel()

    def allowed_s(self, size: int) -> float | None:
        """How long a step of fewer than 2 ** `size` tokens may take; None: as long as it likes."""
        if not self._usual_s:
            return None
        nearest = min(self._usual_s, key=lambda other: (abs(other - size), other))
        # Longer steps than any before take at most in proportion.
        usual_s = self._usual_s[nearest] * 2.0 ** max(0, size - nearest)
        return max(self._limit_s, FACTOR * usual_s)

    def _look(self) -> None:
        self._timer = None
        if self._size is None:
            return  # the next step looks again
        self._num_looks += 1
        # The first look may have come right after it began.
        allowed_s, age_s = self.allowed_s(self._size), (self._num_looks - 1) * LOOK_S
        if allowed_s is not None and age_s >= allowed_s:
            self._note(True)
            if age_s >= GIVE_UP * allowed_s:
                self.hopeless.set()
                return
        self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._look)

    def _note(self, is_stalled: bool) -> None:
        if is_stalled != self.is_stalled:
            self.is_stalled = is_stalled
            self.on_change()
