"""One attempt as a worker's services see it: its sequence, what its trace is told, and the events that calls wait for.

The observer here is what `Sequence.move` tells: it notes the move for the trace and, at the end, runs what must happen
before blocks are freed (breaking a lease, stopping a fetch).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import grpc.aio

from engine.request import Request
from engine.sequence import Sequence, State
from engine.timeline import Timeline
from protos import worker_pb2
from runtime.traces import extract


class Attempt:
    """A sequence and who waits for it."""

    def __init__(
        self,
        request: Request,
        moves: dict[State, frozenset[State]],
        context: grpc.aio.ServicerContext[object, object],
        on_end: Callable[[Attempt], None],
    ) -> None:
        """`context` is that of the call which brought it; `on_end` runs once, inside the move to a terminal state and
        so before any block is freed."""
        self.sequence = Sequence(request, moves, time.monotonic(), self._observe)
        self.changed = asyncio.Event()
        """Set at every move, and by whoever else has something for `wait_for` to look at."""
        self._on_end = on_end
        is_traced = extract(context.invocation_metadata()) is not None
        self._timeline = Timeline(self.sequence.arrived_s, time.monotonic) if is_traced else None

    @property
    def queue_ms(self) -> float:
        """Time from arrival to admission; up to now while it is not admitted."""
        started_s = self.sequence.started_s or time.monotonic()
        return 1000 * (started_s - self.sequence.arrived_s)

    async def wait_for(self, reached: Callable[[Sequence], bool]) -> None:
        """Returns when the sequence is over or `reached` says so, looked at after every change."""
        while not (self.sequence.is_over or reached(self.sequence)):
            self.changed.clear()
            await self.changed.wait()

    def note(self, name: str, num_tokens: int = 0) -> None:
        """Something happens that a trace tells and that is no move."""
        if self._timeline is not None:
            self._timeline.note(name, num_tokens)

    def timeline(self) -> worker_pb2.Timeline | None:
        """What is told of it; None where nobody traces it."""
        return None if self._timeline is None else self._timeline.to_proto()

    def _observe(self, sequence: Sequence, source: State, target: State) -> None:
        self.note(target.value)
        self.changed.set()
        if sequence.is_over:
            self._on_end(self)
