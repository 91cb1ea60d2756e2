"""A process for the supervisor to supervise: `fake_child.py BEHAVIOUR [ARGUMENT] --status-fd=N`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from runtime.status import StatusReporter


def main() -> None:
    *arguments, fd_flag = sys.argv[1:]  # the last one holds, as in every process of ours
    behaviour, argument = arguments[0], arguments[1] if len(arguments) > 1 else ""
    fd = int(fd_flag.removeprefix("--status-fd="))
    reporter = StatusReporter(fd)
    if behaviour == "fail":
        reporter.loading(0.5, "weights")
        reporter.failed(argument)
        sys.exit(1)
    if behaviour == "exit":
        sys.exit(int(argument))
    if behaviour == "garbage":
        os.write(fd, b"not json\n")
    if behaviour == "ignore-term":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if behaviour == "die-after-ready-until":
        ready_and_die(reporter, Path(argument))
    if behaviour == "goes-on-as":
        reporter.ready()
        Path(argument).with_suffix(".fifo").open().close()
        reporter.goes_on_as([sys.executable, __file__, "record-start", argument, fd_flag])
        os.kill(os.getpid(), signal.SIGKILL)
    if behaviour == "record-start":
        record(Path(argument))
    if behaviour == "grandchild":
        grandchild = subprocess.Popen(["sleep", "1000"])
        Path(argument).write_text(str(grandchild.pid))
    if behaviour == "record-end":
        signal.signal(signal.SIGTERM, lambda *_: record_end(Path(argument)))
    if behaviour != "never-ready":
        reporter.listening(f"127.0.0.1:{os.getpid()}")
        reporter.ready()
    time.sleep(1000)


def ready_and_die(reporter: StatusReporter, lives: Path) -> None:
    """Dies after getting ready while the file lists fewer than three lives; the first time not before somebody has
    opened the fifo beside it."""
    reporter.ready()
    if not lives.exists():
        lives.with_suffix(".fifo").open().close()
    with lives.open("a") as file:
        file.write(f"{os.getpid()}\n")
    if len(lives.read_text().split()) < 3:
        os.kill(os.getpid(), signal.SIGKILL)


def record(path: Path) -> None:
    with path.open("a") as file:
        file.write(f"{os.getpid()}\n")


def record_end(path: Path) -> None:
    record(path)
    sys.exit(0)


if __name__ == "__main__":
    main()
