"""A router process that cannot work says why and ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("flags", "code", "text"),
    [
        (["--model=tracer"], 1, "--redis-url or --decode-workers"),
        (["--model=tracer", "--decode-workers=127.0.0.1:1", "--policy=none-such"], 1, "none-such"),
        (["--model=tracer", "--redis-url=nonsense"], 1, "metadata store"),
        (["--model=/no/such/model", "--decode-workers=127.0.0.1:1"], 1, "/no/such/model"),
        (["--model=tracer", "--worker-silence-s=0.1"], 2, "worker-silence-s"),
        ([], 2, "--model"),
    ],
    ids=["no workers", "policy", "store", "model", "range", "required"],
)
def test_configuration_that_cannot_work_is_refused(flags: list[str], code: int, text: str) -> None:
    argv = [sys.executable, "-P", "-m", "router", "--port=0", *flags]
    ended = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=30, check=False)
    assert ended.returncode == code, ended.stderr
    assert text in ended.stderr and "Traceback" not in ended.stderr
