"""Workers that do what a test's script says, on real sockets: what no worker of ours does on purpose.

A script of Prefill.Run is an async generator over (worker, request), one of Decode.Run a coroutine; both may wait on
`worker.may_go_on`. Reports and the token stream are as a good worker's. `linked` is a router's link to such a worker,
over a wire that the test can cut.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Any
from unittest import mock

from wire import Wire, wire_to

import router.fleet
from kvstore.metadata.base import MetadataStore
from protos import inference_pb2, worker_pb2, worker_pb2_grpc
from router.answer import Answer
from router.attempts import Attempt
from router.fleet import Fleet, Probe
from router.links import Incarnation, WorkerLink
from router.model import open_text_model
from router.validation import PreparedRequest
from runtime.rpc import Server, time_remaining_s

PREFILL, DECODE = inference_pb2.WORKER_ROLE_PREFILL, inference_pb2.WORKER_ROLE_DECODE
MIXED = inference_pb2.WORKER_ROLE_MIXED
SERVING, DRAINING = inference_pb2.WORKER_STATE_SERVING, inference_pb2.WORKER_STATE_DRAINING
ROUTER_ID = "router-under-test"
PROMPT = tuple(b"prompt")
LIMIT_S = 8.0
TOKENIZER = open_text_model("tracer", None).tokenizer

PrefillScript = Callable[["FakeWorker", Any], AsyncIterator[worker_pb2.PrefillRunResponse]]
DecodeScript = Callable[["FakeWorker", Any], Awaitable[worker_pb2.DecodeRunResponse]]


class FakeWorker:
    """One worker."""

    def __init__(
        self,
        role: inference_pb2.WorkerRole,
        worker_id: str,
        prefill: PrefillScript | None = None,
        decode: DecodeScript | None = None,
        fingerprint: str = "tracer",
        layout: str = "layout",
    ) -> None:
        self.prefill_script, self.decode_script = prefill or good_prefill, decode or good_decode
        self.state = SERVING
        self.load = inference_pb2.WorkerLoad()
        self.epoch = secrets.randbits(63)
        self.may_go_on = asyncio.Event()
        """For scripts that wait for the test."""
        self.reached = asyncio.Event()
        """For scripts that tell the test where they are."""
        self.prefills: list[worker_pb2.PrefillRunRequest] = []
        self.decodes: list[worker_pb2.DecodeRunRequest] = []
        self.finishes: list[worker_pb2.FinishRequest] = []
        self.times_allowed_s: list[float | None] = []
        """What each Run call was given, as `time_remaining_s` sees it."""
        self.finished = asyncio.Event()
        self.num_open = 0
        """Run calls that have not ended."""
        self.idle = asyncio.Event()
        """Set while there are none."""
        self.idle.set()
        self.num_described = 0
        self.report_interval_s = 0.2
        self.attach_delay_s = 0.0
        """How long it takes to open the token stream."""
        self.description = worker_pb2.DescribeResponse(
            worker_id=worker_id,
            epoch=self.epoch,
            role=role,
            layout=layout,
            block_size=16,
            block_bytes=64,
            num_seats=64,
        )
        self.description.model.model = "tracer"
        self.description.model.fingerprint = fingerprint
        self.description.model.max_model_len = 4096
        self.description.model.vocab_size = 257
        self.description.model.eos_token_ids.append(256)
        self.streams: list[asyncio.Queue[worker_pb2.AttachResponse]] = []
        self.changed = asyncio.Event()
        self.server = Server()
        self.server.add(worker_pb2_grpc.add_PrefillServicer_to_server, _Prefill(self), "baton.v1.Prefill")
        self.server.add(worker_pb2_grpc.add_DecodeServicer_to_server, _Decode(self), "baton.v1.Decode")
        self.server.add(worker_pb2_grpc.add_WorkerServicer_to_server, _Worker(self), "baton.v1.Worker")

    @contextlib.contextmanager
    def open_call(self) -> Iterator[None]:
        """Counts a Run call."""
        self.num_open += 1
        self.idle.clear()
        try:
            yield
        finally:
            self.num_open -= 1
            if not self.num_open:
                self.idle.set()

    def report(self) -> None:
        """Sends a load report now."""
        self.changed.set()

    def emit(self, request: Any, *tokens: int, position: int | None = None) -> None:
        """Tokens on the Attach stream, the first at `position` (default: after all that the attempt came with)."""
        attempt = request.attempt
        if position is None:
            position = len(attempt.prompt_token_ids) + len(attempt.output_token_ids)
        decoded = [worker_pb2.DecodedToken(position=position + i, token_id=t) for i, t in enumerate(tokens)]
        entry = worker_pb2.AttemptTokens(attempt_id=attempt.attempt_id, tokens=decoded)
        for stream in self.streams:
            stream.put_nowait(worker_pb2.AttachResponse(attempts=[entry]))


class _Prefill(worker_pb2_grpc.PrefillServicer):
    def __init__(self, worker: FakeWorker) -> None:
        self.worker = worker

    async def Run(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.worker.prefills.append(request)
        self.worker.times_allowed_s.append(time_remaining_s(context))
        with self.worker.open_call():
            async with contextlib.aclosing(self.worker.prefill_script(self.worker, request)) as events:
                async for event in events:
                    yield event


class _Decode(worker_pb2_grpc.DecodeServicer):
    def __init__(self, worker: FakeWorker) -> None:
        self.worker = worker

    async def Run(self, request: Any, context: Any) -> Any:
        self.worker.decodes.append(request)
        self.worker.times_allowed_s.append(time_remaining_s(context))
        with self.worker.open_call():
            return await self.worker.decode_script(self.worker, request)

    async def Attach(self, request: Any, context: Any) -> AsyncIterator[Any]:
        stream: asyncio.Queue[worker_pb2.AttachResponse] = asyncio.Queue()
        self.worker.streams.append(stream)
        try:
            await asyncio.sleep(self.worker.attach_delay_s)
            yield worker_pb2.AttachResponse()
            while True:
                yield await stream.get()
        finally:
            self.worker.streams.remove(stream)

    async def Finish(self, request: Any, context: Any) -> Any:
        self.worker.finishes.append(request)
        self.worker.finished.set()
        return worker_pb2.FinishResponse()


class _Worker(worker_pb2_grpc.WorkerServicer):
    def __init__(self, worker: FakeWorker) -> None:
        self.worker = worker

    async def Describe(self, request: Any, context: Any) -> Any:
        self.worker.num_described += 1
        return self.worker.description

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:
        worker = self.worker
        while True:
            yield worker_pb2.WatchResponse(state=worker.state, epoch=worker.epoch, load=worker.load)
            worker.changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(worker.report_interval_s):
                    await worker.changed.wait()


def accepted(worker: FakeWorker) -> worker_pb2.PrefillRunResponse:
    """The first event of a good prefill."""
    return worker_pb2.PrefillRunResponse(accepted=worker_pb2.PrefillAccepted(epoch=worker.epoch))


def first_token(request: Any, token_id: int) -> worker_pb2.PrefillRunResponse:
    """The event with the token that follows the attempt's input."""
    position = len(request.attempt.prompt_token_ids) + len(request.attempt.output_token_ids)
    token = worker_pb2.DecodedToken(position=position, token_id=token_id)
    return worker_pb2.PrefillRunResponse(first_token=worker_pb2.PrefillFirstToken(token=token))


