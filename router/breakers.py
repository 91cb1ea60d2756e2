"""Circuit breakers: what failed several requests running is left alone for a while, then tried by one at a time.

A circuit is a worker, or a prefill and a decode worker between which KV does not get across although both are there. It
opens when NUM_REQUESTS different requests have failed on it without a success between them. A single request, however
often it fails, opens nothing, because it may be its own cause; errors of the request itself never come here.
Knows no sockets and picks nobody: a dispatcher that finds every circuit open uses them all the same.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from router.links import Incarnation

LOG = logging.getLogger(__name__)
NUM_REQUESTS = 3
FIRST_OPEN_S = 1.0
"""How long a circuit stays open at first; it doubles each time that a try fails."""
MAX_OPEN_S = 30.0
Circuit = tuple[Incarnation, ...]


@dataclass(slots=True)
class _Failing:
    request_ids: set[str] = field(default_factory=set)
    open_s: float = 0.0  # 0: closed
    until_s: float = 0.0
    is_tried: bool = False


class Breakers:
    """The circuits of one router that have failed since their last success."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failing: dict[Circuit, _Failing] = {}
        self.num_opened = 0
        """How often a circuit was opened that had been closed."""

    @property
    def num_open(self) -> int:
        """Circuits that are open now."""
        return sum(self.is_open(*circuit) for circuit in self._failing)

    def is_open(self, *circuit: Incarnation) -> bool:
        """Whether requests had better go elsewhere."""
        failing = self._failing.get(circuit)
        return failing is not None and self._clock() < failing.until_s

    def note_use(self, *circuit: Incarnation) -> None:
        """A request goes there. If that is to find out whether it works again, others wait for the outcome."""
        failing = self._failing.get(circuit)
        if failing is not None and failing.open_s and not self.is_open(*circuit):
            failing.is_tried, failing.until_s = True, self._clock() + failing.open_s

    def note_success(self, *circuit: Incarnation) -> None:
        """It works."""
        self._failing.pop(circuit, None)

    def note_failure(self, request_id: str, *circuit: Incarnation) -> None:
        """An attempt of that request failed there."""
        self._forget_lost()
        failing = self._failing.setdefault(circuit, _Failing())
        if failing.open_s:
            if not failing.is_tried:
                return  # it was under way when the circuit opened
            failing.open_s = min(2 * failing.open_s, MAX_OPEN_S)
        else:
            failing.request_ids.add(request_id)
            if len(failing.request_ids) < NUM_REQUESTS:
                return
            failing.open_s = FIRST_OPEN_S
            self.num_opened += 1
            names = " -> ".join(worker.worker_id for worker in circuit)
            LOG.warning("%d requests running have failed at %s: it is left alone for a while", NUM_REQUESTS, names)
        failing.is_tried = False
        # Not all routers try again at the same moment.
        failing.until_s = self._clock() + failing.open_s * random.uniform(1.0, 1.5)

    def _forget_lost(self) -> None:
        for circuit in [each for each in self._failing if any(worker.lost.is_set() for worker in each)]:
            del self._failing[circuit]
