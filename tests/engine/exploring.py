"""Exhaustive exploration of small systems: every state that some order of events reaches, breadth first.

A `World` is a system that can be pickled, says which events are possible in it, checks itself after each, and names its
state by a key in which names that do not matter (block ids, attempt ids) are left out. `explore` visits each key once;
then it demands that, from every state, the events that need nobody from outside end all work, in whatever order.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from itertools import chain
from typing import Any

from pools import BLOCK_SIZE

from engine.holdings import Holdings
from engine.sequence import Sequence

Event = tuple[Any, ...]


class World:
    """A system under exploration."""

    def events(self) -> list[Event]:
        """What can happen next: a method's name and its arguments."""
        raise NotImplementedError

    def is_own(self, event: Event) -> bool:
        """Whether it happens by itself, without anything new from outside."""
        raise NotImplementedError

    def has_work(self) -> bool:
        """Whether something is not over."""
        raise NotImplementedError

    def key(self) -> Hashable:
        """The state, up to names."""
        raise NotImplementedError

    def check(self) -> None:
        """What holds after every event."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Explored:
    """How far an exploration went."""

    num_states: int
    """Different states."""
    num_events: int
    """Events played, one from each state where it is possible."""
    longest_run: int
    """Most events that the work left in some state can take to end."""


class Found(AssertionError):
    """A state that should not exist, with the way to it."""


def explore(world: World, max_states: int) -> Explored:
    """Visits all states. Raises Found for one that breaks a rule, or from which the work never ends."""
    start = world.key()
    ways: dict[Hashable, tuple[Hashable, Event] | None] = {start: None}
    following: dict[Hashable, list[Hashable]] = {}
    working: set[Hashable] = set()
    frontier = deque([(start, pickle.dumps(world, -1))])
    num_events = 0
    while frontier:
        key, frozen = frontier.popleft()
        here: World = pickle.loads(frozen)
        following[key] = []
        if here.has_work():
            working.add(key)
        for event in here.events():
            successor = pickle.loads(frozen)
            try:
                getattr(successor, event[0])(*event[1:])
                successor.check()
                reached = successor.key()
            except Exception as error:
                raise Found(f"{error!r} after {[*_way(ways, key), event]}") from error
            num_events += 1
            if here.is_own(event) and reached != key:
                following[key].append(reached)
            if reached not in ways:
                ways[reached] = (key, event)
                frontier.append((reached, pickle.dumps(successor, -1)))
                assert len(ways) <= max_states, "more states than this exploration is meant for"
    for key in working:
        if not following[key]:
            raise Found(f"the work stands still after {_way(ways, key)}: {key}")
    return Explored(len(ways), num_events, _longest_run(following, ways))


def _way(ways: dict[Hashable, tuple[Hashable, Event] | None], key: Hashable) -> list[Event]:
    events: list[Event] = []
    while (step := ways[key]) is not None:
        key, event = step
        events.append(event)
    return events[::-1]


def _longest_run(following: dict[Hashable, list[Hashable]], ways: dict[Hashable, tuple[Hashable, Event] | None]) -> int:
    """Events to the end of the work, at most over all states and orders; a run that comes back may never end."""
    lengths: dict[Hashable, int] = {}
    for start in following:
        path, on_path = [(start, iter(following[start]))], {start}
        while path and start not in lengths:
            key, successors = path[-1]
            successor = next((each for each in successors if each not in lengths), None)
            if successor is None:
                path.pop()
                on_path.remove(key)
                lengths[key] = max((1 + lengths[each] for each in following[key]), default=0)
            elif successor in on_path:
                raise Found(f"the work goes in circles after {_way(ways, successor)}: {successor}")
            else:
                path.append((successor, iter(following[successor])))
                on_path.add(successor)
    return max(lengths.values())


class Names:
    """Block ids by order of first mention, so that equal pools have equal keys."""

    def __init__(self, holdings: Holdings) -> None:
        self._pool = holdings.pool
        self._names: dict[int, int] = {}

    def table(self, sequence: Sequence) -> Hashable:
        """A block table: names, and whether others can find the block."""
        return tuple(
            (self._names.setdefault(block, len(self._names)), self._pool.block_hash(block) is not None)
            for block in sequence.block_table
        )

    def pool(self) -> Hashable:
        """Free blocks by number, cached ones by content in the order they would be taken."""
        cached = chain.from_iterable(self._pool._cached)
        return self._pool.num_total, self._pool.num_free, tuple(map(self._pool.block_hash, cached))


def describe(sequence: Sequence, names: Names) -> Hashable:
    """All of a sequence that decisions depend on, but its request."""
    return (
        sequence.state.value,
        sequence.num_tokens,
        sequence.num_computed,
        sequence.num_yielded,
        sequence.num_registered,
        sequence.num_pins,
        names.table(sequence),
        None if sequence.host_table is None else len(sequence.host_table),
        sequence.num_displaced,
    )


def check_accounts(holdings: Holdings, live: list[Sequence]) -> None:
    """No block is lost or held twice, and nothing that is over and untouched holds any."""
    holdings.check()
    assert holdings.num_accounted == holdings.pool.num_used
    for sequence in live:
        table = sequence.block_table if sequence.host_table is None else sequence.block_table or sequence.host_table
        assert sequence.num_computed <= len(table) * BLOCK_SIZE