def finished(request: Any, num_new: int, **fields: Any) -> worker_pb2.DecodeRunResponse:
    """The record of an attempt that ended well after `num_new` tokens."""
    num_tokens = len(request.attempt.prompt_token_ids) + len(request.attempt.output_token_ids) + num_new
    defaults = {
        "outcome": worker_pb2.OUTCOME_FINISHED,
        "finish_reason": inference_pb2.FINISH_REASON_LENGTH,
        "num_tokens": num_tokens,
        "kv_bytes": 64,
    }
    return worker_pb2.DecodeRunResponse(**{**defaults, **fields})


def next_tokens(request: Any) -> list[int]:
    """What a good worker answers: the output is "abcdef..." up to max_tokens."""
    num_given = len(request.attempt.output_token_ids)
    return list(b"abcdefghijklmnopqrstuvwxyz"[num_given : request.attempt.sampling.max_tokens])


async def good_prefill(worker: FakeWorker, request: Any) -> AsyncIterator[worker_pb2.PrefillRunResponse]:
    """Accepts, computes, is released."""
    yield accepted(worker)
    yield first_token(request, next_tokens(request)[0])
    yield worker_pb2.PrefillRunResponse(finished=worker_pb2.PrefillFinished(intact=True))


async def good_decode(worker: FakeWorker, request: Any) -> worker_pb2.DecodeRunResponse:
    """Gives every token and the record."""
    tokens = next_tokens(request)
    worker.emit(request, *tokens)
    return finished(request, len(tokens))


