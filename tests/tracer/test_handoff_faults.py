"""Handoffs that go wrong: what must never be answered, and that nobody keeps blocks for it."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from harness import (
    FINISHED,
    KV_LOST,
    LIMIT_S,
    PROMPT,
    Cell,
    Client,
    Router,
    Stream,
    attempt,
    cell,
    config,
    expected,
    gated,
)
from transports_here import TRANSPORTS

from engine.kv_reader import check_name
from engine.worker import Worker
from kvstore.transport import grpc as grpc_transport
from kvstore.transport import mooncake as mooncake_transport
from kvstore.transport import shm as shm_transport
from kvstore.transport.base import OwnerUnreachable
from prefill_svc.service import PrefillService
from protos import worker_pb2, worker_pb2_grpc
from runtime.rpc import Server
from runtime.status import StatusReporter

LONG = (PROMPT * 3)[:250]
READERS = {"shm": shm_transport.Reader, "grpc": grpc_transport.Reader, "mooncake": mooncake_transport.Reader}
Code = grpc.StatusCode


# An owner that lies, stands between a decode worker and the true one


class FalseOwner(worker_pb2_grpc.KVTransferServicer, worker_pb2_grpc.WorkerServicer):
    """Passes everything on to a true owner and changes what a test says."""

    def __init__(self, c: Cell) -> None:
        self._c = c
        self.describe: Callable[[worker_pb2.DescribeResponse], Any] = lambda _: None
        self.frame: Callable[[worker_pb2.FetchResponse], Any] = lambda _: None
        self.release: Callable[[worker_pb2.ReleaseResponse], Any] = lambda _: None
        self.release_request: Callable[[worker_pb2.ReleaseRequest], Any] = lambda _: None
        self.num_frames: int | None = None
        self.on_frame: Callable[[], Any] | None = None
        self.num_releases = 0

    async def Describe(self, request: Any, context: Any) -> Any:
        answer = await self._c.p.worker.Describe(request)
        self.describe(answer)
        return answer

    async def Fetch(self, request: Any, context: Any) -> Any:
        count = 0
        async for frame in self._c.p.kv.Fetch(request):
            if count == self.num_frames:
                return
            self.frame(frame)
            yield frame
            count += 1
            if self.on_frame is not None:
                await self.on_frame()

    async def Release(self, request: Any, context: Any) -> Any:
        self.num_releases += 1
        self.release_request(request)
        answer = await self._c.p.kv.Release(request)
        self.release(answer)
        return answer


async def answer_through(c: Cell, owner: FalseOwner, prompt: tuple[int, ...] = LONG) -> worker_pb2.DecodeRunResponse:
    """The final record of an attempt whose KV comes through `owner`; checks that nothing leaks."""
    server = Server()
    server.add(worker_pb2_grpc.add_KVTransferServicer_to_server, owner, "baton.v1.KVTransfer")
    server.add(worker_pb2_grpc.add_WorkerServicer_to_server, owner, "baton.v1.Worker")
    port = await server.start("127.0.0.1", 0)
    request = attempt(prompt)
    try:
        prefilling = await c.router.prefill(request)
        source = c.router.source(address=f"127.0.0.1:{port}")
        record = await asyncio.wait_for(c.router.decode(request, source), LIMIT_S)
        if record.outcome == FINISHED:
            assert await c.router.until_tokens(request.attempt_id, 8) == expected(prompt, 8)
        else:
            assert not c.router.tokens[request.attempt_id], "tokens from doubtful KV"
            assert record.detail
            prefilling.cancel()
        await c.balanced()
        return record
    finally:
        await server.stop(0)


def _flip(frame: worker_pb2.FetchResponse) -> None:
    data = bytearray(frame.data)
    data[len(data) // 2] ^= 1
    frame.data = bytes(data)


def _wrong_first_position(answer: worker_pb2.ReleaseResponse) -> None:
    answer.first_token.position += 1


def _repeat(frame: worker_pb2.FetchResponse) -> None:
    # Before the first there is none; all may come in one frame, when the first is the only one to lie about.
    frame.first_block = frame.first_block - 1 if frame.first_block else len(frame.block_ids)


BLOCKS, COUNT, LEASE = worker_pb2.KV_CHECK_BLOCKS, worker_pb2.KV_CHECK_COUNT, worker_pb2.KV_CHECK_LEASE
EPOCH, LAYOUT, CHECKSUM = worker_pb2.KV_CHECK_EPOCH, worker_pb2.KV_CHECK_LAYOUT, worker_pb2.KV_CHECK_CHECKSUM
REACHABLE = worker_pb2.KV_CHECK_REACHABLE
LIES: dict[str, tuple[str, Callable[[Any], Any], worker_pb2.KVCheck]] = {
    "a bit flipped": ("frame", _flip, CHECKSUM),
    "bytes missing": ("frame", lambda frame: setattr(frame, "data", frame.data[:-1]), BLOCKS),
    "no bytes": ("frame", lambda frame: setattr(frame, "data", b""), BLOCKS),
    "a block skipped": ("frame", lambda frame: setattr(frame, "first_block", frame.first_block + 1), BLOCKS),
    "a block repeated": ("frame", _repeat, BLOCKS),
    "blocks too many": ("frame", lambda frame: frame.block_ids.extend(range(99)), BLOCKS),
    "another checksum": ("release", lambda answer: setattr(answer, "checksum", answer.checksum ^ 1), CHECKSUM),
    "another epoch": ("release", lambda answer: setattr(answer, "epoch", answer.epoch ^ 1), EPOCH),
    "another count": ("release", lambda answer: setattr(answer, "num_tokens", answer.num_tokens - 1), COUNT),
    "not intact": ("release", lambda answer: setattr(answer, "intact", False), LEASE),
    "no first token": ("release", lambda answer: answer.ClearField("first_token"), COUNT),
    "first token elsewhere": ("release", _wrong_first_position, COUNT),
    "described epoch": ("describe", lambda answer: setattr(answer, "epoch", answer.epoch ^ 1), EPOCH),
    "described layout": ("describe", lambda answer: setattr(answer, "layout", "other"), LAYOUT),
    "no transport": ("describe", lambda answer: answer.ClearField("transports"), LAYOUT),
    "told another count": ("release_request", lambda request: setattr(request, "num_tokens", 3), LEASE),
}


@pytest.mark.parametrize("lie", LIES)
async def test_kv_that_is_not_attested_is_never_answered_from(lie):
    """And the record says which check failed, as the worker's counters do."""
    async with cell(kv_transports=("grpc",), chunk_size=16, max_num_tokens=32) as c:
        owner = FalseOwner(c)
        where, change, check = LIES[lie]
        setattr(owner, where, change)
        record = await answer_through(c, owner)
        assert (record.outcome, record.failed_check) == (KV_LOST, check)
        load = c.decode.role.load()
        assert dict(load.handoffs_lost) == {check_name(check): 1} and load.num_handoffs_lost == 1
        # The same bytes, told truly, are good: the lie was the reason.
        record = await answer_through(c, FalseOwner(c))
        assert (record.outcome, record.failed_check) == (FINISHED, worker_pb2.KV_CHECK_UNSPECIFIED)


