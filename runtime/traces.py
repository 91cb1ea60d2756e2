"""Traces as plain values, and W3C trace context in gRPC metadata.

Owns what a trace is (`runtime.trace_export` sends it away), the ring of recent ones, the form of `traceparent`, and the
rule by which a ratio of traces is chosen. There is no ambient current span: a context is an argument like any other,
so interleaved coroutines cannot adopt each other's. Times in a trace are seconds since its request arrived, by the
clock of the router that wrote it.
"""

from __future__ import annotations

import random
import re
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter

AttributeValue = str | bool | int | float | tuple[str, ...]
TRACEPARENT, TRACESTATE = "traceparent", "tracestate"
MAX_STATE_BYTES = 512
"""Of a caller's tracestate; a longer one is left out, as the standard allows."""
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A place in a trace: what a caller passes on and its callee continues."""

    trace_id: int
    """128 bits, not 0."""
    span_id: int
    """64 bits, not 0: the span that what follows is a part of."""
    is_sampled: bool = True
    """Whether the caller records it."""
    state: str = ""
    """What tracing systems of callers want passed on."""

    def child(self) -> TraceContext:
        """The context of a new span below this one."""
        return TraceContext(self.trace_id, new_span_id(), self.is_sampled, self.state)


def new_trace_id() -> int:
    """A drawn one."""
    return random.getrandbits(128) or 1


def new_span_id() -> int:
    """A drawn one."""
    return random.getrandbits(64) or 1


def inject(context: TraceContext | None) -> tuple[tuple[str, str], ...]:
    """gRPC metadata that carries `context` to the callee; none for None."""
    if context is None:
        return ()
    parent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.is_sampled:02x}"
    state = ((TRACESTATE, context.state),) if context.state else ()
    return ((TRACEPARENT, parent), *state)


def extract(metadata: Iterable[tuple[str, str | bytes]] | None) -> TraceContext | None:
    """The caller's context; None when it sent none, or none that is valid."""
    sent: dict[str, str] = {}
    for key, value in metadata or ():
        if key in (TRACEPARENT, TRACESTATE) and isinstance(value, str):
            # Several of tracestate are one list; several of traceparent are none.
            sent[key] = f"{sent[key]},{value}" if key in sent else value
    found = _TRACEPARENT.fullmatch(sent.get(TRACEPARENT, "").strip())
    if found is None:
        return None
    version, trace_id, span_id = found[1], int(found[2], 16), int(found[3], 16)
    if version == "ff" or (version == "00" and found[5]) or not trace_id or not span_id:
        return None
    state = sent.get(TRACESTATE, "")
    return TraceContext(
        trace_id, span_id, bool(int(found[4], 16) & 1), state if len(state.encode()) <= MAX_STATE_BYTES else ""
    )


def is_in_ratio(trace_id: int, ratio: float) -> bool:
    """Whether a trace is among the `ratio` of all that are recorded: by its id, so that others choose the same ones."""
    return trace_id & (1 << 64) - 1 < round(ratio * (1 << 64))


@dataclass(frozen=True, slots=True)
class SpanEvent:
    """Something that happened at a moment."""

    name: str
    """What."""
    at_s: float
    """When."""
    attributes: Mapping[str, AttributeValue] = field(default_factory=dict)
    """Further facts."""


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time."""

    name: str
    """What."""
    span_id: int
    """Its own id."""
    parent_id: int
    """The span it is a part of; of the first one the caller's, or 0."""
    service: str
    """The kind of process: "baton-router", "baton-prefill", "baton-decode" or "baton-mixed"."""
    instance: str
    """The process's name."""
    start_s: float
    """When it began."""
    end_s: float
    """When it ended."""
    attributes: Mapping[str, AttributeValue] = field(default_factory=dict)
    """Further facts."""
    events: tuple[SpanEvent, ...] = ()
    """What happened meanwhile."""
    error: str = ""
    """Why it failed; empty: it did not."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the time that a client waited."""

    name: str
    """For what."""
    start_s: float
    """When it began."""
    end_s: float
    """When it ended and the next one began."""


@dataclass(frozen=True, slots=True)
class Trace:
    """What became of a request."""

    trace_id: int
    """Its own, or the caller's."""
    request_id: str
    """The request; empty where it was refused before it had a name."""
    state: str
    """The caller's tracestate."""
    began_unix_s: float
    """When the request arrived."""
    first_token_s: float | None
    """When its first token came to the router; None: none did."""
    spans: tuple[Span, ...]
    """Parents before their children; the first is the whole request."""
    parts: tuple[Part, ...]
    """The critical path: what the client waited for, from arrival to end without gaps."""
    is_notable: bool = False
    """Whether it failed, was slow or had to recover."""

    @property
    def duration_s(self) -> float:
        """From arrival to end."""
        return self.spans[0].end_s

    def total_s(self, name: str) -> float:
        """How long the client waited for `name`, all its parts together."""
        return sum(part.end_s - part.start_s for part in self.parts if part.name == name)


class TraceRing:
    """The latest traces. Notable ones have a room of their own: ordinary traffic does not push them out."""

    def __init__(self, num_each: int) -> None:
        """Keeps `num_each` notable ones and as many others."""
        self._rooms = {True: deque[Trace](maxlen=num_each), False: deque[Trace](maxlen=num_each)}

    def add(self, trace: Trace) -> None:
        """Takes a trace in; the oldest of its kind may go."""
        self._rooms[trace.is_notable].append(trace)

    def recent(self, request_id: str = "") -> list[Trace]:
        """What is kept, or what of it belongs to a request; the one that began last is the last."""
        kept = [trace for room in self._rooms.values() for trace in room if request_id in ("", trace.request_id)]
        return sorted(kept, key=attrgetter("began_unix_s"))
