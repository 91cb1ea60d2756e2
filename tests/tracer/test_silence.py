"""Silence: owners say that they are there, readers leave those that do not, and a step that hangs is not hidden."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from harness import FINISHED, KV_LOST, LIMIT_S, PROMPT, Stream, attempt, cell, code_of, expected, gated
from test_handoff_faults import LONG, FalseOwner, answer_through

from engine import kv_reader, step_stalls, worker_service
from protos import worker_pb2


async def test_an_owner_that_has_nothing_to_send_yet_says_that_it_is_there(monkeypatch):
    """A prompt may wait far longer than its reader would for a silent owner."""
    monkeypatch.setattr(worker_service, "FETCH_MAX_INTERVAL_S", 0.05)
    monkeypatch.setattr(kv_reader, "SILENCE_S", 0.5)
    async with cell(kv_transports=("grpc",)) as c:
        owner, num_signs, enough = FalseOwner(c), 0, asyncio.Event()

        def look(frame: worker_pb2.FetchResponse) -> None:
            nonlocal num_signs
            num_signs += not frame.block_ids
            if num_signs * 0.05 > 2 * kv_reader.SILENCE_S:
                enough.set()

        owner.frame = look
        with gated(c.prefill) as gate:
            answering = asyncio.create_task(answer_through(c, owner))
            await asyncio.wait_for(enough.wait(), LIMIT_S)
            assert not answering.done()
            gate.open()
            assert (await answering).outcome == FINISHED


async def test_an_owner_that_falls_silent_is_left(monkeypatch):
    monkeypatch.setattr(kv_reader, "SILENCE_S", 0.2)
    async with cell(kv_transports=("grpc",), chunk_size=16, max_num_tokens=32) as c:
        owner, never = FalseOwner(c), asyncio.Event()
        owner.on_frame = never.wait
        record = await answer_through(c, owner, LONG)
        assert record.outcome == KV_LOST and "said nothing for 0.2 s" in record.detail
        reports = Stream(c.d.worker.Watch(worker_pb2.WatchRequest()))
        assert (await reports.next()).load.num_handoffs_lost == 1
        reports.cancel()


@pytest.mark.parametrize("role", ["prefill", "mixed"])
async def test_while_a_step_stands_still_routers_and_readers_are_told(role, monkeypatch):
    monkeypatch.setattr(step_stalls, "LOOK_S", 0.02)
    async with cell(mixed=role == "mixed", step_stall_s=0.1) as c:
        client = c.d if role == "mixed" else c.p
        assert (await c.router.generate(attempt())).record.outcome == FINISHED
        watching = Stream(client.worker.Watch(worker_pb2.WatchRequest()))
        await watching.next()
        with gated(client.running) as gate:
            serving = asyncio.create_task(c.router.generate(attempt(LONG)))
            await gate.arrival()
            assert await watching.code() is grpc.StatusCode.UNAVAILABLE
            described = client.worker.Describe(worker_pb2.DescribeRequest())
            assert await code_of(described) is grpc.StatusCode.UNAVAILABLE
            gate.open()
            assert (await asyncio.wait_for(serving, LIMIT_S)).tokens == expected(LONG, 8), "it was only slow"
        described = client.worker.Describe(worker_pb2.DescribeRequest())
        assert await code_of(described) is grpc.StatusCode.OK
        assert (await c.router.generate(attempt(PROMPT[:50]))).record.outcome == FINISHED
        await c.balanced()
