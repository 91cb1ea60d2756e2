"""`python -m prefill_svc`: one prefilling worker."""

from __future__ import annotations

import sys

from engine.config import WorkerConfig
from engine.worker import run_worker
from prefill_svc.service import PrefillService
from runtime.config import load_or_exit

if __name__ == "__main__":
    config = load_or_exit(
        WorkerConfig, sys.argv[1:], prog="python -m prefill_svc", description="Computes the KV of prompts."
    )
    sys.exit(run_worker(config, "prefill", PrefillService))
