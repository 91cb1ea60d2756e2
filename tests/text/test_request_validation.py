"""What clients may ask, and how the rest is refused: field, limit and value, and nothing lost."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos import inference_pb2 as pb
from router.chat_template import ChatTemplate
from router.validation import ModelFacts, PreparedRequest, validate
from runtime.errors import ContextLengthExceeded, InvalidArgument, NotFound

MODEL = ModelFacts("tiny", max_model_len=64, vocab_size=259, eos_token_ids=(257,), has_chat_template=True)
TEMPLATE = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}<|end|>", {}, "test")


@pytest.fixture
def check(byte_tokenizer):
    def check(
        request: pb.GenerateRequest | None = None, model=MODEL, template=TEMPLATE, before=(), **sampling
    ) -> PreparedRequest:
        request = pb.GenerateRequest(prompt="abc") if request is None else request
        request.sampling.MergeFrom(pb.SamplingParams(**sampling))
        return validate(request, model, byte_tokenizer, template, before)

    return check


def test_everything_left_out_is_filled_in(check):
    got = check()
    assert got.prompt_token_ids == (256, 99)
    assert got.request_id.startswith("req-") and len(got.request_id) == 28
    assert (got.stops, got.include_stop, got.priority, got.session_id) == ((), False, pb.PRIORITY_NORMAL, "")
    expected = pb.SamplingParams(
        temperature=1, top_p=1, top_k=0, min_p=0, presence_penalty=0, frequency_penalty=0, repetition_penalty=1
    )
    expected.MergeFrom(pb.SamplingParams(max_tokens=62, min_tokens=0, seed=got.seed))
    assert got.sampling == expected
    optional = [field.name for field in pb.SamplingParams.DESCRIPTOR.fields if field.has_presence]
    assert len(optional) == 10
    assert all(got.sampling.HasField(name) for name in optional)


def test_everything_given_is_kept(check):
    request = pb.GenerateRequest(prompt="a", request_id="mine", model="tiny", session_id="s", priority=pb.PRIORITY_HIGH)
    sampling = {
        "temperature": 0.0,
        "top_p": 0.5,
        "top_k": 7,
        "min_p": 0.25,
        "presence_penalty": -2.0,
        "frequency_penalty": 2.0,
        "repetition_penalty": 1.5,
        "max_tokens": 9,
        "min_tokens": 9,
        "seed": 2**64 - 1,
        "stop_token_ids": [1, 258],
        "ignore_eos": True,
        "logprobs": True,
        "top_logprobs": 20,
        "logit_bias": {0: -100.0, 258: 100.0},
    }
    got = check(request, stop=["x", "y"], include_stop_str_in_output=True, **sampling)
    assert got.sampling == pb.SamplingParams(**sampling)
    assert (got.request_id, got.session_id, got.priority, got.seed) == ("mine", "s", pb.PRIORITY_HIGH, 2**64 - 1)
    assert (got.stops, got.include_stop) == (("x", "y"), True)


def test_request_of_the_caller_is_not_changed(check):
    request = pb.GenerateRequest(prompt="a", sampling=pb.SamplingParams(stop=["x"], top_k=-1))
    before = pb.GenerateRequest()
    before.CopyFrom(request)
    assert check(request).sampling.top_k == 0
    assert request == before


def test_drawn_ids_and_seeds_differ(check):
    first, second = check(), check()
    assert first.request_id != second.request_id
    assert first.seed != second.seed


@pytest.mark.parametrize(
    ("request_fields", "expected"),
    [
        ({"prompt": "ab<|end|>"}, (256, 257)),
        ({"messages": [pb.ChatMessage(role="user", content="ab")]}, (256, 257)),
        ({"prompt_token_ids": [5, 258]}, (5, 258)),
    ],
)
def test_three_ways_to_give_a_prompt(check, request_fields, expected):
    assert check(pb.GenerateRequest(**request_fields)).prompt_token_ids == expected


MESSAGE = [pb.ChatMessage(role="user", content="hi")]


@pytest.mark.parametrize(
    ("request_fields", "words"),
    [
        ({}, "prompt: give exactly one of prompt, messages, prompt_token_ids, got none"),
        ({"prompt": "a", "messages": MESSAGE}, "messages: give exactly one of .* got prompt and messages"),
        ({"prompt": "", "prompt_token_ids": [1]}, "got prompt and prompt_token_ids"),
        ({"messages": MESSAGE, "prompt_token_ids": [1]}, "got messages and prompt_token_ids"),
        ({"prompt": ""}, "prompt: must not be empty"),
        ({"messages": [pb.ChatMessage(content="hi")]}, r"messages\[0\]\.role: must not be empty"),
        ({"prompt_token_ids": [1, 259, 5]}, r"prompt_token_ids\[1\]: token id 259 .* 0 to 258"),
        ({"prompt_token_ids": [2**32 - 1]}, "token id 4294967295"),
        ({"prompt": "a", "request_id": "é" * 129}, "request_id: at most 256 bytes are possible, got 258"),
        ({"prompt": "a", "session_id": "x" * 257}, "session_id: at most 256 bytes are possible, got 257"),
        ({"prompt": "a", "priority": 9}, "priority: must be one of PRIORITY_UNSPECIFIED, .*, got 9"),
    ],
)
def test_request_that_cannot_be(check, request_fields, words):
    with pytest.raises(InvalidArgument, match=words):
        check(pb.GenerateRequest(**request_fields))


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("field", "values", "words"),
    [
        ("temperature", [-0.1, NAN, INF, -INF], "must be at least 0 and finite, got"),
        ("top_p", [0.0, -1.0, 1.5, NAN, INF], "must be above 0 and at most 1, got"),
        ("top_k", [-2, -(2**31)], "must be -1 or more, got -"),
        ("min_p", [-0.5, 1.01, NAN, INF], "must be at least 0 and at most 1, got"),
        ("presence_penalty", [-2.1, 2.1, NAN, -INF], "must be at least -2 and at most 2, got"),
        ("frequency_penalty", [-2.1, 2.1, NAN, INF], "must be at least -2 and at most 2, got"),
        ("repetition_penalty", [0.0, -1.0, NAN, INF], "must be above 0 and finite, got"),
        ("max_tokens", [0], "must be at least 1, got 0"),
        ("min_tokens", [63, 2**32 - 1], "at most 62 tokens"),
        ("top_logprobs", [1], "needs logprobs to be true, got 1"),
        ("top_logprobs", [21, 2**32 - 1], "at most 20 tokens are possible, got"),
        ("stop", [["x"] * 17], "at most 16 strings are possible, got 17"),
        ("stop", [["x", ""]], r"stop\[1\]: must not be empty"),
        ("stop", [["é" * 513]], r"stop\[0\]: at most 1024 bytes are possible, got 1026"),
        ("stop_token_ids", [[1] * 65], "at most 64 ids are possible, got 65"),
        ("stop_token_ids", [[1, 259]], r"stop_token_ids\[1\]: token id 259"),
        ("logit_bias", [{259: 1.0}], "token id 259"),
        ("logit_bias", [{1: 100.5}, {1: -101.0}, {1: NAN}, {1: INF}], r"\[1\]: must be at least -100 and at most 100"),
        ("logit_bias", [{i: 0.0 for i in range(1025)}], "at most 1024 entries are possible, got 1025"),
    ],
)
def test_sampling_value_that_cannot_be(check, field, values, words):
    for value in values:
        with pytest.raises(InvalidArgument, match=words) as caught:
            check(**{field: value})
        assert caught.value.field.startswith(f"sampling.{field}")


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "presence_penalty": -2.0},
        {"top_k": 2**31 - 1, "min_p": 1.0, "frequency_penalty": 2.0, "max_tokens": 1, "min_tokens": 1},
        {"stop": ["x" * 1024] * 16, "stop_token_ids": [258] * 64, "logprobs": True, "top_logprobs": 20},
        {"max_tokens": 62, "min_tokens": 62, "seed": 0, "repetition_penalty": 0.5},
    ],
)
def test_values_at_the_limits_are_possible(check, sampling):
    check(**sampling)


def test_seed_zero_is_a_seed(check):
    assert check(seed=0).seed == 0


def test_two_bad_values_give_an_error_about_one(check):
    with pytest.raises(InvalidArgument, match="temperature"):
        check(temperature=-1.0, top_p=9.0)


def test_other_model_is_not_found(check):
    with pytest.raises(NotFound, match='"huge" is not served here, only "tiny"') as caught:
        check(pb.GenerateRequest(prompt="a", model="huge"))
    assert caught.value.metadata == {"kind": "model", "name": "huge"}


def test_messages_need_a_template(check):
    with pytest.raises(InvalidArgument, match="messages: the model has no chat template"):
        check(pb.GenerateRequest(messages=MESSAGE), template=None)


def test_messages_that_the_template_refuses(check):
    template = ChatTemplate("{{ raise_exception('no system role') }}", {}, "test")
    with pytest.raises(InvalidArgument, match=r"messages: .*no system role"):
        check(pb.GenerateRequest(messages=MESSAGE), template=template)


def test_template_that_writes_nothing(check):
    with pytest.raises(InvalidArgument, match="messages: must not be empty"):
        check(pb.GenerateRequest(messages=MESSAGE), template=ChatTemplate("", {}, "test"))


@pytest.mark.parametrize("fields", [{"prompt": "x" * 64}, {"prompt_token_ids": [1] * 64}])
def test_prompt_must_leave_room_for_one_token(check, fields):
    with pytest.raises(ContextLengthExceeded, match="has 64 tokens, at most 63") as caught:
        check(pb.GenerateRequest(**fields))
    assert caught.value.field == next(iter(fields))
    assert caught.value.metadata == {"limit": "63", "got": "64"}
    (name, value) = next(iter(fields.items()))
    assert check(pb.GenerateRequest(**{name: value[:-1]})).sampling.max_tokens == 1


def test_prompt_and_output_must_fit_together(check):
    request = pb.GenerateRequest(prompt_token_ids=[1] * 60)
    assert check(request, max_tokens=4).sampling.max_tokens == 4
    with pytest.raises(ContextLengthExceeded, match="60 tokens of prompt_token_ids and 5 of output are 65") as caught:
        check(request, max_tokens=5)
    assert caught.value.field == "sampling.max_tokens"
    assert caught.value.metadata == {"limit": "64", "got": "65"}


class CountingTokenizer:
    """Lets the test see whether text was tokenised."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.num_encoded = 0

    def encode(self, text, add_special_tokens):
        self.num_encoded += 1
        return self.tokenizer.encode(text, add_special_tokens)

    def max_text_bytes(self, num_tokens):
        return self.tokenizer.max_text_bytes(num_tokens)


