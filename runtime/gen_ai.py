"""The metrics that OpenTelemetry's conventions for generative AI name, as instruments of its SDK.

Owns the three histograms of a server, `gen_ai.server.*`, with the buckets and attributes of the conventions, and their
way out: to the scrape (`families`, in the names that Prometheus gives them), and to a collector where one is named. One
record for each request that ends, so the SDK's cost does not matter. Everything else that is measured stands elsewhere.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from typing import Literal

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import (
    ConsoleMetricExporter,
    HistogramDataPoint,
    InMemoryMetricReader,
    MetricExporter,
    MetricReader,
    PeriodicExportingMetricReader,
)
from opentelemetry.sdk.resources import Resource

from runtime.config import version
from runtime.errors import ConfigError
from runtime.metrics import Family

Exporter = Literal["none", "console", "otlp"]
EXPORT_INTERVAL_S = 15.0
REQUEST_S = tuple(0.01 * 2**power for power in range(14))
FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
EACH_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)


class GenAi:
    """The histograms of one process."""

    def __init__(
        self,
        service_name: str,
        model_name: str,
        exporter: Exporter = "none",
        *,
        endpoint: str | None = None,
        instance_id: str = "",
    ) -> None:
        """`endpoint` ("http://host:4317") is for "otlp" alone. ConfigError when that is not installed."""
        self._scraped = InMemoryMetricReader()
        readers: list[MetricReader] = [self._scraped]
        if exporter != "none":
            sent = _exporter(exporter, endpoint)
            readers.append(PeriodicExportingMetricReader(sent, export_interval_millis=1000 * EXPORT_INTERVAL_S))
        resource = Resource.create(
            {"service.name": service_name, "service.instance.id": instance_id, "service.version": version()}
        )
        self._provider = MeterProvider(readers, resource, shutdown_on_exit=False)
        self._model = {"gen_ai.request.model": model_name, "gen_ai.response.model": model_name}
        meter = self._provider.get_meter("baton", version())
        self._request = meter.create_histogram(
            "gen_ai.server.request.duration",
            "s",
            "From a request's arrival to its end.",
            explicit_bucket_boundaries_advisory=REQUEST_S,
        )
        self._first_token = meter.create_histogram(
            "gen_ai.server.time_to_first_token",
            "s",
            "From a request's arrival to its first token, of requests that ended well.",
            explicit_bucket_boundaries_advisory=FIRST_TOKEN_S,
        )
        self._each_token = meter.create_histogram(
            "gen_ai.server.time_per_output_token",
            "s",
            "Mean time between a request's tokens after the first, of requests that ended well.",
            explicit_bucket_boundaries_advisory=EACH_TOKEN_S,
        )

    def record(
        self,
        operation: str,
        duration_s: float,
        first_token_s: float | None,
        each_token_s: float | None,
        error_type: str | None,
    ) -> None:
        """A request has ended; what does not apply to it is None."""
        attributes = {"gen_ai.operation.name": operation, "gen_ai.provider.name": "baton", **self._model}
        failed = {} if error_type is None else {"error.type": error_type}
        self._request.record(duration_s, {**attributes, **failed})
        if first_token_s is not None:
            self._first_token.record(first_token_s, attributes)
        if each_token_s is not None:
            self._each_token.record(each_token_s, attributes)

    def families(self) -> Iterator[Family]:
        """As Prometheus names them: underscores for dots, the unit at the end."""
        data = self._scraped.get_metrics_data()
        for resource in data.resource_metrics if data is not None else ():
            for scope in resource.scope_metrics:
                for metric in scope.metrics:
                    family = Family(metric.name.replace(".", "_") + "_seconds", "histogram", metric.description or "")
                    for point in metric.data.data_points:
                        assert isinstance(point, HistogramDataPoint)
                        labels = {key.replace(".", "_"): str(text) for key, text in (point.attributes or {}).items()}
                        family.add_histogram(point.explicit_bounds, point.bucket_counts, point.sum, **labels)
                    yield family

    def shut_down(self) -> None:
        """Sends what is left, if anyone gets it; blocks."""
        self._provider.shutdown()


def _exporter(name: Exporter, endpoint: str | None) -> MetricExporter:
    if name == "console":
        return ConsoleMetricExporter(out=sys.stdout)
    try:
        module = importlib.import_module("opentelemetry.exporter.otlp.proto.grpc.metric_exporter")
    except ModuleNotFoundError as error:
        raise ConfigError(f"--metric-exporter otlp: {error.name} is not installed; install baton-llm[otlp]") from None
    exporter = module.OTLPMetricExporter(endpoint=endpoint)
    assert isinstance(exporter, MetricExporter)
    return exporter
