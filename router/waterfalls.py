"""Recent requests as the live page draws them: from their traces, or, where none are kept, from their last messages.

Owns which requests are shown and what of them: times, processes, sizes and reasons. Attributes of the whole request
stay out, since there may be a session's name or a text among them. What is made of a last message has durations of the
last attempt, laid one after the other, and knows no events and no critical path.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import Any

from router.ledger import Ended, Ledger
from router.trace_wire import attribute_texts
from router.tracing import Tracer
from runtime.traces import AttributeValue, Span, SpanEvent, Trace

MAX_SHOWN = 16
"""Requests that are shown that failed, were slow or had to recover, and others."""
MAX_EVENTS = 24
"""Events that are shown of a span, from its beginning."""


def recent_requests(tracer: Tracer, ledger: Ledger) -> dict[str, Any]:
    """The last requests, the latest first, and whether they are told by their traces."""
    if tracer.keeps_recent:
        traces = tracer.recent_traces()
        shown = [each for is_notable in (True, False) for each in _latest(traces, is_notable)]
        shown.sort(key=attrgetter("began_unix_s"))
    else:
        shown = [_trace_of(ended) for ended in list(ledger.recent)[-MAX_SHOWN:]]
    return {"is_traced": tracer.keeps_recent, "requests": [_waterfall(trace) for trace in reversed(shown)]}


def _latest(traces: Iterable[Trace], is_notable: bool) -> list[Trace]:
    return [trace for trace in traces if trace.is_notable is is_notable][-MAX_SHOWN:]


def _waterfall(trace: Trace) -> dict[str, Any]:
    whole = trace.spans[0]
    depths: dict[int, int] = {}
    for span in trace.spans:
        depths[span.span_id] = depths.get(span.parent_id, -1) + 1
    return {
        "request_id": trace.request_id,
        "trace_id": f"{trace.trace_id:032x}" if trace.trace_id else "",
        "status": whole.attributes["rpc.status_code"],
        "is_notable": trace.is_notable,
        "total_ms": _ms(trace.duration_s),
        "first_token_ms": None if trace.first_token_s is None else _ms(trace.first_token_s),
        "num_input_tokens": whole.attributes.get("gen_ai.usage.input_tokens"),
        "num_output_tokens": whole.attributes.get("gen_ai.usage.output_tokens", 0),
        "num_attempts": whole.attributes["baton.num_attempts"],
        "waits_ms": {name: _ms(trace.total_s(name)) for name in dict.fromkeys(part.name for part in trace.parts)},
        "spans": [_span(span, depths[span.span_id]) for span in trace.spans],
    }


def _span(span: Span, depth: int) -> dict[str, Any]:
    return {
        "name": span.name if depth else "request",
        "depth": depth,
        "where": span.instance,
        "start_ms": _ms(span.start_s),
        "duration_ms": _ms(span.end_s - span.start_s),
        "error": span.error,
        "facts": _facts(span.attributes) if depth else {},
        "events": [_event(event) for event in span.events[:MAX_EVENTS]],
        "num_more_events": max(0, len(span.events) - MAX_EVENTS),
    }


def _event(event: SpanEvent) -> dict[str, Any]:
    return {"name": event.name, "at_ms": _ms(event.at_s), "facts": _facts(event.attributes)}


def _facts(attributes: Mapping[str, AttributeValue]) -> dict[str, str]:
    return {name.removeprefix("baton."): text for name, text in attribute_texts(attributes).items()}


def _trace_of(ended: Ended) -> Trace:
    """As far as a last message tells it. A transfer ends with the prompt's last blocks."""
    timing, usage, by = ended.finish.timing, ended.finish.usage, ended.finish.served_by
    first_ms, queue_ms = timing.time_to_first_token_ms, timing.router_queue_ms
    computed_ms = queue_ms + timing.prefill_queue_ms + timing.prefill_ms
    attributes: dict[str, AttributeValue] = {
        "rpc.status_code": "OK",
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "baton.num_attempts": by.num_attempts,
    }
    moved = {"baton.kv.transport": by.transport}
    lengths: tuple[tuple[str, float, float, str, Mapping[str, AttributeValue]], ...] = (
        ("admission", 0.0, queue_ms, "", {}),
        ("prefill.queue", queue_ms, timing.prefill_queue_ms, by.prefill_worker_id, {}),
        ("prefill", computed_ms - timing.prefill_ms, timing.prefill_ms, by.prefill_worker_id, {}),
        (
            "kv.transfer",
            max(queue_ms, computed_ms - timing.transfer_ms),
            timing.transfer_ms,
            by.decode_worker_id,
            moved,
        ),
        ("decode", first_ms, timing.total_ms - first_ms, by.decode_worker_id, {}),
    )
    whole = Span("request", 1, 0, "", "", 0.0, timing.total_ms / 1000, attributes)
    spans = [
        Span(name, number, 1, "", where, start_ms / 1000, (start_ms + length_ms) / 1000, about)
        for number, (name, start_ms, length_ms, where, about) in enumerate(lengths, 2)
        if length_ms > 0
    ]
    trace_id = int(ended.trace_id or "0", 16)
    return Trace(trace_id, ended.request_id, "", 0.0, first_ms / 1000, (whole, *spans), parts=())


def _ms(duration_s: float) -> float:
    return round(1000 * duration_s, 2)
