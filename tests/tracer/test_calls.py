"""A worker's calls one by one: attach, refusals, drain, description, and steps that fail."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from harness import (
    EVICTED,
    FINISHED,
    LIMIT_S,
    PROMPT,
    Router,
    attempt,
    cell,
    code_of,
    expected,
    gated,
)

from engine.batch import Batch, Runner
from engine.request import Sample
from protos import inference_pb2, worker_pb2

LONG = (PROMPT * 3)[:250]
Code = grpc.StatusCode


# Attach


async def test_run_without_attach_is_refused():
    async with cell() as c:
        run = worker_pb2.DecodeRunRequest(attempt=attempt(), router_id="stranger")
        assert await code_of(c.d.decode.Run(run)) is Code.FAILED_PRECONDITION
        nameless = c.d.decode.Attach(worker_pb2.AttachRequest())
        assert await code_of(nameless.read()) is Code.INVALID_ARGUMENT
        await c.router.detach()
        async with asyncio.timeout(LIMIT_S):
            while await code_of(c.router.decode(attempt(PROMPT[:3]))) is not Code.FAILED_PRECONDITION:
                pass
        await c.router.attach()
        assert (await c.router.generate(attempt())).record.outcome == FINISHED


async def test_a_second_attach_replaces_the_first():
    async with cell() as c:
        second = Router(c.p, c.d, "router-1")
        await second.attach()
        assert c.router._attached is not None
        await asyncio.wait_for(asyncio.shield(c.router._attached), LIMIT_S)
        assert (await second.generate(attempt())).tokens == expected(PROMPT, 8)
        assert not c.router.tokens
        await second.detach()


async def test_routers_get_their_own_tokens_only():
    async with cell() as c:
        other = Router(c.p, c.d, "router-2")
        await other.attach()
        answers = await asyncio.gather(
            *(r.generate(attempt(max_tokens=30)) for r in (c.router, other) for _ in range(4))
        )
        assert {tuple(answer.tokens) for answer in answers} == {tuple(expected(PROMPT, 30))}
        assert len(c.router.tokens) == len(other.tokens) == 4
        await other.detach()


async def test_one_attempt_runs_once_on_a_worker():
    async with cell() as c:
        request = attempt()
        with gated(c.prefill):
            first = await c.router.prefill(request)
            again = c.p.prefill.Run(worker_pb2.PrefillRunRequest(attempt=request))
            assert await code_of(again.read()) is Code.ALREADY_EXISTS
            decoding = c.router.decode(request, c.router.source())
            async with asyncio.timeout(LIMIT_S):
                async for report in c.d.worker.Watch(worker_pb2.WatchRequest()):
                    if report.load.num_running:
                        break
            assert await code_of(c.router.decode(request, c.router.source())) is Code.ALREADY_EXISTS
        assert (await decoding).outcome == FINISHED
        assert (await first.rest())[-1].finished.intact
        await c.balanced()


# Refused attempts


@pytest.mark.parametrize("change", ["fingerprint", "empty", "long", "id", "temperature"])
async def test_a_refused_attempt_leaves_nothing(change):
    async with cell(max_model_len=200) as c:
        request = attempt(PROMPT)
        if change == "fingerprint":
            request.fingerprint = "other"
        elif change == "empty":
            del request.prompt_token_ids[:]
        elif change == "long":
            request.prompt_token_ids.extend([1] * 200)
        elif change == "id":
            request.attempt_id = b"short"
        else:
            request.sampling.temperature = -1
        code = Code.FAILED_PRECONDITION if change == "fingerprint" else Code.INVALID_ARGUMENT
        run = c.p.prefill.Run(worker_pb2.PrefillRunRequest(attempt=request))
        assert await code_of(run.read()) is code
        assert await code_of(c.router.decode(request, c.router.source())) is code
        await c.balanced()


async def test_a_mixed_worker_takes_no_source():
    async with cell(mixed=True) as c:
        source = worker_pb2.KVSource(worker_id="p", address="127.0.0.1:1", epoch=1)
        assert await code_of(c.router.decode(attempt(), source)) is Code.FAILED_PRECONDITION


# Drain


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_drain_refuses_new_attempts_and_finishes_those_it_has(role):
    async with cell() as c:
        worker, client = (c.prefill, c.p) if role == "prefill" else (c.decode, c.d)
        request = attempt(LONG, max_tokens=20)
        with gated(worker) as gate:
            prefilling = await c.router.prefill(request)
            decoding = c.router.decode(request, c.router.source())
            await gate.arrival()
            watching = client.worker.Watch(worker_pb2.WatchRequest())
            assert (await watching.read()).state == inference_pb2.WORKER_STATE_SERVING
            draining = client.worker.Drain(worker_pb2.DrainRequest())
            async with asyncio.timeout(LIMIT_S):
                while (await watching.read()).state != inference_pb2.WORKER_STATE_DRAINING:
                    pass
            watching.cancel()
            if role == "prefill":
                refused = c.p.prefill.Run(worker_pb2.PrefillRunRequest(attempt=attempt())).read()
            else:
                refused = c.router.decode(attempt())
            assert await code_of(refused) is Code.UNAVAILABLE
            assert not draining.done()
        assert (await decoding).outcome == FINISHED
        assert await c.router.until_tokens(request.attempt_id, 20) == expected(LONG, 20)
        await prefilling.rest()
        assert (await asyncio.wait_for(draining, LIMIT_S)).num_evicted == 0
        await c.balanced()


async def test_drain_with_a_timeout_gives_decoding_attempts_back():
    async with cell() as c:
        request, queued = attempt(LONG, max_tokens=200), attempt(max_tokens=200)
        with gated(c.decode) as gate:
            calls = []
            for one in (request, queued):
                await c.router.prefill(one)
                calls.append(c.router.decode(one, c.router.source()))
            await gate.arrival()
            first = c.d.worker.Drain(worker_pb2.DrainRequest())
            answer = await c.d.worker.Drain(worker_pb2.DrainRequest(timeout_ms=50))
            records = [await asyncio.wait_for(call, LIMIT_S) for call in calls]
            assert (answer.num_evicted, [record.outcome for record in records]) == (2, [EVICTED, EVICTED])
            assert (await asyncio.wait_for(first, LIMIT_S)).num_evicted == 0
        await c.balanced()


async def test_drain_with_a_timeout_gives_prefilling_attempts_back():
    async with cell(chunk_size=16) as c:
        request = attempt(LONG)
        with gated(c.prefill) as gate:
            prefilling = await c.router.prefill(request)
            decoding = c.router.decode(request, c.router.source())
            await gate.arrival()
            answer = await c.p.worker.Drain(worker_pb2.DrainRequest(timeout_ms=50))
            assert answer.num_evicted == 1
            assert await prefilling.code() is Code.UNAVAILABLE
            assert (await asyncio.wait_for(decoding, LIMIT_S)).outcome == worker_pb2.OUTCOME_KV_LOST
        await c.balanced()


# Steps that fail


class Poisoned:
    """Fails at every batch that holds a certain token."""

    def __init__(self, inner: Runner, token_id: int) -> None:
        self._inner, self._token_id = inner, token_id

    def run(self, batch: Batch) -> list[Sample]:
        if self._token_id in batch.token_ids:
            raise RuntimeError("poison")
        return self._inner.run(batch)


@pytest.mark.parametrize("mixed", [False, True])
async def test_a_sequence_that_no_step_survives_fails_alone(mixed):
    async with cell(mixed=mixed, chunk_size=16, max_num_tokens=256) as c:
        worker = c.decode if mixed else c.prefill
        worker.step_loop.runner = Poisoned(worker.step_loop.runner, 255)
        poison = attempt((*LONG[:100], 255))
        async with asyncio.TaskGroup() as group:
            good = [group.create_task(c.router.generate(attempt(LONG[n:]))) for n in range(8)]
            if mixed:
                assert await code_of(c.router.decode(poison)) is Code.ABORTED
            else:
                prefilling = await c.router.prefill(poison)
                decoding = c.router.decode(poison, c.router.source())
                assert await prefilling.code() is Code.ABORTED
                assert (await decoding).outcome == worker_pb2.OUTCOME_KV_LOST
        assert [task.result().tokens for task in good] == [expected(LONG[n:], 8) for n in range(8)]
        await c.balanced()


# What workers say of themselves


async def test_describe_and_watch():
    async with cell(kv_block_size=4) as c:
        for client, role in ((c.p, inference_pb2.WORKER_ROLE_PREFILL), (c.d, inference_pb2.WORKER_ROLE_DECODE)):
            described = await client.worker.Describe(worker_pb2.DescribeRequest(nonce="n"))
            assert (described.role, described.epoch, described.block_size) == (role, client.epoch, 4)
            assert described.model.fingerprint == "tracer" and described.model.eos_token_ids == [256]
            assert [offer.name for offer in described.transports] == ["shm", "grpc"]
            assert described.block_bytes == client.running.parts.identity.layout.block_bytes
        with gated(c.prefill) as gate:
            request = attempt(LONG)
            prefilling = await c.router.prefill(request)
            c.router.decode(request, c.router.source())
            await gate.arrival()
            report = await c.p.worker.Watch(worker_pb2.WatchRequest()).read()
            assert (report.load.num_running, report.load.num_leases) == (1, 1)
            assert report.load.pool.used == report.load.pool.accounted == -(-len(LONG) // 4)
            assert report.load.num_queued_tokens == len(LONG)
            decoding = await c.d.worker.Watch(worker_pb2.WatchRequest()).read()
            assert decoding.load.pool.used == -(-(len(LONG) + 1) // 4)
        assert (await prefilling.rest())[-1].finished.intact
