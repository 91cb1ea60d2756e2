"""Cancel and finish: whatever ends an attempt, at whatever moment, both pools balance at once."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from harness import (
    FINISHED,
    LIMIT_S,
    PROMPT,
    Cell,
    Gate,
    attempt,
    balanced,
    cell,
    code_of,
    expected,
    gated,
)
from transports_here import TRANSPORTS

from protos import inference_pb2, worker_pb2

LONG = (PROMPT * 3)[:250]
Code = grpc.StatusCode
PHASES = ["queued at prefill", "prefilling", "fetching", "leased", "queued at decode", "decoding"]


@contextlib.asynccontextmanager
async def stopped_at(c: Cell, phase: str) -> AsyncIterator[tuple[Any, Any, Gate | None]]:
    """An attempt held in a phase: its Prefill.Run, its Decode.Run (None before there is one), and the closed gate."""
    assert c.prefill is not None
    request = attempt(LONG, max_tokens=200)
    p, d = c.prefill.role.scheduler, c.decode.role.scheduler
    if phase == "queued at prefill":
        yield await c.router.prefill(request), None, None
    elif phase in ("prefilling", "fetching"):
        with gated(c.prefill) as gate:
            calls = await c.router.prefill(request), c.router.decode(request, c.router.source())
            await gate.arrival()
            if phase == "fetching":
                # Some blocks have crossed and the next chunk is being computed.
                gate.let_through()
                await gate.arrival()
            assert (p.num_running, d.num_running) == (1, 1)
            yield *calls, gate
    elif phase == "leased":
        call = await c.router.prefill(request)
        await c.p.fetch(request.attempt_id, transport=c.prefill.parts.config.kv_transports[0]).rest()
        assert p.num_leased == 1
        yield call, None, None
    elif phase == "queued at decode":
        with gated(c.decode) as gate:
            other = attempt(PROMPT, max_tokens=200)
            first = await c.router.prefill(other), c.router.decode(other, c.router.source())
            await gate.arrival()
            call = c.router.decode(request, c.router.source())
            async with asyncio.timeout(LIMIT_S):
                async for report in c.d.worker.Watch(worker_pb2.WatchRequest()):
                    if report.load.num_queued:
                        break
            for other_call in first:
                other_call.cancel()
            yield await c.router.prefill(request), call, gate
    else:
        with gated(c.decode) as gate:
            calls = await c.router.prefill(request), c.router.decode(request, c.router.source())
            for _ in range(3):
                await gate.arrival()
                gate.let_through()
            await gate.arrival()
            assert d.num_running == 1
            yield *calls, gate


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("close", ["both", "prefill first", "decode first"])
@pytest.mark.parametrize("phase", PHASES)
async def test_cancel_frees_everything_on_both_sides(phase, close, transport):
    async with cell(chunk_size=16, max_num_tokens=32, kv_transports=(transport,)) as c:
        async with stopped_at(c, phase) as (prefilling, decoding, gate):
            calls = [call for call in (prefilling, decoding) if call is not None]
            if close == "decode first":
                calls.reverse()
            calls[0].cancel()
            if close == "both":
                for call in calls[1:]:
                    call.cancel()
            if gate is not None:
                gate.open()
        if close == "decode first" and decoding is not None and phase != "decoding":
            # The reader's end reaches the owner by itself, except from a queue, where no fetch had begun.
            if phase == "queued at decode":
                prefilling.cancel()
            else:
                events = await prefilling.rest()
                assert not events[-1].finished.intact
        if close == "prefill first" and decoding is not None:
            if phase == "decoding":
                decoding.cancel()
            else:
                assert (await asyncio.wait_for(decoding, LIMIT_S)).outcome == worker_pb2.OUTCOME_KV_LOST
        await c.balanced()
        answer = await c.router.generate(attempt(LONG))
        assert answer.tokens == expected(LONG, 8), "what was left in the cache is wrong"


async def test_cancel_at_decode_does_not_wait_for_the_owner():
    async with cell(chunk_size=16, max_num_tokens=32) as c:
        async with stopped_at(c, "prefilling") as (prefilling, decoding, _):
            decoding.cancel()
            await balanced(c.decode)
            events = await prefilling.rest()
            assert [event.WhichOneof("event") for event in events] == ["finished"]
        await c.balanced()


async def test_cancel_in_the_third_chunk_stops_before_the_fifth():
    """peers.md #11."""
    async with cell(chunk_size=16, max_num_tokens=32, num_kv_blocks=64) as c:
        prompt = (LONG * 3)[: 40 * 16]
        request = attempt(prompt)
        with gated(c.prefill) as gate:
            prefilling = await c.router.prefill(request)
            decoding = c.router.decode(request, c.router.source())
            for number in (1, 2, 3):
                assert (await gate.arrival()).context_lens == [16 * number]
                if number < 3:
                    gate.let_through()
            prefilling.cancel()
            decoding.cancel()
            gate.open()
            await c.balanced()
            assert gate.num_arrived <= 1, "it went on"


