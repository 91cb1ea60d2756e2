"""Who waits in this router and who goes on to the workers: a bounded queue by rank, and the places it leads to.

A ticket is a request from its arrival to its end: it waits, holds a place while workers serve it, and gives the place
back. Rank is the workers' rule: when a request arrived, minus `ageing_s` for each class; equals in order of arrival. A
place goes to the first by rank and to nobody else, at the moment it is there. So nothing of its own class overtakes a
request, nothing at all that came more than twice `ageing_s` later, and no class needs a limit of waiting of its own.
Only a tenant with as many requests at workers as it may have is passed by, until one of its own ends.
Knows neither sockets nor workers: `capacity` says what there is. Every place taken is given back exactly once.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from bisect import bisect_right, insort
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from protos import inference_pb2
from router.tenants import ANYONE, Tenant
from runtime.errors import BatonError, Overloaded

CLASSES = (inference_pb2.PRIORITY_LOW, inference_pb2.PRIORITY_NORMAL, inference_pb2.PRIORITY_HIGH)
NUM_AVERAGED = 64
"""The mean time in a place follows about so many of the last requests."""
MIN_RETRY_S = 0.1
MAX_RETRY_S = 60.0
UNKNOWN_RETRY_S = 1.0
"""Before any request has ended nothing is known of the time it takes."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the workers have to give, as this router sees it."""

    num_free: int
    """Seats that nobody holds, whoever was told to take the others."""
    num_assigned: int
    """This router's requests that are at workers now. Who has a place and is not among them takes a free seat soon."""
    num_ahead: int
    """Requests that may wait at the workers themselves, so that a seat is taken again at once when it is free."""


class Stage(Enum):
    """Where a ticket is."""

    WAITING = auto()
    PLACED = auto()
    GAVE_BACK = auto()
    LEFT = auto()