def test_text_that_is_surely_too_long_is_not_tokenised(byte_tokenizer):
    counting = CountingTokenizer(byte_tokenizer)
    longest = 64 * len("<|end|>")
    for length, num_encoded in ((longest, 1), (longest + 1, 1)):
        with pytest.raises(ContextLengthExceeded):
            validate(pb.GenerateRequest(prompt="x" * length), MODEL, counting, TEMPLATE)
        assert counting.num_encoded == num_encoded


def test_longest_tokens_are_not_refused_early(byte_tokenizer):
    got = validate(pb.GenerateRequest(prompt="<|end|>" * 63), MODEL, byte_tokenizer, TEMPLATE)
    assert got.prompt_token_ids == (257,) * 63


def test_tokenizer_may_know_more_ids_than_the_model(check):
    smaller = ModelFacts("tiny", max_model_len=64, vocab_size=258, eos_token_ids=(), has_chat_template=True)
    with pytest.raises(InvalidArgument, match="prompt: token id 258 is out of range"):
        check(pb.GenerateRequest(prompt="<think>"), model=smaller)


@given(data=st.binary(max_size=60))
def test_any_bytes_on_the_wire_are_served_or_refused(byte_tokenizer, data):
    request = pb.GenerateRequest(prompt="a")
    try:
        request.MergeFromString(data)
    except Exception as error:
        assert type(error).__name__ == "DecodeError"
        return
    try:
        prepared = validate(request, MODEL, byte_tokenizer, TEMPLATE)
    except (InvalidArgument, NotFound):
        return
    assert 1 <= len(prepared.prompt_token_ids) + prepared.sampling.max_tokens <= MODEL.max_model_len


