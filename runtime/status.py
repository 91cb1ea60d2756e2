"""How a process tells its supervisor what it is doing, and learns that the supervisor is gone.

Owns `--status-fd`, an inherited stream socket whose other end only the supervisor holds. The child writes one JSON
object a line; end of file means that the supervisor died, however it died, and the child then ends itself like after
SIGTERM. A plain pipe or file will do for reports alone. Reports: {"state": "loading", "progress": 0.4, "detail":
"weights"} · {"state": "listening", "address": "127.0.0.1:5"} · {"state": "ready"} · {"state": "draining"} ·
{"state": "failed", "error": "..."} · {"state": "starting", "argv": [...]}, from one that goes on as another program.
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
import logging
import os
import signal
import stat
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from runtime.errors import ConfigError

LOG = logging.getLogger(__name__)
State = Literal["starting", "loading", "listening", "ready", "draining", "failed"]
ORPHAN_GRACE_S = 15.0
"""How long an orphan may take to end in good order."""
END_GRACE_S = 8.0
"""How long a process that was told to end may take beyond its drain time; less than pods get, or nobody would hear."""
STATES: tuple[State, ...] = ("starting", "loading", "listening", "ready", "draining", "failed")


@dataclass(frozen=True, slots=True)
class Report:
    """One line from a child."""

    state: State
    """What the child is doing."""
    progress: float | None = None
    """Part of the loading that is done, 0 to 1."""
    detail: str = ""
    """What is being loaded."""
    address: str = ""
    """Where the child listens, host:port."""
    error: str = ""
    """Why it failed, for people."""
    argv: tuple[str, ...] = ()
    """The command line that the child goes on with, and is to be started with from now on."""


def end_orphan() -> None:
    """SIGTERM to this very process, so that it drains as usual, and an end by force if that takes too long."""
    force = threading.Timer(ORPHAN_GRACE_S, os._exit, (1,))
    force.daemon = True
    force.start()
    os.kill(os.getpid(), signal.SIGTERM)


def end_by_force(limit_s: float) -> None:
    """Ends this process after `limit_s`, should it still be there, and says what it was waiting for: nothing that goes
    wrong while it ends may keep it for ever. Call it in the event loop, once the process has been told to end."""
    loop = asyncio.get_running_loop()

    def end() -> None:
        try:
            stacks = "\n".join(map(_stack_of, asyncio.all_tasks(loop)))
            LOG.critical("not ended within %g s, so by force; it waited here:\n%s", limit_s, stacks)
            faulthandler.dump_traceback()  # of threads
        finally:
            os._exit(1)  # whatever went wrong while it was said

    force = threading.Timer(limit_s, end)
    force.daemon = True
    force.start()


def _stack_of(task: asyncio.Task[object]) -> str:
    """Where a task waits. `Task.print_stack` fails for coroutines of the gRPC library, whose frames have no lines."""
    frames = [f"  {f.f_code.co_filename}:{f.f_lineno} in {f.f_code.co_name}" for f in task.get_stack()]
    return "\n".join([f"{task.get_name()}: {task.get_coro()!r}", *frames])


class StatusReporter:
    """The child's end. Without a descriptor every call does nothing."""

    def __init__(self, fd: int | None, on_orphaned: Callable[[], None] = end_orphan) -> None:
        """Starts to watch for the supervisor's end where `fd` is a socket; `on_orphaned` runs in a thread.

        ConfigError when `fd` is not open.
        """
        self._fd = fd
        if fd is None:
            return
        try:
            mode = os.fstat(fd).st_mode
        except OSError as error:
            raise ConfigError(f"--status-fd: {fd} is not an open descriptor ({error.strerror})") from None
        os.set_inheritable(fd, False)
        if stat.S_ISSOCK(mode):
            # A descriptor of its own, so that nobody can close it and have its number mean something else.
            watched = os.dup(fd)
            threading.Thread(target=_watch, args=(watched, on_orphaned), name="supervisor-watch", daemon=True).start()

    @property
    def enabled(self) -> bool:
        """Whether somebody listens; if not, a failure is for standard error."""
        return self._fd is not None

    def loading(self, progress: float, detail: str) -> None:
        """Loads `detail`, of which the part `progress` (0 to 1) is done."""
        self._write({"state": "loading", "progress": round(progress, 3), "detail": detail})

    def listening(self, address: str) -> None:
        """Takes connections at `address` (host:port)."""
        self._write({"state": "listening", "address": address})

    def ready(self) -> None:
        """Takes work."""
        self._write({"state": "ready"})

    def draining(self) -> None:
        """Finishes what it has."""
        self._write({"state": "draining"})

    def goes_on_as(self, argv: Sequence[str]) -> None:
        """Replaces itself by that program, of which it wants to be one ever after."""
        self._write({"state": "starting", "argv": list(argv)})

    def failed(self, error: str) -> None:
        """Cannot go on, because of `error`; the process exits next."""
        self._write({"state": "failed", "error": error})

    def _write(self, report: dict[str, object]) -> None:
        if self._fd is None:
            return
        try:
            os.write(self._fd, json.dumps(report).encode() + b"\n")
        except ConnectionError:
            self._fd = None  # Nobody listens any more; the watch decides what follows from that.


def parse_report(line: str) -> Report:
    """The report on a line; ValueError when it is none."""
    content = json.loads(line)
    if not isinstance(content, dict) or content.get("state") not in STATES:
        raise ValueError(f"not a status report: {line!r}")
    progress = content.get("progress")
    return Report(
        state=content["state"],
        progress=None if progress is None else float(progress),
        detail=str(content.get("detail", "")),
        address=str(content.get("address", "")),
        error=str(content.get("error", "")),
        argv=tuple(map(str, content.get("argv", ()))),
    )


def _watch(fd: int, on_orphaned: Callable[[], None]) -> None:
    """Blocks until end of file. A thread, because the event loop may be busy loading a model for long."""
    try:
        while os.read(fd, 4096):
            pass
    except ConnectionError:
        pass  # Reset instead of closed: the supervisor is gone all the same.
    finally:
        os.close(fd)
    on_orphaned()
