"""One attempt as a worker's services see it: its sequence, its span, and the events that calls wait for.

The observer here is what `Sequence.move` tells: it writes the span event and, at the end, runs what must happen before
blocks are freed (breaking a lease, stopping a fetch).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import grpc.aio
from opentelemetry.trace import Span, Status, StatusCode

from engine.request import Request
from engine.sequence import Sequence, State
from kvstore.hashing import attempt_label
from runtime.telemetry import Telemetry, extract

_BAD_ENDINGS = frozenset({State.EVICTED, State.CANCELLED, State.FAILED})


class Attempt:
    """A sequence and who waits for it."""

    def __init__(
        self,
        request: Request,
        moves: dict[State, frozenset[State]],
        span: Span,
        on_end: Callable[[Attempt], None],
    ) -> None:
        """`on_end` runs once, inside the move to a terminal state and so before any block is freed."""
        self.sequence = Sequence(request, moves, time.monotonic(), self._observe)
        self.span = span
        self.changed = asyncio.Event()
        """Set at every move, and by whoever else has something for `wait_for` to look at."""
        self._on_end = on_end
        span.add_event(State.QUEUED.value)

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

    def close(self) -> None:
        """Ends the span."""
        sequence = self.sequence
        self.span.set_attribute("baton.num_tokens", sequence.num_tokens)
        self.span.set_attribute("baton.num_cached_tokens", sequence.num_cached)
        if sequence.num_drafts:
            self.span.set_attribute("baton.num_drafts", sequence.num_drafts)
            self.span.set_attribute("baton.num_accepted_drafts", sequence.num_accepted_drafts)
        if sequence.state in _BAD_ENDINGS:
            self.span.set_status(Status(StatusCode.ERROR, sequence.detail or sequence.state.value))
        self.span.end()

    def _observe(self, sequence: Sequence, source: State, target: State) -> None:
        self.span.add_event(target.value)
        self.changed.set()
        if sequence.is_over:
            self._on_end(self)


def start_span(
    telemetry: Telemetry,
    name: str,
    context: grpc.aio.ServicerContext[object, object],
    request: Request,
    worker_id: str,
) -> Span:
    """The span of an attempt at this worker, child of the caller's."""
    attributes: dict[str, str | int] = {
        "baton.attempt_id": attempt_label(request.attempt_id),
        "baton.request_id": request.request_id,
        "baton.worker_id": worker_id,
        "baton.num_input_tokens": request.num_input_tokens,
        "baton.priority": request.priority.name.lower(),
    }
    return telemetry.start_span(name, parent=extract(context.invocation_metadata()), attributes=attributes)
