"""What a worker refuses at its door, and that nothing is lost on the wire."""

from __future__ import annotations

import math

import pytest

from engine.request import Priority, Sample, SessionTurn
from engine.sequence import FinishReason
from engine.wire import finish_reason_to_proto, request_from_attempt, token_from_proto, token_to_proto
from protos import inference_pb2, worker_pb2
from runtime.errors import ContextLengthExceeded, FailedPrecondition, InvalidArgument

VOCAB, MAX_LEN = 100, 20


def attempt(sampling=None, **changes):
    defaults = {"attempt_id": b"x" * 16, "prompt_token_ids": [1, 2], "fingerprint": "fp"}
    base = {"top_p": 1.0, "repetition_penalty": 1.0, "max_tokens": 4}
    made = worker_pb2.Attempt(**{**defaults, **changes})
    made.sampling.CopyFrom(inference_pb2.SamplingParams(**{**base, **(sampling or {})}))
    return made


def read(made):
    return request_from_attempt(made, "fp", VOCAB, MAX_LEN)


BAD = {
    "no id": ({"attempt_id": b""}, {}, "attempt_id"),
    "short id": ({"attempt_id": b"x" * 15}, {}, "attempt_id"),
    "long id": ({"attempt_id": b"x" * 17}, {}, "attempt_id"),
    "no prompt": ({"prompt_token_ids": []}, {}, "prompt_token_ids"),
    "output without prompt": ({"prompt_token_ids": [], "output_token_ids": [1]}, {}, "prompt_token_ids"),
    "prompt id out of range": ({"prompt_token_ids": [1, VOCAB]}, {}, "prompt_token_ids"),
    "huge prompt id": ({"prompt_token_ids": [2**32 - 1]}, {}, "prompt_token_ids"),
    "output id out of range": ({"output_token_ids": [VOCAB]}, {}, "output_token_ids"),
    "unknown priority": ({"priority": 9}, {}, "priority"),
    "no session key": ({"session": worker_pb2.SessionTurn(fence=1)}, {}, "session_key"),
    "long session key": ({"session": worker_pb2.SessionTurn(session_key=b"x" * 17)}, {}, "session_key"),
    "negative temperature": ({}, {"temperature": -0.1}, "sampling.temperature"),
    "nan temperature": ({}, {"temperature": math.nan}, "sampling.temperature"),
    "infinite temperature": ({}, {"temperature": math.inf}, "sampling.temperature"),
    "top_p above 1": ({}, {"top_p": 1.5}, "sampling.top_p"),
    "top_p 0": ({}, {"top_p": 0.0}, "sampling"),
    "nan top_p": ({}, {"top_p": math.nan}, "sampling.top_p"),
    "min_p above 1": ({}, {"min_p": 1.5}, "sampling.min_p"),
    "presence": ({}, {"presence_penalty": 3.0}, "sampling.presence_penalty"),
    "frequency": ({}, {"frequency_penalty": -3.0}, "sampling.frequency_penalty"),
    "repetition 0": ({}, {"repetition_penalty": 0.0}, "sampling"),
    "repetition negative": ({}, {"repetition_penalty": -1.0}, "sampling.repetition_penalty"),
    "max_tokens 0": ({}, {"max_tokens": 0}, "sampling"),
    "stop id out of range": ({}, {"stop_token_ids": [VOCAB]}, "sampling"),
    "bias id out of range": ({}, {"logit_bias": {VOCAB: 1.0}}, "sampling"),
    "nan bias": ({}, {"logit_bias": {1: math.nan}}, "sampling.logit_bias"),
    "infinite bias": ({}, {"logit_bias": {1: -math.inf}}, "sampling.logit_bias"),
    "top_logprobs": ({}, {"top_logprobs": 2**32 - 1}, "sampling.top_logprobs"),
}


@pytest.mark.parametrize("name", BAD)
def test_refuses(name):
    changes, sampling, field = BAD[name]
    with pytest.raises(InvalidArgument) as raised:
        read(attempt(sampling, **changes))
    assert raised.value.field == field


def test_refuses_sampling_left_out():
    made = attempt()
    made.ClearField("sampling")
    with pytest.raises(InvalidArgument):
        read(made)


def test_refuses_another_model():
    with pytest.raises(FailedPrecondition, match="serves fp, got other"):
        read(attempt(fingerprint="other"))


@pytest.mark.parametrize(
    "num_prompt, num_output, fits",
    [(MAX_LEN - 1, 0, True), (MAX_LEN, 0, False), (MAX_LEN - 1, 1, True), (MAX_LEN, 1, False), (10, 11, False)],
)
def test_prompt_and_output_fit_the_context(num_prompt, num_output, fits):
    """A prompt without room for one token would wait for ever; one with a complete output is finished at once."""
    made = attempt(prompt_token_ids=[1] * num_prompt, output_token_ids=[1] * num_output)
    if fits:
        assert read(made).num_input_tokens == num_prompt + num_output
        return
    with pytest.raises(ContextLengthExceeded) as raised:
        read(made)
    assert raised.value.metadata["got"] == str(num_prompt + num_output)


def test_everything_arrives():
    sampling = {
        "temperature": 0.5,
        "top_p": 0.75,
        "top_k": -1,
        "min_p": 0.25,
        "presence_penalty": 1.0,
        "frequency_penalty": -1.0,
        "repetition_penalty": 1.5,
        "max_tokens": 3,
        "min_tokens": 2,
        "seed": 2**64 - 1,
        "stop_token_ids": [4, 5],
        "ignore_eos": True,
        "logprobs": True,
        "top_logprobs": 20,
        "logit_bias": {7: -2.0, 3: 1.0},
    }
    turn = worker_pb2.SessionTurn(session_key=b"k" * 16, fence=2**64 - 1, ttl_ms=1500)
    named = {"tenant": "t", "request_id": "r", "session": turn}
    request = read(attempt(sampling, output_token_ids=[9], priority=3, waited_ms=12, **named))
    assert request.prompt_token_ids == (1, 2) and request.output_token_ids == (9,)
    assert (request.attempt_id, request.request_id, request.tenant) == (b"x" * 16, "r", "t")
    assert (request.priority, request.waited_ms) == (Priority.HIGH, 12)
    got = request.sampling
    assert (got.temperature, got.top_p, got.top_k, got.min_p) == (0.5, 0.75, 0, 0.25)
    assert (got.presence_penalty, got.frequency_penalty, got.repetition_penalty) == (1.0, -1.0, 1.5)
    assert (got.max_tokens, got.min_tokens, got.seed) == (3, 2, 2**64 - 1)
    assert (got.stop_token_ids, got.ignore_eos, got.logprobs, got.top_logprobs) == ((4, 5), True, True, 20)
    assert got.logit_bias == ((3, 1.0), (7, -2.0))
    assert request.session == SessionTurn(b"k" * 16, 2**64 - 1, 1.5)
    plain = read(attempt())
    assert plain.priority is Priority.NORMAL and plain.session is None


@pytest.mark.parametrize(
    "sample", [Sample(0), Sample(5, -0.5), Sample(5, 0.0), Sample(7, -1.0, ((7, -1.0), (3, -2.0)))]
)
def test_tokens_cross_the_wire(sample):
    token = worker_pb2.DecodedToken.FromString(token_to_proto(11, sample).SerializeToString())
    assert (token.position, token_from_proto(token)) == (11, sample)


def test_every_finish_reason_has_a_name_on_the_wire():
    names = {reason: finish_reason_to_proto(reason) for reason in FinishReason}
    assert len({*names.values(), finish_reason_to_proto(None)}) == len(FinishReason) + 1
