"""One picture of a measurement: gaps between tokens, running and queued requests over time, load of each worker.

Owns the drawing. The library is imported only here and only when a picture was asked for; it is an extra.
"""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from baton.bench.rows import Row
from baton.bench.system import Sample
from runtime.errors import ConfigError

SIZE_INCHES = (10, 12)
NO_GAP_MS = 1e-3
"""Gaps below this are drawn here: the axis is logarithmic."""


def load_library() -> Any:
    """The drawing library's figure module. ConfigError where it is not installed."""
    try:
        return importlib.import_module("matplotlib.figure")
    except ModuleNotFoundError:
        raise ConfigError("--plot: the package matplotlib is not installed; pip install 'baton-llm[bench]'") from None


def draw(path: Path, title: str, rows: Sequence[Row], samples: Sequence[Sample]) -> None:
    """Writes the picture. ConfigError where it cannot be written."""
    figure = load_library().Figure(figsize=SIZE_INCHES, layout="constrained")
    figure.suptitle(title)
    gaps, timeline, load = figure.subplots(3, 1)
    _draw_gaps(gaps, rows)
    _draw_timeline(timeline, samples)
    _draw_load(load, samples)
    try:
        figure.savefig(path, format="png", dpi=100)
    except OSError as error:
        raise ConfigError(f"--plot: {str(path)!r} cannot be written: {error}") from None


def _draw_gaps(axes: Any, rows: Sequence[Row]) -> None:
    """For each row, which part of its gaps is at most so long."""
    for row in rows:
        ordered = sorted(max(gap, NO_GAP_MS) for gap in row.gaps_ms)
        if ordered:
            axes.step(ordered, [(index + 1) / len(ordered) for index in range(len(ordered))], label=row.name)
            axes.set_xscale("log")
    axes.set(title="Gaps between messages with tokens", xlabel="ms", ylabel="part of gaps at most so long")
    _legend(axes)


def _draw_timeline(axes: Any, samples: Sequence[Sample]) -> None:
    """Running and queued sequences of each role of each service."""
    started_s = min((sample.time_s for sample in samples), default=0.0)
    for service, role in sorted({(sample.service, sample.role) for sample in samples}):
        by_time: dict[float, list[Sample]] = {}
        for sample in samples:
            if (sample.service, sample.role) == (service, role):
                by_time.setdefault(sample.time_s, []).append(sample)
        times = [time_s - started_s for time_s in by_time]
        name = f"{service} {role}".strip()
        axes.plot(
            times, [sum(each.num_running for each in group) for group in by_time.values()], label=f"{name} running"
        )
        queued = [sum(each.num_queued for each in group) for group in by_time.values()]
        axes.plot(times, queued, linestyle="--", label=f"{name} queued")
    axes.set(title="Requests at the workers", xlabel="s", ylabel="sequences")
    _legend(axes)


def _draw_load(axes: Any, samples: Sequence[Sample]) -> None:
    """Mean and largest number of running sequences of each worker."""
    names = list(dict.fromkeys((sample.service, sample.worker_id) for sample in samples))
    running = [[s.num_running for s in samples if (s.service, s.worker_id) == name] for name in names]
    labels = [" ".join(filter(None, name)) for name in names]
    places = range(len(names))
    axes.barh(places, [max(values) for values in running], color="lightgray", label="largest")
    axes.barh(places, [statistics.fmean(values) for values in running], label="mean")
    axes.set_yticks(places, labels)
    axes.set(title="Running sequences by worker", xlabel="sequences")
    _legend(axes)


def _legend(axes: Any) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="small")
