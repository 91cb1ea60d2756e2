"""What a client sends and gets, as plain values: the one place in `baton` that knows the public messages.

Owns building a GenerateRequest from keyword arguments and reading responses. What a message cannot hold (a negative
count, a lone surrogate) is an InvalidArgument here; every other limit is the router's to judge.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from protos import inference_pb2
from runtime.errors import BatonError, InvalidArgument

Priority = Literal["low", "normal", "high"]
FinishReason = Literal["stop", "length", "abort"]


class Sampling(TypedDict, total=False):
    """How tokens are chosen and when generation ends. What is left out takes the router's default."""

    temperature: float
    """0 is greedy; at least 0."""
    top_p: float
    """Smallest set of tokens that reaches this probability; in (0, 1], 1 is off."""
    top_k: int
    """The k most likely tokens; 0 or -1 is off."""
    min_p: float
    """Tokens at least this many times as likely as the likeliest; in [0, 1], 0 is off."""
    presence_penalty: float
    """Subtracted once for tokens already generated; in [-2, 2]."""
    frequency_penalty: float
    """Subtracted for each time a token was generated; in [-2, 2]."""
    repetition_penalty: float
    """Over prompt and output; above 0, 1 is off."""
    max_tokens: int
    """Most tokens to generate; default: what the context has room for."""
    min_tokens: int
    """No end before this many tokens."""
    seed: int
    """Makes sampling repeatable; drawn and reported when left out."""
    stop: str | Sequence[str]
    """Generation ends where this, or one of these, first appears; at most 16."""
    stop_token_ids: Sequence[int]
    """Generation ends when one of these ids is generated; at most 64."""
    include_stop_str_in_output: bool
    """Keep the matched stop string in the text."""
    ignore_eos: bool
    """Go on past the model's end-of-sequence tokens."""
    logprobs: bool
    """Report each token's log-probability."""
    top_logprobs: int
    """Also report this many likeliest tokens, 0 to 20; needs `logprobs`."""
    logit_bias: Mapping[int, float]
    """Added to the logits of these ids, -100 to 100 each."""


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token."""

    token_id: int
    """Its id."""
    index: int
    """Its place in the output, from 0."""
    logprob: float | None
    """Natural-log probability; None unless asked for."""
    top_logprobs: tuple[tuple[int, float], ...]
    """(token id, log-probability) of the likeliest, most likely first."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts."""

    prompt_tokens: int
    """Tokens of the prompt, template included, and of the session that it was appended to."""
    completion_tokens: int
    """Tokens generated."""
    cached_tokens: int
    """Prompt tokens whose KV was reused."""
    drafted_tokens: int = 0
    """Tokens that were guessed and checked beside others, by the worker that answered last."""
    accepted_tokens: int = 0
    """Of these, those that came true."""

    @property
    def session_tokens(self) -> int:
        """Tokens of the conversation: what a next turn that appends may say the session must have."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Timing:
    """Durations as the router measured them, in milliseconds."""

    router_queue_ms: float
    """From arrival to the first dispatch."""
    prefill_queue_ms: float
    """Waiting at the prefilling worker."""
    prefill_ms: float
    """From the first chunk to the first token."""
    transfer_ms: float
    """From asking for KV to its attestation."""
    time_to_first_token_ms: float
    """From arrival to the first token."""
    inter_token_latency_ms: float
    """Mean gap between tokens after the first."""
    total_ms: float
    """From arrival to the end."""


@dataclass(frozen=True, slots=True)
class ServedBy:
    """Who served a request and what passed between them."""

    prefill_worker_id: str
    """Who prefilled."""
    decode_worker_id: str
    """Who decoded."""
    transport: str
    """How KV moved; empty when nothing did."""
    kv_bytes: int
    """KV bytes handed off."""
    num_attempts: int
    """1 when nothing went wrong."""


@dataclass(frozen=True, slots=True)
class Finish:
    """What is known when a request ends."""

    reason: FinishReason
    """Why it ended."""
    matched: str | int | None
    """The stop string or token id that ended it."""
    usage: Usage
    """Token counts."""
    timing: Timing
    """Durations."""
    served_by: ServedBy
    """Workers."""
    seed: int
    """The seed that was used."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of an answer."""

    request_id: str
    """The request's name."""
    text: str
    """New text, whole characters."""
    tokens: tuple[Token, ...]
    """New tokens; their text may follow later."""
    finish: Finish | None
    """Set on the last chunk alone."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer."""

    request_id: str
    """The request's name."""
    text: str
    """All text."""
    tokens: tuple[Token, ...]
    """All tokens."""
    finish: Finish
    """How it ended."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Ids of all tokens."""
        return tuple(token.token_id for token in self.tokens)

    @property
    def finish_reason(self) -> FinishReason:
        """Why it ended."""
        return self.finish.reason

    @property
    def usage(self) -> Usage:
        """Token counts."""
        return self.finish.usage

    @property
    def timing(self) -> Timing:
        """Durations."""
        return self.finish.timing

    @property
    def served_by(self) -> ServedBy:
        """Workers."""
        return self.finish.served_by