class Ticket:
    """One request in the queue's books."""

    __slots__ = ("is_started", "placed", "placed_s", "priority", "rank", "stage", "tenant")

    def __init__(self, priority: int, rank: float, tenant: Tenant) -> None:
        self.priority = priority
        """Its class."""
        self.tenant = tenant
        """Whose it is."""
        self.rank = rank
        """The smaller goes first."""
        self.stage = Stage.WAITING
        """Where it is."""
        self.placed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when it has a place; raises Overloaded or Unavailable when it will get none."""
        self.placed_s = 0.0
        """When it got its place."""
        self.is_started = False
        """Whether workers have answered anything: a higher class may still take its seat, but it waits for none."""


class Admission:
    """The queue and the places."""

    def __init__(
        self,
        capacity: Callable[[], Capacity],
        max_num_queued: int,
        max_queue_wait_s: float,
        ageing_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`max_queue_wait_s` limits the wait that is expected at arrival; 0: no limit."""
        self._capacity = capacity
        self._max_num_queued = max_num_queued
        self._max_queue_wait_s = max_queue_wait_s or math.inf
        self._ageing_s = ageing_s
        self._clock = clock
        self._waiting: list[Ticket] = []
        self._placed: dict[Ticket, None] = {}  # who got its place first is first
        self._num_unstarted: Counter[int] = Counter()  # by class: those with a place and no token yet
        self._num_placed_of: Counter[str] = Counter()  # by tenant
        self._num_waiting_of: Counter[str] = Counter()  # by tenant
        self._num_limited = 0  # those that wait and whose tenant may have so many at workers and no more
        self._mean_placed_s = 0.0
        self._num_ended = 0
        self.num_present = 0
        """Tickets that have not left: those that wait, hold a place, or have yet to tell their client."""

    @property
    def num_placed(self) -> int:
        """Tickets that hold a place."""
        return len(self._placed)

    @property
    def num_waiting(self) -> int:
        """Tickets that wait for a place."""
        return len(self._waiting)

    def enter(self, priority: int, time_left_s: float | None = None, tenant: Tenant = ANYONE) -> Ticket:
        """Takes a request in; it may have its place at once. `time_left_s` is what its client's deadline leaves.

        Raises Overloaded if it would wait too long, if its tenant has as many waiting as it may, or if the queue is
        full and nobody of a lower class is in it; of those the last by rank makes room.
        """
        if priority not in CLASSES:
            # None given, or one that validation will refuse.
            priority = inference_pb2.PRIORITY_NORMAL
        ticket = Ticket(priority, self._clock() - self._ageing_s * priority, tenant)
        self._add(ticket)
        self.place_first()
        if ticket.stage is Stage.WAITING:
            try:
                self._check_tenant(tenant)
                self._check_wait(ticket, time_left_s)
                self._check_room(ticket)
            except Overloaded:
                self.leave(ticket)
                raise
        return ticket

    def place_first(self) -> None:
        """Gives what places there are to the first by rank; to be called whenever there may be more of them."""
        index = 0
        while index < len(self._waiting):
            ticket = self._waiting[index]
            if self._is_held_back(ticket):
                index += 1
                continue
            if not self._has_place(ticket):
                return
            self._forget_at(index)
            ticket.stage, ticket.placed_s = Stage.PLACED, self._clock()
            self._placed[ticket] = None
            self._num_placed_of[ticket.tenant.name] += 1
            self._num_unstarted[ticket.priority] += 1
            if not ticket.placed.done():
                # Cancelled: its request is leaving, and gives the place back in a moment.
                ticket.placed.set_result(None)

    def note_started(self, ticket: Ticket) -> None:
        """A first token has come: it waits at no worker any more."""
        if ticket.stage is Stage.PLACED and not ticket.is_started:
            ticket.is_started = True
            self._num_unstarted[ticket.priority] -= 1
            self.place_first()

    def give_back(self, ticket: Ticket) -> None:
        """The workers are done with it, or it gives up waiting. Repeating it does nothing."""
        if ticket.stage is Stage.WAITING:
            self._remove(ticket)
            ticket.placed.cancel()
        elif ticket.stage is Stage.PLACED:
            del self._placed[ticket]
            self._num_placed_of[ticket.tenant.name] -= 1
            self._num_unstarted[ticket.priority] -= not ticket.is_started
            self._num_ended += 1
            placed_s = self._clock() - ticket.placed_s
            self._mean_placed_s += (placed_s - self._mean_placed_s) / min(self._num_ended, NUM_AVERAGED)
        else:
            return
        ticket.stage = Stage.GAVE_BACK
        self.place_first()

    def leave(self, ticket: Ticket) -> None:
        """The request is over. Repeating it does nothing."""
        if ticket.stage is not Stage.LEFT:
            self.give_back(ticket)
            ticket.stage = Stage.LEFT
            self.num_present -= 1

    def refuse_waiting(self, error: BatonError) -> None:
        """Nobody who waits now will get a place."""
        for ticket in list(self._waiting):
            self._refuse(ticket, error)

    def expected_wait_s(self, ticket: Ticket) -> float | None:
        """How long a ticket that waits will wait, from the mean time in a place; None: not known yet.

        The longer of two estimates. By Little's law places come back at the rate of their number over that time; whom
        nothing was answered yet may wait at a worker, so those of its class and above are ahead as well. And if each
        place comes back after that time, that is when there are as many as it takes: requests placed together end
        together, and nothing comes back before.
        """
        if not self._num_ended:
            return None
        before = self._waiting[: bisect_right(self._waiting, ticket.rank, key=_rank)]
        own_s = self._wait_in_tenant_s(ticket, before)
        num_needed = len(before)
        if self._num_limited:
            # Those passed by are in nobody's way.
            num_needed = 1 + sum(not self._is_held_back(each) for each in before if each is not ticket)
        if not self._placed:
            return max(own_s, num_needed * self._mean_placed_s)
        num_ahead = num_needed + self._num_unstarted_from(ticket.priority)
        num_rounds, index = divmod(num_needed - 1, self.num_placed)
        last = next(itertools.islice(self._placed, index, None))
        back_s = last.placed_s + (1 + num_rounds) * self._mean_placed_s
        return max(own_s, num_ahead * self._mean_placed_s / self.num_placed, back_s - self._clock())

    def _wait_in_tenant_s(self, ticket: Ticket, before: list[Ticket]) -> float:
        """How long until its tenant may have one more at workers, if each of its places comes back after the mean."""
        limit = ticket.tenant.max_num_running
        if limit is None or not self._is_held_back(ticket):
            return 0.0
        num_of_tenant = sum(each.tenant.name == ticket.tenant.name for each in before)
        return math.ceil(num_of_tenant / limit) * self._mean_placed_s

    def _is_held_back(self, ticket: Ticket) -> bool:
        limit = ticket.tenant.max_num_running
        return limit is not None and self._num_placed_of[ticket.tenant.name] >= limit

    def _has_place(self, ticket: Ticket) -> bool:
        """Whether it may go to the workers: a seat is free, or too few of its class and above wait there. What is below
        its class does not count, because it can be made to yield there."""
        capacity = self._capacity()
        if capacity.num_free > max(0, self.num_placed - capacity.num_assigned):
            return True
        return self._num_unstarted_from(ticket.priority) < capacity.num_ahead

    def _num_unstarted_from(self, priority: int) -> int:
        return sum(count for each, count in self._num_unstarted.items() if each >= priority)

    def _check_wait(self, ticket: Ticket, time_left_s: float | None) -> None:
        expected_s = self.expected_wait_s(ticket)
        limit_s = min(self._max_queue_wait_s, math.inf if time_left_s is None else time_left_s)
        if expected_s is not None and expected_s > limit_s:
            text = f"the wait would be about {expected_s:.1f} s, at most {limit_s:.1f} s are allowed"
            raise self._overloaded(text, limit_s=f"{limit_s:.1f}", expected_s=f"{expected_s:.1f}")

    def _check_tenant(self, tenant: Tenant) -> None:
        """The newcomer counts among those that wait."""
        limit = tenant.max_num_queued
        if limit is not None and self._num_waiting_of[tenant.name] > limit:
            running = "" if tenant.max_num_running is None else f" and max_num_running is {tenant.max_num_running}"
            text = f"tenant {tenant.name}: {limit} requests wait, its max_num_queued{running}"
            raise self._overloaded(text, tenant=tenant.name, max_num_queued=limit)

    def _check_room(self, ticket: Ticket) -> None:
        """Those whose clients have yet to read the end count too: they take memory and no place."""
        if self.num_present - self.num_placed <= self._max_num_queued:
            return
        victim = next((other for other in reversed(self._waiting) if other.priority < ticket.priority), None)
        full = f"{self._max_num_queued} requests wait, which is the limit"
        if victim is None:
            raise self._overloaded(full, limit=self._max_num_queued)
        error = self._overloaded(f"{full}, and one of a higher class came", limit=self._max_num_queued)
        self._refuse(victim, error)

    def _overloaded(self, message: str, **metadata: object) -> Overloaded:
        """Come again when those that wait now are served."""
        last_s = self.expected_wait_s(self._waiting[-1])
        retry_s = UNKNOWN_RETRY_S if last_s is None else min(max(last_s, MIN_RETRY_S), MAX_RETRY_S)
        return Overloaded(message, retry_after_s=retry_s, **metadata)

    def _refuse(self, ticket: Ticket, error: BatonError) -> None:
        self._remove(ticket)
        ticket.stage = Stage.GAVE_BACK
        if not ticket.placed.done():
            ticket.placed.set_exception(error)
            # Looked at: whoever waits may be leaving just now.
            ticket.placed.exception()

    def _add(self, ticket: Ticket) -> None:
        insort(self._waiting, ticket, key=_rank)
        self._num_waiting_of[ticket.tenant.name] += 1
        self._num_limited += ticket.tenant.max_num_running is not None
        self.num_present += 1

    def _remove(self, ticket: Ticket) -> None:
        index = bisect_right(self._waiting, ticket.rank, key=_rank) - 1
        while self._waiting[index] is not ticket:
            index -= 1
        self._forget_at(index)

    def _forget_at(self, index: int) -> None:
        """It waits no more."""
        ticket = self._waiting.pop(index)
        self._num_waiting_of[ticket.tenant.name] -= 1
        self._num_limited -= ticket.tenant.max_num_running is not None


def _rank(ticket: Ticket) -> float:
    return ticket.rank
