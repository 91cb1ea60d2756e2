"""Both clients against a scripted router on a real socket."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import pytest
from fake_router import FakeRouter

from baton import AsyncClient, Client
from baton.answers import Completion, build_request, join
from protos import inference_pb2
from runtime import errors

Call = Callable[..., Any]


async def blocking(address: str, method: str, *args: Any, **kwargs: Any) -> Any:
    """Uses Client in a thread, since the router lives in this event loop."""

    def call() -> Any:
        with Client(address, timeout_s=20) as client:
            result = getattr(client, method)(*args, **kwargs)
            return list(result) if method == "generate" else result

    return await asyncio.to_thread(call)


async def awaiting(address: str, method: str, *args: Any, **kwargs: Any) -> Any:
    async with AsyncClient(address, timeout_s=20) as client:
        result = getattr(client, method)(*args, **kwargs)
        return [chunk async for chunk in result] if method == "generate" else await result


both = pytest.mark.parametrize("call", [blocking, awaiting])


@both
async def test_a_stream_carries_text_tokens_and_the_finish(call: Call, address: str) -> None:
    chunks = await call(address, "generate", "one two", logprobs=True, top_logprobs=1)
    assert [chunk.text for chunk in chunks] == ["one ", "two ", ""]
    assert [token.token_id for chunk in chunks for token in chunk.tokens] == [100, 101]
    assert chunks[0].tokens[0].logprob == -0.5
    assert chunks[0].tokens[0].top_logprobs == ((7, -0.5),)
    assert [chunk.finish is None for chunk in chunks] == [True, True, False]


@both
async def test_a_completion_is_the_whole_answer(call: Call, address: str) -> None:
    completion = await call(address, "complete", messages=[{"role": "user", "content": "a b c"}], seed=5)
    assert isinstance(completion, Completion)
    assert (completion.text, completion.token_ids, completion.finish_reason) == ("a b c ", (100, 101, 102), "stop")
    assert (completion.finish.matched, completion.finish.seed, completion.request_id) == ("END", 5, "r1")
    assert (completion.usage.completion_tokens, completion.timing.total_ms) == (3, 4)
    assert (completion.served_by.prefill_worker_id, completion.served_by.kv_bytes) == ("p0", 4096)
    assert completion.tokens[0].logprob is None


@both
async def test_every_option_reaches_the_router(call: Call, address: str, router: FakeRouter) -> None:
    sampling = {
        "temperature": 0.0,
        "top_p": 0.5,
        "top_k": -1,
        "min_p": 0.25,
        "presence_penalty": 1.0,
        "frequency_penalty": -1.0,
        "repetition_penalty": 2.0,
        "max_tokens": 5,
        "min_tokens": 1,
        "seed": 2**64 - 1,
        "stop": ["x", "y"],
        "stop_token_ids": [4],
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "logprobs": True,
        "top_logprobs": 2,
        "logit_bias": {3: 1.5},
    }
    names = {"model": "fake", "session_id": "s", "request_id": "r", "append": True, "session_tokens": 7}
    await call(address, "generate", "hi", priority="high", **names, **sampling)
    expected = inference_pb2.GenerateRequest(
        prompt="hi", priority=inference_pb2.PRIORITY_HIGH, sampling=inference_pb2.SamplingParams(**sampling), **names
    )
    assert router.requests == [expected]
    assert expected.sampling.HasField("temperature")
    assert {field.name for field in expected.sampling.DESCRIPTOR.fields} == sampling.keys()


@both
async def test_two_inputs_are_sent_for_the_router_to_refuse(call: Call, address: str, router: FakeRouter) -> None:
    await call(address, "generate", "hi", prompt_token_ids=[1, 2])
    assert (router.requests[0].prompt, list(router.requests[0].prompt_token_ids)) == ("hi", [1, 2])


@both
@pytest.mark.parametrize("fail_after", [0, 1], ids=["at once", "after a word"])
async def test_errors_come_back_as_their_classes(call: Call, address: str, router: FakeRouter, fail_after: int) -> None:
    router.error, router.fail_after = errors.Overloaded("queue full", 2.0), fail_after
    with pytest.raises(errors.Overloaded, match="queue full") as caught:
        await call(address, "generate", "one two")
    assert caught.value.retry_after_s == 2.0
    with pytest.raises(errors.NotFound, match="'gpt' is not served"):
        await call(address, "get_model", "gpt")


@both
async def test_no_router_is_unavailable(call: Call) -> None:
    with pytest.raises(errors.Unavailable):
        await call("127.0.0.1:1", "get_model")


@both
async def test_a_deadline_ends_the_request_on_the_server_too(call: Call, address: str, router: FakeRouter) -> None:
    router.hang = True
    with pytest.raises(errors.Aborted) as caught:
        await call(address, "complete", "one", timeout_s=0.3)
    assert caught.value.metadata["code"] == "DEADLINE_EXCEEDED"
    await asyncio.wait_for(router.cleaned.wait(), 2)


async def test_leaving_a_stream_cancels_the_request(address: str, router: FakeRouter) -> None:
    router.hang = True
    async with AsyncClient(address) as client:
        stream: Any = client.generate("one two")
        async with contextlib.aclosing(stream):
            async for _ in stream:
                break
        await asyncio.wait_for(router.cleaned.wait(), 2)


async def test_leaving_a_blocking_stream_cancels_the_request(address: str, router: FakeRouter) -> None:
    router.hang = True

    def take_one() -> None:
        with Client(address) as client:
            for _ in client.generate("one two"):
                break

    await asyncio.to_thread(take_one)
    await asyncio.wait_for(router.cleaned.wait(), 2)


@both
async def test_the_other_calls(call: Call, address: str) -> None:
    assert (await call(address, "get_model")).model == "fake"
    assert [worker.worker_id for worker in await call(address, "workers")] == ["p0"]
    assert await call(address, "end_session", "known") is True
    assert await call(address, "end_session", "unknown") is False


@pytest.mark.parametrize(
    ("inputs", "sampling", "field"),
    [
        (("\ud800", None, None), {}, "prompt"),
        ((None, [{"role": "user", "text": "x"}], None), {}, "messages"),
        ((None, ["x"], None), {}, "messages"),
        ((None, None, [-1]), {}, "prompt_token_ids"),
        ((None, None, [2**32]), {}, "prompt_token_ids"),
        ((None, None, ["x"]), {}, "prompt_token_ids"),
        (("x", None, None), {"max_tokens": -1}, "sampling.max_tokens"),
        (("x", None, None), {"temperature": "hot"}, "sampling.temperature"),
        (("x", None, None), {"top_k": 2**40}, "sampling.top_k"),
        (("x", None, None), {"logit_bias": {-1: 0.0}}, "sampling.logit_bias"),
        (("x", None, None), {"stop": [b"\xff"]}, "sampling.stop"),
    ],
)
def test_what_a_message_cannot_hold_is_refused_by_name(inputs: Any, sampling: dict[str, Any], field: str) -> None:
    with pytest.raises(errors.InvalidArgument) as caught:
        build_request(*inputs, sampling)
    assert caught.value.field == field


def test_an_unknown_priority_is_refused() -> None:
    with pytest.raises(errors.InvalidArgument, match="priority: 'urgent'"):
        build_request("x", None, None, {}, priority="urgent")


def test_an_unknown_option_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="unknown sampling option: temprature"):
        build_request("x", None, None, {"temprature": 0})


def test_one_stop_string_is_not_split() -> None:
    assert list(build_request("x", None, None, {"stop": "END"}).sampling.stop) == ["END"]


def test_an_answer_without_its_last_message_is_an_error() -> None:
    with pytest.raises(errors.BatonError, match="without its last message"):
        join([])
