"""Where traces go beside the ring: to a collector by OTLP, or to standard output, through the OpenTelemetry SDK.

A trace comes whole, when its request has ended, and is made into the SDK's spans here; its batch processor sends them
from a thread of its own and drops what a slow collector leaves no room for. Every process of a request has a resource
of its own, although one process sends for all. The SDK is imported only where an exporter is asked for.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from runtime.config import version
from runtime.errors import ConfigError
from runtime.traces import AttributeValue, Trace

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter

ExporterName = Literal["none", "console", "otlp"]
OTLP_MODULE = "opentelemetry.exporter.otlp.proto.grpc.trace_exporter"
MAX_RESOURCES = 256
"""Processes remembered; workers that are started again have new names."""


class TraceExporter:
    """Sends traces."""

    def __init__(self, exporter: SpanExporter, instance: str) -> None:
        """`instance` names this process, to which alone what the environment says of resources applies."""
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        self._processor = BatchSpanProcessor(exporter)
        self._scope = InstrumentationScope("baton", version())
        self._instance = instance
        self._resources: dict[tuple[str, str], Resource] = {}

    def send(self, trace: Trace) -> None:
        """Hands a trace over; never blocks."""
        for span in self.spans_of(trace):
            self._processor.on_end(span)

    def shut_down(self) -> None:
        """Sends what is left and ends; blocks for as long as the collector takes."""
        self._processor.shutdown()

    def spans_of(self, trace: Trace) -> list[ReadableSpan]:
        """A trace as the SDK's spans."""
        from opentelemetry.sdk.trace import Event, ReadableSpan
        from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

        flags, state = TraceFlags(TraceFlags.SAMPLED), TraceState.from_header([trace.state])
        own_ids = {span.span_id for span in trace.spans}

        def context(span_id: int) -> SpanContext:
            return SpanContext(trace.trace_id, span_id, span_id not in own_ids, flags, state)

        def time_ns(at_s: float) -> int:
            return round(1e9 * (trace.began_unix_s + at_s))

        return [
            ReadableSpan(
                name=span.name,
                context=context(span.span_id),
                parent=context(span.parent_id) if span.parent_id else None,
                resource=self._resource(span.service, span.instance),
                attributes=_plain(span.attributes),
                events=[Event(event.name, _plain(event.attributes), time_ns(event.at_s)) for event in span.events],
                kind=SpanKind.SERVER if span is trace.spans[0] else SpanKind.INTERNAL,
                status=Status(StatusCode.ERROR, span.error) if span.error else Status(StatusCode.UNSET),
                start_time=time_ns(span.start_s),
                end_time=time_ns(span.end_s),
                instrumentation_scope=self._scope,
            )
            for span in trace.spans
        ]

    def _resource(self, service: str, instance: str) -> Resource:
        from opentelemetry.sdk.resources import Resource

        key = service, instance
        found = self._resources.get(key)
        if found is None:
            if len(self._resources) >= MAX_RESOURCES:
                self._resources.clear()
            names = {"service.name": service, "service.instance.id": instance, "service.version": version()}
            found = Resource.create(names) if instance == self._instance else Resource(names)
            self._resources[key] = found
        return found


def open_exporter(name: ExporterName, endpoint: str | None, instance: str) -> TraceExporter | None:
    """The exporter of that name; None for "none". `endpoint` ("http://host:4317") is for "otlp" alone.

    ConfigError when "otlp" is asked for and its package is not installed.
    """
    if name == "none":
        return None
    if name == "console":
        from opentelemetry.sdk.trace.export import ConsoleSpanExporter

        return TraceExporter(ConsoleSpanExporter(out=sys.stdout), instance)
    try:
        module = importlib.import_module(OTLP_MODULE)
    except ModuleNotFoundError as error:
        raise ConfigError(f"--trace-exporter otlp: {error.name} is not installed; install baton-llm[otlp]") from None
    return TraceExporter(module.OTLPSpanExporter(endpoint=endpoint), instance)


def _plain(attributes: Mapping[str, AttributeValue]) -> dict[str, AttributeValue]:
    """A copy: what the SDK holds on to is nobody else's."""
    return dict(attributes)
