"""Bad input over a whole system: each a clear status with details, and nothing lost."""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio
import pytest
from cluster import PROMPT, cluster, expected, request_of
from failures import details_of, failure
from google.rpc import error_details_pb2

from protos import inference_pb2
from runtime.rpc import MAX_MESSAGE_BYTES

METHOD = "/baton.v1.Inference/Generate"
MAX_MODEL_LEN = 512


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
    "append_without_a_session": (request_of(append=True), "session_id", "INVALID_ARGUMENT"),
    "session_tokens_without_a_session": (request_of(session_tokens=9), "session_id", "INVALID_ARGUMENT"),
    "session_tokens_without_append": (
        request_of(session_id="s", session_tokens=9),
        "session_tokens",
        "INVALID_ARGUMENT",
    ),
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