async def test_random_cancels_leave_nothing_and_others_are_exact():
    async with cell(chunk_size=16, max_num_tokens=64, decode={"num_kv_blocks": 128}, max_model_len=600) as c:

        async def one(number: int) -> None:
            choose = random.Random(number)
            prompt = LONG[: choose.randrange(1, 250)]
            request = attempt(prompt, max_tokens=choose.choice([3, 30]))
            generating = asyncio.create_task(c.router.generate(request))
            if choose.random() < 0.7:
                for _ in range(choose.randrange(1500)):
                    await asyncio.sleep(0)  # passes of the event loop, not time
                generating.cancel()
                await asyncio.wait([generating])
                return
            answer = await generating
            if answer.record.outcome == FINISHED:
                assert answer.tokens == expected(prompt, request.sampling.max_tokens)

        await asyncio.gather(*(one(number) for number in range(80)))
        await c.balanced()


# Finish


@pytest.mark.parametrize("num_outputs", [0, 1, 3])
async def test_finish_at_a_stop_truncates_and_leaves_a_cache_that_is_right(num_outputs):
    async with cell(decode={"kv_block_size": 4}, prefill={"kv_block_size": 4}) as c:
        request = attempt(max_tokens=100)
        with gated(c.decode) as gate:
            prefilling = await c.router.prefill(request)
            decoding = c.router.decode(request, c.router.source())
            for _ in range(4):
                await gate.arrival()
                gate.let_through()
            await gate.arrival()
            assert await c.router.until_tokens(request.attempt_id, 5) == expected(PROMPT, 5)
            finish = worker_pb2.FinishRequest(attempt_id=request.attempt_id, num_output_tokens=num_outputs)
            await c.d.decode.Finish(finish)
            record = await asyncio.wait_for(decoding, LIMIT_S)
            assert (record.outcome, record.num_tokens) == (FINISHED, len(PROMPT) + num_outputs)
            assert record.finish_reason == inference_pb2.FINISH_REASON_STOP
            assert not record.HasField("matched_token_id")
        assert (await prefilling.rest())[-1].finished.intact
        await c.balanced()
        assert (await c.router.generate(attempt(max_tokens=20))).tokens == expected(PROMPT, 20)


async def test_finish_while_prefilling_here():
    async with cell(mixed=True, chunk_size=16, max_num_tokens=32) as c:
        given = expected(PROMPT, 4)
        request = attempt(outputs=given, max_tokens=20)
        with gated(c.decode) as gate:
            decoding = c.router.decode(request)
            await gate.arrival()
            await c.d.decode.Finish(worker_pb2.FinishRequest(attempt_id=request.attempt_id, num_output_tokens=2))
            record = await asyncio.wait_for(decoding, LIMIT_S)
        assert (record.outcome, record.num_tokens) == (FINISHED, len(PROMPT) + 2)
        await c.balanced()


async def test_finish_that_does_not_fit_is_refused_and_changes_nothing():
    async with cell() as c:
        unknown = worker_pb2.FinishRequest(attempt_id=b"x" * 16)
        assert await code_of(c.d.decode.Finish(unknown)) is Code.NOT_FOUND
        short = worker_pb2.FinishRequest(attempt_id=b"x")
        assert await code_of(c.d.decode.Finish(short)) is Code.INVALID_ARGUMENT
        request = attempt(max_tokens=5)
        with gated(c.decode) as gate:
            await c.router.prefill(request)
            decoding = c.router.decode(request, c.router.source())
            await gate.arrival()
            early = worker_pb2.FinishRequest(attempt_id=request.attempt_id, num_output_tokens=2)
            assert await code_of(c.d.decode.Finish(early)) is Code.INVALID_ARGUMENT
        assert (await decoding).num_tokens == len(PROMPT) + 5
        assert await code_of(c.d.decode.Finish(early)) is Code.NOT_FOUND
        await c.balanced()