def build_request(
    prompt: str | None,
    messages: Sequence[Mapping[str, str]] | None,
    prompt_token_ids: Sequence[int] | None,
    sampling: Mapping[str, Any],
    **fields: str | int | None,
) -> inference_pb2.GenerateRequest:
    """The message for `Inference.Generate`.

    InvalidArgument, naming the field, for what the message cannot hold; TypeError for an option that does not exist.
    """
    unknown = sampling.keys() - Sampling.__annotations__.keys()
    if unknown:
        raise TypeError(f"unknown sampling option: {', '.join(sorted(unknown))}")
    request = inference_pb2.GenerateRequest()
    _fill(request, "prompt", prompt)
    _fill(request, "messages", messages)
    _fill(request, "prompt_token_ids", prompt_token_ids)
    for name, value in fields.items():
        named = name == "priority" and value in _PRIORITIES
        _fill(request, name, f"PRIORITY_{str(value).upper()}" if named else value)
    for name, option in sampling.items():
        one_stop = name == "stop" and isinstance(option, str)
        _fill(request.sampling, name, [option] if one_stop else option, "sampling.")
    return request


_PRIORITIES = ("low", "normal", "high")


def _fill(message: Any, name: str, value: object, prefix: str = "") -> None:
    """Sets a field unless `value` is None, whatever its kind."""
    if value is None:
        return
    try:
        message.MergeFrom(type(message)(**{name: value}))
    except (ValueError, TypeError) as error:
        raise InvalidArgument(prefix + name, f"{value!r:.200} cannot be sent: {error}") from None


def read_chunk(response: inference_pb2.GenerateResponse) -> Chunk:
    """A chunk from its message."""
    return Chunk(
        request_id=response.request_id,
        text=response.text,
        tokens=tuple(_read_token(token) for token in response.tokens),
        finish=_read_finish(response.finish) if response.HasField("finish") else None,
    )


def join(chunks: Iterable[Chunk]) -> Completion:
    """The answer that all chunks of a request make; BatonError when the last one is missing."""
    received = list(chunks)
    if not received or received[-1].finish is None:
        raise BatonError("the answer ended without its last message")
    return Completion(
        request_id=received[-1].request_id,
        text="".join(chunk.text for chunk in received),
        tokens=tuple(token for chunk in received for token in chunk.tokens),
        finish=received[-1].finish,
    )


def _read_token(token: inference_pb2.GeneratedToken) -> Token:
    return Token(
        token_id=token.token_id,
        index=token.index,
        logprob=token.logprob if token.HasField("logprob") else None,
        top_logprobs=tuple((top.token_id, top.logprob) for top in token.top_logprobs),
    )


_REASONS: dict[int, FinishReason] = {
    inference_pb2.FINISH_REASON_STOP: "stop",
    inference_pb2.FINISH_REASON_LENGTH: "length",
    inference_pb2.FINISH_REASON_ABORT: "abort",
}


def _read_finish(finish: inference_pb2.Finish) -> Finish:
    matched = finish.WhichOneof("matched")
    return Finish(
        reason=_REASONS.get(finish.reason, "abort"),
        matched=None if matched is None else getattr(finish, matched),
        usage=Usage(**_values(finish.usage, Usage)),
        timing=Timing(**_values(finish.timing, Timing)),
        served_by=ServedBy(**_values(finish.served_by, ServedBy)),
        seed=finish.seed,
    )


def _values(message: Any, cls: type) -> dict[str, Any]:
    """The fields of a message that has the same names as the dataclass."""
    return {name: getattr(message, name) for name in cls.__annotations__}
