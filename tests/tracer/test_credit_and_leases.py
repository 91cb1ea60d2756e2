"""Credit, overlap and leases as a reader sees them, and what an owner refuses."""

from __future__ import annotations

import asyncio
import secrets

import grpc
import grpc.aio
import pytest
from harness import (
    FINISHED,
    LIMIT_S,
    PROMPT,
    Stream,
    attempt,
    cell,
    code_of,
    expected,
    gated,
)

from engine import tracer
from kvstore.transport.base import Frame, add_to_checksum
from protos import worker_pb2

LONG = (PROMPT * 3)[:250]
Code = grpc.StatusCode


# What an owner refuses


@pytest.mark.parametrize(
    "changes, code",
    [
        ({"epoch": 1}, Code.FAILED_PRECONDITION),
        ({"layout": "layers=1"}, Code.FAILED_PRECONDITION),
        ({"layout": ""}, Code.FAILED_PRECONDITION),
        ({"transport": "pigeon"}, Code.FAILED_PRECONDITION),
        ({"transport": ""}, Code.FAILED_PRECONDITION),
        ({"attempt_id": b"short"}, Code.INVALID_ARGUMENT),
        ({"attempt_id": b"x" * 16}, Code.NOT_FOUND),
        ({"have_tokens": 7}, Code.INVALID_ARGUMENT),
        ({"have_tokens": 96}, Code.INVALID_ARGUMENT),
    ],
)
async def test_a_wrong_fetch_is_refused_and_hurts_nobody(changes, code):
    async with cell() as c:
        request = attempt(PROMPT[:95])
        prefilling = await c.router.prefill(request)
        assert await c.p.fetch(**{"attempt_id": request.attempt_id, **changes}).code() is code
        record = await c.router.decode(request, c.router.source())
        assert record.outcome == FINISHED
        assert (await prefilling.rest())[-1].finished.intact
        await c.balanced()


async def test_ten_thousand_bogus_handoff_ids_leave_no_state():
    """peers.md #14."""
    async with cell() as c:
        for _ in range(20):
            ids = [secrets.token_bytes(16) for _ in range(250)]
            fetches = await asyncio.gather(*(c.p.fetch(attempt_id).code() for attempt_id in ids))
            releases = await asyncio.gather(
                *(
                    code_of(c.p.kv.Release(worker_pb2.ReleaseRequest(attempt_id=attempt_id, epoch=c.p.epoch)))
                    for attempt_id in ids
                )
            )
            assert {*fetches, *releases} == {Code.NOT_FOUND}
        assert len(c.prefill.parts.leases) == 0
        await c.balanced()


async def test_a_second_fetch_is_refused_and_the_first_goes_on():
    async with cell(chunk_size=16) as c:
        request = attempt(LONG)
        with gated(c.prefill) as gate:
            prefilling = await c.router.prefill(request)
            decoding = c.router.decode(request, c.router.source())
            await gate.arrival()
            assert await c.p.fetch(request.attempt_id).code() is Code.ALREADY_EXISTS
        assert (await decoding).outcome == FINISHED
        assert await c.router.until_tokens(request.attempt_id, 8) == expected(LONG, 8)
        assert (await prefilling.rest())[-1].finished.intact
        await c.balanced()


# Credit and overlap


async def test_nothing_is_computed_before_a_reader_has_come():
    async with cell() as c:
        first, second = attempt(LONG), attempt(PROMPT)
        with gated(c.prefill) as gate:
            waiting = await c.router.prefill(first)
            prefilling = await c.router.prefill(second)
            fetching = c.p.fetch(second.attempt_id)
            reading = asyncio.create_task(fetching.rest())
            batch = await gate.arrival()
            assert batch.token_ids == list(PROMPT[:64]), "the one without credit was overtaken"
            assert c.prefill.parts.holdings.num_accounted == c.prefill.parts.holdings.num_blocks(len(PROMPT))
        await asyncio.wait_for(reading, LIMIT_S)
        assert (await c.p.release(second.attempt_id, len(PROMPT))).intact
        assert (await prefilling.rest())[-1].finished.intact
        assert c.prefill.role.scheduler.num_queued == 1
        waiting.cancel()
        await c.balanced()


async def test_blocks_are_readable_before_the_prompt_is_done():
    async with cell(chunk_size=64, max_num_tokens=64) as c:
        request = attempt(LONG)
        with gated(c.prefill) as gate:
            prefilling = await c.router.prefill(request)
            fetching = c.p.fetch(request.attempt_id)
            received = 0
            for num_chunks in (1, 2, 3):
                reading = asyncio.create_task(fetching.next())
                assert (await gate.arrival()).context_lens == [64 * num_chunks]
                assert not reading.done(), "blocks came before they were computed"
                gate.let_through()
                frame = await reading
                assert (frame.first_block, len(frame.block_ids)) == (received, 4)
                received += 4
        rest = await fetching.rest()
        assert sum(len(frame.block_ids) for frame in rest) == 4, "the last one is not full"
        answer = await c.p.release(request.attempt_id, len(LONG))
        assert answer.intact and answer.first_token.token_id == expected(LONG, 1)[0]
        events = await prefilling.rest()
        assert [event.WhichOneof("event") for event in events] == ["first_token", "finished"]
        await c.balanced()


