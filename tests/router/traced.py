"""What must be true of every trace."""

from __future__ import annotations

from runtime.traces import Span, Trace


def check(trace: Trace) -> None:
    """The parts follow each other without gaps from arrival to end, and every span lies within its parent."""
    ends = [0.0, *(part.end_s for part in trace.parts)]
    assert [part.start_s for part in trace.parts] == ends[:-1] and ends[-1] == trace.duration_s
    known: dict[int, Span] = {}
    for span in trace.spans:
        assert span.span_id not in known and span.start_s <= span.end_s
        assert all(span.start_s <= event.at_s <= span.end_s for event in span.events)
        if span is not trace.spans[0]:
            parent = known[span.parent_id]
            assert parent.start_s <= span.start_s and span.end_s <= parent.end_s
        known[span.span_id] = span


def tree(trace: Trace) -> list[tuple[str, str, str]]:
    """(name, process, name of the parent) of each span below the whole."""
    names = {span.span_id: span.name.rpartition("/")[2] for span in trace.spans}
    return [(span.name, span.instance, names[span.parent_id]) for span in trace.spans[1:]]


def span_of(trace: Trace, name: str) -> Span:
    """The only span of that name."""
    (found,) = (span for span in trace.spans if span.name == name)
    return found


def events_of(span: Span) -> list[str]:
    """Names of its events, in order."""
    return [event.name for event in span.events]


def waited(trace: Trace, until_s: float | None = None) -> dict[str, float]:
    """Seconds that the client waited for what, as far as that was before `until_s`."""
    found: dict[str, float] = {}
    for part in trace.parts:
        length_s = min(part.end_s, part.end_s if until_s is None else until_s) - part.start_s
        if length_s > 0:
            found[part.name] = found.get(part.name, 0.0) + length_s
    return found
