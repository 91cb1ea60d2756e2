"""How fast a worker moves KV and computes prompts, by what it did lately; routers choose by it who computes what.

What was not observed for FORGET_S is not known any more: who decides by it must not be kept from trying again for ever
by what was true once.
"""

from __future__ import annotations

import time
from collections.abc import Callable

KEPT = 0.99
"""Weight of what was known, beside one more observation."""
DECODE_WEIGHT = 1 / 16
"""Of the last step that only decodes, in what such steps take."""
FORGET_S = 60.0
LEAST_SPREAD = 0.1
"""Of the numbers of tokens, relative to their mean: with less of it what a step and what a token takes is not told
apart."""


class Rate:
    """An amount a second: a mean in which the last observations count most."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` is in seconds."""
        self._clock = clock
        self._amount = 0.0
        self._duration_s = 0.0
        self._observed_s = 0.0

    def observe(self, amount: float, duration_s: float) -> None:
        """So much was done in that time."""
        kept = KEPT if self.per_s else 0.0
        self._amount = kept * self._amount + amount
        self._duration_s = kept * self._duration_s + duration_s
        self._observed_s = self._clock()

    @property
    def per_s(self) -> float:
        """The rate; 0 where it is not known."""
        is_known = self._duration_s > 0 and self._clock() - self._observed_s <= FORGET_S
        return self._amount / self._duration_s if is_known else 0.0


class PromptTimes:
    """What a step takes longer for tokens of prompts that it computes beside rows that decode: so much for having any,
    and so much for each. By least squares, the last steps counting most."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` is in seconds."""
        self._clock = clock
        self._observed_s = 0.0
        self._decode_step_s = 0.0
        # Weighted sums over steps: of 1, of the tokens n, of the time t, of n * n, of n * t.
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)

    def observe(self, num_prompt_tokens: int, num_rows: int, duration_s: float) -> None:
        """A step with so many tokens of prompts beside rows that decode."""
        if num_prompt_tokens == 0:
            weight = DECODE_WEIGHT if self._decode_step_s else 1.0
            self._decode_step_s += (duration_s - self._decode_step_s) * weight
            return
        # Where decode steps take as long as this one the difference says nothing.
        own_s = max(duration_s - self._decode_step_s, 0.1 * duration_s) if num_rows else duration_s
        kept, n = KEPT if self.is_known else 0.0, num_prompt_tokens
        added = (1, n, own_s, n * n, n * own_s)
        self._sums = tuple(kept * old + new for old, new in zip(self._sums, added, strict=True))  # type: ignore[assignment]
        self._observed_s = self._clock()

    @property
    def is_known(self) -> bool:
        """Whether anything was observed lately."""
        return self._sums[0] > 0 and self._clock() - self._observed_s <= FORGET_S

    def fit(self) -> tuple[float, float]:
        """Seconds for having any, and tokens a second; the latter is 0 where nothing is known."""
        if not self.is_known:
            return 0.0, 0.0
        weight, *sums = self._sums
        mean_n, mean_t, mean_nn, mean_nt = (each / weight for each in sums)
        most_s = mean_t / mean_n  # for a token, if a step took nothing
        token_s = most_s
        variance = mean_nn - mean_n * mean_n
        if variance > (LEAST_SPREAD * mean_n) ** 2:
            token_s = min(most_s, max(0.05 * most_s, (mean_nt - mean_n * mean_t) / variance))
        return max(0.0, mean_t - token_s * mean_n), 1 / token_s if token_s > 0 else 0.0
