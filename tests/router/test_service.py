"""The public service over a whole system: bad input, limits, deadlines, cancellation, slow and dead clients."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from cluster import LIMIT_S, PROMPT, Cluster, another_router, cluster, collect, expected, held, request_of
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos import inference_pb2, inference_pb2_grpc
from runtime.rpc import MAX_MESSAGE_BYTES, create_channel

METHOD = "/baton.v1.Inference/Generate"
MAX_MODEL_LEN = 512


def details_of(error: grpc.aio.AioRpcError, *wanted: Any) -> list[Any]:
    """The google.rpc details of a status, by type; None for those that are missing."""
    trailer = dict(error.trailing_metadata() or ())
    status = status_pb2.Status.FromString(trailer["grpc-status-details-bin"])
    assert (status.code, status.message) == (error.code().value[0], error.details())
    found = []
    for cls in wanted:
        message = cls()
        found.append(message if any(detail.Unpack(message) for detail in status.details) else None)
    return found


async def failure(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async with asyncio.timeout(LIMIT_S):
            if isinstance(call, grpc.aio.UnaryStreamCall):
                async for _ in call:
                    pass
            else:
                await call
    return caught.value


@pytest.fixture(scope="module")
def small() -> dict[str, Any]:
    """The prefill pool holds fewer tokens than the decode pool: the smaller one is the limit."""
    return {"prefill": {"num_kv_blocks": MAX_MODEL_LEN // 16}, "decode": {"num_kv_blocks": 128}}


def sampling(**values: Any) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(
        prompt_token_ids=PROMPT, sampling=inference_pb2.SamplingParams(**{"max_tokens": 4, **values})
    )


Request = inference_pb2.GenerateRequest
NAN, INFINITY = float("nan"), float("inf")
BAD: dict[str, tuple[inference_pb2.GenerateRequest, str, str]] = {
    "prompt_too_long_for_a_pool": (request_of(1, [65] * MAX_MODEL_LEN), "prompt_token_ids", "CONTEXT_LENGTH_EXCEEDED"),
    "text_too_long_for_a_pool": (Request(prompt="x" * 5000), "prompt", "CONTEXT_LENGTH_EXCEEDED"),
    "output_too_long": (request_of(500, [65] * 100), "sampling.max_tokens", "CONTEXT_LENGTH_EXCEEDED"),
    "nothing": (Request(), "prompt", "INVALID_ARGUMENT"),
    "empty_prompt": (Request(prompt=""), "prompt", "INVALID_ARGUMENT"),
    "two_inputs": (Request(prompt="a", prompt_token_ids=[65]), "prompt_token_ids", "INVALID_ARGUMENT"),
    "messages_without_template": (
        Request(messages=[inference_pb2.ChatMessage(role="user", content="hi")]),
        "messages",
        "INVALID_ARGUMENT",
    ),
    "token_id_out_of_range": (Request(prompt_token_ids=[65, 257]), "prompt_token_ids[1]", "INVALID_ARGUMENT"),
    "negative_temperature": (sampling(temperature=-1), "sampling.temperature", "INVALID_ARGUMENT"),
    "nan_temperature": (sampling(temperature=NAN), "sampling.temperature", "INVALID_ARGUMENT"),
    "infinite_temperature": (sampling(temperature=INFINITY), "sampling.temperature", "INVALID_ARGUMENT"),
    "nan_top_p": (sampling(top_p=NAN), "sampling.top_p", "INVALID_ARGUMENT"),
    "zero_top_p": (sampling(top_p=0), "sampling.top_p", "INVALID_ARGUMENT"),
    "top_p_above_one": (sampling(top_p=1.5), "sampling.top_p", "INVALID_ARGUMENT"),
    "negative_top_k": (sampling(top_k=-2), "sampling.top_k", "INVALID_ARGUMENT"),
    "nan_min_p": (sampling(min_p=NAN), "sampling.min_p", "INVALID_ARGUMENT"),
    "nan_penalty": (sampling(presence_penalty=NAN), "sampling.presence_penalty", "INVALID_ARGUMENT"),
    "negative_penalty": (sampling(frequency_penalty=-3), "sampling.frequency_penalty", "INVALID_ARGUMENT"),
    "zero_repetition": (sampling(repetition_penalty=0), "sampling.repetition_penalty", "INVALID_ARGUMENT"),
    "zero_max_tokens": (sampling(max_tokens=0), "sampling.max_tokens", "INVALID_ARGUMENT"),
    "min_above_max": (sampling(min_tokens=5), "sampling.min_tokens", "INVALID_ARGUMENT"),
    "stops_too_many": (sampling(stop=["x"] * 17), "sampling.stop", "INVALID_ARGUMENT"),
    "stop_empty": (sampling(stop=["x", ""]), "sampling.stop[1]", "INVALID_ARGUMENT"),
    "stop_too_long": (sampling(stop=["x" * 1025]), "sampling.stop[0]", "INVALID_ARGUMENT"),
    "stop_ids_too_many": (sampling(stop_token_ids=[1] * 65), "sampling.stop_token_ids", "INVALID_ARGUMENT"),
    "stop_id_out_of_range": (sampling(stop_token_ids=[257]), "sampling.stop_token_ids[0]", "INVALID_ARGUMENT"),
    "logprobs_too_many": (sampling(logprobs=True, top_logprobs=21), "sampling.top_logprobs", "INVALID_ARGUMENT"),
    "logprobs_without_logprobs": (sampling(top_logprobs=1), "sampling.top_logprobs", "INVALID_ARGUMENT"),
    "bias_nan": (sampling(logit_bias={1: NAN}), "sampling.logit_bias[1]", "INVALID_ARGUMENT"),
    "bias_out_of_range": (sampling(logit_bias={999: 1}), "sampling.logit_bias", "INVALID_ARGUMENT"),
    "request_id_too_long": (request_of(request_id="x" * 257), "request_id", "INVALID_ARGUMENT"),
    "session_id_too_long": (request_of(session_id="x" * 257), "session_id", "INVALID_ARGUMENT"),
    "unknown_priority": (request_of(priority=9), "priority", "INVALID_ARGUMENT"),
}


async def test_bad_input_is_refused_with_details_and_nothing_is_lost(small: dict[str, Any]) -> None:
    """All of it against one system, which serves on and holds nothing afterwards."""
    async with cluster(**small) as c:
        for name, (request, field, reason) in BAD.items():
            error = await failure(c.stub.Generate(request))
            info, bad = details_of(error, error_details_pb2.ErrorInfo, error_details_pb2.BadRequest)
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, name
            assert (info.domain, info.reason) == ("baton", reason), name
            assert [violation.field for violation in bad.field_violations] == [field], name
            assert field in error.details(), name
        assert (await c.generate()).tokens == expected(PROMPT, 8)
        await c.balanced()


async def test_the_longest_prompt_and_output_that_fit_are_served(small: dict[str, Any]) -> None:
    async with cluster(**small) as c:
        prompt = [65] * (MAX_MODEL_LEN - 2)
        reply = await c.generate(num_tokens=2, prompt=prompt)
        assert reply.tokens == expected(prompt, 2)
        assert reply.finish.reason == inference_pb2.FINISH_REASON_LENGTH
        await c.balanced()


async def test_another_models_name_is_not_found() -> None:
    async with cluster() as c:
        for call in (
            c.stub.Generate(request_of(model="gpt")),
            c.stub.GetModel(inference_pb2.GetModelRequest(model="gpt")),
        ):
            error = await failure(call)
            info, resource = details_of(error, error_details_pb2.ErrorInfo, error_details_pb2.ResourceInfo)
            assert error.code() is grpc.StatusCode.NOT_FOUND and info.reason == "NOT_FOUND"
            assert (resource.resource_type, resource.resource_name) == ("model", "gpt")
        assert (await c.generate(model="tracer")).tokens == expected(PROMPT, 8)


async def test_what_is_no_message_is_refused() -> None:
    async with cluster() as c:
        raw = c.channel.unary_stream(METHOD)
        for name, data in {"broken UTF-8": b"\x1a\x02\xff\xfe", "garbage": b"\xff" * 40}.items():
            error = await failure(raw(data))
            (info,) = details_of(error, error_details_pb2.ErrorInfo)
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, name
            assert info.reason == "INVALID_ARGUMENT", name
        await c.balanced()


async def test_a_message_over_the_limit_is_refused() -> None:
    options = [("grpc.max_send_message_length", -1)]
    async with cluster() as c, grpc.aio.insecure_channel(c.router.address, options=options) as channel:
        error = await failure(channel.unary_stream(METHOD)(bytes(MAX_MESSAGE_BYTES + 1)))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert str(MAX_MESSAGE_BYTES) in error.details()
        assert (await c.generate()).tokens == expected(PROMPT, 8)


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


async def test_requests_over_the_limit_are_told_when_to_come_again() -> None:
    async with cluster(max_num_requests=2) as c:
        with held(c.decodes[0]):
            running = [asyncio.create_task(c.generate()) for _ in range(2)]
            while c.router.service.num_requests != 2:
                await c.router.fleet.change.wait()
            error = await failure(c.stub.Generate(request_of()))
            info, retry = details_of(error, error_details_pb2.ErrorInfo, error_details_pb2.RetryInfo)
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and info.reason == "OVERLOADED"
            assert info.metadata["limit"] == "2" and retry.retry_delay.ToMilliseconds() > 0
            assert int(dict(error.trailing_metadata())["grpc-retry-pushback-ms"]) > 0
        for task in running:
            assert (await task).tokens == expected(PROMPT, 8)
        assert (await c.generate()).tokens == expected(PROMPT, 8)


async def test_many_requests_at_once_never_exceed_the_limit() -> None:
    """Validation runs beside the loop; a request counts from its arrival."""
    async with cluster(max_num_requests=8) as c:
        results = await asyncio.gather(*(c.generate() for _ in range(40)), return_exceptions=True)
        served = [result for result in results if not isinstance(result, BaseException)]
        refused = [result for result in results if isinstance(result, grpc.aio.AioRpcError)]
        assert len(served) + len(refused) == 40 and len(served) >= 8 and refused
        assert {error.code() for error in refused} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert c.router.service.idle.is_set()


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
    async with cluster() as c, create_channel(c.router.address, keepalive_time_s=1.5) as channel:
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
