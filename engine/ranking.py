"""Who goes first: one rank for everything that waits, what it becomes for those that are served, and a queue in order.

A request's rank is when it arrived, minus the waiting that earlier attempts and hops report, minus `ageing_s` for each
class. The smaller goes first. Because all ranks age alike the order of two sequences never changes: queues need no
re-sorting. A request of a class is overtaken by those of the next higher class only while they arrive within
`ageing_s` after it, so under a steady stream of the highest class the lowest is in front after at most
2 x `ageing_s` plus what was ahead of it then.

Being served is not waiting. So where one that waits is weighed against one of another class that is served, to take its
place, the time for which the latter was served is added to its rank (`rank_when_served`): an urgent request gets past
the less urgent ones that run, however long they run, unless they had waited as long as the classes are apart.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Iterator

from engine.sequence import Sequence

AGEING_S = 5.0
"""Seconds of waiting that weigh as much as one class."""


class RankedQueue:
    """Sequences by rank. Adding and removing cost a binary search and the move of a list's tail."""

    def __init__(self, ageing_s: float = AGEING_S) -> None:
        self._ageing_s = ageing_s
        self._sequences: list[Sequence] = []
        self._members: set[Sequence] = set()

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        """In order; the queue may not change while it is iterated. `snapshot` may."""
        return iter(self._sequences)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._members

    def rank(self, sequence: Sequence) -> float:
        """See the module."""
        return sequence.since_s - self._ageing_s * sequence.request.priority

    def add(self, sequence: Sequence) -> None:
        """Takes a sequence in, behind its equals."""
        insort(self._sequences, sequence, key=self.rank)
        self._members.add(sequence)

    def discard(self, sequence: Sequence) -> None:
        """Takes a sequence out, if it is here."""
        if sequence not in self._members:
            return
        self._members.remove(sequence)
        index = bisect_left(self._sequences, self.rank(sequence), key=self.rank)
        while self._sequences[index] is not sequence:
            index += 1
        del self._sequences[index]

    def snapshot(self, num_sequences: int) -> list[Sequence]:
        """The first ones, as a list of its own."""
        return self._sequences[:num_sequences]


def rank_when_served(sequence: Sequence, now_s: float, ageing_s: float) -> float:
    """See the module. For one that was never served it is the rank in a queue."""
    return sequence.since_s + sequence.served_s(now_s) - ageing_s * sequence.request.priority


def by_class_when_served(sequences: Iterable[Sequence], now_s: float, ageing_s: float) -> Iterator[Sequence]:
    """Each class in the order given, the classes merged by what their first ones rank now."""
    classes: dict[int, deque[Sequence]] = {}
    for sequence in sequences:
        classes.setdefault(sequence.request.priority, deque()).append(sequence)
    while classes:
        firsts = (members[0] for members in classes.values())
        first = min(firsts, key=lambda each: rank_when_served(each, now_s, ageing_s))
        members = classes[first.request.priority]
        yield members.popleft()
        if not members:
            del classes[first.request.priority]


def oldest(sequences: Iterable[Sequence]) -> Sequence:
    """Who is never a victim."""
    return min(sequences, key=lambda sequence: sequence.since_s)
