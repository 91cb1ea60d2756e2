"""The public service over a whole system: bad input, limits, deadlines, cancellation, slow and dead clients."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import sys
import time
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest
from cluster import LIMIT_S, PROMPT, Cluster, another_router, cluster, collect, expected, held, request_of
from failures import details_of, failure
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos import inference_pb2, inference_pb2_grpc
from runtime.rpc import create_channel


async def test_a_request_id_in_flight_is_refused() -> None:
    async with cluster() as c:
        with held(c.decodes[0]):
            first = asyncio.create_task(c.generate(request_of(request_id="twin")))
            await c.until_running()
            error = await failure(c.stub.Generate(request_of(request_id="twin")))
            (info,) = details_of(error, error_details_pb2.ErrorInfo)
            assert error.code() is grpc.StatusCode.ALREADY_EXISTS and info.reason == "ALREADY_EXISTS"
            assert "twin" in error.details()
        assert (await first).tokens == expected(PROMPT, 8)
        assert (await c.generate(request_of(request_id="twin"))).request_id == "twin"


async def test_a_draining_router_refuses() -> None:
    async with cluster() as c:
        c.router.service.is_draining = True
        error = await failure(c.stub.Generate(request_of()))
        info, retry = details_of(error, error_details_pb2.ErrorInfo, error_details_pb2.RetryInfo)
        assert error.code() is grpc.StatusCode.UNAVAILABLE and "draining" in error.details()
        assert info.reason == "UNAVAILABLE" and retry is not None


async def test_without_workers_calls_are_unavailable_and_health_says_so() -> None:
    async with cluster() as c:
        health = health_pb2_grpc.HealthStub(c.channel)
        ready = health_pb2.HealthCheckRequest(service="baton.v1.Inference")
        assert (await health.Check(ready)).status == health_pb2.HealthCheckResponse.SERVING
        await c.decodes[0].server.stop(0)
        async with asyncio.timeout(LIMIT_S):
            while c.router.fleet.is_ready:
                await c.router.fleet.change.wait()
        calls = [c.stub.Generate(request_of()), c.stub.GetModel(inference_pb2.GetModelRequest())]
        for call in calls:
            error = await failure(call)
            assert error.code() is grpc.StatusCode.UNAVAILABLE and "no decode worker is ready" in error.details()
        assert (await health.Check(ready)).status == health_pb2.HealthCheckResponse.NOT_SERVING
        alive = await health.Check(health_pb2.HealthCheckRequest())
        assert alive.status == health_pb2.HealthCheckResponse.SERVING


async def test_the_model_and_the_workers_are_shown() -> None:
    async with cluster(2, 1) as c:
        model = await c.stub.GetModel(inference_pb2.GetModelRequest())
        assert (model.model, model.max_model_len, model.vocab_size) == ("tracer", 4096, 257)
        assert list(model.eos_token_ids) == [256] and not model.has_chat_template
        workers = (await c.stub.ListWorkers(inference_pb2.ListWorkersRequest())).workers
        assert [worker.worker_id for worker in workers] == ["prefill-0", "prefill-1", "decode-0"]
        assert {worker.state for worker in workers} == {inference_pb2.WORKER_STATE_SERVING}
        assert workers[2].load.pool.ceiling == 256 and workers[2].report_age_ms < 3000


async def test_ending_a_session_needs_its_name() -> None:
    async with cluster() as c:
        error = await failure(c.stub.EndSession(inference_pb2.EndSessionRequest()))
        (bad,) = details_of(error, error_details_pb2.BadRequest)
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert bad.field_violations[0].field == "session_id"
        ended = await c.stub.EndSession(inference_pb2.EndSessionRequest(session_id="never seen"))
        assert not ended.existed


async def test_text_stop_strings_and_logprobs() -> None:
    async with cluster() as c:
        whole = bytes(expected(PROMPT, 60)).decode()
        stop = whole[20:23]
        end = whole.index(stop)
        reply = await c.generate(num_tokens=60, sampling={"stop": [stop], "logprobs": True, "top_logprobs": 1})
        assert reply.text == whole[:end]
        assert reply.tokens == list(whole[: end + 3].encode())
        assert (reply.finish.reason, reply.finish.matched_stop) == (inference_pb2.FINISH_REASON_STOP, stop)
        assert reply.finish.usage.completion_tokens == end + 3
        kept = await c.generate(num_tokens=60, sampling={"stop": [stop], "include_stop_str_in_output": True})
        assert kept.text == whole[: end + 3]
        await c.balanced()


async def test_a_stop_string_in_the_first_token() -> None:
    """Prefill reports it, so it is found before decode has the KV."""
    async with cluster() as c:
        first = chr(expected(PROMPT, 1)[0])
        for _ in range(10):
            reply = await c.generate(num_tokens=2000, sampling={"stop": [first]})
            assert (reply.text, reply.finish.matched_stop, len(reply.tokens)) == ("", first, 1)
        await c.balanced()


# Deadlines and clients that leave


async def test_a_deadline_ends_a_request_everywhere() -> None:
    async with cluster() as c:
        began_s = time.monotonic()
        error = await failure(c.stub.Generate(request_of(3000), timeout=0.3))
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert time.monotonic() - began_s < 1.0
        await c.balanced()
        assert c.router.service.idle.is_set()


@pytest.mark.parametrize("where", ["prefill", "decode"])
async def test_a_deadline_ends_a_request_that_nobody_computes(where: str) -> None:
    async with cluster() as c:
        with held(c.prefills[0] if where == "prefill" else c.decodes[0]):
            error = await failure(c.stub.Generate(request_of(), timeout=0.3))
            assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            async with asyncio.timeout(1):
                await c.router.service.idle.wait()
        await c.balanced()


async def test_cancelling_200_streams_at_random_moments_leaves_nothing() -> None:
    drawn = random.Random(7)

    async def one(c: Cluster, turn: asyncio.Semaphore) -> None:
        async with turn:
            prompt = [drawn.randrange(256) for _ in range(drawn.choice([3, 40, 200]))]
            deadline_s = drawn.choice([None, None, drawn.uniform(0.001, 0.2)])
            call = c.stub.Generate(request_of(1500, prompt), timeout=deadline_s)
            num_messages = drawn.choice([0, 0, 1, 2, 5, 20])
            tokens: list[int] = []
            with contextlib.suppress(grpc.aio.AioRpcError):
                for _ in range(num_messages):
                    response = await call.read()
                    if response is grpc.aio.EOF:
                        break
                    tokens += [token.token_id for token in response.tokens]
            call.cancel()
            assert tokens == expected(prompt, len(tokens))

    async with cluster(2, 2) as c:
        turn = asyncio.Semaphore(24)
        await asyncio.gather(*(one(c, turn) for _ in range(200)))
        await c.balanced()
        async with asyncio.timeout(1):
            await c.router.service.idle.wait()
        assert (await c.generate()).tokens == expected(PROMPT, 8)
        for worker in c.router.fleet.incarnations():
            assert (worker.num_assigned, worker.num_assigned_tokens) == (0, 0)


CLIENT = """
import sys, grpc
from protos import inference_pb2, inference_pb2_grpc
stub = inference_pb2_grpc.InferenceStub(grpc.insecure_channel(sys.argv[1]))
sampling = inference_pb2.SamplingParams(max_tokens=3000, ignore_eos=True)
calls = [stub.Generate(inference_pb2.GenerateRequest(prompt="x" * 50, sampling=sampling)) for _ in range(8)]
for call in calls:
    next(call)
