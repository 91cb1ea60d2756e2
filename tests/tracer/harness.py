"""Workers on real sockets in this process, and a client that does to them what a router does.

`cell()` starts a prefill and a decode worker (or one mixed worker) with the tracer as model and attaches a `Router`.
`Router.generate` serves a request from end to end; `prefill` and `decode` open the calls one by one, for tests that
interfere. `gated(worker)` makes a worker's steps wait for the test. `balanced(worker)` waits, at most a second, until
a worker holds nothing. Nothing here sleeps: what is waited for announces itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from decode_svc.service import DecodeService
from engine import tracer
from engine.batch import Batch, Runner, SampleRow
from engine.config import WorkerConfig
from engine.request import Sample, SamplingParams
from engine.worker import RunningWorker, Worker
from prefill_svc.service import PrefillService
from protos import inference_pb2, worker_pb2, worker_pb2_grpc
from runtime.rpc import create_channel
from runtime.status import StatusReporter

FINISHED, KV_LOST, EVICTED = worker_pb2.OUTCOME_FINISHED, worker_pb2.OUTCOME_KV_LOST, worker_pb2.OUTCOME_EVICTED
PROMPT = tuple(b"The baton passes from one runner to the next, and the crowd counts the steps they take together.")
LIMIT_S = 5.0
"""Nothing that a test waits for may take longer."""
ANSWER_LIMIT_S = 120.0
"""Nor any answer, of models that compute beside other tests."""


def expected(prompt: Sequence[int], num_tokens: int, **sampling: Any) -> list[int]:
    """What the tracer must say after `prompt`."""
    params = SamplingParams(**{"ignore_eos": True, **sampling})
    return tracer.expected_tokens(prompt, num_tokens, SampleRow(0, 0, params))


def attempt(prompt: Sequence[int] = PROMPT, outputs: Sequence[int] = (), **sampling: Any) -> worker_pb2.Attempt:
    """A complete attempt, as a router would send it; 8 tokens by default."""
    defaults: dict[str, Any] = {"top_p": 1.0, "repetition_penalty": 1.0, "max_tokens": 8, "ignore_eos": True}
    return worker_pb2.Attempt(
        attempt_id=secrets.token_bytes(16),
        request_id="test",
        prompt_token_ids=prompt,
        output_token_ids=outputs,
        sampling=inference_pb2.SamplingParams(**{**defaults, **sampling}),
        fingerprint="tracer",
    )


@dataclass
class Answer:
    """What a request came to."""

    tokens: list[int]
    record: worker_pb2.DecodeRunResponse
    prefill_cached: int = 0
    events: list[str] = field(default_factory=list)


class Stream:
    """A streaming call, read message by message; the library does not allow `read` and iteration on one call."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self.messages = aiter(call)

    async def next(self) -> Any:
        """The next message; StopAsyncIteration after the last."""
        return await asyncio.wait_for(anext(self.messages), LIMIT_S)

    async def rest(self) -> list[Any]:
        """All further messages; raises the call's error."""
        async with asyncio.timeout(LIMIT_S):
            return [message async for message in self.messages]

    async def code(self) -> grpc.StatusCode:
        """The status with which the call ends, whatever it sends before."""
        try:
            await self.rest()
        except grpc.aio.AioRpcError as error:
            return error.code()
        return grpc.StatusCode.OK

    def cancel(self) -> None:
        """Closes the call."""
        self.call.cancel()


class Client:
    """The stubs of one worker."""

    def __init__(self, worker: RunningWorker) -> None:
        self.running = worker
        self.channel = create_channel(worker.address)
        self.worker = worker_pb2_grpc.WorkerStub(self.channel)
        self.kv = worker_pb2_grpc.KVTransferStub(self.channel)
        self.prefill = worker_pb2_grpc.PrefillStub(self.channel)
        self.decode = worker_pb2_grpc.DecodeStub(self.channel)

    @property
    def epoch(self) -> int:
        return self.running.parts.identity.epoch

    def fetch(self, attempt_id: bytes, **changes: Any) -> Stream:
        """A Fetch call as a reader of equal layout makes it."""
        fields = {
            "attempt_id": attempt_id,
            "epoch": self.epoch,
            "transport": "grpc",
            "layout": self.running.parts.identity.layout.fingerprint,
        }
        return Stream(self.kv.Fetch(worker_pb2.FetchRequest(**{**fields, **changes})))

    async def release(self, attempt_id: bytes, num_tokens: int) -> worker_pb2.ReleaseResponse:
        """Release, as the reader of `num_tokens`."""
        request = worker_pb2.ReleaseRequest(attempt_id=attempt_id, epoch=self.epoch, num_tokens=num_tokens)
        return await self.kv.Release(request, timeout=LIMIT_S)


