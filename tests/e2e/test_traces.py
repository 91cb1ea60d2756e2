"""One request, one trace, over processes that were started as in a cluster: no supervisor, no Redis.

The router sends the spans of all of them, to a collector by OTLP or to its standard output. The model is the tracer:
spans know no other.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from served import START_LIMIT_S, wait_until_serving
from trace_collector import Seen, collecting, printed

from baton.topology import choose_ports
from protos import inference_pb2, inference_pb2_grpc

TRACE_ID, CALLER_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.mark.parametrize("exporter", ["console", "otlp"])
def test_one_trace_over_router_prefill_and_decode(tmp_path: Path, exporter: str) -> None:
    """The caller's trace goes on in all three, and their spans are one tree."""
    with contextlib.ExitStack() as stack:
        flags = [f"--trace-exporter={exporter}"]
        if exporter == "otlp":
            collector = stack.enter_context(collecting())
            flags.append(f"--otlp-endpoint={collector.endpoint}")
        with serving(tmp_path, flags) as router, grpc.insecure_channel(router) as channel:
            request = inference_pb2.GenerateRequest(prompt="Once upon a time", request_id="traced")
            request.sampling.max_tokens, request.sampling.ignore_eos = 5, True
            caller = (("traceparent", f"00-{TRACE_ID}-{CALLER_ID}-01"),)
            assert list(inference_pb2_grpc.InferenceStub(channel).Generate(request, metadata=caller, timeout=60))
        spans = printed(tmp_path / "router.stdout") if exporter == "console" else collector.spans
    check(spans)


def check(spans: list[Seen]) -> None:
    """Nothing but the one request was traced, and all of it."""
    assert {span.trace_id for span in spans} == {TRACE_ID}
    by_name = {span.name: span for span in spans}
    generate, attempt = by_name["baton.v1.Inference/Generate"], by_name["attempt"]
    assert len(by_name) == len(spans) and generate.parent_id == CALLER_ID
    parents = {span.name: span.parent_id for span in spans if span is not generate}
    assert parents == {
        **dict.fromkeys(("admission", "route", "attempt"), generate.span_id),
        **dict.fromkeys(("prefill.queue", "prefill", "decode.queue", "kv.transfer", "decode"), attempt.span_id),
    }
    services = {span.name: (span.service, span.instance.partition("-")[0]) for span in spans}
    assert {services[name] for name in ("prefill.queue", "prefill")} == {("baton-prefill", "prefill")}
    assert {services[name] for name in ("decode.queue", "kv.transfer", "decode")} == {("baton-decode", "decode")}
    assert {services[name] for name in ("admission", "route", "attempt", generate.name)} == {("baton-router", "router")}
    assert [span.name for span in spans if span.is_server] == [generate.name]
    assert not any(span.is_error for span in spans)
    assert generate.attributes["baton.request_id"] == "traced"
    assert generate.attributes["gen_ai.usage.output_tokens"] == 5
    assert by_name["kv.transfer"].attributes["baton.kv.bytes"] > 0
    assert (by_name["prefill"].events, by_name["decode"].events) == (["chunk"], ["first_token"])
    told = [value for name, value in generate.attributes.items() if name.startswith("baton.critical_path.")]
    assert sum(told) == pytest.approx(1000 * generate.length_s, abs=0.01)


@contextlib.contextmanager
def serving(folder: Path, flags: list[str]) -> Iterator[str]:
    """A router with these flags and its workers, which end well."""
    router, prefill, decode = (f"127.0.0.1:{port}" for port in choose_ports(3))
    processes = {"prefill": start(folder, "prefill_svc", prefill), "decode": start(folder, "decode_svc", decode)}
    try:
        # A router that found decode alone for a while would begin to serve with it alone.
        wait_until_serving(prefill, START_LIMIT_S, "Prefill")
        wait_until_serving(decode, START_LIMIT_S, "Decode")
        found = (f"--prefill-workers={prefill}", f"--decode-workers={decode}")
        processes["router"] = start(folder, "router", router, *found, *flags)
        wait_until_serving(router, START_LIMIT_S)
        yield router
    finally:
        for process in processes.values():
            process.terminate()
        codes = {name: process.wait(60) for name, process in processes.items()}
    assert codes == {"prefill": 0, "decode": 0, "router": 0}


def start(folder: Path, module: str, address: str, *flags: str) -> subprocess.Popen[bytes]:
    """A process of the system that listens at `address` and writes what it says to files named after it."""
    port = address.rpartition(":")[2]
    argv = [sys.executable, "-P", "-m", module, "--model=tracer", f"--port={port}", *flags]
    with (folder / f"{module}.stdout").open("wb") as output, (folder / f"{module}.stderr").open("wb") as errors:
        return subprocess.Popen(argv, cwd=folder, stdin=subprocess.DEVNULL, stdout=output, stderr=errors)
