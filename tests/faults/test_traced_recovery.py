"""Traces of real processes against the client's clock, and what they tell of a worker that was killed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
from cluster import LIMIT_S, PROMPT, request_of
from grpc_health.v1 import health_pb2, health_pb2_grpc
from processes import System
from streaming import Streaming, long_prompt, until_load

from baton.topology import choose_ports
from protos import inference_pb2, inference_pb2_grpc
from runtime.rpc import create_channel

MAX_TIMED = 40


@pytest.fixture
async def traced(system: System) -> AsyncIterator[inference_pb2_grpc.InferenceStub]:
    """A router of its own over the shared workers that keeps traces."""
    router = system.new_router("traced", choose_ports(1)[0], "--trace")
    router.start()
    try:
        async with create_channel(router.address) as channel:
            request = health_pb2.HealthCheckRequest(service="baton.v1.Inference")
            async with asyncio.timeout(3 * LIMIT_S):
                async for state in health_pb2_grpc.HealthStub(channel).Watch(request, wait_for_ready=True):
                    if state.status == health_pb2.HealthCheckResponse.SERVING:
                        break
            yield inference_pb2_grpc.InferenceStub(channel)
    finally:
        router.kill()


async def trace_of(stub: Any, request_id: str) -> inference_pb2.Trace:
    """The only trace of a request."""
    (trace,) = (await stub.ListTraces(inference_pb2.ListTracesRequest(request_id=request_id))).traces
    return trace


@dataclass
class Clocked:
    """What a client measured."""

    first_s: float
    total_s: float

    def excess(self, trace: inference_pb2.Trace) -> float:
        """How far the parts of the trace are from it, in units of what is allowed: 5 ms, or 2 % of the whole."""
        allowed_s = max(0.005, 0.02 * self.total_s)
        to_first_s = sum(max(0.0, min(part.end_s, trace.first_token_s) - part.start_s) for part in trace.parts)
        total_s = sum(part.end_s - part.start_s for part in trace.parts)
        return max(abs(to_first_s - self.first_s), abs(total_s - self.total_s)) / allowed_s


async def timed(stub: Any, request: inference_pb2.GenerateRequest) -> Clocked:
    started_s, first_s = time.monotonic(), None
    async with asyncio.timeout(LIMIT_S):
        async for message in stub.Generate(request):
            if message.tokens and first_s is None:
                first_s = time.monotonic() - started_s
    assert first_s is not None
    return Clocked(first_s, time.monotonic() - started_s)


async def test_the_parts_add_up_to_the_clients_clock(traced: Any) -> None:
    """Of two at least: what a trace leaves out it leaves out of all, while this process is kept from looking at its
    clock, by whatever else runs here, now and then."""
    excesses: list[float] = []
    while len(excesses) < MAX_TIMED and sum(excess <= 1.0 for excess in excesses) < 2:
        request = request_of(200, long_prompt(), request_id=f"timed-{len(excesses)}")
        clocked = await timed(traced, request)
        trace = await trace_of(traced, request.request_id)
        assert {part.name for part in trace.parts} >= {"admission", "prefill", "decode"}
        excesses.append(clocked.excess(trace))
    assert sum(excess <= 1.0 for excess in excesses) == 2, excesses


async def test_a_killed_decode_worker_shows_in_the_trace(system: System, traced: Any) -> None:
    """One trace: the lost attempt as the router saw it, the time that it cost, and the attempt that went on."""
    stream = Streaming(traced, request_of(1500, [*PROMPT, 77], request_id="lost"))
    await stream.has(20)
    victim = await until_load(system.decodes, lambda load: load.num_running > 0)
    victim.kill()
    reply = await stream.complete(3 * LIMIT_S)
    trace = await trace_of(traced, "lost")
    attempts = [span for span in trace.spans if span.name == "attempt"]
    assert [bool(span.error) for span in attempts] == [True, False] and reply.finish.served_by.num_attempts == 2
    decodes = {span.parent_id: span for span in trace.spans if span.name == "decode"}
    lost, went_on = (decodes[attempt.span_id] for attempt in attempts)
    assert (lost.instance, lost.attributes["baton.unreported"]) == (victim.name, "true") and lost.error
    assert went_on.instance != victim.name and not went_on.error
    num_tokens = [int(attempt.attributes["baton.num_new_tokens"]) for attempt in attempts]
    assert num_tokens[0] >= 20 and sum(num_tokens) == 1500
    assert [event.name for event in trace.spans[0].events] == ["first_token", "recovery"]
    parts = [part.name for part in trace.parts if part.name in ("decode", "recovery")]
    assert list(dict.fromkeys(parts)) == ["decode", "recovery"] and parts[-1] == "decode", "decode went on after it"
    assert all(before.end_s == after.start_s for before, after in zip(trace.parts, trace.parts[1:], strict=False))
    assert trace.spans[0].attributes["rpc.status_code"] == "OK"
