"""A decode worker with a bug: at its first step it takes a block that no sequence accounts for."""

from __future__ import annotations

import sys

from decode_svc.service import DecodeService
from engine.config import WorkerConfig
from engine.planning import Plan
from engine.scheduling import NewToken
from engine.worker import run_worker
from engine.worker_parts import WorkerParts
from runtime.config import load_or_exit


class LeakyService(DecodeService):
    """Decode with the bug."""

    def __init__(self, parts: WorkerParts) -> None:
        super().__init__(parts)
        self._pool = parts.holdings.pool
        self._leaked: list[int] = []

    def committed(self, plan: Plan, new_tokens: list[NewToken]) -> None:
        super().committed(plan, new_tokens)
        if not self._leaked:
            self._leaked = self._pool.allocate(1)


if __name__ == "__main__":
    config = load_or_exit(WorkerConfig, sys.argv[1:], prog="leaky_worker", description="A worker with a bug.")
    sys.exit(run_worker(config, "decode", LeakyService))
