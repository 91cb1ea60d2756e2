"""How many tokens are still to come of an answer: learned from the requests that have finished.

Owns the lengths of the last `WINDOW` finished answers. Of a sequence it expects the quantile q of those that were
longer than it is now, but looks no further ahead than the quantile 1 - q of all of them: so long nearly all that run
will go on, and later enough of them have ended. A forecast that goes further keeps blocks free for growth that others
give back in time; one that counts on earlier ends has to evict. Decides nothing: decode's admission sums these up
(`decode_svc.outlook`). An answer that ended at its max_tokens counts like one that ended by itself; max_tokens itself
is no expectation, it only bounds one.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque
from math import ceil

WINDOW = 1000
"""Finished answers that are remembered."""
MIN_FINISHED = 16
"""Finished answers from which on they are believed."""
PRIOR_TOKENS = 64
"""Tokens expected of any sequence while nothing is known, and where no remembered answer was as long."""
QUANTILE = 0.9
"""Part of the longer answers that end no later than is expected."""


class OutputLengths:
    """A window of lengths, kept sorted: recording and asking cost a binary search."""

    def __init__(self, quantile: float = QUANTILE, prior_tokens: int = PRIOR_TOKENS, least_tokens: int = 1) -> None:
        """Expects at least `least_tokens` more, as far as a request may have them."""
        self._quantile = quantile
        self._prior_tokens = prior_tokens
        self._least_tokens = least_tokens
        self._recent: deque[int] = deque()
        self._sorted: list[int] = []
        self._horizon = 0  # how far one looks ahead, once there is enough to go by

    def record(self, num_outputs: int) -> None:
        """An answer has ended with so many tokens."""
        if len(self._recent) == WINDOW:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]
        self._recent.append(num_outputs)
        insort(self._sorted, num_outputs)
        if len(self._sorted) >= MIN_FINISHED:
            self._horizon = self._sorted[max(1, ceil((1 - self._quantile) * len(self._sorted))) - 1]

    def expected_more(self, num_outputs: int, most: int) -> int:
        """Tokens still to come, from 1 to `most`, of an answer that has `num_outputs`."""
        more, horizon = self._prior_tokens, self._horizon
        if horizon:
            num_shorter = bisect_right(self._sorted, num_outputs)
            num_longer = len(self._sorted) - num_shorter
            if num_longer:
                more = self._sorted[num_shorter + max(1, ceil(self._quantile * num_longer)) - 1] - num_outputs
            more = min(more, horizon)
        return max(1, min(max(more, self._least_tokens), most))
