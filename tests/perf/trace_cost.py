"""What traces cost: `python tests/perf/trace_cost.py [MODEL [ROUNDS [FLAG ...]]]`.

Two systems of MODEL (tracer), one of them with the flags (--trace), serve the same load in turns, ROUNDS (20) times:
128 requests, 32 at once, of 128 tokens and 64 of output. After every fourth round both are started anew, so that no
start's luck is taken for the cost of traces. Prints the CPU microseconds of all processes for each output token, and
the median of the ratios with the interval in which 95 % of the medians lie when starts are resampled. Before that it
prints what the router spends on the trace of one request by itself, which other work on the machine disturbs less. Not
a test. The tracer computes nothing, so its ratio is an upper bound.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

from baton import AsyncClient
from baton.bench.system import cpu_between_s, session_cpu_times_s
from baton.topology import choose_ports
from protos import inference_pb2, worker_pb2
from router.answer import Answer
from router.config import RouterConfig
from router.links import Incarnation
from router.model import open_text_model
from router.request_trace import AttemptMarks, RequestTrace, TracedAttempt
from router.tracing import Tracer
from router.validation import ModelFacts, validate
from runtime.rpc import create_channel
from runtime.trace_export import TraceExporter
from runtime.traces import TraceContext

NUM_REQUESTS, NUM_AT_ONCE, NUM_PROMPT, NUM_OUTPUT = 128, 32, 128, 64
READY = "ready: "
NUM_WRITTEN, NUM_CHUNKS = 5000, 4
ROUNDS_OF_A_START = 4
ENCODER = "opentelemetry.exporter.otlp.proto.common.trace_encoder"


@contextlib.contextmanager
def served(model: str, flags: list[str]) -> Iterator[tuple[str, list[int]]]:
    """A system: its address and its processes."""
    (port,) = choose_ports(1)
    argv = [sys.executable, "-m", "baton", "serve", model, f"--port={port}", "--drain-timeout-s=1", *flags]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as serving:
        assert serving.stdout is not None
        pids: list[int] = []
        for line in serving.stdout:
            if found := re.match(r"\S+\s+pid (\d+)", line):
                pids.append(int(found[1]))
            if line.startswith(READY):
                break
        try:
            yield f"127.0.0.1:{port}", pids
        finally:
            serving.terminate()


async def load(address: str, seed: int) -> None:
    """The same prompts for the same seed."""
    draws, places = random.Random(seed), asyncio.Semaphore(NUM_AT_ONCE)
    prompts = [[draws.randrange(200) for _ in range(NUM_PROMPT)] for _ in range(NUM_REQUESTS)]
    async with AsyncClient(address) as client:

        async def ask(prompt: list[int]) -> None:
            async with places:
                await client.complete(prompt_token_ids=prompt, max_tokens=NUM_OUTPUT, ignore_eos=True, temperature=0.0)

        await asyncio.gather(*map(ask, prompts))


def cost_us(address: str, pids: list[int], seed: int) -> float:
    """CPU microseconds of the system for each output token."""
    before = session_cpu_times_s(pids)
    asyncio.run(load(address, seed))
    spent_s = cpu_between_s(before, session_cpu_times_s(pids))
    assert spent_s is not None, "a process has ended"
    return 1e6 * spent_s / (NUM_REQUESTS * NUM_OUTPUT)


def noted(model: str = "tracer") -> RequestTrace:
    """A request as it is noted, of so many chunks."""
    text_model = open_text_model(model, None)
    sampling = inference_pb2.SamplingParams(max_tokens=NUM_OUTPUT)
    request = inference_pb2.GenerateRequest(prompt_token_ids=range(NUM_PROMPT), sampling=sampling)
    prepared = validate(request, ModelFacts(model, 4096, 257, (256,), False), text_model.tokenizer, None)
    trace = RequestTrace(1.0, context=TraceContext(1, 2), request=request, prepared=prepared)
    trace.validated_s, trace.placed_s, trace.ended_s = 1.001, 1.002, 2.0
    trace.answer = Answer(prepared, text_model.tokenizer, 1.0)
    trace.answer.first_token_s = trace.answer.last_token_s = 1.2
    trace.finish = inference_pb2.Finish()
    moments = [worker_pb2.Moment(name="chunk", at_ms=9.0 * n, num_tokens=32) for n in range(NUM_CHUNKS)]
    told = worker_pb2.Timeline(age_ms=90.0, moments=[worker_pb2.Moment(name="credit", at_ms=1.0), *moments])
    later = [worker_pb2.Moment(name=name, at_ms=99.0) for name in ("fetching", "first_bytes", "decoding", "finished")]
    marks = AttemptMarks(1.002, 1.003, 1.1, 1.004, 1.12, 1.9)
    marks.first_token = worker_pb2.PrefillFirstToken(queue_ms=5.0, prefill_ms=80.0, timeline=told)
    lived = worker_pb2.Timeline(age_ms=890.0, moments=later)
    marks.record = worker_pb2.DecodeRunResponse(transport="shm", kv_bytes=999, transfer_ms=90.0, timeline=lived)
    channel = create_channel("127.0.0.1:1")
    prefill, decode = (
        Incarnation("127.0.0.1:1", channel, worker_pb2.DescribeResponse(worker_id=name, role=role, block_bytes=9))
        for name, role in (("p", inference_pb2.WORKER_ROLE_PREFILL), ("d", inference_pb2.WORKER_ROLE_DECODE))
    )
    attempt = TracedAttempt(
        TraceContext(1, 3), "label", decode, prefill, "why", "prefill", 0, NUM_PROMPT, 64, 1.9, marks, 1.95
    )
    trace.attempts.append(attempt)
    return trace


async def write_cost_us() -> tuple[float, float | None]:
    """CPU microseconds for a request's trace: to write it, and to make OTLP of it, where that is installed."""
    tracer = Tracer(RouterConfig("tracer", trace=True), "router", open_text_model("tracer", None))
    request = noted()
    began_s = time.process_time()
    for _ in range(NUM_WRITTEN):
        tracer._write(request)
    written_us = 1e6 * (time.process_time() - began_s) / NUM_WRITTEN
    if importlib.util.find_spec("opentelemetry.exporter") is None:
        return written_us, None
    exporter = TraceExporter(importlib.import_module("opentelemetry.sdk.trace.export").ConsoleSpanExporter(), "router")
    encode, trace = importlib.import_module(ENCODER).encode_spans, tracer.recent_traces()[0]
    began_s = time.process_time()
    for _ in range(NUM_WRITTEN):
        encode(exporter.spans_of(trace)).SerializeToString()
    return written_us, 1e6 * (time.process_time() - began_s) / NUM_WRITTEN


