"""Every order of events, up to orders that cannot be told apart, and random ones.

Two events that arrive at different processes cannot tell which of them was first. So an order is tried only where it
reverses two that arrive at the same process and of which neither caused the other (partial-order reduction with source
sets and sleep sets). Where `every_order` explores, reports of load go before all else and time passes only when nothing
is on its way; `Wandering` has neither bound, and lets messages arrive between any two callbacks.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from memory_network import Lane, Network
from playing import Play

Event = tuple[Any, ...]


class Redundant(Exception):
    """This order differs from one that was played in nothing that can be told."""


@dataclass(slots=True)
class _Point:
    """A place where events could happen in several orders."""

    enabled: dict[Event, str]
    """What could happen, and at which process, the oldest first."""
    asleep: dict[Event, str]
    """What need not be tried here: it was, or its order does not matter."""
    chosen: Event
    """What is tried now."""
    planned: set[Event]
    """What was tried and what is still to be."""
    cause: int | None = None
    """Place of the event that sent what is chosen; -1 for before the path; None: everything before, as time passed."""
    past: dict[str, int] = field(default_factory=dict)
    """By process: place of the last event there that happened before the chosen one, in whatever order; its own too."""

    @property
    def target(self) -> str:
        """Where the chosen event arrives."""
        return self.enabled[self.chosen]


class Follower:
    """Follows a path of points and extends it by what is awake and oldest."""

    def __init__(self, path: list[_Point]) -> None:
        self.path = path
        self.network: Network
        self.depth = 0
        self._places: dict[int, int] = {}  # time stamp of what an event sends -> its place
        self._first_stamp: int | None = None

    def choose(self, lanes: list[Lane]) -> Lane | None:
        """See `playing.Chooser`."""
        for lane in lanes:
            if lane.key[2] == "Worker/Watch":
                return lane
        if self._first_stamp is None:
            self._first_stamp = self.network.time_stamp
        by_event = {lane.event: lane for lane in lanes}
        if self.depth == len(self.path):
            self.path.append(self._new_point({lane.event: lane.target for lane in lanes}))
        point = self.path[self.depth]
        assert point.enabled.keys() == by_event.keys(), "the same choices led elsewhere: the run is not determined"
        lane = by_event[point.chosen]
        sent = lane.items[0][0]
        point.cause = -1 if sent <= self._first_stamp else self._places.get(sent)
        self._places[self.network.time_stamp + 1] = self.depth
        self.depth += 1
        return lane

    def _new_point(self, enabled: dict[Event, str]) -> _Point:
        asleep: dict[Event, str] = {}
        if self.path:
            last = self.path[-1]
            asleep = {event: target for event, target in last.asleep.items() if target != last.target}
        awake = [event for event in enabled if event not in asleep]
        if not awake:
            raise Redundant
        return _Point(enabled, asleep, awake[0], {awake[0]})

    def interrupts(self) -> bool:
        """Never: messages arrive when nothing is ready."""
        return False


@dataclass(slots=True)
class Explored:
    """How far an exploration went."""

    num_orders: int = 0
    """Orders that were played to their end."""
    num_redundant: int = 0
    """Orders that were given up as equal to one of those."""
    is_complete: bool = False
    """Whether there are no others."""


def every_order(make: Callable[[Follower], Play], max_orders: int) -> Explored:
    """Plays every order, or the first `max_orders`. Raises Violation."""
    explored, path = Explored(), list[_Point]()
    while explored.num_orders + explored.num_redundant < max_orders:
        follower = Follower(path)
        play = make(follower)
        play.on_network = lambda network, follower=follower: setattr(follower, "network", network)
        try:
            play.run()
            explored.num_orders += 1
        except Redundant:
            explored.num_redundant += 1
        _plan(path)
        while path:
            point = path[-1]
            point.asleep[point.chosen] = point.target
            awake = [event for event in point.enabled if event in point.planned and event not in point.asleep]
            if awake:
                point.chosen = awake[0]
                break
            path.pop()
        if not path:
            explored.is_complete = True
            break
    return explored


def _plan(path: list[_Point]) -> None:
    """Plans the reversal of every two neighbours at a process of which neither caused the other."""
    last_at: dict[str, int] = {}
    for place, point in enumerate(path):
        before = last_at.get(point.target)
        causes = path[point.cause].past if point.cause is not None and point.cause >= 0 else {}
        past = dict(last_at) if point.cause is None else dict(causes)
        if before is not None:
            if past.get(point.target, -1) < before:
                point.past = _joined(past, {point.target: place})
                _plan_reversal(path, before, place)
            past = _joined(past, path[before].past)
        point.past = _joined(past, {point.target: place})
        last_at[point.target] = place


def _plan_reversal(path: list[_Point], first: int, second: int) -> None:
    """At `first`, one event must be planned from which `second` can come to happen before it."""
    others = [k for k in range(first + 1, second) if not _is_before(path, first, k)] + [second]
    initials = [k for k in others if not any(_is_before(path, m, k) for m in others if m < k)]
    point = path[first]
    events = [path[k].chosen for k in initials]
    if not any(event in point.planned for event in events):
        point.planned.add(events[-1] if initials[-1] == second else events[0])


def _is_before(path: list[_Point], first: int, second: int) -> bool:
    return path[second].past.get(path[first].target, -1) >= first


def _joined(one: dict[str, int], other: dict[str, int]) -> dict[str, int]:
    return {each: max(one.get(each, -1), other.get(each, -1)) for each in one.keys() | other.keys()}


@dataclass(slots=True)
class Wandering:
    """Random orders: any message that is on its way arrives next, between any two callbacks, and at times everything
    is late by one timer."""

    draws: random.Random
    """Where chance comes from."""
    late_odds: float
    """How often time passes while something could arrive."""
    interrupt_odds: float
    """How often something arrives while callbacks are ready."""
    slow_thread_odds: float
    """How often what threads do waits for messages that can arrive."""

    def choose(self, lanes: list[Lane]) -> Lane | None:
        """See `playing.Chooser`."""
        if self.draws.random() < self.late_odds:
            # Reports of load share the connection of what they report about: they are not later than all else.
            return next((lane for lane in lanes if lane.key[2] == "Worker/Watch"), None)
        messages = [lane for lane in lanes if lane.call is not None]
        return self.draws.choice(messages if messages and self.draws.random() < self.slow_thread_odds else lanes)

    def interrupts(self) -> bool:
        """See `playing.Chooser`."""
        return self.draws.random() < self.interrupt_odds
