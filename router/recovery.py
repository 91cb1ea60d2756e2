"""What the failed attempts of one request have taught: whether to try again, when, and where not.

Bounded: a request whose worker died MAX_DEATHS times running without a new token is probably the cause, and fails
alone; so does one that has failed MAX_FAILURES times running in any way. A worker that was lost and is found again in
the same life has died once at most. Others wait a little longer after each
failure, not all equally long, since those that one death has hit come back together.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from router.attempts import AttemptFailed
from router.links import Incarnation
from runtime.errors import Unavailable

MAX_DEATHS = 3
MAX_FAILURES = 16
FIRST_BACKOFF_S = 0.02
MAX_BACKOFF_S = 1.0


@dataclass(slots=True)
class Recovery:
    """The attempts of one request so far."""

    avoided: set[Incarnation] = field(default_factory=set)
    """Who failed it; used again only where there is nobody else."""
    num_evictions: int = 0
    """How often it was given back for others."""
    keeper: Incarnation | None = None
    """The prefill worker that has computed its KV and probably has it still; None if there is none."""
    num_kept_tokens: int = 0
    """How much of its input the keeper has."""
    _num_failures: int = 0
    _dead_epochs: set[int] = field(default_factory=set)

    def note_failure(
        self, failure: AttemptFailed, prefill: Incarnation | None, num_input_tokens: int, progressed: bool
    ) -> None:
        """An attempt over `prefill` has failed. Raises Unavailable when that was one too many."""
        if progressed:
            self._num_failures = 0
            self._dead_epochs.clear()
        else:
            self._num_failures += 1
        self.num_evictions += failure.evicted
        if failure.culprit is not None:
            self.avoided.add(failure.culprit)
            if failure.worker_died and not progressed:
                self._dead_epochs.add(failure.culprit.description.epoch)
        if prefill is not None and prefill is not failure.culprit:
            self.keeper, self.num_kept_tokens = prefill, num_input_tokens
        elif prefill is self.keeper:
            self.keeper = None
        if len(self._dead_epochs) >= MAX_DEATHS or self._num_failures >= MAX_FAILURES:
            text = f"the request failed {self._num_failures} times running without a new token; last: {failure.message}"
            raise Unavailable(text) from failure

    @property
    def backoff_s(self) -> float:
        """How long to wait before the next attempt."""
        return random.uniform(0.5, 1.0) * min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2.0**self._num_failures)
