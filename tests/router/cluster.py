"""A whole system over the tracer in this process: a router, its workers, and a client, on real sockets.

`cluster` starts it; `Cluster.generate` is one request from the client's side; `Cluster.balanced` waits, at most a
second, until no worker holds anything, by its own report.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import grpc
import grpc.aio

from decode_svc.service import DecodeService
from engine import tracer
from engine.batch import Batch, Runner, SampleRow
from engine.config import WorkerConfig
from engine.request import Sample, SamplingParams
from engine.worker import RunningWorker, Worker
from prefill_svc.service import PrefillService
from protos import inference_pb2, inference_pb2_grpc, worker_pb2, worker_pb2_grpc
from router import fleet as router_fleet
from router.config import RouterConfig
from router.model import open_text_model
from router.process import RunningRouter, serving
from runtime.doors import NO_PASS, Pass
from runtime.rpc import create_channel
from runtime.status import StatusReporter

PROMPT = tuple(b"The baton passes from one runner to the next.")
LIMIT_S = 10.0


@dataclass
class Reply:
    """A whole answer."""

    text: str
    tokens: list[int]
    finish: inference_pb2.Finish
    request_id: str = ""
    num_messages: int = 0


def expected(prompt: Sequence[int], num_tokens: int, **sampling: Any) -> list[int]:
    """What the tracer must say after `prompt`."""
    params = SamplingParams(**{"temperature": 0.0, "ignore_eos": True, **sampling})
    return tracer.expected_tokens(prompt, num_tokens, SampleRow(0, 0, params))


def request_of(num_tokens: int = 8, prompt: Sequence[int] = PROMPT, **fields: Any) -> inference_pb2.GenerateRequest:
    """A greedy request that goes on past the end-of-sequence token."""
    sampling = {"temperature": 0.0, "ignore_eos": True, "max_tokens": num_tokens, **fields.pop("sampling", {})}
    return inference_pb2.GenerateRequest(
        prompt_token_ids=prompt, sampling=inference_pb2.SamplingParams(**sampling), **fields
    )


async def collect(call: Any, num_before: int = 0) -> Reply:
    """Reads a stream, of which `num_before` tokens were read, to its end; every token must come once and in order."""
    text, tokens, finish, request_id, num_messages = "", [], None, "", 0
    async for response in call:
        assert finish is None, "a message after the last"
        text += response.text
        for token in response.tokens:
            assert token.index == num_before + len(tokens), "a gap or a repeat"
            tokens.append(token.token_id)
        request_id, num_messages = response.request_id, num_messages + 1
        if response.HasField("finish"):
            finish = response.finish
    assert finish is not None, "the stream ended without a finish"
    return Reply(text, tokens, finish, request_id, num_messages)


async def load_of(address: str, is_wanted: Any, limit_s: float, shown: Pass = NO_PASS) -> worker_pb2.WatchResponse:
    """Waits until a worker reports a load that `is_wanted`; AssertionError with the last report when it does not."""
    last = None
    async with create_channel(address, shown) as channel:
        call = worker_pb2_grpc.WorkerStub(channel).Watch(worker_pb2.WatchRequest())
        try:
            async with asyncio.timeout(limit_s):
                async for last in call:
                    if is_wanted(last.load):
                        return last
        except TimeoutError:
            pass
        finally:
            call.cancel()
    raise AssertionError(f"after {limit_s} s {address} still reports {last}")


def holds_nothing(load: inference_pb2.WorkerLoad) -> bool:
    """Whether a worker holds no block for anybody and has nothing to do."""
    return not any((load.pool.used, load.pool.accounted, load.num_leases, load.num_queued, load.num_running))


@dataclass
class Cluster:
    """What was started."""

    router: RunningRouter
    prefills: list[RunningWorker]
    decodes: list[RunningWorker]
    channel: grpc.aio.Channel
    stub: inference_pb2_grpc.InferenceStub

    async def generate(self, request: inference_pb2.GenerateRequest | None = None, **fields: Any) -> Reply:
        """One request from end to end."""
        async with asyncio.timeout(LIMIT_S):
            return await collect(self.stub.Generate(request or request_of(**fields)))

    async def balanced(self, limit_s: float = 1.0) -> None:
        """Waits until no worker holds anything, then audits the pools."""
        for worker in (*self.prefills, *self.decodes):
            await load_of(worker.address, holds_nothing, limit_s, worker.parts.cluster.calling)
            worker.parts.holdings.check()
            assert worker.role.live_attempts() == 0
            assert not worker.stepping.done()

    async def until_running(self) -> None:
        """Waits until a decode worker runs something."""
        decode = self.decodes[0]
        await load_of(decode.address, lambda load: load.num_running > 0, LIMIT_S, decode.parts.cluster.calling)


@contextlib.asynccontextmanager
async def cluster(
    num_prefill: int = 1,
    num_decode: int = 1,
    *,
    worker: dict[str, Any] | None = None,
    prefill: dict[str, Any] | None = None,
    decode: dict[str, Any] | None = None,
    shown: Pass = NO_PASS,
    **router: Any,
) -> AsyncIterator[Cluster]:
    """Starts workers and router and waits until every worker is proved. `worker` configures all workers, `prefill` and
    `decode` those of a pool, `shown` is the client's pass, everything else configures the router."""
    async with contextlib.AsyncExitStack() as stack:
        if not num_prefill:
            # None will come: decode workers need not wait for one.
            stack.enter_context(mock.patch.object(router_fleet, "PREFILL_GRACE_S", 0.0))
        sizes = {"num_kv_blocks": 256, "max_num_seqs": 32, "chunk_size": 64}
        both = {"model": "tracer", "trusted_transfer_network": True, **sizes, **(worker or {})}
        prefills = [await _start(stack, f"prefill-{i}", {**both, **(prefill or {})}) for i in range(num_prefill)]
        decodes = [await _start(stack, f"decode-{i}", {**both, **(decode or {})}) for i in range(num_decode)]
        running = await stack.enter_async_context(_router(prefills, decodes, **router))
        channel = await stack.enter_async_context(create_channel(running.address, shown))
        yield Cluster(running, prefills, decodes, channel, inference_pb2_grpc.InferenceStub(channel))