print("streaming", flush=True)
for call in calls:
    for _ in call:
        pass
"""


async def test_a_client_process_that_is_killed_leaves_nothing() -> None:
    async with cluster() as c:
        client = await asyncio.create_subprocess_exec(
            sys.executable, "-c", CLIENT, c.router.address, stdout=asyncio.subprocess.PIPE
        )
        assert client.stdout is not None
        async with asyncio.timeout(LIMIT_S):
            assert await client.stdout.readline() == b"streaming\n"
        assert c.router.service.num_requests == 8
        client.send_signal(signal.SIGKILL)
        await client.wait()
        await c.balanced()
        assert c.router.service.idle.is_set()


async def test_a_silent_call_survives_keep_alive() -> None:
    """Pings every 1.5 s while nothing is said: more of them than a server with the library's limits would take."""
    async with (
        cluster(worker={"step_stall_s": 0.0}) as c,
        create_channel(c.router.address, keepalive_time_s=1.5) as channel,
    ):
        stub = inference_pb2_grpc.InferenceStub(channel)
        with held(c.prefills[0]):
            call = asyncio.create_task(collect(stub.Generate(request_of())))
            done, _ = await asyncio.wait([call], timeout=8)
            assert not done
        assert (await asyncio.wait_for(call, LIMIT_S)).tokens == expected(PROMPT, 8)


@contextlib.asynccontextmanager
async def narrow_channel(address: str) -> AsyncIterator[inference_pb2_grpc.InferenceStub]:
    """A client whose window does not grow."""
    options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65536)]
    async with create_channel(address, options=options) as channel:
        yield inference_pb2_grpc.InferenceStub(channel)


async def test_a_slow_client_is_cut_off_and_its_kv_freed() -> None:
    async with (
        cluster(client_stall_s=0.5, worker={"num_kv_blocks": 1024}) as c,
        narrow_channel(c.router.address) as stub,
    ):
        messages = aiter(stub.Generate(request_of(2500, request_id="x" * 256)))
        num_before = len((await anext(messages)).tokens)
        assert c.router.service.num_requests == 1
        # It reads nothing more; what is generated meanwhile does not fit its window.
        async with asyncio.timeout(LIMIT_S):
            await c.router.service.idle.wait()
        await c.balanced()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(messages, num_before)
        (info,) = details_of(caught.value, error_details_pb2.ErrorInfo)
        assert caught.value.code() is grpc.StatusCode.ABORTED and info.reason == "ABORTED"
        assert "taken nothing for 0.5 s" in caught.value.details()


async def test_a_client_that_pauses_and_reads_on_gets_everything() -> None:
    async with (
        cluster(client_stall_s=30, worker={"num_kv_blocks": 1024}) as c,
        narrow_channel(c.router.address) as stub,
    ):
        messages = aiter(stub.Generate(request_of(1500, request_id="x" * 256)))
        first = await anext(messages)
        # Until decode has nothing to do any more: the whole answer waits.
        async with asyncio.timeout(LIMIT_S):
            while c.decodes[0].role.live_attempts():
                await c.router.fleet.change.wait()
        assert c.router.service.num_requests == 1
        reply = await collect(messages, len(first.tokens))
        assert [token.token_id for token in first.tokens] + reply.tokens == expected(PROMPT, 1500)


async def test_routers_of_the_same_name_do_not_take_each_others_tokens() -> None:
    async with cluster() as c, another_router(c) as stub:
        both = [c.stub, stub] * 4
        replies = await asyncio.gather(*(collect(each.Generate(request_of(200))) for each in both))
        assert all(reply.tokens == expected(PROMPT, 200) for reply in replies)
        assert all(reply.finish.served_by.num_attempts == 1 for reply in replies)