def compared(model: str, flags: list[str], numbers: range) -> list[tuple[float, float]]:
    """Rounds of two systems just started: the cost without the flags, and with them."""
    pairs: list[tuple[float, float]] = []
    with served(model, []) as plain, served(model, flags) as other:
        for system in (plain, other):
            cost_us(*system, seed=-1)
        for number in numbers:
            first, second = (plain, other) if number % 2 == 0 else (other, plain)
            one, two = cost_us(*first, seed=number), cost_us(*second, seed=number)
            pairs.append((one, two) if number % 2 == 0 else (two, one))
            print(f"{pairs[-1][0]:7.1f} us without, {pairs[-1][1]:7.1f} with", flush=True)
    return pairs


def median_ratio(pairs: list[tuple[float, float]]) -> float:
    """Of the costs with the flags to those without."""
    return statistics.median(with_ / without for without, with_ in pairs)


def main(model: str = "tracer", rounds: str = "20", *flags: str) -> None:
    """Prints a line for each round, and the medians."""
    written_us, encoded_us = asyncio.run(write_cost_us())
    encoded = "" if encoded_us is None else f", {encoded_us:.0f} us more to send it by OTLP"
    print(f"{written_us:.0f} us to write the trace of a request{encoded}", flush=True)
    groups: list[list[tuple[float, float]]] = []
    for first_round in range(0, int(rounds), ROUNDS_OF_A_START):
        last_round = min(first_round + ROUNDS_OF_A_START, int(rounds))
        groups.append(compared(model, list(flags) or ["--trace"], range(first_round, last_round)))
    pairs = [pair for group in groups for pair in group]
    draws = random.Random(0)
    resampled = ([pair for group in draws.choices(groups, k=len(groups)) for pair in group] for _ in range(2000))
    medians = sorted(map(median_ratio, resampled))
    without, with_ = (statistics.median(each) for each in zip(*pairs, strict=True))
    print(
        f"{model}: medians {without:.1f} and {with_:.1f} us a token; "
        f"ratio {median_ratio(pairs):.4f} ({medians[50]:.4f} to {medians[1949]:.4f})"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
