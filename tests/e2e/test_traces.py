"""One request, one trace, over three processes that were started as in a cluster: no supervisor, no Redis.

Each process writes its spans as JSON to a standard output of its own. The model is the tracer: spans know no other.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
from served import START_LIMIT_S, wait_until_serving

from baton.topology import choose_ports
from protos import inference_pb2, inference_pb2_grpc

TRACE_ID, CALLER_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def test_one_trace_over_router_prefill_and_decode(tmp_path: Path) -> None:
    """The caller's trace goes on in all three, and the workers' spans tell every move of the sequence."""
    router, prefill, decode = (f"127.0.0.1:{port}" for port in choose_ports(3))
    processes = {
        "prefill": start(tmp_path, "prefill_svc", prefill),
        "decode": start(tmp_path, "decode_svc", decode),
    }
    try:
        # A router that found decode alone for a while would begin to serve with it alone.
        wait_until_serving(prefill, START_LIMIT_S, "Prefill")
        wait_until_serving(decode, START_LIMIT_S, "Decode")
        found = (f"--prefill-workers={prefill}", f"--decode-workers={decode}")
        processes["router"] = start(tmp_path, "router", router, *found)
        wait_until_serving(router, START_LIMIT_S)
        with grpc.insecure_channel(router) as channel:
            request = inference_pb2.GenerateRequest(prompt="Once upon a time", request_id="traced")
            request.sampling.max_tokens, request.sampling.ignore_eos = 5, True
            caller = (("traceparent", f"00-{TRACE_ID}-{CALLER_ID}-01"),)
            assert list(inference_pb2_grpc.InferenceStub(channel).Generate(request, metadata=caller, timeout=60))
    finally:
        for process in processes.values():
            process.terminate()
        codes = {name: process.wait(60) for name, process in processes.items()}
    assert codes == {"prefill": 0, "decode": 0, "router": 0}

    spans = {name: traced(tmp_path / f"{module}.stdout") for name, module in MODULES.items()}
    (generate,) = (span for span in spans["router"] if span["name"] == "baton.v1.Inference/Generate")
    (attempt,) = (span for span in spans["router"] if span["name"] == "baton.attempt")
    (prefilling,), (decoding,) = spans["prefill"], spans["decode"]
    assert (prefilling["name"], decoding["name"]) == ("baton.prefill", "baton.decode")
    parents = [span["parent_id"] for span in (generate, attempt, prefilling, decoding)]
    ids = [span["context"]["span_id"] for span in (generate, attempt)]
    assert parents == [f"0x{CALLER_ID}", ids[0], ids[1], ids[1]]
    assert events(prefilling) == ["queued", "prefilling", "leased", "finished"]
    assert events(decoding) == ["queued", "fetching", "decoding", "finished"]
    assert {span["attributes"]["baton.request_id"] for span in (generate, prefilling, decoding)} == {"traced"}
    assert generate["attributes"]["gen_ai.usage.output_tokens"] == 5


MODULES = {"router": "router", "prefill": "prefill_svc", "decode": "decode_svc"}


def start(folder: Path, module: str, address: str, *flags: str) -> subprocess.Popen[bytes]:
    """A process of the system that listens at `address` and writes what it says to files named after it."""
    port = address.rpartition(":")[2]
    argv = [sys.executable, "-P", "-m", module, "--model=tracer", f"--port={port}", "--trace-exporter=console", *flags]
    with (folder / f"{module}.stdout").open("wb") as output, (folder / f"{module}.stderr").open("wb") as errors:
        return subprocess.Popen(argv, cwd=folder, stdin=subprocess.DEVNULL, stdout=output, stderr=errors)


def traced(path: Path) -> list[dict[str, Any]]:
    """The spans of the caller's trace in a file of JSON objects; those of probes belong to others."""
    text, decoder, spans = path.read_text().strip(), json.JSONDecoder(), []
    while text:
        span, end = decoder.raw_decode(text)
        spans.append(span)
        text = text[end:].lstrip()
    return [span for span in spans if span["context"]["trace_id"] == f"0x{TRACE_ID}"]


def events(span: dict[str, Any]) -> list[str]:
    """Names of a span's events, in order."""
    return [event["name"] for event in span["events"]]
