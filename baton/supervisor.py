"""Keeps processes running: starts them, listens to their reports, restarts the dead, ends them in order.

Owns processes and their status sockets; knows nothing of what they do. Each child leads a session of its own, so that
Ctrl-C reaches the supervisor alone, and holds the other end of a socket whose closing tells it that the supervisor is
gone. Invariant: when `stop` has returned or raised, no child and no member of a child's group is left.
A child that goes on as another program says so, and is that program when it is started again.
Life of a child: started, reports, exits; before the system was ready that is a StartFailed, later it is started again
after a delay that doubles from BACKOFF_FIRST_S to BACKOFF_LIMIT_S and begins anew once a child has run for STABLE_S.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from baton.topology import ProcessSpec
from runtime.errors import BatonError
from runtime.status import Report, parse_report

BACKOFF_FIRST_S = 0.5
BACKOFF_LIMIT_S = 30.0
STABLE_S = 60.0
KILL_MARGIN_S = 5.0
"""How long a child may take to end beyond the time its requests get."""
MAX_REPORT_BYTES = 1 << 20


class StartFailed(BatonError):
    """A process ended before the system was ready; the message is the process's own where it gave one."""

    reason = "START_FAILED"


@dataclass(frozen=True, slots=True)
class Change:
    """Something happened to a child."""

    name: str
    """The child."""
    kind: Literal["started", "report", "died"]
    """What happened."""
    pid: int
    """Its process id."""
    report: Report | None = None
    """What it said."""
    exit_text: str = ""
    """How it ended."""
    restart_in_s: float = 0.0
    """When it is started again."""


@dataclass(slots=True)
class _Child:
    """A process and what it said last."""

    spec: ProcessSpec
    process: asyncio.subprocess.Process | None = None
    ready: bool = False
    error: str = ""
    exited: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None


class Supervisor:
    """Supervises children; create it inside the running event loop."""

    def __init__(
        self,
        on_change: Callable[[Change], None],
        *,
        drain_timeout_s: float,
        backoff_first_s: float = BACKOFF_FIRST_S,
        stable_s: float = STABLE_S,
    ) -> None:
        """`on_change` is called in the event loop for everything that happens to a child."""
        self._on_change = on_change
        self._drain_timeout_s = drain_timeout_s
        self._backoff_first_s = backoff_first_s
        self._stable_s = stable_s
        self._children: list[_Child] = []
        self._stopping = asyncio.Event()
        self._news = asyncio.Event()
        self._failure: BaseException | None = None
        self._started = False

    async def start(self, specs: Sequence[ProcessSpec]) -> None:
        """Starts processes, and returns when all of them that gate readiness are ready.

        StartFailed when any ends before that, those of earlier calls included. May be called again for more.
        """
        self._started = False
        for spec in specs:
            child = _Child(spec)
            self._children.append(child)
            child.task = asyncio.create_task(self._keep(child), name=spec.name)
        while not all(child.ready for child in self._children if child.spec.gates_readiness):
            await self._next_news()
        self._started = True

    async def wait_for_failure(self) -> None:
        """Waits until supervision itself fails, which is a bug, and raises what happened."""
        while True:
            await self._next_news()

    async def stop(self) -> None:
        """Ends all children: SIGTERM by rank, each rank getting the drain time, then SIGKILL to whole groups."""
        self._stopping.set()
        grace_s = KILL_MARGIN_S + (self._drain_timeout_s if self._started else 0.0)
        try:
            for rank in sorted({child.spec.stop_rank for child in self._children}):
                await self._stop_rank([child for child in self._children if child.spec.stop_rank == rank], grace_s)
        finally:
            for child in self._children:
                _kill_group(child)
        await asyncio.gather(*(child.task for child in self._children if child.task), return_exceptions=True)

    async def _stop_rank(self, children: list[_Child], grace_s: float) -> None:
        alive = [child for child in children if child.process is not None and not child.exited.is_set()]
        for child in alive:
            assert child.process is not None
            with contextlib.suppress(ProcessLookupError):
                child.process.terminate()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                for child in alive:
                    await child.exited.wait()
        for child in alive:
            _kill_group(child)

    async def _next_news(self) -> None:
        if self._failure is None:
            await self._news.wait()
            self._news.clear()
        if self._failure is not None:
            raise self._failure

    def _tell(self, change: Change) -> None:
        self._on_change(change)
        self._news.set()

    async def _keep(self, child: _Child) -> None:
        try:
            await self._keep_running(child)
        except Exception as error:
            self._failure = error
            self._news.set()

    async def _keep_running(self, child: _Child) -> None:
        loop = asyncio.get_running_loop()
        delay_s = self._backoff_first_s
        while not self._stopping.is_set():
            began_s = loop.time()
            process = await self._run(child)
            if self._stopping.is_set():
                return
            exit_text = _exit_text(process.returncode)
            if not self._started:
                raise StartFailed(f"{child.spec.name}: {child.error or exit_text + '; its messages are above'}")
            if loop.time() - began_s >= self._stable_s:
                delay_s = self._backoff_first_s
            self._tell(Change(child.spec.name, "died", process.pid, exit_text=exit_text, restart_in_s=delay_s))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), delay_s)
            delay_s = min(2 * delay_s, BACKOFF_LIMIT_S)

    async def _run(self, child: _Child) -> asyncio.subprocess.Process:
        """One life of a child, from start to exit."""
        ours, theirs = socket.socketpair()
        child.ready, child.error = False, ""
        child.exited.clear()
        try:
            child.process = process = await asyncio.create_subprocess_exec(
                *child.spec.argv,
                f"--status-fd={theirs.fileno()}",
                pass_fds=(theirs.fileno(),),
                env={**dict(child.spec.environment), **os.environ},
                stdin=asyncio.subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            ours.close()
            raise StartFailed(f"{child.spec.name}: cannot start {child.spec.argv[0]}: {error}") from None
        finally:
            theirs.close()
        _pin(process.pid, child.spec.cpus)
        reader, writer = await asyncio.open_connection(sock=ours, limit=MAX_REPORT_BYTES)
        self._tell(Change(child.spec.name, "started", process.pid))
        listening = asyncio.create_task(self._listen(child, reader))
        try:
            if self._stopping.is_set():
                process.kill()  # Started while `stop` was already counting its children.
            await process.wait()
            # What the child said last arrives with end of file, unless a process of its own still holds the socket.
            await asyncio.wait([listening], timeout=1.0)
        finally:
            listening.cancel()
            writer.close()
            _kill_group(child)
            child.exited.set()
        return process

    async def _listen(self, child: _Child, reader: asyncio.StreamReader) -> None:
        assert child.process is not None
        while line := await reader.readline():
            try:
                report = parse_report(line.decode())
            except ValueError as error:
                child.error = str(error)
                child.process.kill()
                return
            child.ready = child.ready or report.state == "ready"
            child.error = report.error or child.error
            if report.argv:
                # Its socket was of this life; of a flag that is given twice the last one holds.
                child.spec = replace(child.spec, argv=report.argv)
            self._tell(Change(child.spec.name, "report", child.process.pid, report=report))


def _pin(pid: int, cpus: frozenset[int]) -> None:
    if cpus and sys.platform == "linux":
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(pid, cpus)


def _kill_group(child: _Child) -> None:
    """Ends whatever is left of a child and of processes that it started."""
    if child.process is not None and not child.exited.is_set():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.process.pid, signal.SIGKILL)


def _exit_text(returncode: int | None) -> str:
    assert returncode is not None
    if returncode < 0:
        return f"killed by {signal.Signals(-returncode).name}"
    return f"exited with code {returncode}"
