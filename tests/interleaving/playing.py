"""Plays one schedule: starts a system, lets events happen in the order a `Chooser` says, strikes faults, checks.

Events are counted from the moment when the system is whole until every request is answered and nothing is held; faults
strike before the event of their number. A run ends with a `Record`, or with a Violation that says how to play it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from unittest import mock

from memory_calls import Channel
from memory_network import Lane, Network
from memory_server import MemoryServer
from virtual_loop import PROCESS, Process, VirtualLoop
from whole_system import Ask, Size, System, Violation

import engine.kv_reader
import engine.worker
import router.links
import router.process
from router.probe import Prober
from runtime.errors import BatonError

LIMIT_S = 60.0
"""Virtual time in which every answer must be complete, and again for everything to be given back."""
MAX_EVENTS = 20_000


class Chooser(Protocol):
    """Which of the events that are possible happens next."""

    def choose(self, lanes: list[Lane]) -> Lane | None:
        """One of the lanes, the oldest of which is the first; None lets time pass."""
        ...

    def interrupts(self) -> bool:
        """Whether something happens although callbacks are ready."""
        ...


class OldestFirst:
    """The order in which things were sent."""

    def choose(self, lanes: list[Lane]) -> Lane | None:
        """The first."""
        return lanes[0]

    def interrupts(self) -> bool:
        """Never."""
        return False


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that goes wrong."""

    name: str
    """What."""
    index: int
    """Before which event."""
    strike: Callable[[System, Lane], None]
    """Does it."""
    may_fail: bool = False
    """Whether the client may get an error for it."""
    is_logged: bool = False
    """Whether the product logs it as an error."""


@dataclass(slots=True)
class Record:
    """How a run went."""

    num_events: int
    """Events that were counted."""
    duration_s: float
    """Virtual time from the first request until nothing was held."""
    num_attempts: int
    """Of the request that took most."""


@dataclass(slots=True)
class Play:
    """One run; see the module."""

    asks: Sequence[Ask]
    """What is asked, all at once but for delays."""
    chooser: Chooser = field(default_factory=OldestFirst)
    """The order of events."""
    faults: Sequence[Fault] = ()
    """What goes wrong."""
    size: Size = field(default_factory=Size)
    """What is started."""
    splits_jobs: bool = False
    """See `Network`."""
    seed: int = 0
    """Of the product's own draws."""
    asks_again: bool = False
    """Whether one more request must be served when all is over."""
    on_network: Callable[[Network], None] = lambda _: None
    """Told of the network before anything is on its way."""
    counts_start: bool = False
    """Whether events are counted, and faults strike, from the first one on: while workers are found and proved."""
    num_events: int = 0
    """Counted so far."""
    events: list[tuple[Any, ...]] = field(default_factory=list)
    """Those counted."""
    network: Any = None
    """The run's, once it has begun."""
    system: Any = None
    """The run's, once it has begun."""
    _is_counting: bool = False
    _violation: BaseException | None = None
    _limit_s: float = 0.0
    _loop: Any = None
    _main: Any = None

    def run(self) -> Record:
        """Plays it. Raises Violation."""
        was_collecting = gc.isenabled()
        gc.disable()  # an eighth of a run's time, for little: runs are short
        loop = self._loop = VirtualLoop()
        loop.director = self
        network = self.network = Network(loop)
        network.splits_jobs = self.splits_jobs
        self.on_network(network)
        with _replaced(loop, network, self.seed, self.size.has_probes):
            try:
                self._main = loop.create_task(self._play())
                record: Record = loop.run_until_complete(self._main)
                left = [repr(task) for task in loop.tasks]
                if left:
                    raise Violation(f"tasks that never end: {left}")
                if loop.errors or (loop.logged and not any(fault.is_logged for fault in self.faults)):
                    raise Violation(f"errors that nobody took: {loop.errors}, logged: {loop.logged}")
                return record
            except (Exception, asyncio.CancelledError) as error:
                found = self._violation or error
                self._dismantle()
                if not isinstance(found, (AssertionError, BatonError, TimeoutError)):
                    raise found from None
                raise Violation(self._describe(found)) from found
            finally:
                loop.close()
                if was_collecting:
                    gc.enable()

    async def _play(self) -> Record:
        system = self.system = System(self.network, self.size)
        started_s = self._loop.time()
        self._is_counting, self._limit_s = self.counts_start, started_s + LIMIT_S
        await system.start()
        if not self.counts_start:
            self._is_counting, started_s = True, self._loop.time()
        self._limit_s = self._loop.time() + LIMIT_S
        replies = await asyncio.gather(*(system.ask(ask) for ask in self.asks))
        await self._until_nothing_is_held()
        self._is_counting = False
        record = Record(
            self.num_events,
            self._loop.time() - started_s,
            max((reply.finish.served_by.num_attempts for reply in replies if reply.finish), default=0),
        )
        system.audit()
        may_fail = any(fault.may_fail for fault in self.faults)
        for reply in replies:
            reply.check(may_fail)
        if self.asks_again:
            again = await system.ask(Ask())
            again.check(may_fail=False)
            await self._until_nothing_is_held()
            system.audit()
        await system.stop()
        return record

    async def _until_nothing_is_held(self) -> None:
        self._limit_s = self._loop.time() + LIMIT_S
        while held := self.system.held():
            if self._loop.time() + 0.05 >= self._limit_s:
                raise Violation(f"still held after {LIMIT_S:g} s: {held}")
            await asyncio.sleep(0.05)

    def _describe(self, found: BaseException) -> str:
        faults = [(fault.name, fault.index) for fault in self.faults]
        last = "\n  ".join(" ".join(map(str, event)) for event in self.events if event[2] != "Worker/Watch")
        return (
            f"{type(found).__name__}: {found}\nrequests: {self.asks}\nfaults: {faults}\nevents but reports:\n  {last}"
        )

    # Director

    def happen(self) -> None:
        """See `Director`."""
        lanes = self.network.arriving()
        if not lanes:
            self._pass_time()
            return
        if not self._is_counting or self._violation is not None:
            self.network.arrive(lanes[0])
            return
        lane = self.chooser.choose(lanes)
        if lane is None:
            self._pass_time()
            return
        self.events.append(lane.event)
        for fault in self.faults:
            if fault.index == self.num_events:
                fault.strike(self.system, lane)
        self.num_events += 1
        if lane in self.network.arriving():
            self.network.arrive(lane)
        self._check()

    def _pass_time(self) -> None:
        self.network.time_stamp += 1
        if self._loop.is_busy:
            return
        if not self._loop.pass_to_next_timer():
            self._fail(Violation("nothing can happen any more"))
        if self._is_counting and self._loop.time() > self._limit_s:
            self._fail(Violation(f"stuck: after {LIMIT_S:g} s there is no answer; held: {self.system.held()}"))

    def _check(self) -> None:
        try:
            self.system.accounts()
        except Violation as violation:
            self._fail(violation)
        if self.num_events > MAX_EVENTS:
            self._fail(Violation(f"no end after {MAX_EVENTS} events"))

    def _fail(self, violation: Violation) -> None:
        if self._violation is not None:
            raise self._violation
        self._violation = violation
        self._main.cancel()

    def interrupts(self) -> bool:
        """See `Director`."""
        return self._is_counting and self._violation is None and self.chooser.interrupts()

    def submit(self, process: Process, job: Callable[[], Any], done: asyncio.Future[Any]) -> None:
        """See `Director`."""
        self.network.submit(process, job, done)

    def _dismantle(self) -> None:
        """After a violation: ends all tasks as they can be, so that nothing is left to the garbage collector."""
        self._violation = self._violation or Violation("dismantled")
        for process in list(self.network.processes.values()):
            self.network.crash(process)
        with contextlib.suppress(Violation):
            for _ in range(5):
                for task in list(self._loop.tasks):
                    task.cancel()
                self._loop.run_until_complete(asyncio.wait_for(_nothing_left(self._loop), 120.0))


async def _nothing_left(loop: VirtualLoop) -> None:
    for _ in range(50):
        if len(loop.tasks) <= 2:
            return
        await asyncio.sleep(0.01)


@contextlib.contextmanager
def _replaced(loop: VirtualLoop, network: Network, seed: int, has_probes: bool) -> Iterator[None]:
    """The product over this loop and network; what it logs as an error is one of the loop's."""

    def channel(address: str, _: object) -> Channel:
        return Channel(network, PROCESS.get(), address)

    handler = _ErrorHandler(loop)
    root = logging.getLogger()
    state = random.getstate()
    random.seed(seed)
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    root.addHandler(handler)
    try:
        with (
            mock.patch.object(time, "monotonic", loop.time),
            mock.patch.object(router.links, "create_channel", channel),
            mock.patch.object(engine.kv_reader, "create_channel", channel),
            mock.patch.object(engine.worker, "Server", MemoryServer),
            mock.patch.object(router.process, "Server", MemoryServer),
            mock.patch.object(router.process, "Prober", Prober if has_probes else _Trusting),
        ):
            yield
    finally:
        root.removeHandler(handler)
        logging.disable(level)
        random.setstate(state)


class _Trusting:
    """In place of a `Prober`: whatever serves is good."""

    def __init__(self, *_: object) -> None:
        pass

    async def __call__(self, *_: object) -> None:
        pass


class _ErrorHandler(logging.Handler):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__(logging.ERROR)
        self._loop = loop

    def emit(self, record: logging.LogRecord) -> None:
        self._loop.logged.append(f"{record.getMessage()} {record.exc_info[1] if record.exc_info else ''}")