async def test_the_first_bytes_of_a_prompt_let_others_in_while_decode_has_nothing_to_compute():
    async with cell(chunk_size=64, max_num_tokens=64, decode={"max_reserved_tokens": 1}) as c:
        first, second = attempt(LONG), attempt(PROMPT)
        with gated(c.prefill) as gate:
            prefillings = [await c.router.prefill(each) for each in (first, second)]
            decodings = [c.router.decode(each, c.router.source()) for each in (first, second)]
            await gate.arrival()
            assert c.decode.role.scheduler.num_queued == 1, "two have blocks of which nothing has come"
            gate.let_through()
            await gate.arrival()
            reports = Stream(c.d.worker.Watch(worker_pb2.WatchRequest()))
            while (await reports.next()).load.num_queued:
                pass
            reports.cancel()
            gate.open()
            gate.let_through()
            assert [(await each).outcome for each in decodings] == [FINISHED] * 2
        for prefilling in prefillings:
            assert (await prefilling.rest())[-1].finished.intact
        await c.balanced()


async def test_the_bytes_fetched_are_the_kv_of_the_prompt():
    async with cell() as c:
        request = attempt(LONG[:100])
        await c.router.prefill(request)
        frames = await c.p.fetch(request.attempt_id, have_tokens=32).rest()
        data = b"".join(frame.data for frame in frames)
        layout = c.prefill.parts.identity.layout
        assert sum(len(frame.block_ids) for frame in frames) == 5
        assert frames[0].first_block == 2
        first = tracer.records(LONG[32:48], 32, layout.num_planes)[0].tobytes()
        assert data.startswith(first)
        answer = await c.p.release(request.attempt_id, 100)
        checksum = 0
        for frame in frames:
            checksum = add_to_checksum(Frame(tuple(frame.block_ids), frame.data), checksum)
        assert (answer.intact, answer.checksum) == (True, checksum)
        await c.balanced()


async def test_a_prompt_gets_all_blocks_or_none():
    """Two prompts of 6 blocks in a pool of 10: the second starts when the first is released."""
    async with cell(prefill={"num_kv_blocks": 10}, chunk_size=16, max_num_tokens=32, max_model_len=160) as c:
        first, second = attempt(LONG[:90]), attempt(LONG[100:190])
        for request in (first, second):
            await c.router.prefill(request)
        one, two = c.p.fetch(first.attempt_id), c.p.fetch(second.attempt_id)
        reading = asyncio.create_task(two.rest())
        await one.rest()
        scheduler = c.prefill.role.scheduler
        assert (scheduler.num_queued, scheduler.num_leased, c.prefill.parts.holdings.num_accounted) == (1, 1, 6)
        assert not reading.done()
        assert (await c.p.release(first.attempt_id, 90)).intact
        await asyncio.wait_for(reading, LIMIT_S)
        assert (await c.p.release(second.attempt_id, 90)).intact
        await c.balanced()


# Leases that break


@pytest.mark.parametrize("num_tokens", [0, 89, 91])
async def test_a_wrong_count_is_not_attested(num_tokens):
    async with cell() as c:
        request = attempt(LONG[:90])
        prefilling = await c.router.prefill(request)
        await c.p.fetch(request.attempt_id).rest()
        answer = await c.p.release(request.attempt_id, num_tokens)
        assert not answer.intact and not answer.HasField("first_token")
        assert not (await prefilling.rest())[-1].finished.intact
        await c.balanced()


async def test_a_release_before_everything_was_read_is_not_attested():
    async with cell(chunk_size=16) as c:
        request = attempt(LONG)
        with gated(c.prefill) as gate:
            prefilling = await c.router.prefill(request)
            fetching = c.p.fetch(request.attempt_id)
            reading = asyncio.create_task(fetching.code())
            await gate.arrival()
            assert not (await c.p.release(request.attempt_id, len(LONG))).intact
            assert await reading is Code.ABORTED
            gate.let_through()
            assert [event.WhichOneof("event") for event in await prefilling.rest()] == ["finished"]
            await c.balanced()
            assert gate.num_arrived <= 1, "chunks were computed for nobody"


async def test_a_reader_that_goes_ends_the_work():
    async with cell(chunk_size=16) as c:
        request = attempt(LONG)
        with gated(c.prefill) as gate:
            prefilling = await c.router.prefill(request)
            fetching = c.p.fetch(request.attempt_id)
            reading = asyncio.create_task(fetching.code())
            await gate.arrival()
            fetching.cancel()
            await asyncio.wait([reading])
            events = await asyncio.wait_for(prefilling.rest(), LIMIT_S)
            assert [event.finished.intact for event in events] == [False]
            gate.let_through()
            await c.balanced()
            assert gate.num_arrived == 0, "chunks were computed for nobody"


async def test_an_unread_lease_expires_and_frees_its_blocks():
    async with cell(kv_lease_ttl_s=0.1) as c:
        request = attempt(LONG)
        prefilling = await c.router.prefill(request)
        await c.p.fetch(request.attempt_id).rest()
        events = await prefilling.rest()
        assert [event.WhichOneof("event") for event in events] == ["first_token", "finished"]
        assert not events[-1].finished.intact
        await c.balanced()
        release = worker_pb2.ReleaseRequest(attempt_id=request.attempt_id, epoch=c.p.epoch, num_tokens=len(LONG))
        assert await code_of(c.p.kv.Release(release)) is Code.NOT_FOUND