numbers = st.one_of(st.floats(width=32), st.sampled_from([0.0, 1.0, -0.0, 2.0, 100.0]))


@given(
    values=st.fixed_dictionaries(
        {},
        optional={
            name: numbers
            for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
        }
        | {"top_k": st.integers(-3, 5), "max_tokens": st.integers(0, 70), "min_tokens": st.integers(0, 70)},
    )
)
def test_what_passes_is_possible(byte_tokenizer, values):
    request = pb.GenerateRequest(prompt="abc", sampling=pb.SamplingParams(**values))
    try:
        got = validate(request, MODEL, byte_tokenizer, TEMPLATE).sampling
    except InvalidArgument:
        return
    assert 0 <= got.temperature < math.inf and 0 < got.top_p <= 1 and 0 <= got.min_p <= 1 and got.top_k >= 0
    assert abs(got.presence_penalty) <= 2 and abs(got.frequency_penalty) <= 2 and 0 < got.repetition_penalty < math.inf
    assert 0 <= got.min_tokens <= got.max_tokens and 1 <= got.max_tokens <= 62


END = 257
TURNS = ChatTemplate(
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}<|end|>{% endfor %}a:",
    {},
    "test",
)


def appended(**fields):
    return pb.GenerateRequest(session_id="s", append=True, **fields)


