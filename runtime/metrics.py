"""Metrics of a process: numbers that its loops hold anyway, read at a scrape, and their text for Prometheus.

Owns histograms and the text format (0.0.4). Owns no counters: a collector is a function that reads what there is and
answers families, so that nothing is done for a metric that nobody asks for. Histograms alone are told of values, once
for each request or step. Everything lives in one event loop. Written here and not taken from a library: what is left is
a page of formatting, names with colons are refused by OpenTelemetry's, and Prometheus' own locks every value.
Invariant: a name has one kind and one help text in a process, whoever gives samples of it.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal

from runtime.config import version
from runtime.host import resident_bytes

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Labels = Mapping[str, str]
Kind = Literal["counter", "gauge", "histogram"]

ENGINE = {"engine": "0"}
"""The label that vLLM's own series have; a process is one engine."""
TIME_BOUNDS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0,
)  # fmt: skip
"""Of durations between a step and a long answer."""


@dataclass(slots=True)
class Family:
    """All samples of one name."""

    name: str
    """As Prometheus has it: counters end in _total, units are in the name."""
    kind: Kind
    """What its numbers mean."""
    help: str
    """One sentence."""
    samples: list[tuple[str, Labels, float]] = field(default_factory=list)
    """Suffix of the name, labels, value."""

    def add(self, value: float, **labels: str) -> Family:
        """One more sample."""
        self.samples.append(("", labels, value))
        return self

    def add_each(self, values: Mapping[str, float], label: str) -> Family:
        """A sample for each entry, whose key is the value of `label`."""
        for key, value in values.items():
            self.add(value, **{label: key})
        return self

    def add_histogram(self, bounds: Sequence[float], counts: Sequence[int], total: float, **labels: str) -> Family:
        """A histogram: `counts` has one number for each bucket, that above the last bound included."""
        so_far = list(accumulate(counts))
        for bound, count in zip((*bounds, math.inf), so_far, strict=True):
            self.samples.append(("_bucket", {**labels, "le": _bound(bound)}, count))
        self.samples.append(("_sum", labels, total))
        self.samples.append(("_count", labels, so_far[-1]))
        return self


def gauge(name: str, text: str) -> Family:
    """A family of what goes up and down."""
    return Family(name, "gauge", text)


def counter(name: str, text: str) -> Family:
    """A family of what only grows while the process lives."""
    return Family(name, "counter", text)


def load_families(num_queued: int, num_running: int, kv_usage: float) -> Iterator[Family]:
    """What every process has, under the names of ours and of others."""
    yield gauge("baton_queued_requests", "Requests that wait here.").add(num_queued)
    yield gauge("baton_running_requests", "Requests that are served here.").add(num_running)
    yield gauge("vllm:num_requests_waiting", "Requests that wait here.").add(num_queued, **ENGINE)
    yield gauge("vllm:num_requests_running", "Requests that are served here.").add(num_running, **ENGINE)
    yield gauge("vllm:kv_cache_usage_perc", "Part of the KV blocks there can be that is held, 0 to 1.").add(
        kv_usage, **ENGINE
    )


class Histogram:
    """Counts values by the bucket they fall into."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds` are the largest values of the buckets, ascending; one more bucket takes what is above."""
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Takes a value, `count` times."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def add_to(self, family: Family, **labels: str) -> Family:
        """Adds what was observed so far."""
        return family.add_histogram(self._bounds, self._counts, self._sum, **labels)


class HistogramSet:
    """Histograms of one name, by the value of one label. Those named at the start are there before any value is."""

    def __init__(self, bounds: Sequence[float], label: str, values: Iterable[str] = ()) -> None:
        self._bounds = bounds
        self._label = label
        self._histograms: dict[str, Histogram] = {value: Histogram(bounds) for value in values}

    def observe(self, label_value: str, value: float) -> None:
        """Takes a value."""
        if label_value not in self._histograms:
            self._histograms[label_value] = Histogram(self._bounds)
        self._histograms[label_value].observe(value)

    def add_to(self, family: Family) -> Family:
        """Adds what was observed so far."""
        for label_value, histogram in self._histograms.items():
            histogram.add_to(family, **{self._label: label_value})
        return family


Collector = Callable[[], Iterable[Family]]


class Metrics:
    """What a process shows at a scrape."""

    def __init__(self, collector: Collector, **labels: str) -> None:
        """`labels` are on every sample that has none of the same name."""
        self._collector = collector
        self._labels = labels
        self._began_s = time.time()

    def text(self) -> str:
        """Everything now, in the text format of Prometheus."""
        families: dict[str, Family] = {}
        for family in (*self._collector(), *self._of_process()):
            known = families.setdefault(family.name, family)
            assert (known.kind, known.help) == (family.kind, family.help), f"two meanings of {family.name}"
            if known is not family:
                known.samples += family.samples
        return "".join(line for family in families.values() for line in self._lines(family))

    def _lines(self, family: Family) -> Iterator[str]:
        yield f"# HELP {family.name} {_escaped(family.help)}\n# TYPE {family.name} {family.kind}\n"
        for suffix, labels, value in family.samples:
            pairs = ",".join(
                f'{key}="{_escaped(text, quote=True)}"' for key, text in {**self._labels, **labels}.items()
            )
            yield f"{family.name}{suffix}{f'{{{pairs}}}' if pairs else ''} {_number(value)}\n"

    def _of_process(self) -> Iterator[Family]:
        yield gauge("baton_build_info", "Always 1; the labels say what runs.").add(1, version=version())
        yield counter("process_cpu_seconds_total", "CPU time of all threads.").add(time.process_time())
        yield gauge("process_start_time_seconds", "When this process began to count, in seconds since 1970.").add(
            self._began_s
        )
        num_bytes = resident_bytes()
        if num_bytes:
            yield gauge("process_resident_memory_bytes", "Memory in use, that shared with others included.").add(
                num_bytes
            )


def _escaped(text: str, quote: bool = False) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quote else text


def _bound(bound: float) -> str:
    """Always with a point, as newer servers store it, so that a query finds it at all of them."""
    return "+Inf" if math.isinf(bound) else repr(float(bound))


def _number(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    if math.isnan(value):
        return "NaN"
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(float(value))
