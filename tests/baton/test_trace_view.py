"""`baton trace`: the table, the waterfall and the file for Perfetto, over a scripted router."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from fake_router import FakeRouter
from test_cli import baton

from protos import inference_pb2


def trace_of(request_id: str, began_unix_s: float = 0.0) -> inference_pb2.Trace:
    """A request of 100 ms that lost its decode worker."""
    trace = inference_pb2.Trace(
        trace_id="1f" * 16, request_id=request_id, began_unix_s=began_unix_s, first_token_s=0.04
    )
    facts = {
        "gen_ai.usage.input_tokens": "12",
        "gen_ai.usage.output_tokens": "5",
        "baton.num_attempts": "2",
        "rpc.status_code": "OK",
    }
    trace.spans.add(name="baton.v1.Inference/Generate", span_id="01", instance="router-0", end_s=0.1, attributes=facts)
    trace.spans.add(name="admission", span_id="02", parent_id="01", instance="router-0", end_s=0.01)
    attempt = trace.spans.add(name="attempt", span_id="03", parent_id="01", start_s=0.01, end_s=0.06)
    attempt.instance, attempt.error = "router-0", "worker d0 was \x1b[31mlost"
    prefill = trace.spans.add(name="prefill", span_id="04", parent_id="03", service="baton-prefill", start_s=0.02)
    prefill.instance, prefill.end_s = "prefill-0", 0.04
    prefill.attributes["baton.num_chunks"] = "14"
    for number in range(14):
        prefill.events.add(name="chunk", at_s=0.02 + number / 1000, attributes={"baton.num_tokens": "64"})
    for name, start_s, end_s in (("admission", 0.0, 0.01), ("prefill", 0.01, 0.04), ("recovery", 0.04, 0.1)):
        trace.parts.add(name=name, start_s=start_s, end_s=end_s)
    return trace


async def test_a_waterfall(address: str, router: FakeRouter) -> None:
    router.traces = [trace_of("other"), trace_of("wanted")]
    code, output, errors_text = await baton("trace", "wanted", "--address", address)
    assert (code, errors_text) == (0, "")
    lines = output.splitlines()
    assert lines[0] == "wanted: OK, 12 tokens in, 5 out, 100.0 ms, first token after 40.0 ms"
    assert lines[1].endswith(f"trace {'1f' * 16}")
    assert lines[2] == "the client waited for recovery 60.0 ms, prefill 30.0 ms, admission 10.0 ms"
    rows = {line.split()[0]: line for line in lines[5:] if "█" in line}
    assert list(rows) == ["request", "admission", "attempt", "prefill"]
    assert rows["request"].split()[1:] == ["router-0", "0.0", "100.0", "█" * 40]
    assert rows["prefill"].split()[1:] == ["prefill-0", "20.0", "20.0", "█" * 8]
    assert rows["prefill"].startswith("    prefill") and rows["attempt"].startswith("  attempt")
    # Names may come from clients: no control character gets to the terminal.
    assert "! worker d0 was \N{REPLACEMENT CHARACTER}[31mlost" in output and "\x1b" not in output
    assert output.count("chunk num_tokens=64") == 12 and "and 2 more" in output and "num_chunks=14" in output
    start = rows["request"].index("█")
    assert rows["prefill"].index("█") == start + 8, "a fifth of the time is before it"


async def test_a_table_of_recent_requests(address: str, router: FakeRouter) -> None:
    refused = inference_pb2.Trace(spans=[inference_pb2.TraceSpan(attributes={"rpc.status_code": "UNAVAILABLE"})])
    router.traces = [trace_of("first"), trace_of("second"), refused]
    code, output, errors_text = await baton("trace", "--address", address, "--limit=2")
    assert (code, errors_text) == (0, "")
    header, second, last = output.splitlines()
    assert header.split()[:2] == ["began", "request"]
    assert second.split()[1:] == ["second", "100.0", "40.0", "12", "5", "2", "OK", "recovery", "60%"]
    assert last.split()[1:] == ["-", "0.0", "-", "-", "-", "-", "UNAVAILABLE"]


async def test_no_such_trace(address: str) -> None:
    code, output, errors_text = await baton("trace", "unknown", "--address", address)
    assert (code, output) == (1, "")
    assert f"{address} keeps no trace of 'unknown'" in errors_text and "--trace" in errors_text


async def test_a_file_for_perfetto(address: str, router: FakeRouter, tmp_path: Path) -> None:
    """Every slice lies on a named track of a named process, and slices of a track nest."""
    router.traces = [trace_of("first", 1000.0), trace_of("second", 1000.5)]
    path = tmp_path / "out.json"
    code, output, _ = await baton("trace", "--address", address, "--perfetto", str(path))
    assert code == 0 and output.startswith(f"2 traces are in {path}")
    events = json.loads(await asyncio.to_thread(path.read_text))["traceEvents"]
    named = {event["args"]["name"]: event["pid"] for event in events if event["name"] == "process_name"}
    assert named.keys() == {"critical path", " router-0", "baton-prefill prefill-0"}
    threads = {
        (event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"
    }
    slices = [event for event in events if event["ph"] == "X"]
    assert {threads[each["pid"], each["tid"]] for each in slices} == {"first", "second"}
    assert len(slices) == 2 * (4 + 3)
    prefills = [each for each in slices if each["pid"] == named["baton-prefill prefill-0"]]
    assert [(each["ts"], each["dur"]) for each in prefills] == [
        (pytest.approx(20_000), pytest.approx(20_000)),
        (pytest.approx(520_000), pytest.approx(20_000)),
    ]
    assert sum(event["ph"] == "i" for event in events) == 28
    assert all(event.get("dur", 0) >= 0 for event in events)
