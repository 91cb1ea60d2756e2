"""How likely the next draft of a sequence comes true, learned from those that were checked.

Drafters say how much speaks for a guess (`Drafter.evidence`); each draft that came true before it in the same step
speaks for it as well. Owns the rate at each evidence, of all sequences together, and by how much each sequence differs
from that, as odds. What is known fades with every step, checked or not, towards what is believed at first: so nothing
is given up for ever, and what does not pay is tried again, each time as little as pays if it comes true as believed.
Decides nothing and knows no costs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.drafters import MAX_EVIDENCE

PRIOR_DRAFTS = 4.0
"""Drafts that weigh as much as what is believed at first of an evidence."""
PRIOR_OWN = 0.5
"""Right ones and wrong ones of a sequence's own, each, that weigh as much as what is known of all: so many for each
sequence that drafts, because the fewer there are, the more is what is known of all known of it alone; within bounds."""
LEAST_PRIOR_OWN, MOST_PRIOR_OWN = 1.0, 8.0
KEPT = 0.998
"""Weight of what was known of all, at each step."""
KEPT_OWN = 0.99
"""The same of one sequence, at each of its steps."""


@dataclass(slots=True)
class Own:
    """How the drafts of one sequence fared, and how they would have if it were like the others; later ones more."""

    num_right: float = 0.0
    """Drafts that came true."""
    num_wrong: float = 0.0
    """Steps' first ones that did not."""
    expected_right: float = 0.0
    """Of all these, by the rates of all sequences."""
    expected_wrong: float = 0.0
    """The rest of them."""
    odds: float = 1.0
    """By which the odds of its drafts differ."""

    def fade(self) -> None:
        """A step begins."""
        self.num_right *= KEPT_OWN
        self.num_wrong *= KEPT_OWN
        self.expected_right *= KEPT_OWN
        self.expected_wrong *= KEPT_OWN

    def weigh(self, prior: float) -> None:
        """Takes what was counted into the odds."""
        right = (self.num_right + prior) / (self.expected_right + prior)
        wrong = (self.num_wrong + prior) / (self.expected_wrong + prior)
        self.odds = right / wrong

    @property
    def rate(self) -> float:
        """Part of its drafts that came true, a half where nothing is known."""
        return (self.num_right + 1) / (self.num_right + self.num_wrong + 2)


class Acceptance:
    """Rates of one pool."""

    def __init__(self, first_rate: Callable[[int], float], most_evidence: int) -> None:
        """`first_rate` of each evidence is what is believed at first; a first draft has at most `most_evidence`."""
        self._num_first = most_evidence + 1
        self._first = [first_rate(evidence) for evidence in range(MAX_EVIDENCE + 1)]
        self._num_right = [0.0] * (MAX_EVIDENCE + 1)
        self._num_counted = [0.0] * (MAX_EVIDENCE + 1)
        self._rates, self._best = list(self._first), max(self._first[: self._num_first])
        self._prior_own = LEAST_PRIOR_OWN

    def fade(self, num_sequences: int) -> None:
        """A step of so many sequences begins."""
        self._prior_own = min(max(LEAST_PRIOR_OWN, PRIOR_OWN * num_sequences), MOST_PRIOR_OWN)
        self._num_right = [KEPT * count for count in self._num_right]
        self._num_counted = [KEPT * count for count in self._num_counted]
        self._rates = [
            (right + PRIOR_DRAFTS * first) / (counted + PRIOR_DRAFTS)
            for right, counted, first in zip(self._num_right, self._num_counted, self._first, strict=True)
        ]
        self._best = max(self._rates[: self._num_first])

    def fade_own(self, own: Own) -> None:
        """The same for what is known of one of them."""
        own.fade()
        own.weigh(self._prior_own)

    def chance(self, own: Own, evidence: int) -> float:
        """That a draft comes true if all before it do."""
        return _by_odds(self._rates[min(evidence, MAX_EVIDENCE)], own)

    def best_chance(self, own: Own) -> float:
        """The chance of the likeliest draft that there may be."""
        return _by_odds(self._best, own)

    def count(self, own: Own, evidence: int, num_drafts: int, num_right: int) -> None:
        """A step had drafts of a sequence; those after a wrong one say nothing."""
        for place in range(min(num_drafts, num_right + 1)):
            kind, is_right = min(evidence + place, MAX_EVIDENCE), place < num_right
            self._num_counted[kind] += 1
            self._num_right[kind] += is_right
            own.num_right += is_right
            own.num_wrong += not is_right
            own.expected_right += self._rates[kind]
            own.expected_wrong += 1 - self._rates[kind]
        own.weigh(self._prior_own)


def _by_odds(rate: float, own: Own) -> float:
    return own.odds * rate / (own.odds * rate + 1 - rate)
