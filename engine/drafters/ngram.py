"""Prompt lookup: what followed the last tokens where they occurred before in the sequence follows them again.

Needs no model and no memory but an index of each sequence's own tokens, which grows with them. It is right where texts
repeat themselves: code, JSON, quotations, and the loops that small models fall into. Of several places the latest
counts, of several lengths of what is looked up the longest. Evidence is how many tokens before the guess are the same
at that place: the more, the more often it comes true. Where the guess runs into the end of the sequence it goes on with
itself, as a loop does.
"""

from __future__ import annotations

from engine import drafters
from engine.drafters import MAX_EVIDENCE
from engine.sequence import Sequence

LENGTHS = (4, 3, 2)
"""Of runs of tokens that are looked up, in this order. Single tokens recur too often to tell what follows."""
FIRST_RATES = (0.5, 0.5, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85)
"""By evidence, and the last one for all above."""


class _Index:
    """Where runs of a sequence's tokens were followed by more."""

    __slots__ = ("_num_indexed", "_places", "evidence")

    def __init__(self) -> None:
        # By hash of the run: two that share one are a wrong guess at worst.
        self._places: dict[int, int] = {}
        self._num_indexed = 0
        self.evidence = 0  # of the place found last

    def find(self, token_ids: list[int]) -> int | None:
        """The place after the latest run that equals the last tokens."""
        places, num_tokens = self._places, len(token_ids)
        for end in range(self._num_indexed + 1, num_tokens):
            for length in LENGTHS:
                if length <= end:
                    places[hash(tuple(token_ids[end - length : end]))] = end
        self._num_indexed = max(self._num_indexed, num_tokens - 1)
        for length in LENGTHS:
            place = places.get(hash(tuple(token_ids[-length:]))) if length < num_tokens else None
            if place is not None:
                self.evidence = _num_equal(token_ids, place)
                return place
        return None


def _num_equal(token_ids: list[int], place: int) -> int:
    """How many of the last tokens are those before a place, as far as is told apart."""
    num_equal, most = 0, min(place, MAX_EVIDENCE)
    while num_equal < most and token_ids[place - 1 - num_equal] == token_ids[-1 - num_equal]:
        num_equal += 1
    return num_equal


class Drafter(drafters.Drafter):
    """See the module."""

    most_evidence = MAX_EVIDENCE

    def __init__(self) -> None:
        self._indexes: dict[Sequence, _Index] = {}

    @classmethod
    def open(cls, target: drafters.Target) -> Drafter:
        """See `engine.drafters.Drafter`."""
        target.check_budget(0)
        return cls()

    def propose(self, sequence: Sequence, most: int) -> tuple[int, ...]:
        """See `engine.drafters.Drafter`."""
        token_ids = sequence.token_ids
        index = self._indexes.get(sequence)
        if index is None:
            index = self._indexes[sequence] = _Index()
        place = index.find(token_ids)
        if place is None:
            return ()
        drafts = token_ids[place : place + most]
        period = len(token_ids) - place
        while len(drafts) < most:
            drafts.append(drafts[-period])
        return tuple(drafts)

    def evidence(self, sequence: Sequence) -> int:
        """See `engine.drafters.Drafter`."""
        return self._indexes[sequence].evidence

    def first_rate(self, evidence: int) -> float:
        """See `engine.drafters.Drafter`."""
        return FIRST_RATES[min(evidence, len(FIRST_RATES) - 1)]

    def forget(self, sequence: Sequence) -> None:
        """See `engine.drafters.Drafter`."""
        self._indexes.pop(sequence, None)