async def test_a_stream_that_ends_early_is_not_believed():
    async with cell(kv_transports=("grpc",), chunk_size=16, max_num_tokens=32) as c:
        owner = FalseOwner(c)
        owner.num_frames = 1
        assert (await answer_through(c, owner)).outcome == KV_LOST
        assert owner.num_releases == 1, "the owner was told that the reader gives up"


async def test_an_owner_that_dies_between_frames():
    async with cell(chunk_size=16, max_num_tokens=32, kv_transports=("grpc",)) as c:
        request = attempt(LONG)
        with gated(c.prefill) as gate:
            prefilling = await c.router.prefill(request)
            decoding = c.router.decode(request, c.router.source())
            await gate.arrival()
            gate.let_through()
            await gate.arrival()
            gate.open()
            await c.prefill.server.stop(0)
            record = await asyncio.wait_for(decoding, LIMIT_S)
        assert record.outcome == KV_LOST and "prefill" in record.detail
        assert await prefilling.code() is not Code.OK
        assert not c.router.tokens[request.attempt_id]


async def test_an_owner_that_does_not_exist():
    async with cell() as c:
        record = await asyncio.wait_for(
            c.router.decode(attempt(), c.router.source(address="127.0.0.1:1", worker_id="ghost")), LIMIT_S
        )
        assert record.outcome == KV_LOST and "ghost" in record.detail
        assert record.failed_check == REACHABLE
        await c.balanced()


async def test_an_owner_of_another_epoch_or_without_the_attempt():
    async with cell() as c:
        request = attempt()
        await c.router.prefill(request)
        record = await c.router.decode(request, c.router.source(epoch=c.p.epoch + 1))
        assert (record.outcome, record.failed_check) == (KV_LOST, EPOCH)
        record = await c.router.decode(attempt(), c.router.source())
        assert (record.outcome, record.failed_check) == (KV_LOST, LEASE)
        assert (await c.router.decode(request, c.router.source())).outcome == FINISHED, "the true attempt is unhurt"
        await c.balanced()


def read_only_mappings(path: str) -> int:
    """How often this process maps a file as a reader does; owners map theirs for writing."""
    return sum(path in line and " r--s " in line for line in Path("/proc/self/maps").read_text().splitlines())