@contextlib.asynccontextmanager
async def started(worker: FakeWorker) -> AsyncIterator[Wire]:
    """Serves a worker; the wire is the way to it."""
    port = await worker.server.start("127.0.0.1", 0)
    try:
        async with wire_to(f"127.0.0.1:{port}") as wire:
            yield wire
    finally:
        await worker.server.stop(0)


@contextlib.asynccontextmanager
async def linked(worker: FakeWorker, silence_s: float = 2.0) -> AsyncIterator[tuple[Incarnation, Wire]]:
    """A worker, as a router that has heard it sees it, and the wire between them."""
    changed = asyncio.Event()
    async with started(worker) as wire:
        link = WorkerLink(wire.address, ROUTER_ID, silence_s, lambda _: True, changed.set)
        running = asyncio.create_task(link.run())
        try:
            async with asyncio.timeout(LIMIT_S):
                while link.current is None or not link.current.is_serving:
                    await changed.wait()
                    changed.clear()
            yield link.current, wire
        finally:
            running.cancel()
            await asyncio.wait([running])


def request_of(num_tokens: int = 6, stops: Sequence[str] = (), **fields: Any) -> PreparedRequest:
    """A validated request."""
    sampling = inference_pb2.SamplingParams(max_tokens=num_tokens, ignore_eos=True, min_tokens=fields.pop("min", 0))
    defaults: dict[str, Any] = {
        "request_id": "request",
        "prompt_token_ids": PROMPT,
        "sampling": sampling,
        "stops": tuple(stops),
        "include_stop": False,
        "priority": inference_pb2.PRIORITY_NORMAL,
        "session_id": "",
        "seed": 7,
    }
    return PreparedRequest(**{**defaults, **fields})


def answer_of(num_tokens: int = 6, stops: Sequence[str] = (), **fields: Any) -> Answer:
    """An empty answer to such a request."""
    return Answer(request_of(num_tokens, stops, **fields), TOKENIZER, time.monotonic())


def attempt_of(answer: Answer, decode: Incarnation, prefill: Incarnation | None) -> Attempt:
    """One try."""
    return Attempt(answer, decode, prefill, 0, router_id=ROUTER_ID)


async def crosses(decode: Incarnation, prefill: Incarnation | None) -> None:
    """A probe that always crosses."""


class Seen:
    """A fleet over fake workers, and the wires to them in the order of the workers."""

    def __init__(self, wires: list[Wire]) -> None:
        self.wires = wires
        self.num_changes = 0
        self.fleet: Fleet

    async def until(self, condition: Callable[[Fleet], bool]) -> None:
        """Waits until the fleet looks so."""
        async with asyncio.timeout(LIMIT_S):
            while not condition(self.fleet):
                await self.fleet.change.wait()

    def named(self, worker_id: str) -> Incarnation:
        """The worker of that name."""
        (found,) = [worker for worker in self.fleet.incarnations() if worker.worker_id == worker_id]
        return found

    def usable_ids(self) -> set[str]:
        """Names of all workers that get requests."""
        return {worker.worker_id for decodes in (True, False) for worker in self.fleet.usable(decodes=decodes)}


@contextlib.asynccontextmanager
async def fleet_over(
    *workers: FakeWorker,
    probe: Probe = crosses,
    silence_s: float = 2.0,
    store: MetadataStore | None = None,
    static: bool = True,
    grace_s: float = 0.0,
) -> AsyncIterator[Seen]:
    """A running fleet that is told of all `workers`, or of none unless `static`. A decode worker is proved alone once
    `grace_s` have passed."""
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(mock.patch.object(router.fleet, "PREFILL_GRACE_S", grace_s))
        seen = Seen([await stack.enter_async_context(started(worker)) for worker in workers])

        def count() -> None:
            seen.num_changes += 1

        addresses = [wire.address for wire in seen.wires] if static else []
        seen.fleet = Fleet(ROUTER_ID, "tracer", addresses, store, silence_s, probe, count)
        running = asyncio.create_task(seen.fleet.run())
        try:
            yield seen
        finally:
            running.cancel()
            await asyncio.wait([running])
