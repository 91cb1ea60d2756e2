"""A router, its workers and their clients, all real, over an in-memory network and a virtual clock.

`System` starts, ends and restarts them and says what they still hold; `Ask` is one request and what may come of it.
The only things replaced are the sockets (`memory_network`), the clock and threads (`virtual_loop`).
"""

from __future__ import annotations

import asyncio
import functools
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
from memory_calls import Channel
from memory_network import Network
from virtual_loop import Process
from what_is_held import router_holds, worker_holds

from decode_svc.service import DecodeService
from engine import tracer
from engine.batch import SampleRow
from engine.config import WorkerConfig
from engine.request import SamplingParams
from engine.worker import RunningWorker, Worker
from prefill_svc.service import PrefillService
from protos import inference_pb2, inference_pb2_grpc
from router.config import RouterConfig
from router.model import TextModel, open_text_model
from router.process import serving
from runtime.status import StatusReporter

STREAMS = ("Watch", "Attach")
"""Calls that last as long as the peers."""
START_LIMIT_S = 60.0
MAX_TRIES = 30
NOT_READY = "no decode worker is ready"
"""What a router says to a new request then; a client asks again after a second, so many times."""


class Violation(AssertionError):
    """Something that must never be."""


@dataclass(frozen=True, slots=True)
class Size:
    """What is started."""

    num_prefill: int = 2
    """Prefill workers."""
    num_decode: int = 2
    """Decode workers."""
    prefill: dict[str, Any] = field(default_factory=dict)
    """Configuration of the prefill workers that differs from the smallest."""
    decode: dict[str, Any] = field(default_factory=dict)
    """Configuration of the decode workers that differs from the smallest."""
    router: dict[str, Any] = field(default_factory=dict)
    """Configuration of the router that differs from the default."""
    has_probes: bool = True
    """Whether workers are proved by real probes; without, a run costs half."""


ROUTER: dict[str, Any] = {"worker_wait_s": 20.0}
WORKER: dict[str, Any] = {
    "model": "tracer",
    "kv_block_size": 2,
    "num_kv_blocks": 32,
    "max_num_seqs": 4,
    "max_num_tokens": 8,
    "chunk_size": 4,
    "kv_shared_memory_dir": "none",
    "kv_transports": ("grpc",),
    "kv_lease_ttl_s": 5.0,
}


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of a client."""

    prompt: bytes = b"abcde"
    """What is asked."""
    num_tokens: int = 2
    """Tokens wanted."""
    stop: str = ""
    """A stop string; none if empty."""
    priority: inference_pb2.Priority = inference_pb2.PRIORITY_NORMAL
    """Its class."""
    timeout_s: float | None = None
    """The client's deadline."""
    delay_s: float = 0.0
    """When it comes."""
    session_id: str = ""
    """Whose turn it is; none if empty."""

    def expected(self) -> tuple[list[int], str]:
        """The right answer: tokens and text."""
        params = SamplingParams(temperature=0.0, ignore_eos=True)
        tokens = tracer.expected_tokens(self.prompt, self.num_tokens, SampleRow(0, 0, params))
        text = bytes(token for token in tokens if token < 256).decode()
        if self.stop and self.stop in text:
            end = text.index(self.stop)
            return tokens[: end + len(self.stop)], text[:end]
        return tokens, text

    def message(self) -> inference_pb2.GenerateRequest:
        """As it is sent."""
        sampling = inference_pb2.SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=self.num_tokens)
        if self.stop:
            sampling.stop.append(self.stop)
        return inference_pb2.GenerateRequest(
            prompt_token_ids=self.prompt, sampling=sampling, priority=self.priority, session_id=self.session_id
        )