async def test_an_owner_that_starts_again_is_found_and_its_old_memory_let_go():
    """peers.md #32; a mapping that stays would keep the dead process's pool in memory."""
    async with cell() as c:
        assert (await c.router.generate(attempt())).record.outcome == FINISHED
        old_file = str(c.prefill.parts.memory.shared_path)
        port = c.prefill.address.rpartition(":")[2]
        for same_port in (True, False):
            settings = config(port=int(port) if same_port else 0)
            worker = Worker(settings, "prefill", "new", StatusReporter(None), PrefillService)
            await c.stop_prefill()
            async with worker.serving() as again:
                client = Client(again)
                router = Router(client, c.d, f"router-{same_port}")
                await router.attach()
                assert (await router.generate(attempt(LONG))).tokens == expected(LONG, 8)
                gc.collect()
                assert await asyncio.to_thread(read_only_mappings, str(again.parts.memory.shared_path)) == 1
                assert await asyncio.to_thread(read_only_mappings, old_file) == 0
                await router.detach()
                await client.channel.close()
                old_file = str(again.parts.memory.shared_path)


async def test_layouts_that_differ_are_refused():
    async with cell(prefill={"kv_block_size": 8}) as c:
        request = attempt()
        prefilling = await c.router.prefill(request)
        record = await c.router.decode(request, c.router.source())
        assert record.outcome == KV_LOST and "layout" in record.detail and record.failed_check == LAYOUT
        prefilling.cancel()
        await c.balanced()


async def test_a_reader_slower_than_the_lease_gets_nothing_attested():
    """peers.md #18: the owner's blocks are someone else's by the time the bytes are counted."""
    arrived, proceed = asyncio.Event(), asyncio.Event()
    async with cell(kv_transports=("grpc",), kv_lease_ttl_s=0.1) as c:
        owner = FalseOwner(c)

        async def hold() -> None:
            arrived.set()
            await proceed.wait()

        owner.on_frame = hold
        server_side = asyncio.create_task(answer_through(c, owner))
        await asyncio.wait_for(arrived.wait(), LIMIT_S)
        async with asyncio.timeout(LIMIT_S):
            while len(c.prefill.parts.leases):
                reports = c.p.worker.Watch(worker_pb2.WatchRequest())
                await reports.read()
                await reports.read()
                reports.cancel()
        proceed.set()
        assert (await server_side).outcome == KV_LOST


async def test_a_copy_that_fails_here_ends_the_attempt(monkeypatch):
    """An error nobody thought of must not leave an attempt fetching for ever."""

    def fail(*_: Any) -> int:
        raise ZeroDivisionError("nobody thought of this")

    async with cell(kv_transports=("grpc",)) as c:
        monkeypatch.setattr(grpc_transport.Reader, "receive", fail)
        request = attempt()
        prefilling = await c.router.prefill(request)
        record = await asyncio.wait_for(c.router.decode(request, c.router.source()), LIMIT_S)
        assert record.outcome == KV_LOST and "nobody thought of this" in record.detail
        assert record.failed_check == worker_pb2.KV_CHECK_READER
        prefilling.cancel()
        await c.balanced()


async def test_an_owner_whose_memory_cannot_be_read_is_out_of_reach(monkeypatch):
    """Though its calls answer: the count of what was lost says where to look."""

    def fail(*_: Any) -> int:
        raise OwnerUnreachable("nothing moves")

    async with cell(kv_transports=("grpc",)) as c:
        monkeypatch.setattr(grpc_transport.Reader, "receive", fail)
        record = await answer_through(c, FalseOwner(c))
        assert (record.outcome, record.failed_check) == (KV_LOST, REACHABLE) and "nothing moves" in record.detail


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_blocks_are_not_freed_under_a_copy_that_cannot_be_stopped(transport, monkeypatch):
    """Cancelled while a thread writes: whoever got the blocks next would find foreign bytes in them."""
    entered, proceed, loop = asyncio.Event(), threading.Event(), asyncio.get_running_loop()
    reader_class = READERS[transport]
    receive = reader_class.receive

    def slow(*arguments: Any) -> int:
        loop.call_soon_threadsafe(entered.set)
        proceed.wait(LIMIT_S)
        return receive(*arguments)

    async with cell(kv_transports=(transport,)) as c:
        monkeypatch.setattr(reader_class, "receive", slow)
        request = attempt(LONG)
        prefilling = await c.router.prefill(request)
        decoding = c.router.decode(request, c.router.source())
        await asyncio.wait_for(entered.wait(), LIMIT_S)
        decoding.cancel()
        reports = Stream(c.d.worker.Watch(worker_pb2.WatchRequest()))
        while (load := (await reports.next()).load).num_running:
            pass
        reports.cancel()
        assert load.pool.used == load.pool.accounted == c.decode.parts.holdings.num_blocks(len(LONG) + 1)
        proceed.set()
        assert not (await prefilling.rest())[-1].finished.intact, "the owner was left to its lease's end"
        await c.balanced()
        assert (await c.router.generate(attempt(LONG))).tokens == expected(LONG, 8)