@contextlib.asynccontextmanager
async def another_router(c: Cluster, **options: Any) -> AsyncIterator[inference_pb2_grpc.InferenceStub]:
    """A second router of the same name over the same workers, by a client of its own."""
    async with _router(c.prefills, c.decodes, **options) as running, create_channel(running.address) as channel:
        yield inference_pb2_grpc.InferenceStub(channel)


@contextlib.asynccontextmanager
async def _router(
    prefills: list[RunningWorker], decodes: list[RunningWorker], **options: Any
) -> AsyncIterator[RunningRouter]:
    """A router that has proved every worker."""
    config = RouterConfig(
        model="tracer",
        port=0,
        prefill_workers=tuple(each.address for each in prefills),
        decode_workers=tuple(each.address for each in decodes),
        **options,
    )
    async with serving(config, "router-0", open_text_model("tracer", None), StatusReporter(None)) as running:
        fleet, num_workers = running.fleet, len(prefills) + len(decodes)
        async with asyncio.timeout(LIMIT_S):
            while sum(each.is_proved for each in fleet.incarnations()) < num_workers:
                await fleet.change.wait()
        yield running


async def _start(stack: contextlib.AsyncExitStack, name: str, options: dict[str, Any]) -> RunningWorker:
    role = name.partition("-")[0]
    make = PrefillService if role == "prefill" else DecodeService
    worker = Worker(WorkerConfig(**options), role, name, StatusReporter(None), make)
    return await stack.enter_async_context(worker.serving())


@dataclass
class Gate:
    """A runner whose steps wait for the test."""

    inner: Runner
    is_open: threading.Event = field(default_factory=threading.Event)

    def run(self, batch: Batch) -> list[Sample]:
        self.is_open.wait()
        return self.inner.run(batch)


@contextlib.contextmanager
def held(worker: RunningWorker):  # type: ignore[no-untyped-def]
    """While open, the worker computes nothing."""
    gate = Gate(worker.step_loop.runner)
    worker.step_loop.runner = gate
    try:
        yield
    finally:
        worker.step_loop.runner = gate.inner
        gate.is_open.set()
