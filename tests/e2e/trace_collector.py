"""Spans as they leave a router: what an OTLP collector in this process is sent, and what is printed."""

from __future__ import annotations

import contextlib
import importlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

SERVICE = "opentelemetry.proto.collector.trace.v1"


@dataclass(frozen=True)
class Seen:
    """A span that was exported."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    service: str
    instance: str
    is_server: bool
    is_error: bool
    length_s: float
    attributes: dict[str, Any]
    events: list[str]


@dataclass
class Collector:
    """A server of the OTLP trace service."""

    endpoint: str = ""
    spans: list[Seen] = field(default_factory=list)
    num_messages: int = 0

    def take(self, request: Any, _: Any) -> Any:
        self.num_messages += 1
        for resource_spans in request.resource_spans:
            resource = _values(resource_spans.resource.attributes)
            for scope_spans in resource_spans.scope_spans:
                assert scope_spans.scope.name == "baton"
                self.spans += [_from_otlp(span, resource) for span in scope_spans.spans]
        return importlib.import_module(f"{SERVICE}.trace_service_pb2").ExportTraceServiceResponse()


@contextlib.contextmanager
def collecting() -> Iterator[Collector]:
    """A collector on a free port of loopback."""
    messages = importlib.import_module(f"{SERVICE}.trace_service_pb2")
    collector = Collector()
    handler = grpc.unary_unary_rpc_method_handler(
        collector.take,
        messages.ExportTraceServiceRequest.FromString,
        messages.ExportTraceServiceResponse.SerializeToString,
    )
    server = grpc.server(ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(f"{SERVICE}.TraceService", {"Export": handler}),)
    )
    collector.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(1).wait()


def printed(path: Path) -> list[Seen]:
    """What the console exporter wrote."""
    text, decoder, spans = path.read_text().strip(), json.JSONDecoder(), []
    while text:
        span, end = decoder.raw_decode(text)
        spans.append(_from_console(span))
        text = text[end:].lstrip()
    return spans


def _from_otlp(span: Any, resource: dict[str, Any]) -> Seen:
    return Seen(
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        resource["service.name"],
        resource["service.instance.id"],
        span.kind == 2,
        span.status.code == 2,
        (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9,
        _values(span.attributes),
        [event.name for event in span.events],
    )


def _values(attributes: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}


def _from_console(span: dict[str, Any]) -> Seen:
    resource = span["resource"]["attributes"]
    return Seen(
        span["name"],
        span["context"]["trace_id"].removeprefix("0x"),
        span["context"]["span_id"].removeprefix("0x"),
        (span["parent_id"] or "").removeprefix("0x"),
        resource["service.name"],
        resource["service.instance.id"],
        span["kind"] == "SpanKind.SERVER",
        span["status"]["status_code"] == "ERROR",
        _seconds(span["end_time"]) - _seconds(span["start_time"]),
        span["attributes"],
        [event["name"] for event in span["events"]],
    )


def _seconds(stamp: str) -> float:
    hours, minutes, seconds = stamp.rstrip("Z").partition("T")[2].split(":")
    return 3600 * int(hours) + 60 * int(minutes) + float(seconds)
