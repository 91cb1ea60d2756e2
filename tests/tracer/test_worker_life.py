"""A worker from configuration to its end: bad configuration, memory that runs out, broken accounts, SIGTERM."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import grpc
import pytest
from harness import (
    EVICTED,
    FINISHED,
    LIMIT_S,
    PROMPT,
    Client,
    Router,
    Stream,
    attempt,
    cell,
    code_of,
    config,
    expected,
    gated,
)

from decode_svc.service import DecodeService
from engine.worker import RunningWorker, Worker
from kvstore.memory import PoolMemoryFull
from prefill_svc.service import PrefillService
from protos import worker_pb2
from runtime.errors import BatonError, ConfigError
from runtime.status import END_GRACE_S, Report, StatusReporter, parse_report

LONG = (PROMPT * 40)[:3000]


class Process:
    """A worker that runs as its process would, with its status line read by the test."""

    def __init__(self, **changes: Any) -> None:
        self._read, self._write = os.pipe()
        self.running: RunningWorker
        self.roles: list[Any] = []
        self.limits_s: list[float] = []
        """Within which it is to end, as it says that."""
        worker = Worker(config(**changes), "mixed", "w", StatusReporter(self._write), self._make, self.limits_s.append)
        self.ended = asyncio.create_task(worker.run())
        self._lines = os.fdopen(self._read)

    def _make(self, parts: Any) -> DecodeService:
        self.roles.append(DecodeService(parts))
        return self.roles[-1]

    async def until(self, state: str) -> Report:
        """The next report of that state."""
        async with asyncio.timeout(LIMIT_S):
            while (report := parse_report(await asyncio.to_thread(self._lines.readline))).state != state:
                pass
        return report

    def close(self) -> None:
        os.close(self._write)
        self._lines.close()


async def test_sigterm_ends_an_idle_worker_with_0():
    process = Process(drain_timeout_s=50.0)
    address = (await process.until("listening")).address
    assert address.startswith("127.0.0.1:")
    await process.until("ready")
    os.kill(os.getpid(), signal.SIGTERM)
    await process.until("draining")
    assert await asyncio.wait_for(process.ended, LIMIT_S) == 0
    assert process.limits_s == [50 + END_GRACE_S, END_GRACE_S], "time that the drain did not need is not for the end"
    process.close()


async def test_broken_accounts_end_the_worker_loudly():
    """Failure table: pool accounting broken."""
    process = Process()
    await process.until("ready")
    role = process.roles[0]
    role._parts.holdings.pool.allocate(1)
    role._step_loop.wake()
    report = await process.until("failed")
    assert "none is accounted for" in report.error
    assert await asyncio.wait_for(process.ended, LIMIT_S) == 70
    process.close()


async def test_sigterm_gives_back_what_does_not_end_in_time():
    async with cell(mixed=True) as c:
        request = attempt(max_tokens=200)
        with gated(c.decode) as gate:
            decoding = c.router.decode(request)
            await gate.arrival()
            assert await c.decode.service.drain(0.05) == 1
            assert (await asyncio.wait_for(decoding, LIMIT_S)).outcome == EVICTED
        await c.balanced()


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"num_kv_blocks": 4, "max_model_len": 65}, "--max-model-len: the KV pool holds 64 tokens"),
        ({"max_model_len": 100_000, "num_kv_blocks": 10_000}, "--max-model-len: the model's context is"),
        ({"kv_transports": ("pigeon",)}, "pigeon"),
    ],
)
async def test_configuration_that_cannot_work_is_refused(changes, message):
    worker = Worker(config(**changes), "prefill", "w", StatusReporter(None), PrefillService)
    with pytest.raises(BatonError, match=message) as raised:
        async with worker.serving():
            pass
    assert isinstance(raised.value, ConfigError)


async def test_a_port_in_use_is_refused_and_leaves_nothing_running():
    async with cell(mixed=True) as c:
        port = int(c.decode.address.rpartition(":")[2])
        worker = Worker(config(port=port), "prefill", "w", StatusReporter(None), PrefillService)
        before = asyncio.all_tasks()
        with pytest.raises(BatonError, match="cannot listen"):
            async with worker.serving():
                pass
        assert asyncio.all_tasks() == before
        assert (await c.router.generate(attempt())).record.outcome == FINISHED


@pytest.mark.parametrize("role", ["prefill", "decode", "mixed"])
async def test_memory_that_runs_out_refuses_what_cannot_fit_and_serves_the_rest(role, monkeypatch):
    """The pool could grow by configuration; the system has no pages for it."""
    async with cell(mixed=role == "mixed", num_kv_blocks=2000, max_num_tokens=4096) as c:
        full = c.prefill if role == "prefill" else c.decode

        def no_room(num_blocks: int) -> None:
            raise PoolMemoryFull("no room")

        monkeypatch.setattr(full.parts.memory, "commit", no_room)
        request = attempt(LONG)
        if role == "mixed":
            assert await code_of(c.router.decode(request)) is grpc.StatusCode.ABORTED
        else:
            prefilling = await c.router.prefill(request)
            decoding = c.router.decode(request, c.router.source())
            if role == "prefill":
                assert await prefilling.code() is grpc.StatusCode.ABORTED
                assert (await asyncio.wait_for(decoding, LIMIT_S)).outcome == worker_pb2.OUTCOME_KV_LOST
            else:
                assert await code_of(decoding) is grpc.StatusCode.ABORTED
                prefilling.cancel()
        assert (await c.router.generate(attempt())).tokens == expected(PROMPT, 8)
        await c.balanced()


async def test_output_that_outgrows_such_a_pool_is_given_back():
    async with cell(mixed=True, num_kv_blocks=2000, kv_block_size=1, chunk_size=64) as c:

        def no_room(num_blocks: int) -> None:
            raise PoolMemoryFull("no room")

        c.decode.parts.memory.commit = no_room
        num_blocks = c.decode.parts.holdings.pool.num_total
        request = attempt(PROMPT, max_tokens=500)
        answer = await c.router.generate(request)
        assert answer.record.outcome == EVICTED
        assert answer.tokens == expected(PROMPT, num_blocks + 1 - len(PROMPT))
        assert await code_of(c.router.decode(attempt(PROMPT, answer.tokens, max_tokens=500))) is grpc.StatusCode.ABORTED
        await c.balanced()


async def test_open_calls_do_not_keep_a_worker_alive():
    worker = Worker(config(), "mixed", "w", StatusReporter(None), DecodeService)
    async with asyncio.timeout(LIMIT_S):
        async with worker.serving() as running:
            client = Client(running)
            router = Router(None, client, "r")
            await router.attach()
            watching = Stream(client.worker.Watch(worker_pb2.WatchRequest()))
            await watching.next()
            with gated(running):
                decoding = router.decode(attempt(PROMPT, max_tokens=10_000))
                await watching.next()
        assert await watching.code() is grpc.StatusCode.OK, "reports end in good order"
        assert await code_of(decoding) is not grpc.StatusCode.OK
    await router.detach()
    await client.channel.close()
