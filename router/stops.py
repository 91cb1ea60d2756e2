"""Finds stop strings in a stream of text and holds back what may become one.

Means what a search of the whole text means, however it is cut: the stop string that starts leftmost wins, and of those
that start at one place the one that ends first. An Aho-Corasick automaton looks at each character once. State depends
on the text alone, so pushing the same text again rebuilds it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class StopDelta:
    """What a piece of text led to."""

    text: str
    """Text that is certain now; never any of a stop string, except a matched one that was asked for."""
    matched: str | None = None
    """The stop string that ends the text; nothing follows it."""
    end: int | None = None
    """Where the matched stop string ends: characters from the start of the whole text, the stop string included. It may
    lie before the last piece, when a longer stop string that began further left had to be ruled out first."""


@dataclass(slots=True)
class _Node:
    """A prefix of one or more stop strings."""

    depth: int
    """Its length in characters."""
    children: dict[str, _Node] = field(default_factory=dict)
    fallback: _Node | None = None
    """The longest proper suffix that is a node too; None at the root."""
    ending: str | None = None
    """The longest stop string that this prefix ends with."""


class StopMatcher:
    """Matches the stop strings of one request."""

    def __init__(self, stops: Sequence[str], include_stop: bool) -> None:
        """`stops` may be empty but hold no empty string. With `include_stop` a match stays in the text."""
        assert all(stops), "an empty stop string would match everywhere"
        self._include_stop = include_stop
        self._root = _build(stops)
        self._node = self._root
        self._num_read = 0
        self._held = ""
        self._held_start = 0
        self._best: tuple[int, int, str] | None = None  # (start, end, stop) of the leftmost match so far
        self._is_over = False

    @property
    def waiting_end(self) -> int | None:
        """Where a match ends that waits for a longer stop string, begun further left, to be ruled out: characters from
        the start of the whole text. None while there is no such match."""
        return None if self._best is None or self._is_over else self._best[1]

    def push(self, text: str) -> StopDelta:
        """Takes the next piece of text. After a match all text is dropped."""
        if self._is_over:
            return StopDelta("")
        if not self._root.children:
            return StopDelta(text)
        self._held += text
        for char in text:
            self._read(char)
            # What is still open starts at the match or right of it, so nothing can start further left.
            if self._best is not None and self._num_read - self._node.depth >= self._best[0]:
                return self._finish(self._best)
        certain_end = self._num_read - self._node.depth
        if self._best is not None:
            certain_end = min(certain_end, self._best[0])
        return StopDelta(self._release(certain_end))

    def flush(self) -> StopDelta:
        """Ends the text: what was held back is text after all, unless a match waited for a longer one."""
        if self._is_over:
            return StopDelta("")
        if self._best is not None:
            return self._finish(self._best)
        self._is_over = True
        return StopDelta(self._release(self._num_read))

    def _read(self, char: str) -> None:
        """Moves the automaton and keeps the leftmost match, of equals the first to end."""
        node: _Node | None = self._node
        while node is not None and char not in node.children:
            node = node.fallback
        self._node = self._root if node is None else node.children[char]
        self._num_read += 1
        stop = self._node.ending
        if stop is not None:
            start = self._num_read - len(stop)
            if self._best is None or start < self._best[0]:
                self._best = (start, self._num_read, stop)

    def _finish(self, match: tuple[int, int, str]) -> StopDelta:
        start, end, stop = match
        self._is_over = True
        return StopDelta(self._release(end if self._include_stop else start), stop, end)

    def _release(self, end: int) -> str:
        """Takes the held text up to character `end` of the whole text."""
        num_chars = end - self._held_start
        text, self._held = self._held[:num_chars], self._held[num_chars:]
        self._held_start = end
        return text


def _build(stops: Sequence[str]) -> _Node:
    """The automaton of `stops`: a tree of their prefixes with fallbacks."""
    root = _Node(0)
    for stop in stops:
        node = root
        for char in stop:
            node = node.children.setdefault(char, _Node(node.depth + 1))
        node.ending = stop
    queue = deque([root])
    while queue:
        node = queue.popleft()
        for char, child in node.children.items():
            fallback = node.fallback
            while fallback is not None and char not in fallback.children:
                fallback = fallback.fallback
            child.fallback = root if fallback is None else fallback.children[char]
            # Shorter prefixes come first, so the fallback's ending is known.
            child.ending = child.ending or child.fallback.ending
            queue.append(child)
    return root
