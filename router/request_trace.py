"""What a router notes of a request while it serves it, so that its trace can be written when it is over.

A few readings of the clock for a request and for each of its attempts, none for a token; they are taken whether or not
anybody keeps traces, and `router.trace_spans` makes spans of them. All times are this router's monotonic clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from protos import inference_pb2, worker_pb2
from router.answer import Answer
from router.links import Incarnation
from router.validation import MAX_ID_BYTES, PreparedRequest
from runtime.traces import TraceContext


@dataclass(slots=True)
class AttemptMarks:
    """When what happened to an attempt, and what its workers said of it; None: it has not happened."""

    began_s: float = 0.0
    """Its workers were chosen."""
    prefill_asked_s: float | None = None
    """Prefill.Run was opened."""
    computed_s: float | None = None
    """Prefill's first token came."""
    decode_asked_s: float | None = None
    """Decode.Run was opened."""
    handed_off_s: float | None = None
    """Decode's first token came: its copy of the KV is good."""
    decided_s: float | None = None
    """Decode's final record came."""
    first_token: worker_pb2.PrefillFirstToken | None = None
    """Prefill's report."""
    record: worker_pb2.DecodeRunResponse | None = None
    """Decode's final record."""


@dataclass(frozen=True, slots=True)
class TracedAttempt:
    """An attempt that is over."""

    context: TraceContext | None
    """Its place in the trace; None where there is none."""
    label: str
    """What the attempt is called outside."""
    decode: Incarnation
    """Generates."""
    prefill: Incarnation | None
    """Computes the prompt; None: decode does."""
    why: str
    """Why these workers."""
    placement: str
    """Where what is new of the input was to be computed: see `router.placement`."""
    num_held: int
    """Leading tokens whose KV decode should have had."""
    num_input_tokens: int
    """Prompt, and output of earlier attempts."""
    num_new_tokens: int
    """Tokens that came by it."""
    last_token_s: float | None
    """When the last of them came; None for none."""
    marks: AttemptMarks
    """Its course."""
    ended_s: float
    """When both its calls were closed."""
    failure: str = ""
    """Why it failed; empty: it did not, or its request was cancelled."""
    is_eviction: bool = False
    """Whether it was given back for want of blocks or seats, or to drain."""
    is_fault: bool = False
    """Whether the failure is anybody's: an eviction is not, nor that KV of earlier turns was given to others."""


@dataclass(slots=True)
class RequestTrace:
    """One request, from its arrival to its end."""

    arrived_s: float
    """When it arrived."""
    began_unix_s: float = 0.0
    """The same, since 1970; for display."""
    context: TraceContext | None = None
    """Of the whole request; None: nobody keeps its trace."""
    parent_id: int = 0
    """The caller's span; 0 for none."""
    tenant: str = ""
    """Whose it is."""
    request: inference_pb2.GenerateRequest = field(default_factory=inference_pb2.GenerateRequest)
    """As the client sent it."""
    prepared: PreparedRequest | None = None
    """As it was validated."""
    validated_s: float | None = None
    """When that was done."""
    placed_s: float | None = None
    """When it could go to workers."""
    answer: Answer | None = None
    """Its output."""
    attempts: list[TracedAttempt] = field(default_factory=list)
    """Those that are over."""
    finish: inference_pb2.Finish | None = None
    """How it ended; None: it did not get so far."""
    error: BaseException | None = None
    """What its client got in place of an end."""
    ended_s: float = 0.0
    """When its call ended."""

    @property
    def request_id(self) -> str:
        """Its name; of one that was refused no more than a name may have."""
        return self.request.request_id[:MAX_ID_BYTES] if self.prepared is None else self.prepared.request_id

    def attempt_context(self) -> TraceContext | None:
        """The context of a new attempt, for its workers; None where nobody asks them what they did."""
        return None if self.context is None else self.context.child()

    @property
    def is_recovered(self) -> bool:
        """Whether a worker, or the way between two, has failed it."""
        return any(attempt.is_fault for attempt in self.attempts)

    @property
    def first_token_s(self) -> float | None:
        """When the first token came; None: none did."""
        return None if self.answer is None else self.answer.first_token_s
