"""Traces as messages of the public API, for `ListTraces`. Translates; owns nothing."""

from __future__ import annotations

from collections.abc import Mapping

from protos import inference_pb2
from runtime.traces import AttributeValue, Span, Trace


def trace_to_proto(trace: Trace) -> inference_pb2.Trace:
    """A trace for the wire; attributes become text."""
    return inference_pb2.Trace(
        trace_id=f"{trace.trace_id:032x}",
        request_id=trace.request_id,
        began_unix_s=trace.began_unix_s,
        first_token_s=trace.first_token_s,
        spans=map(_span, trace.spans),
        parts=[inference_pb2.TracePart(name=part.name, start_s=part.start_s, end_s=part.end_s) for part in trace.parts],
    )


def _span(span: Span) -> inference_pb2.TraceSpan:
    return inference_pb2.TraceSpan(
        name=span.name,
        span_id=f"{span.span_id:016x}",
        parent_id=f"{span.parent_id:016x}" if span.parent_id else "",
        service=span.service,
        instance=span.instance,
        start_s=span.start_s,
        end_s=span.end_s,
        attributes=attribute_texts(span.attributes),
        events=[
            inference_pb2.SpanEvent(name=event.name, at_s=event.at_s, attributes=attribute_texts(event.attributes))
            for event in span.events
        ],
        error=span.error,
    )


def attribute_texts(attributes: Mapping[str, AttributeValue]) -> dict[str, str]:
    """Values as text, for readers that show them."""
    return {name: _text(value) for name, value in attributes.items()}


def _text(value: AttributeValue) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return ", ".join(value) if isinstance(value, tuple) else str(value)