class Router:
    """Acts as a router towards a prefill and a decode worker."""

    def __init__(self, prefill: Client | None, decode: Client, router_id: str) -> None:
        self.p, self.d, self.router_id = prefill, decode, router_id
        self.tokens: defaultdict[bytes, dict[int, worker_pb2.DecodedToken]] = defaultdict(dict)
        self.num_messages = 0
        self._changed = asyncio.Condition()
        self._attached: asyncio.Task[None] | None = None

    async def attach(self) -> None:
        """Opens the token stream and returns when it stands."""
        stream = Stream(self.d.decode.Attach(worker_pb2.AttachRequest(router_id=self.router_id)))
        assert not (await stream.next()).attempts
        self._attached = asyncio.create_task(self._collect(stream))

    async def detach(self) -> None:
        """Gives the token stream up."""
        assert self._attached is not None
        self._attached.cancel()
        await asyncio.wait([self._attached])

    async def _collect(self, stream: Stream) -> None:
        try:
            while (message := await anext(stream.messages, None)) is not None:
                async with self._changed:
                    self.num_messages += 1
                    for entry in message.attempts:
                        for token in entry.tokens:
                            assert token.position not in self.tokens[entry.attempt_id], "a token came twice"
                            self.tokens[entry.attempt_id][token.position] = token
                    self._changed.notify_all()
        finally:
            stream.cancel()

    async def until_tokens(self, attempt_id: bytes, num_tokens: int) -> list[int]:
        """Waits until an attempt has that many new tokens; they must be without gaps."""
        async with asyncio.timeout(LIMIT_S), self._changed:
            await self._changed.wait_for(lambda: len(self.tokens[attempt_id]) >= num_tokens)
        got = self.tokens[attempt_id]
        positions = sorted(got)
        assert not positions or positions == list(range(positions[0], positions[0] + len(positions))), "a gap"
        return [got[position].token_id for position in positions]

    def source(self, **changes: Any) -> worker_pb2.KVSource:
        """The prefill worker as decode is told of it."""
        assert self.p is not None
        fields = {"worker_id": "prefill", "address": self.p.running.address, "epoch": self.p.epoch}
        return worker_pb2.KVSource(**{**fields, **changes})

    async def prefill(self, request: worker_pb2.Attempt) -> Stream:
        """Opens Prefill.Run and returns the call once it is accepted."""
        assert self.p is not None
        stream = Stream(self.p.prefill.Run(worker_pb2.PrefillRunRequest(attempt=request)))
        try:
            first = await stream.next()
        except asyncio.CancelledError:
            stream.cancel()
            raise
        assert first.WhichOneof("event") == "accepted"
        assert first.accepted.epoch == self.p.epoch
        return stream

    def decode(self, request: worker_pb2.Attempt, source: worker_pb2.KVSource | None = None) -> Any:
        """Opens Decode.Run."""
        return self.d.decode.Run(
            worker_pb2.DecodeRunRequest(attempt=request, router_id=self.router_id, source=source),
            timeout=ANSWER_LIMIT_S,
        )

    async def generate(self, request: worker_pb2.Attempt) -> Answer:
        """Serves an attempt from end to end."""
        if self.p is None:
            return await self._finish(request, self.decode(request))
        prefilling = await self.prefill(request)
        try:
            answer = await self._finish(request, self.decode(request, self.source()))
            for event in await prefilling.rest() if answer.record.outcome == FINISHED else ():
                answer.events.append(event.WhichOneof("event"))
                if answer.events[-1] == "first_token":
                    answer.prefill_cached = event.first_token.cached_tokens
            return answer
        finally:
            prefilling.cancel()

    async def _finish(self, request: worker_pb2.Attempt, decoding: Any) -> Answer:
        record = await decoding
        num_given = len(request.prompt_token_ids) + len(request.output_token_ids)
        tokens = await self.until_tokens(request.attempt_id, record.num_tokens - num_given)
        return Answer(tokens, record)


