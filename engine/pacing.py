"""Steps that take at least a given time, whatever computes them: for measurements of all that is around them.

A step's time counts from the end of the one before it, so that as long as there is work steps end at an even rate,
whatever is done between them; after a pause the first step ends at once. Owns no batch and changes no answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from engine.batch import Answer, Batch, Runner
from engine.request import Sample


class PacedRunner(Runner):
    """A runner that ends no step earlier than `step_s` after the last one."""

    def __init__(
        self,
        runner: Runner,
        step_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._runner = runner
        self._step_s = step_s
        self._clock = clock
        self._sleep = sleep
        self._ended_s = clock() - step_s

    def run(self, batch: Batch) -> list[Sample]:
        """As the runner itself."""
        samples = self._runner.run(batch)
        now_s = self._clock()
        self._ended_s = max(self._ended_s + self._step_s, now_s)
        if self._ended_s > now_s:
            self._sleep(self._ended_s - now_s)
        return samples

    def call_between_layers(self, call: Callable[[], None]) -> None:
        """As the runner itself."""
        self._runner.call_between_layers(call)

    def call_aside(self, call: Callable[[], Answer]) -> Answer:
        """As the runner itself."""
        return self._runner.call_aside(call)
