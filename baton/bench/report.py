"""How results are shown and kept: a table, and JSON that says where and from what it came.

Owns both formats; docs/bench.md describes them. The commit is that of the folder this package lies in, marked when
files differ from it; None for an installed copy.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from baton.bench.options import BenchConfig, Sizes, printed
from baton.bench.rows import Row, Spread
from runtime import config as configuration

GIT_TIMEOUT_S = 10.0
COLUMNS = (
    "",
    "requests",
    "failed",
    "refused",
    "tok/s",
    "CPU ms/tok",
    "first token ms",
    "gap ms",
    "worst gap",
    "end ms",
)
LEGEND = "Times are median / 99th percentile."


def to_json(name: str, model: str, config: BenchConfig, sizes: Sizes, rows: Sequence[Row]) -> dict[str, Any]:
    """The results as they stand in the file."""
    options = dataclasses.asdict(config) | printed(sizes) | {"model": model}
    return {
        "scenario": name,
        "version": configuration.version(),
        "commit": commit(),
        "machine": machine(),
        "config": {key: str(value) if isinstance(value, Path) else value for key, value in options.items()},
        "results": [row.to_json() for row in rows],
    }


def commit() -> str | None:
    """The commit of this package's folder, with -dirty where files differ from it."""
    command = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    try:
        done = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=GIT_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def machine() -> dict[str, Any]:
    """What the figures were taken on. The load is that of the minute before the end, our own included."""
    return {
        "system": platform.platform(),
        "cpu": _cpu_name(),
        "num_cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load_average": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
    }


def table(rows: Sequence[Row]) -> str:
    """The main figures, a line a row; then what only this scenario measures."""
    lines = [COLUMNS, *(_cells(row) for row in rows)]
    widths = [max(len(line[index]) for line in lines) for index in range(len(COLUMNS))]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    for row in rows:
        if row.goodput_rps is not None:
            text.append(f"{row.name}: goodput {row.goodput_rps:.3g} requests/s")
        if row.figures:
            text.append(f"{row.name}: {', '.join(f'{name} {_figure(value)}' for name, value in row.figures.items())}")
        if row.recomputed:
            text.append(f"{row.name}: {row.recomputed} attempts beyond the first")
    return "\n".join([*text, LEGEND])


def _cells(row: Row) -> tuple[str, ...]:
    cpu = "-" if row.cpu_s_per_token is None else f"{1000 * row.cpu_s_per_token:.3g}"
    worst = "-" if row.itl_ms is None else f"{row.itl_ms.max:.1f}"
    counts = (str(row.requests), str(row.failed), str(row.refused), f"{row.output_tok_s:.1f}")
    return (row.name, *counts, cpu, _pair(row.ttft_ms), _pair(row.itl_ms), worst, _pair(row.e2e_ms))


def _pair(values: Spread | None) -> str:
    return "-" if values is None else f"{values.p50:.1f} / {values.p99:.1f}"


def _figure(value: float | Spread | None) -> str:
    if value is None:
        return "unknown"
    return _pair(value) if isinstance(value, Spread) else f"{value:,.6g}"


def _cpu_name() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