@dataclass
class Cell:
    """Two workers, or one mixed, and their router."""

    prefill: RunningWorker | None
    decode: RunningWorker
    p: Client
    d: Client
    router: Router
    stop_prefill: Callable[[], Awaitable[None]]
    """Ends the prefill worker before the others."""

    @property
    def workers(self) -> list[RunningWorker]:
        return [worker for worker in (self.prefill, self.decode) if worker is not None]

    async def balanced(self) -> None:
        """Waits until no worker holds anything."""
        for worker in self.workers:
            await balanced(worker)


def config(**changes: Any) -> WorkerConfig:
    """A small tracer worker."""
    defaults = {"model": "tracer", "num_kv_blocks": 256, "max_num_seqs": 32, "kv_block_size": 16, "chunk_size": 64}
    return WorkerConfig(**{**defaults, "trusted_transfer_network": True, **changes})


@contextlib.asynccontextmanager
async def cell(
    *, mixed: bool = False, prefill: dict[str, Any] | None = None, decode: dict[str, Any] | None = None, **both: Any
) -> AsyncIterator[Cell]:
    """Starts the workers: `both` configures all, `prefill` and `decode` one each."""
    async with contextlib.AsyncExitStack() as stack:
        status, first = StatusReporter(None), None
        first_stack = await stack.enter_async_context(contextlib.AsyncExitStack())
        if not mixed:
            worker = Worker(config(**{**both, **(prefill or {})}), "prefill", "prefill", status, PrefillService)
            first = await first_stack.enter_async_context(worker.serving())
        role = "mixed" if mixed else "decode"
        worker = Worker(config(**{**both, **(decode or {})}), role, role, status, DecodeService)
        second = await stack.enter_async_context(worker.serving())
        d = Client(second)
        p = Client(first) if first is not None else d
        router = Router(None if mixed else p, d, "router-1")
        await router.attach()
        try:
            yield Cell(first, second, p, d, router, first_stack.aclose)
        finally:
            await router.detach()
            for client in {p, d}:
                await client.channel.close()


async def balanced(worker: RunningWorker, limit_s: float = 1.0) -> None:
    """Waits until a worker reports, over the wire, that it holds nothing; then audits its pool."""
    async with create_channel(worker.address) as channel:
        reports = worker_pb2_grpc.WorkerStub(channel).Watch(worker_pb2.WatchRequest())
        last = None
        try:
            async with asyncio.timeout(limit_s):
                async for report in reports:
                    load = last = report.load
                    held = (load.pool.used, load.pool.accounted, load.num_leases, load.num_queued, load.num_running)
                    if held == (0, 0, 0, 0, 0) and worker.role.live_attempts() == 0:
                        break
        except TimeoutError:
            raise AssertionError(f"after {limit_s} s the worker still holds: {last}") from None
        finally:
            reports.cancel()
    pool = worker.parts.holdings.pool
    worker.parts.holdings.check()
    assert pool.num_free + pool.num_cached == pool.num_total
    assert worker.parts.holdings.host_pool.num_used == 0
    assert not worker.stepping.done()


class Gate:
    """A runner that runs each batch when the test says so."""

    def __init__(self, inner: Runner) -> None:
        self._inner = inner
        self._loop = asyncio.get_running_loop()
        self._permits = threading.Semaphore(0)
        self._arrivals: asyncio.Queue[Batch] = asyncio.Queue()
        self.is_open = False

    def run(self, batch: Batch) -> list[Sample]:
        self._loop.call_soon_threadsafe(self._arrivals.put_nowait, batch)
        if not self.is_open:
            self._permits.acquire()
        return self._inner.run(batch)

    async def arrival(self) -> Batch:
        """The next batch, now waiting at the gate."""
        return await asyncio.wait_for(self._arrivals.get(), LIMIT_S)

    @property
    def num_arrived(self) -> int:
        """Batches that came and were not taken by `arrival`."""
        return self._arrivals.qsize()

    def let_through(self) -> None:
        """Runs the batch that waits, or the next one."""
        self._permits.release()

    def open(self) -> None:
        """Lets everything through from now on."""
        self.is_open = True
        self._permits.release()


@contextlib.contextmanager
def gated(worker: RunningWorker) -> Iterator[Gate]:
    """A gate before a worker's runner."""
    gate = Gate(worker.step_loop.runner)
    worker.step_loop.runner = gate
    try:
        yield gate
    finally:
        gate.open()
        worker.step_loop.runner = gate._inner


async def code_of(call: Any) -> grpc.StatusCode:
    """The status with which a unary call ends."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK
