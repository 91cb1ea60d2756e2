"""What is on its way between processes, in memory, and where a process is when it is not reached.

Each direction of each call is a `Lane`, and so is each job of a thread: what is in one lane arrives in order, lanes
overtake each other as the director likes. Processes crash, with or without their peers hearing of it at once, or are
cut off for a while. Owns no calls: `memory_calls` makes them and says what an arrival does.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from virtual_loop import Process, VirtualLoop

if TYPE_CHECKING:
    from memory_calls import Call

KEEPALIVE_S = 10.0
"""When the library finds that a peer has vanished."""


class Lane:
    """What is on its way to one process, in order."""

    def __init__(self, key: tuple[Any, ...], target: str, call: Call | None) -> None:
        self.key = key
        """Names it, the same in every order of events."""
        self.target = target
        """Name or address of the process where things arrive: events of different targets do not depend on each
        other."""
        self.call = call
        self.ends = frozenset((call.caller.address, call.channel.address) if call is not None else (target,))
        """Addresses of the processes between which it runs."""
        self.items: deque[tuple[int, Any, Callable[[Any], None]]] = deque()
        """(when it was sent, message or None, what its arrival does)."""
        self.num_arrived = 0
        self.not_before_s = 0.0
        """Nothing arrives before."""
        self.not_before_stamp = 0
        """Nothing arrives before so many events have happened."""

    @property
    def event(self) -> tuple[Any, ...]:
        """Names the next arrival."""
        return (*self.key, self.num_arrived)


class Network:
    """Everything that is on its way."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop = loop
        self.processes: dict[str, Process] = {}
        """By address: those that live."""
        self.calls: set[Call] = set()
        """Calls of which some end is open."""
        self.cut_until_s: dict[str, float] = {}
        """By address: processes that nothing reaches, and that reach nobody, until then."""
        self.splits_jobs = False
        """Whether what a thread has done may be seen in memory long before its process hears of it."""
        self.time_stamp = 0
        """Raised with every event: what is sent between two events is of the same age."""
        self._lanes: dict[tuple[Any, ...], Lane] = {}
        self._numbers: Counter[tuple[str, ...]] = Counter()

    def start_process(self, name: str, address: str) -> Process:
        """A new process."""
        process = self.processes[address] = Process(self.loop, name, address)
        return process

    def crash(self, process: Process, silent: bool = False) -> None:
        """Ends a process between two of its steps. Its peers hear of it at once, or by keep-alive if it goes silently.
        Its tasks are unwound where nobody sees it."""
        process.is_alive = False
        self.processes.pop(process.address, None)
        delay_s = KEEPALIVE_S if silent else 0.0
        process.silent_until_s = self.loop.time() + delay_s
        for call in sorted(self.calls, key=lambda call: call.name):
            if call.caller is process:
                call.lose_client(delay_s)
            elif call.callee is process:
                self.drop(call.to_server)
                call.lose_server(delay_s)
                call.settle()
        for lane in [lane for lane in self._lanes.values() if lane.call is None and lane.key[0] == process.name]:
            while lane.items:
                self.arrive(lane)
        for task in list(process.tasks):
            task.cancel()

    def number(self, *name: str) -> int:
        """How many of this name came before."""
        self._numbers[name] += 1
        return self._numbers[name]

    def send(self, lane: Lane, message: Any, act: Callable[[Any], None]) -> None:
        """Puts something on its way."""
        lane.items.append((self.time_stamp, message, act))
        self._lanes[lane.key] = lane

    def drop(self, lane: Lane) -> None:
        """What is on its way here never arrives."""
        lane.items.clear()
        self._lanes.pop(lane.key, None)

    def submit(self, process: Process, job: Callable[[], Any], done: asyncio.Future[Any]) -> None:
        """A thread's work. A dead process's is done at once: nobody sees it."""
        lane = Lane((process.name, "job", self.number(process.name, "job")), process.address, None)
        self.send(lane, job, partial(self._work, lane, done))
        if not process.is_alive:
            self.arrive(lane)

    def _work(self, lane: Lane, done: asyncio.Future[Any], job: Callable[[], Any]) -> None:
        try:
            result, error = job(), None
        except Exception as raised:
            result, error = None, raised
        if self.splits_jobs:
            self.send(lane, None, lambda _: _settle(done, result, error))
        else:
            _settle(done, result, error)

    def arriving(self) -> list[Lane]:
        """Lanes of which something may arrive now, the oldest thing first."""
        now_s = self.loop.time()
        lanes = [
            lane
            for lane in self._lanes.values()
            if lane.not_before_s <= now_s and lane.not_before_stamp <= self.time_stamp
        ]
        if self.cut_until_s:
            self.cut_until_s = {each: until_s for each, until_s in self.cut_until_s.items() if until_s > now_s}
            lanes = [lane for lane in lanes if not lane.ends & self.cut_until_s.keys()]
        lanes.sort(key=lambda lane: (lane.items[0][0], lane.key))
        return lanes

    def arrive(self, lane: Lane) -> None:
        """Lets the next thing of a lane arrive."""
        self.time_stamp += 1
        _, message, act = lane.items.popleft()
        lane.num_arrived += 1
        if not lane.items:
            self._lanes.pop(lane.key, None)
        act(message)

    def hold(self, lane: Lane, duration_s: float) -> None:
        """Nothing of a lane arrives for so long."""
        lane.not_before_s = max(lane.not_before_s, self.loop.time() + duration_s)
        # The director goes from timer to timer: one must stand where the lane opens.
        self.loop.call_at(lane.not_before_s, _nothing)

    def overtake(self, lane: Lane, num_events: int) -> None:
        """So many other events happen before the next of a lane, or time passes where there are none."""
        lane.not_before_stamp = self.time_stamp + num_events

    def cut_off(self, address: str, duration_s: float) -> None:
        """A process hears nobody, and nobody hears it, for so long; shorter than the library's keep-alive."""
        assert duration_s < KEEPALIVE_S
        self.cut_until_s[address] = self.loop.time() + duration_s
        self.loop.call_later(duration_s, _nothing)


def _settle(done: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if done.cancelled():
        return
    if error is None:
        done.set_result(result)
    else:
        done.set_exception(error)


def _nothing() -> None:
    """For a timer that only marks a time."""
