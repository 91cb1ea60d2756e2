"""Turns what a client sent into a request that can be served, or says what is wrong with it.

Owns the limits of the public API: every promise of protos/inference.proto about values is kept here, so that workers
get only complete and possible requests. Each violation is one error that names field, limit and value. Does not admit
or queue. Tokenising a long prompt takes time: call from a worker thread where the event loop must not wait.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from protos import inference_pb2
from router.chat_template import ChatTemplate
from router.tokenizer import Tokenizer
from runtime.errors import ContextLengthExceeded, InvalidArgument, NotFound

MAX_ID_BYTES = 256
MAX_STOPS = 16
MAX_STOP_BYTES = 1024
MAX_STOP_TOKEN_IDS = 64
MAX_TOP_LOGPROBS = 20
MAX_LOGIT_BIASES = 1024
MAX_LOGIT_BIAS = 100.0
MAX_PENALTY = 2.0


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What validation has to know of the served model."""

    name: str
    """Its public name."""
    max_model_len: int
    """The most tokens that prompt and output may have together."""
    vocab_size: int
    """Number of token ids."""
    eos_token_ids: tuple[int, ...]
    """Ids that end generation."""
    has_chat_template: bool
    """Whether `messages` can be used."""


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request that can be served as it is."""

    request_id: str
    """The client's, or a drawn one."""
    prompt_token_ids: tuple[int, ...]
    """The prompt, at least one token."""
    sampling: inference_pb2.SamplingParams
    """Every optional field set; without what stays at the router: `stop` and `include_stop_str_in_output`."""
    stops: tuple[str, ...]
    """Strings that end the output."""
    include_stop: bool
    """Whether a matched stop string stays in the text."""
    priority: inference_pb2.Priority
    """Never PRIORITY_UNSPECIFIED."""
    session_id: str
    """Empty for none."""
    seed: int
    """The client's, or a drawn one; 64 bits."""
    tenant: str = ""
    """Whose request it is, and so whose cached KV and sessions it may use; the router says so, never the client."""


def validate(
    request: inference_pb2.GenerateRequest,
    model: ModelFacts,
    tokenizer: Tokenizer,
    chat_template: ChatTemplate | None,
    before: Sequence[int] = (),
    tenant: str = "",
) -> PreparedRequest:
    """Checks and completes `request` of `tenant`; `before` are the session's tokens, if the input is to be
    appended to them.

    Raises InvalidArgument, ContextLengthExceeded (which is one) or NotFound for another model's name.
    """
    _check_identity(request, model)
    _check_sampling(request.sampling, model)
    prompt = _prompt(request, model, tokenizer, chat_template, before)
    sampling = _complete(request.sampling, prompt.field, len(prompt.token_ids), model)
    priority = request.priority or inference_pb2.PRIORITY_NORMAL
    return PreparedRequest(
        request_id=request.request_id or f"req-{secrets.token_hex(12)}",
        prompt_token_ids=prompt.token_ids,
        sampling=sampling,
        stops=tuple(request.sampling.stop),
        include_stop=request.sampling.include_stop_str_in_output,
        priority=priority,
        session_id=request.session_id,
        seed=sampling.seed,
        tenant=tenant,
    )


def _check_identity(request: inference_pb2.GenerateRequest, model: ModelFacts) -> None:
    if request.model and request.model != model.name:
        raise NotFound("model", request.model, f'model: "{request.model}" is not served here, only "{model.name}"')
    for field, value in (("request_id", request.request_id), ("session_id", request.session_id)):
        _at_most(field, "bytes", len(value.encode()), MAX_ID_BYTES)
    if not request.session_id and (request.append or request.HasField("session_tokens")):
        raise InvalidArgument("session_id", "is needed to append to a session, got none")
    if request.HasField("session_tokens") and not request.append:
        raise InvalidArgument("session_tokens", f"needs append to be true, got {request.session_tokens}")
    if request.priority not in inference_pb2.Priority.values():
        known = ", ".join(inference_pb2.Priority.keys())
        raise InvalidArgument("priority", f"must be one of {known}, got {request.priority}")


