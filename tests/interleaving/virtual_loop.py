"""An event loop without threads, sockets or a clock of its own: a test decides what happens next and when.

Whatever is ready runs in asyncio's order until nothing is; then `director` makes one thing happen from outside: a
message arrives, a job of a thread is done, or the time of the next timer comes. Callbacks and tasks belong to the
`Process` in whose context they were made, so that a process can be ended by itself.
Invariant: given the director's choices a run is always the same.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

PROCESS: contextvars.ContextVar[Process] = contextvars.ContextVar("process")
"""Whose code runs."""


class Director(Protocol):
    """Who decides what happens."""

    def happen(self) -> None:
        """Nothing is ready: makes one thing happen, or lets time pass."""
        ...

    def interrupts(self) -> bool:
        """Whether something happens although callbacks are ready."""
        ...

    def submit(self, process: Process, job: Callable[[], Any], done: asyncio.Future[Any]) -> None:
        """A process has given a thread something to do."""
        ...


class Process:
    """One life of one process: what runs in it ends with it."""

    def __init__(self, loop: VirtualLoop, name: str, address: str) -> None:
        self.name = name
        self.address = address
        self.is_alive = True
        """False once it has crashed: nobody hears it any more, while its tasks are unwound."""
        self.silent_until_s = 0.0
        """When those who were connected to a process that vanished hear of it."""
        self.server: Any = None
        """What listens at its address; None while nothing does."""
        self.tasks: dict[asyncio.Task[Any], None] = {}
        self._loop = loop
        self._context = contextvars.copy_context()
        self._context.run(PROCESS.set, self)

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Runs `work` as code of this process."""
        return self._loop.create_task(work, context=self._context.copy())

    def do(self, act: Callable[[], Any]) -> Any:
        """Calls `act` as code of this process."""
        return self._context.copy().run(act)


class VirtualLoop(asyncio.BaseEventLoop):
    """See the module."""

    director: Director

    def __init__(self) -> None:
        super().__init__()
        self._now_s = 1000.0
        self.errors: list[str] = []
        """What asyncio reported: exceptions that nobody has taken."""
        self.logged: list[str] = []
        """What the product logged as errors."""
        self.tasks: set[asyncio.Task[Any]] = set()
        """All that are not done."""
        self.set_task_factory(self._make_task)
        self.set_exception_handler(lambda _, context: self.errors.append(f"{context['message']}: {context!r}"))

    def time(self) -> float:
        """Virtual seconds; also `time.monotonic` during a run."""
        return self._now_s

    @property
    def is_busy(self) -> bool:
        """Whether callbacks are ready."""
        return bool(self._ready)

    def pass_time(self, duration_s: float) -> None:
        """Lets time pass; timers that are due fire before anything else happens."""
        self._now_s += duration_s

    def pass_to_next_timer(self) -> bool:
        """Goes to when the next timer is due; False when there is none."""
        while self._scheduled and self._scheduled[0]._cancelled:
            heapq.heappop(self._scheduled)._scheduled = False
        if self._scheduled:
            self._now_s = max(self._now_s, self._scheduled[0]._when)
        return bool(self._scheduled)

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """A thread's work is one more thing that happens when the director says so."""
        done = self.create_future()
        self.director.submit(PROCESS.get(), lambda: func(*args), done)
        return done

    def _run_once(self) -> None:
        if not self._ready or self.director.interrupts():
            self._take_due()
            if not self._ready or self.director.interrupts():
                self.director.happen()
        for _ in range(len(self._ready)):
            handle = self._ready.popleft()
            if not handle._cancelled:
                handle._run()

    def _take_due(self) -> None:
        while self._scheduled and self._scheduled[0]._when <= self._now_s:
            handle = heapq.heappop(self._scheduled)
            handle._scheduled = False
            if not handle._cancelled:
                self._ready.append(handle)

    def _make_task(self, loop: Any, work: Any, context: contextvars.Context | None = None) -> asyncio.Task[Any]:
        task = asyncio.Task(work, loop=loop, context=context)
        process = context.get(PROCESS) if context is not None else PROCESS.get(None)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        if process is not None:
            process.tasks[task] = None
            task.add_done_callback(process.tasks.pop)
        return task

    def _write_to_self(self) -> None:
        """Nobody sleeps in a system call."""
