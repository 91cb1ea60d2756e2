"""Whatever happens to requests and in whatever order, what their traces tell has no gaps and lies within its limits."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from random_walks import walk

from router import tracing
from router.trace_spans import build
from runtime.traces import Trace

# What must be true of a trace is told beside the router's tests.
sys.path.insert(0, str(Path(__file__).parents[1] / "router"))

from traced import check

NUM_WALKS = 60


def test_traces_of_random_walks(monkeypatch: pytest.MonkeyPatch, first_seed: int, tmp_path: Path) -> None:
    traces: list[Trace] = []

    def checked(*args: Any) -> Trace:
        trace = build(*args)
        traces.append(trace)
        try:
            check(trace)
        except AssertionError as violation:
            raise AssertionError(f"{violation}: {trace}") from violation
        return trace

    monkeypatch.setattr(tracing, "build", checked)
    for seed in range(first_seed, first_seed + NUM_WALKS):
        play = walk(seed, tmp_path)
        play.size.router["trace"] = True
        try:
            play.run()
        except AssertionError as violation:
            raise AssertionError(f"walk {seed}: {violation}") from violation
    assert len(traces) >= NUM_WALKS
    spans = [span for trace in traces for span in trace.spans]
    assert {span.name for span in spans} >= {"prefill.queue", "prefill", "decode.queue", "kv.transfer", "decode"}
    assert any(span.attributes.get("baton.unreported") for span in spans) and any(span.error for span in spans)
    # Of what takes time here: messages and steps take none.
    assert {part.name for trace in traces for part in trace.parts} >= {"admission", "recovery"}
