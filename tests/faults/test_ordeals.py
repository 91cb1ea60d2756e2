"""Short forms of the ordeals in `tests/tools/ordeals.py`: chaos, a rolling restart, cancels, handoffs tampered with."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from corrupted_handoffs import BY_MESSAGE, EVERYWHERE, corrupt_many
from many_cancels import cancel_many
from processes import ROOT
from transports_here import TRANSPORTS

SEED = 2026
TOOL = Path(__file__).parents[1] / "tools" / "ordeals.py"


def ordeal(*arguments: str) -> dict[str, Any]:
    """Plays one as its user would."""
    command = [sys.executable, str(TOOL), *arguments, f"--seed={SEED}"]
    played = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert played.stdout.startswith("{"), played.stderr
    report: dict[str, Any] = json.loads(played.stdout)
    assert played.returncode == 0 and not report["violations"], played.stdout + played.stderr
    return report


def test_chaos() -> None:
    """Whatever befalls workers, Redis and the pools: answers are right, and in the end nobody holds anything."""
    report = ordeal("chaos", "--minutes=0.2", "--pause-s=1", "--clients=6")
    assert sum(report["faults"].values()) >= 6, report
    assert report["requests"]["recovered"] > 0, report
    assert report["requests"]["cancelled"] > 0, report


def test_rolling_restart() -> None:
    """Every process under load, one after another: no request fails."""
    report = ordeal("rolling", "--clients=3")
    assert len(report["faults"]) == 6, report
    assert report["requests"]["finished"] > 0, report


async def test_clients_that_leave_in_every_phase() -> None:
    cancels = await cancel_many(150, SEED)
    assert {"-/-", "prefilling/fetching", "leased/fetching", "-/decoding"} <= cancels.phases.keys(), cancels


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_handoffs_that_are_tampered_with(transport: str) -> None:
    tampering = await corrupt_many(150, SEED, transport)
    kinds = EVERYWHERE | (BY_MESSAGE if transport == "grpc" else {})
    assert set(tampering.done) == set(kinds), tampering.done
    assert tampering.num_handoffs > tampering.done.total(), "good ones are to be among them"
