"""A decode worker with a bug: its steps hang from some step on, while everything else of it goes on answering."""

from __future__ import annotations

import sys
import threading

from decode_svc.service import DecodeService
from engine import tracer
from engine.batch import Batch
from engine.config import WorkerConfig
from engine.request import Sample
from engine.worker import run_worker
from runtime.config import load_or_exit

NUM_GOOD_STEPS = 20


class HangingRunner(tracer.TracerRunner):
    """The tracer with the bug."""

    num_steps = 0

    def run(self, batch: Batch) -> list[Sample]:
        self.num_steps += 1
        if self.num_steps > NUM_GOOD_STEPS:
            threading.Event().wait()
        return super().run(batch)


if __name__ == "__main__":
    tracer.TracerRunner = HangingRunner  # type: ignore[misc]
    config = load_or_exit(WorkerConfig, sys.argv[1:], prog="hanging_worker", description="A worker with a bug.")
    sys.exit(run_worker(config, "decode", DecodeService))
