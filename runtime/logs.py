"""Logs of a process: one line a record, to standard error.

Owns the root logger's handler and format. A line names the time, the level, the process (`router-0`) and the module;
line breaks inside a message are kept only in tracebacks.
"""

from __future__ import annotations

import logging
import sys
from typing import Literal

Level = Literal["debug", "info", "warning", "error"]


class LineFormatter(logging.Formatter):
    """`12:00:00.123 INFO router-0 router.service: text`."""

    default_msec_format = "%s.%03d"

    def __init__(self, process_name: str) -> None:
        super().__init__("%(asctime)s %(levelname)s %(process_name)s %(name)s: %(message)s", datefmt=None)
        self.default_time_format = "%H:%M:%S"
        self._process_name = process_name

    def format(self, record: logging.LogRecord) -> str:
        """One line; a traceback, where there is one, follows on lines of its own."""
        record.process_name = self._process_name
        return super().format(record)

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line with breaks in the message written as \\n, so that a caller's text cannot forge a record."""
        record.message = record.message.replace("\r", "\\r").replace("\n", "\\n")
        return super().formatMessage(record)


def configure(level: Level, process_name: str) -> None:
    """Sends all records of at least `level` to standard error; a second call replaces the first."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter(process_name))
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())