@dataclass(slots=True)
class Reply:
    """What a client has so far, checked message by message."""

    ask: Ask
    """What it asked."""
    tokens: list[int] = field(default_factory=list)
    """Tokens that came."""
    text: str = ""
    """Text that came."""
    finish: inference_pb2.Finish | None = None
    """The last message's record."""
    code: grpc.StatusCode | None = None
    """How it ended; None while it has not."""
    details: str = ""
    """What the error says."""
    call: Any = None
    """The call, once it is open."""

    def take(self, message: inference_pb2.GenerateResponse) -> None:
        """Raises Violation for anything that is not the oracle's."""
        tokens, text = self.ask.expected()
        for token in message.tokens:
            if token.index != len(self.tokens):
                raise Violation(f"token {token.index} came to the client where {len(self.tokens)} was due")
            self.tokens.append(token.token_id)
        self.text += message.text
        if self.tokens != tokens[: len(self.tokens)] or not text.startswith(self.text):
            raise Violation(f"the client got {self.tokens} {self.text!r}, the answer is {tokens} {text!r}")
        if message.HasField("finish"):
            self.finish = message.finish

    def check(self, may_fail: bool) -> None:
        """The whole answer came, or an error that the client's own deadline, or what `may_fail`, explains."""
        tokens, text = self.ask.expected()
        if self.code is grpc.StatusCode.DEADLINE_EXCEEDED and self.ask.timeout_s is not None:
            return
        if self.code is grpc.StatusCode.ABORTED and self.ask.session_id and "has a turn that" in self.details:
            return  # others of its session were before it, for too long
        if self.code is grpc.StatusCode.OK:
            if self.finish is None or (self.tokens, self.text) != (tokens, text):
                raise Violation(f"the answer ended with {self.tokens} {self.text!r}, it is {tokens} {text!r}")
        elif not may_fail:
            raise Violation(f"the client got {self.code}: {self.details}")


@dataclass(slots=True)
class Node:
    """One life of one process of the system."""

    name: str
    process: Process
    running: Any
    """RunningWorker or RunningRouter."""
    life: asyncio.Task[None]
    """Ends when the process has ended."""
    told: asyncio.Event
    """Set to end it in order."""


