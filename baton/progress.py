"""What `baton serve` shows while processes start, run and die: one line that changes on a terminal, else plain lines.

Owns the text and the terminal; decides nothing. A plain line is written only when a process enters a new phase, so that
a log file does not fill with percentages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TextIO

from baton.supervisor import Change
from runtime.status import Report

CLEAR_LINE = "\r\x1b[2K"


@dataclass(slots=True)
class _Row:
    """What is known of a process."""

    pid: int = 0
    phase: str = "starting"
    address: str = ""


class Progress:
    """Shows changes; `finish_loading` ends the changing line and prints a line a service."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._live = stream.isatty()
        self._rows: dict[str, _Row] = {}
        self._loading = True

    def on_change(self, change: Change) -> None:
        """Takes in one change of a process and shows what is new about it."""
        row = self._rows.setdefault(change.name, _Row())
        before = row.phase
        if change.kind == "started":
            row.pid, row.phase = change.pid, "starting"
        elif change.kind == "died":
            row.phase = "dead"
            self._print(f"{change.name}: {change.exit_text}; starts again in {change.restart_in_s:g} s")
        elif change.report is not None:
            row.address = change.report.address or row.address
            row.phase = _phase(change.report)
        if self._loading and self._live:
            shown = "  ".join(f"{name}: {row.phase}" for name, row in self._rows.items() if row.phase != "ready")
            self._stream.write(f"{CLEAR_LINE}{shown[:200]}")
            self._stream.flush()
        elif self._loading and _words(row.phase) != _words(before):
            self._print(f"{change.name}: {_words(row.phase)}")
        elif not self._loading and change.kind == "report" and row.phase == "ready":
            self._print(_line(change.name, row))

    def finish_loading(self) -> None:
        """Prints name, process id and address of every process."""
        self._loading = False
        if self._live:
            self._stream.write(CLEAR_LINE)
        for name, row in self._rows.items():
            self._print(_line(name, row))

    def abandon_loading(self) -> None:
        """Clears the changing line, for an error to be printed in its place."""
        if self._loading and self._live:
            self._stream.write(CLEAR_LINE)
            self._stream.flush()
        self._loading = False

    def _print(self, text: str) -> None:
        prefix = CLEAR_LINE if self._live and self._loading else ""
        self._stream.write(f"{prefix}{text}\n")
        self._stream.flush()


def _phase(report: Report) -> str:
    if report.state == "loading" and report.progress is not None:
        return f"loading {report.detail} {report.progress:.0%}"
    return report.state


def _words(phase: str) -> str:
    """The phase without its percentage."""
    return phase.rsplit(" ", 1)[0] if phase.endswith("%") else phase


def _line(name: str, row: _Row) -> str:
    return f"{name:<12} pid {row.pid:<8} {row.address}"