def _check_sampling(sampling: inference_pb2.SamplingParams, model: ModelFacts) -> None:
    """Values that were not set are 0 and pass or are left out; their defaults are possible anyway."""
    given = {field.name for field, _ in sampling.ListFields()}
    if "temperature" in given:
        _in_range("temperature", sampling.temperature, 0.0, math.inf)
    if "top_p" in given:
        _in_range("top_p", sampling.top_p, 0.0, 1.0, above=True)
    if sampling.top_k < -1:
        raise InvalidArgument("sampling.top_k", f"must be -1 or more, got {sampling.top_k}", limit=-1)
    _in_range("min_p", sampling.min_p, 0.0, 1.0)
    _in_range("presence_penalty", sampling.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
    _in_range("frequency_penalty", sampling.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
    if "repetition_penalty" in given:
        _in_range("repetition_penalty", sampling.repetition_penalty, 0.0, math.inf, above=True)
    if "max_tokens" in given and sampling.max_tokens < 1:
        raise InvalidArgument("sampling.max_tokens", "must be at least 1, got 0", limit=1, got=0)
    _at_most("sampling.top_logprobs", "tokens", sampling.top_logprobs, MAX_TOP_LOGPROBS)
    if sampling.top_logprobs and not sampling.logprobs:
        raise InvalidArgument("sampling.top_logprobs", f"needs logprobs to be true, got {sampling.top_logprobs}")
    _check_lists(sampling, model)


def _check_lists(sampling: inference_pb2.SamplingParams, model: ModelFacts) -> None:
    _at_most("sampling.stop", "strings", len(sampling.stop), MAX_STOPS)
    for index, stop in enumerate(sampling.stop):
        if not stop:
            raise InvalidArgument(f"sampling.stop[{index}]", "must not be empty")
        _at_most(f"sampling.stop[{index}]", "bytes", len(stop.encode()), MAX_STOP_BYTES)
    _at_most("sampling.stop_token_ids", "ids", len(sampling.stop_token_ids), MAX_STOP_TOKEN_IDS)
    for index, token_id in enumerate(sampling.stop_token_ids):
        _check_token_id(f"sampling.stop_token_ids[{index}]", token_id, model)
    _at_most("sampling.logit_bias", "entries", len(sampling.logit_bias), MAX_LOGIT_BIASES)
    for token_id, bias in sorted(sampling.logit_bias.items()):
        _check_token_id("sampling.logit_bias", token_id, model)
        _in_range(f"logit_bias[{token_id}]", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)


@dataclass(frozen=True, slots=True)
class _Prompt:
    field: str
    token_ids: tuple[int, ...]


def _prompt(
    request: inference_pb2.GenerateRequest,
    model: ModelFacts,
    tokenizer: Tokenizer,
    chat_template: ChatTemplate | None,
    before: Sequence[int],
) -> _Prompt:
    """The one prompt that was given, after what was before it, as token ids that fit the context."""
    given = [field for field, is_given in _inputs(request) if is_given]
    if len(given) != 1:
        got = " and ".join(given) or "none"
        raise InvalidArgument(given[-1] if given else "prompt", f"give exactly one of {_INPUT_NAMES}, got {got}")
    (field,) = given
    if field == "prompt_token_ids":
        new = tuple(request.prompt_token_ids)
        _check_prompt_length(field, len(before) + len(new), model)
        highest = max(new)
        _check_token_id(f"{field}[{new.index(highest)}]", highest, model)
        return _Prompt(field, (*before, *new))
    new = _tokenize(request, field, model, tokenizer, chat_template)
    if field == "messages" and before and before[-1] == new[0] and tokenizer.is_special(new[0]):
        # The token that ended the answer is also what the template writes at the end of one.
        new = new[1:]
    _check_prompt_length(field, len(before) + len(new), model)
    # A tokenizer may know more ids than the model has rows.
    _check_token_id(field, max(new, default=0), model)
    return _Prompt(field, (*before, *new))


def _tokenize(
    request: inference_pb2.GenerateRequest,
    field: str,
    model: ModelFacts,
    tokenizer: Tokenizer,
    chat_template: ChatTemplate | None,
) -> tuple[int, ...]:
    text = _render(request, chat_template) if field == "messages" else request.prompt
    if not text:
        raise InvalidArgument(field, "must not be empty")
    _check_text_length(field, text, model, tokenizer)
    frames = field == "prompt" and not request.append
    token_ids = tuple(tokenizer.encode(text, add_special_tokens=frames))
    if not token_ids:
        raise InvalidArgument(field, "has no tokens")
    return token_ids


_INPUT_NAMES = "prompt, messages, prompt_token_ids"


def _inputs(request: inference_pb2.GenerateRequest) -> tuple[tuple[str, bool], ...]:
    return (
        ("prompt", request.HasField("prompt")),
        ("messages", len(request.messages) > 0),
        ("prompt_token_ids", len(request.prompt_token_ids) > 0),
    )


def _render(request: inference_pb2.GenerateRequest, chat_template: ChatTemplate | None) -> str:
    if chat_template is None:
        raise InvalidArgument("messages", "the model has no chat template; give prompt or prompt_token_ids")
    for index, message in enumerate(request.messages):
        if not message.role:
            raise InvalidArgument(f"messages[{index}].role", "must not be empty")
    messages = [{"role": each.role, "content": each.content} for each in request.messages]
    return chat_template.render_after_answer(messages) if request.append else chat_template.render(messages)


def _complete(
    sampling: inference_pb2.SamplingParams, prompt_field: str, num_prompt_tokens: int, model: ModelFacts
) -> inference_pb2.SamplingParams:
    """Sets what was left out; `_check_sampling` has seen the rest."""
    room = model.max_model_len - num_prompt_tokens
    if sampling.max_tokens > room:
        total = num_prompt_tokens + sampling.max_tokens
        raise ContextLengthExceeded(
            "sampling.max_tokens",
            f"{num_prompt_tokens} tokens of {prompt_field} and {sampling.max_tokens} of output are {total}, "
            f"but the model's context has {model.max_model_len}",
            limit=model.max_model_len,
            got=total,
        )
    complete = inference_pb2.SamplingParams()
    complete.CopyFrom(sampling)
    complete.ClearField("stop")
    complete.ClearField("include_stop_str_in_output")
    defaults: dict[str, float | int] = {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "max_tokens": room,
        "min_tokens": 0,
    }
    for name, value in defaults.items():
        if not sampling.HasField(name):
            setattr(complete, name, value)
    if not sampling.HasField("seed"):
        complete.seed = secrets.randbits(64)
    complete.top_k = max(0, complete.top_k)
    _at_most("sampling.min_tokens", "tokens (max_tokens)", complete.min_tokens, complete.max_tokens)
    return complete


def _check_text_length(field: str, text: str, model: ModelFacts, tokenizer: Tokenizer) -> None:
    """Refuses text that is surely too long before time is spent on it."""
    num_bytes, limit = len(text.encode()), tokenizer.max_text_bytes(model.max_model_len)
    if num_bytes > limit:
        raise ContextLengthExceeded(
            field,
            f"{num_bytes} bytes are too many for the model's context of {model.max_model_len} tokens, "
            f"which take at most {limit}",
            limit=limit,
            got=num_bytes,
        )


def _check_prompt_length(field: str, num_tokens: int, model: ModelFacts) -> None:
    limit = model.max_model_len - 1
    if num_tokens > limit:
        raise ContextLengthExceeded(
            field,
            f"has {num_tokens} tokens, at most {limit} leave room for one of output "
            f"in the model's context of {model.max_model_len}",
            limit=limit,
            got=num_tokens,
        )


def _check_token_id(field: str, token_id: int, model: ModelFacts) -> None:
    if token_id >= model.vocab_size:
        raise InvalidArgument(
            field,
            f"token id {token_id} is out of range, the model has ids 0 to {model.vocab_size - 1}",
            limit=model.vocab_size - 1,
            got=token_id,
        )


def _in_range(name: str, value: float, low: float, high: float, above: bool = False) -> None:
    """NaN and infinity are never in range; with `above` neither is `low` itself."""
    if math.isfinite(value) and (low < value if above else low <= value) and value <= high:
        return
    least = f"above {low:g}" if above else f"at least {low:g}"
    bounds = f"{least} and finite" if math.isinf(high) else f"{least} and at most {high:g}"
    raise InvalidArgument(f"sampling.{name}", f"must be {bounds}, got {value:g}", low=low, high=high, got=value)


def _at_most(field: str, unit: str, got: int, limit: int) -> None:
    if got > limit:
        raise InvalidArgument(field, f"at most {limit} {unit} are possible, got {got}", limit=limit, got=got)