class System:
    """See the module."""

    def __init__(self, network: Network, size: Size) -> None:
        self.network, self.size = network, size
        self.loop = network.loop
        self.nodes: dict[str, Node] = {}
        """By name, those that live."""
        self.chores: set[asyncio.Task[None]] = set()
        """Ends and restarts that are under way."""
        self.replies: list[Reply] = []
        names = [f"prefill-{i}" for i in range(size.num_prefill)] + [f"decode-{i}" for i in range(size.num_decode)]
        self._ports = {name: 7000 + i for i, name in enumerate([*names, "router", "client"])}
        self.worker_names = names
        self.client = network.start_process("client", self.address("client"))
        self.gone: set[str] = set()
        """Workers that ended for good."""
        self._is_ending = False

    def address(self, name: str) -> str:
        """Where it is reached."""
        return f"127.0.0.1:{self._ports[name]}"

    def name_of(self, address: str) -> str:
        """Who is reached there."""
        (name,) = [name for name in self._ports if self.address(name) == address]
        return name

    async def start(self) -> None:
        """Starts everything and waits until the router has proved all workers."""
        for name in self.worker_names:
            await self.start_node(name)
        await self.start_node("router")
        async with asyncio.timeout(START_LIMIT_S):
            while not self.is_whole():
                await self.nodes["router"].running.fleet.change.wait()

    def is_whole(self) -> bool:
        """Whether every worker is proved at the router."""
        router = self.nodes["router"].running
        usable = {worker.worker_id for decodes in (True, False) for worker in router.fleet.usable(decodes=decodes)}
        return usable == set(self.worker_names) - self.gone

    # Lives

    async def start_node(self, name: str) -> None:
        """Starts a worker or the router; returns when it listens."""
        process = self.network.start_process(name, self.address(name))
        started: asyncio.Future[Any] = self.loop.create_future()
        told = asyncio.Event()
        life = process.spawn(self._live(name, started, told))
        self.nodes[name] = Node(name, process, await started, life, told)

    async def _live(self, name: str, started: asyncio.Future[Any], told: asyncio.Event) -> None:
        async with self._serving(name) as running:
            started.set_result(running)
            ending = asyncio.ensure_future(told.wait())
            work = running.stepping if isinstance(running, RunningWorker) else running.watching
            try:
                await asyncio.wait([ending, work], return_when=asyncio.FIRST_COMPLETED)
            finally:
                ending.cancel()
            if work.done():
                self.loop.errors.append(f"{name} ended by itself: {work.exception()!r}")

    def _serving(self, name: str) -> AbstractAsyncContextManager[Any]:
        role, port = name.partition("-")[0], self._ports[name]
        if role == "router":
            addresses = {
                f"{pool}_workers": tuple(self.address(each) for each in self.worker_names if each.startswith(pool))
                for pool in ("prefill", "decode")
            }
            config = RouterConfig(model="tracer", port=port, **addresses, **{**ROUTER, **self.size.router})
            return serving(config, "router-0", _text_model(), StatusReporter(None))
        changes = self.size.prefill if role == "prefill" else self.size.decode
        make = PrefillService if role == "prefill" else DecodeService
        return Worker(
            WorkerConfig(port=port, **{**WORKER, **changes}), role, name, StatusReporter(None), make
        ).serving()

    def crash(self, name: str, silent: bool = False, restart_s: float | None = 0.5) -> None:
        """A process dies now; after `restart_s` (None: never) another one stands in its place."""
        node = self.nodes.pop(name, None)
        if node is not None:
            self.network.crash(node.process, silent)
            self._do(self._replace(node, restart_s))

    def drain(self, name: str, timeout_s: float, restart_s: float | None = 0.5) -> None:
        """A worker is told to stop in order, as by SIGTERM."""
        node = self.nodes.get(name)
        if node is not None and not node.running.service.is_draining:
            self._do(self._end(node, timeout_s, restart_s))

    async def _end(self, node: Node, timeout_s: float, restart_s: float | None) -> None:
        await asyncio.wait([node.process.spawn(node.running.service.drain(timeout_s))])
        node.told.set()
        await asyncio.wait([node.life])
        if self.nodes.get(node.name) is node:
            del self.nodes[node.name]
            self.network.crash(node.process)
            await self._replace(node, restart_s)

    async def _replace(self, node: Node, restart_s: float | None) -> None:
        if restart_s is None:
            self.gone.add(node.name)
        elif not self._is_ending:
            await asyncio.sleep(restart_s)
            await self.start_node(node.name)

    def _do(self, chore: Any) -> None:
        task = self.loop.create_task(chore)
        self.chores.add(task)
        task.add_done_callback(self.chores.discard)

    async def stop(self) -> None:
        """Ends what lives, the router first."""
        self._is_ending = True
        if self.chores:
            await asyncio.wait(list(self.chores))
        for name in ["router", *self.worker_names]:
            node = self.nodes.get(name)
            if node is not None:
                node.told.set()
                await asyncio.wait([node.life])

    # Requests

    async def ask(self, ask: Ask) -> Reply:
        """Asks as a client; returns however it ends."""
        reply = Reply(ask)
        self.replies.append(reply)
        await self.client.spawn(self._ask(ask, reply))
        return reply

    async def _ask(self, ask: Ask, reply: Reply) -> None:
        await asyncio.sleep(ask.delay_s)
        async with Channel(self.network, self.client, self.address("router")) as channel:
            stub: Any = inference_pb2_grpc.InferenceStub(channel)
            for _ in range(MAX_TRIES):
                reply.call = stub.Generate(ask.message(), timeout=ask.timeout_s)
                try:
                    while (message := await reply.call.read()) is not grpc.aio.EOF:
                        reply.take(message)
                    reply.code = grpc.StatusCode.OK
                except grpc.aio.AioRpcError as error:
                    reply.code, reply.details = error.code(), error.details() or ""
                    if reply.details == NOT_READY and not reply.tokens:
                        await asyncio.sleep(1.0)
                        continue
                except asyncio.CancelledError:
                    if not reply.call.is_over:
                        raise
                    reply.code = grpc.StatusCode.CANCELLED
                return

    # What is held

    def accounts(self) -> None:
        """Raises Violation if a worker's pool has given out what no sequence accounts for. Holds at every moment."""
        for node in self.nodes.values():
            if isinstance(node.running, RunningWorker):
                holdings = node.running.parts.holdings
                if holdings.pool.num_used != holdings.num_accounted:
                    text = f"{holdings.pool.num_used} blocks are used, {holdings.num_accounted} accounted for"
                    raise Violation(f"{node.name}: {text}")

    def held(self) -> list[str]:
        """What somebody still holds or does for requests; empty when all is over and everyone is back."""
        found = [f"{task!r}" for task in self.chores]
        found += [f"call {call.name}" for call in self.network.calls if call.name[2].split("/")[1] not in STREAMS]
        for name in (*self.worker_names, "router"):
            node = self.nodes.get(name)
            if node is None and name not in self.gone:
                found.append(f"{name} is not there")
            elif node is not None:
                found += [
                    f"{name}: {text}" for text in (router_holds if name == "router" else worker_holds)(node.running)
                ]
        if "router" in self.nodes and not self.is_whole():
            found.append("the router has not proved every worker")
        return found

    def audit(self) -> None:
        """The last look at the pools, when nothing is held."""
        for node in self.nodes.values():
            if isinstance(node.running, RunningWorker):
                holdings = node.running.parts.holdings
                holdings.check()
                if holdings.pool.num_free + holdings.pool.num_cached != holdings.pool.num_total:
                    raise Violation(f"{node.name}: blocks are missing: {holdings.pool!r}")


@functools.cache
def _text_model() -> TextModel:
    return open_text_model("tracer", None)
