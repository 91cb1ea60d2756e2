"""Files of trace events, which https://ui.perfetto.dev opens: named processes with named tracks of slices and counters.

Owns the format alone. Times are seconds from a beginning that the caller chooses.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MICROSECONDS = 1_000_000


class TraceFile:
    """Collects events; `write` makes the file."""

    def __init__(self) -> None:
        self._events: list[dict[str, Any]] = []
        self._pids: dict[str, int] = {}
        self._named: set[tuple[int, int]] = set()

    def track(self, process: str, number: int, name: str) -> dict[str, int]:
        """Where slices go: track `number` of a process. Process and track are named when they are first seen."""
        pid = self._pid(process)
        if (pid, number) not in self._named:
            self._named.add((pid, number))
            self._events.append({"pid": pid, "tid": number, "ph": "M", "name": "thread_name", "args": {"name": name}})
        return {"pid": pid, "tid": number}

    def slice(
        self,
        track: Mapping[str, int],
        name: str,
        start_s: float,
        end_s: float,
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        """Something that took time; on one track slices follow each other or lie within each other."""
        times = {"ts": MICROSECONDS * start_s, "dur": MICROSECONDS * (end_s - start_s)}
        shown = {} if arguments is None else {"args": dict(arguments)}
        self._events.append({**track, "ph": "X", "name": name, **times, **shown})

    def instant(self, track: Mapping[str, int], name: str, at_s: float, arguments: Mapping[str, Any]) -> None:
        """Something that happened."""
        marked = {"ph": "i", "s": "t", "name": name, "ts": MICROSECONDS * at_s, "args": dict(arguments)}
        self._events.append({**track, **marked})

    def counter(self, process: str, name: str, at_s: float, value: float) -> None:
        """The value that a quantity of a process has from then on."""
        event = {"ph": "C", "name": name, "ts": MICROSECONDS * at_s, "args": {"value": value}}
        self._events.append({"pid": self._pid(process), "tid": 0, **event})

    def write(self, path: Path) -> None:
        """Raises OSError where the file cannot be written."""
        path.write_text(json.dumps({"traceEvents": self._events, "displayTimeUnit": "ms"}), encoding="utf-8")

    def _pid(self, process: str) -> int:
        pid = self._pids.get(process)
        if pid is None:
            pid = self._pids[process] = len(self._pids) + 1
            self._events.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": process}})
        return pid
