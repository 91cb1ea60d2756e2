"""Traces: an explicit tracer of the OpenTelemetry SDK, and W3C context in gRPC metadata.

Owns exporters, sampling and propagation. There is no global provider and no ambient current span: who starts a span
names its parent, so that interleaved coroutines cannot adopt each other's. With the exporter "none" spans record
nothing and `inject` still passes on a caller's context.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Mapping
from typing import Literal

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import NoOpTracer, Span, SpanKind, Tracer, format_trace_id, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from runtime.config import version
from runtime.errors import ConfigError

Exporter = Literal["none", "console", "otlp"]
TRACER_NAME = "baton"
CONTEXT_KEYS = ("traceparent", "tracestate")
_PROPAGATOR = TraceContextTextMapPropagator()


class Telemetry:
    """The tracer of a process."""

    def __init__(self, provider: TracerProvider | None) -> None:
        """Without a provider nothing is recorded."""
        self._provider = provider
        self._tracer: Tracer = provider.get_tracer(TRACER_NAME, version()) if provider else NoOpTracer()

    @property
    def enabled(self) -> bool:
        """Whether spans go anywhere."""
        return self._provider is not None

    def start_span(
        self,
        name: str,
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        parent: Context | Span | None = None,
        attributes: Mapping[str, AttributeValue] | None = None,
    ) -> Span:
        """A started span, child of `parent` or the root of a new trace. Its owner ends it."""
        context = set_span_in_context(parent, Context()) if isinstance(parent, Span) else parent or Context()
        return self._tracer.start_span(name, context=context, kind=kind, attributes=attributes)

    def flush(self, timeout_s: float = 5.0) -> None:
        """Hands ended spans to the exporter; blocks for at most `timeout_s`."""
        if self._provider is not None:
            self._provider.force_flush(round(timeout_s * 1000))

    def shut_down(self) -> None:
        """Flushes and ends; blocks. Spans ended later are lost."""
        if self._provider is not None:
            self.flush()
            self._provider.shutdown()


def configure(
    service_name: str,
    exporter: Exporter = "none",
    *,
    endpoint: str | None = None,
    sample_ratio: float = 1.0,
    instance_id: str = "",
) -> Telemetry:
    """The telemetry of a process.

    `endpoint` ("http://host:4317") is for "otlp" alone. `sample_ratio` (0 to 1) decides for traces that begin here; a
    caller's decision is followed. ConfigError when "otlp" is asked for and its exporter is not installed.
    """
    if exporter == "none":
        return Telemetry(None)
    resource = Resource.create(
        {"service.name": service_name, "service.instance.id": instance_id, "service.version": version()}
    )
    provider = TracerProvider(
        resource=resource, sampler=ParentBased(TraceIdRatioBased(sample_ratio)), shutdown_on_exit=False
    )
    provider.add_span_processor(BatchSpanProcessor(_exporter(exporter, endpoint)))
    return Telemetry(provider)


def _exporter(name: Exporter, endpoint: str | None) -> SpanExporter:
    if name == "console":
        return ConsoleSpanExporter(out=sys.stdout)
    try:
        module = importlib.import_module("opentelemetry.exporter.otlp.proto.grpc.trace_exporter")
    except ModuleNotFoundError as error:
        raise ConfigError(f"--trace-exporter otlp: {error.name} is not installed; install baton-llm[otlp]") from None
    exporter = module.OTLPSpanExporter(endpoint=endpoint)
    assert isinstance(exporter, SpanExporter)
    return exporter


def trace_id_of(span: Span) -> str:
    """The trace that a span is recorded in, as collectors write it; empty for one that is not recorded."""
    context = span.get_span_context()
    return format_trace_id(context.trace_id) if span.is_recording() else ""


def inject(parent: Context | Span) -> tuple[tuple[str, str], ...]:
    """gRPC metadata that carries `parent` to the callee; empty when there is no valid span in it."""
    carrier: dict[str, str] = {}
    context = set_span_in_context(parent, Context()) if isinstance(parent, Span) else parent
    _PROPAGATOR.inject(carrier, context=context)
    return tuple(carrier.items())


def extract(invocation_metadata: Iterable[tuple[str, str | bytes]] | None) -> Context | None:
    """The caller's context; None when it sent none that is valid."""
    pairs = invocation_metadata or ()
    carrier = {key: value for key, value in pairs if key in CONTEXT_KEYS and isinstance(value, str)}
    if "traceparent" not in carrier:
        return None
    context = _PROPAGATOR.extract(carrier, context=Context())
    return context or None
