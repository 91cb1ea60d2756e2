"""Translates between protobuf and the engine's values, and refuses what a worker cannot serve.

Owns no state. Routers send complete requests; what is checked here protects the worker from a router that is wrong,
old or not a router at all.
"""

from __future__ import annotations

import math

from engine.holdings import Holdings
from engine.request import Priority, Request, Sample, SamplingParams, SessionTurn
from engine.sequence import FinishReason
from kvstore.hashing import HASH_BYTES
from protos import inference_pb2, worker_pb2
from runtime.errors import ContextLengthExceeded, FailedPrecondition, InvalidArgument

ATTEMPT_ID_BYTES = 16
MAX_TOP_LOGPROBS = 20
"""As the public API says; more would swell every message of a step."""

_PRIORITIES = {0: Priority.NORMAL, **{int(priority): priority for priority in Priority}}

_FINISH_REASONS = {
    FinishReason.STOP: inference_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: inference_pb2.FINISH_REASON_LENGTH,
}


def request_from_attempt(attempt: worker_pb2.Attempt, fingerprint: str, vocab_size: int, max_model_len: int) -> Request:
    """The request in an attempt.

    Raises FailedPrecondition for another model's attempt, ContextLengthExceeded for one that does not fit, and
    InvalidArgument for anything else that no router of ours would send.
    """
    if attempt.fingerprint != fingerprint:
        raise FailedPrecondition(
            f"fingerprint: this worker serves {fingerprint}, got {attempt.fingerprint}", fingerprint=fingerprint
        )
    check_attempt_id(attempt.attempt_id)
    prompt, output = tuple(attempt.prompt_token_ids), tuple(attempt.output_token_ids)
    if not prompt:
        raise InvalidArgument("prompt_token_ids", "at least one token is needed, got none")
    for name, token_ids in (("prompt_token_ids", prompt), ("output_token_ids", output)):
        if token_ids and max(token_ids) >= vocab_size:
            raise InvalidArgument(name, f"ids must be below {vocab_size}, got {max(token_ids)}")
    # A prompt leaves room for one token, else it could never be admitted. One whose output filled the context in an
    # earlier attempt is taken, and finished at once.
    limit, got = max_model_len if output else max_model_len - 1, len(prompt) + len(output)
    if got > limit:
        raise ContextLengthExceeded("prompt_token_ids", f"at most {limit} tokens fit, got {got}", limit=limit, got=got)
    if attempt.priority not in _PRIORITIES:
        raise InvalidArgument("priority", f"must be one of {', '.join(map(str, _PRIORITIES))}, got {attempt.priority}")
    return Request(
        attempt_id=attempt.attempt_id,
        request_id=attempt.request_id,
        prompt_token_ids=prompt,
        output_token_ids=output,
        sampling=sampling_from_proto(attempt.sampling, vocab_size),
        priority=_PRIORITIES[attempt.priority],
        waited_ms=attempt.waited_ms,
        tenant=attempt.tenant,
        num_evictions=attempt.num_evictions,
        session=_session_from_proto(attempt.session) if attempt.HasField("session") else None,
    )


def _session_from_proto(turn: worker_pb2.SessionTurn) -> SessionTurn:
    return SessionTurn(check_session_key(turn.session_key), turn.fence, turn.ttl_ms / 1000)


def check_session_key(key: bytes) -> bytes:
    """The key; raises InvalidArgument unless it is one that a router derives."""
    if len(key) != HASH_BYTES:
        raise InvalidArgument("session_key", f"must be {HASH_BYTES} bytes, got {len(key)}")
    return key


def check_attempt_id(attempt_id: bytes) -> None:
    """Raises InvalidArgument unless it is 16 bytes."""
    if len(attempt_id) != ATTEMPT_ID_BYTES:
        raise InvalidArgument("attempt_id", f"must be {ATTEMPT_ID_BYTES} bytes, got {len(attempt_id)}")


def sampling_from_proto(sampling: inference_pb2.SamplingParams, vocab_size: int) -> SamplingParams:
    """Sampling parameters that the router has validated and completed; raises InvalidArgument where it has not."""
    numbers = {
        "temperature": (sampling.temperature, 0.0, math.inf),
        "top_p": (sampling.top_p, 0.0, 1.0),
        "min_p": (sampling.min_p, 0.0, 1.0),
        "presence_penalty": (sampling.presence_penalty, -2.0, 2.0),
        "frequency_penalty": (sampling.frequency_penalty, -2.0, 2.0),
        "repetition_penalty": (sampling.repetition_penalty, 0.0, math.inf),
    }
    for name, (value, low, high) in numbers.items():
        if not (math.isfinite(value) and low <= value <= high):
            raise InvalidArgument(f"sampling.{name}", f"must be between {low} and {high}, got {value}")
    if sampling.max_tokens < 1 or sampling.top_p <= 0 or sampling.repetition_penalty <= 0:
        raise InvalidArgument("sampling", "max_tokens, top_p and repetition_penalty must be set and above 0")
    biased = [*sampling.logit_bias, *sampling.stop_token_ids]
    if biased and max(biased) >= vocab_size:
        raise InvalidArgument("sampling", f"logit_bias and stop_token_ids must be below {vocab_size}")
    if not all(map(math.isfinite, sampling.logit_bias.values())):
        raise InvalidArgument("sampling.logit_bias", "must be finite")
    if sampling.top_logprobs > MAX_TOP_LOGPROBS:
        raise InvalidArgument("sampling.top_logprobs", f"at most {MAX_TOP_LOGPROBS}, got {sampling.top_logprobs}")
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=max(0, sampling.top_k),
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        seed=sampling.seed,
        stop_token_ids=tuple(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos,
        logprobs=sampling.logprobs,
        top_logprobs=sampling.top_logprobs,
        logit_bias=tuple(sorted(sampling.logit_bias.items())),
    )


def token_to_proto(position: int, sample: Sample) -> worker_pb2.DecodedToken:
    """A token for the wire."""
    return worker_pb2.DecodedToken(
        position=position,
        token_id=sample.token_id,
        logprob=sample.logprob,
        top_logprobs=[inference_pb2.TokenLogprob(token_id=i, logprob=p) for i, p in sample.top_logprobs],
    )


def token_from_proto(token: worker_pb2.DecodedToken) -> Sample:
    """A token from the wire; its position is for the caller to check."""
    return Sample(
        token_id=token.token_id,
        logprob=token.logprob if token.HasField("logprob") else None,
        top_logprobs=tuple((entry.token_id, entry.logprob) for entry in token.top_logprobs),
    )


def finish_reason_to_proto(reason: FinishReason | None) -> inference_pb2.FinishReason:
    """A finish reason for the wire; unspecified for None."""
    return inference_pb2.FINISH_REASON_UNSPECIFIED if reason is None else _FINISH_REASONS[reason]


def pool_status(holdings: Holdings) -> inference_pb2.PoolStatus:
    """The pool's accounts beside what the live block tables account for."""
    counts = holdings.pool.status()
    return inference_pb2.PoolStatus(
        total=counts.total,
        free=counts.free,
        used=counts.used,
        cached=counts.cached,
        accounted=holdings.num_accounted,
        ceiling=counts.ceiling,
    )
