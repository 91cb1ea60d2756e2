"""Whose blocks and seat others get: the last by rank, and only where that helps.

For growth: whoever ranks last. For a newcomer: those of lower classes that rank behind it, service not counted as
waiting, and only if all of them together make room. Before anybody is evicted, those go whose KV has room in host
memory, first of all those that pause anyway. Never the oldest, so that something always finishes. Owns the choice
alone; the scheduler displaces whom it names.
"""

from __future__ import annotations

from collections.abc import Collection

from decode_svc.outlook import Outlook
from engine.holdings import Holdings
from engine.ranking import RankedQueue, oldest, rank_when_served
from engine.scheduling import Limits
from engine.sequence import Sequence, State

EVICTED = {"blocks": "no KV block for the next token", "class": "a request of a higher class took its place"}
"""What is said of one that was evicted, by cause."""


class Victims:
    """Choice among those that hold blocks."""

    def __init__(self, holdings: Holdings, limits: Limits, outlook: Outlook) -> None:
        self._holdings = holdings
        self._limits = limits
        self._outlook = outlook
        self._rank = RankedQueue(limits.ageing_s).rank

    def for_growth(self, holders: list[Sequence]) -> Sequence:
        """One of them; the oldest only where it is alone in a pool that could not grow. Of a higher class than the last
        by rank none goes to host memory either."""
        never = oldest(holders)
        others = [holder for holder in holders if holder is not never]
        last = max(others or holders, key=self._rank)
        movable = [
            each
            for each in others
            if each.request.priority <= last.request.priority and self._holdings.can_swap_out(each)
        ]
        paused = [each for each in movable if each.state is State.PAUSED]
        return max(paused or movable or [last], key=self._rank)

    def for_newcomer(
        self, holders: list[Sequence], newcomer: Sequence, max_cached: int, now_s: float
    ) -> Sequence | None:
        """Who goes first so that a newcomer, of whose input `max_cached` tokens may be reused, gets in; None: nobody.
        Never an equal, and none more often than the cap."""
        if not holders:
            return None
        rank, priority, never = self._rank_now(newcomer, now_s), newcomer.request.priority, oldest(holders)
        victims = {
            holder
            for holder in holders
            if holder is not never
            and holder.request.priority < priority
            and self._rank_now(holder, now_s) > rank
            and holder.request.num_evictions + holder.num_displaced < self._limits.max_preemptions
        }
        if not victims or not self._would_be_seated(newcomer, max_cached, holders, victims):
            return None
        movable = [victim for victim in victims if self._holdings.can_swap_out(victim)]
        return max(movable or victims, key=lambda holder: (self._rank_now(holder, now_s), self._rank(holder)))

    def _would_be_seated(
        self, newcomer: Sequence, max_cached: int, holders: list[Sequence], victims: Collection[Sequence]
    ) -> bool:
        """Whether it would get its blocks if none of the victims were there."""
        prospect = self._holdings.prospect(newcomer, max_cached, without=victims)
        if not prospect.has_room_for(self._holdings.num_blocks(newcomer.num_tokens + 1)):
            return False
        forecast = self._outlook.forecast(holder for holder in holders if holder not in victims)
        return self._outlook.has_blocks_for(newcomer, prospect, forecast)

    def _rank_now(self, sequence: Sequence, now_s: float) -> float:
        return rank_when_served(sequence, now_s, self._limits.ageing_s)
