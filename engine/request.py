"""What a worker is asked to do: immutable values, no proto, no torch.

Owns the types of a request as workers see it: token ids, sampling, identity. Text, stop strings and names of sessions
stop at the router. `engine.wire` translates between these and protobuf.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Priority(IntEnum):
    """Classes of urgency; a higher value goes first."""

    LOW = 1
    NORMAL = 2
    HIGH = 3


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when generation ends. Already validated and completed by the router."""

    temperature: float = 0.0
    """0 is greedy."""
    top_p: float = 1.0
    """Nucleus, in (0, 1]; 1 is off."""
    top_k: int = 0
    """0 is off."""
    min_p: float = 0.0
    """Relative floor, in [0, 1]; 0 is off."""
    presence_penalty: float = 0.0
    """Subtracted once from logits of tokens already generated."""
    frequency_penalty: float = 0.0
    """Subtracted from logits for each time a token was generated."""
    repetition_penalty: float = 1.0
    """Over prompt and output; 1 is off."""
    max_tokens: int = 16
    """Output tokens at which generation ends, earlier attempts' tokens counted."""
    min_tokens: int = 0
    """End-of-sequence and stop ids are suppressed below this many output tokens."""
    seed: int = 0
    """Unsigned 64 bit. A draw depends on (seed, position) and the logits alone."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end generation."""
    ignore_eos: bool = False
    """Go on past the model's end-of-sequence ids."""
    logprobs: bool = False
    """Report log-probabilities of the unmodified distribution."""
    top_logprobs: int = 0
    """Also report this many likeliest tokens."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, bias) pairs added to the logits."""


@dataclass(frozen=True, slots=True)
class SessionTurn:
    """What to keep of an attempt that ends well, because more is to come after it."""

    key: bytes
    """The session's, 16 bytes."""
    fence: int
    """Number of the session's record after this turn."""
    ttl_s: float
    """How long it is remembered."""


@dataclass(frozen=True, slots=True)
class Request:
    """One attempt to serve a request."""

    attempt_id: bytes
    """16 random bytes."""
    request_id: str
    """For logs and traces."""
    prompt_token_ids: tuple[int, ...]
    """The prompt, at least one token."""
    output_token_ids: tuple[int, ...]
    """Output the client already has; generation goes on after it."""
    sampling: SamplingParams
    """How tokens are chosen."""
    priority: Priority = Priority.NORMAL
    """Class of urgency."""
    waited_ms: int = 0
    """Waiting time before this attempt."""
    tenant: str = ""
    """Whose cached prefixes may be used."""
    num_evictions: int = 0
    """How often earlier attempts were evicted for others."""
    session: SessionTurn | None = None
    """Whose turn it is; None for a request that stands alone."""
    keep_tokens: int = 0
    """Leading tokens whose KV is fetched and kept for the session, with nothing generated; 0: an ordinary attempt."""

    @property
    def num_input_tokens(self) -> int:
        """Tokens whose KV must exist before the next one can be sampled."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)


@dataclass(frozen=True, slots=True)
class Sample:
    """A sampled token."""

    token_id: int
    """The token."""
    logprob: float | None = None
    """Its log-probability in the unmodified distribution; None unless asked for."""
    top_logprobs: tuple[tuple[int, float], ...] = ()
    """(token id, log-probability), most likely first."""