@pytest.mark.parametrize(
    ("fields", "new"),
    [
        ({"prompt": "xy"}, tuple(b"xy")),
        ({"prompt_token_ids": [257, 5]}, (257, 5)),
        ({"messages": [pb.ChatMessage(role="user", content="xy")]}, (END, *b"u:xy", END, *b"a:")),
    ],
)
def test_what_is_appended_goes_after_the_session(check, fields, new):
    before = tuple(b"said")
    assert check(appended(**fields), template=TURNS, before=before).prompt_token_ids == (*before, *new)


def test_an_answer_that_ended_by_itself_is_not_ended_twice(check):
    request = appended(messages=[pb.ChatMessage(role="user", content="xy")])
    before = (*b"said", END)
    assert check(request, template=TURNS, before=before).prompt_token_ids == (*before, *b"u:xy", END, *b"a:")


def test_the_session_counts_for_the_context(check):
    assert len(check(appended(prompt="x" * 3), before=(1,) * 60).prompt_token_ids) == 63
    with pytest.raises(ContextLengthExceeded, match="has 64 tokens, at most 63"):
        check(appended(prompt="x" * 4), before=(1,) * 60)


@pytest.mark.parametrize(
    ("request_fields", "text"),
    [
        ({"append": True, "prompt": "x"}, "session_id: is needed to append to a session, got none"),
        ({"session_tokens": 3, "prompt": "x"}, "session_id: is needed"),
        ({"session_id": "s", "session_tokens": 3, "prompt": "x"}, "session_tokens: needs append to be true, got 3"),
    ],
)
def test_append_needs_a_session(check, request_fields, text):
    with pytest.raises(InvalidArgument, match=text):
        check(pb.GenerateRequest(**request_fields))
