"""`python -m decode_svc`: one decoding worker; with `--role mixed`, one that always prefills for itself."""

from __future__ import annotations

import sys

from decode_svc.service import DecodeService
from engine.config import WorkerConfig
from engine.worker import run_worker
from runtime.config import load_or_exit

if __name__ == "__main__":
    config = load_or_exit(
        WorkerConfig, sys.argv[1:], prog="python -m decode_svc", description="Generates tokens from fetched KV."
    )
    sys.exit(run_worker(config, config.role, DecodeService))
