"""A worker's mutable record of one attempt, and the table of moves it may make.

Phase is arithmetic: a sequence has tokens, and tokens whose KV is computed; what is pending is the difference. The
state says only who is responsible for the next thing to happen. `Sequence.move` is the one place that changes it: it
checks the table and tells the observer, which notes the move for the trace.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from engine.request import Request, Sample


class State(Enum):
    """Where a sequence stands on this worker."""

    QUEUED = "queued"
    """Holds nothing, waits for admission."""
    PREFILLING = "prefilling"
    """Holds all blocks of its input; chunks are being computed here."""
    FETCHING = "fetching"
    """Holds all blocks of its input; their content, or that of the first ones, comes from another worker."""
    DECODING = "decoding"
    """Has a seat; gets a token each step."""
    LEASED = "leased"
    """Computed; its blocks wait for their reader."""
    PAUSED = "paused"
    """Keeps its KV, in blocks or in host memory; gets no steps."""
    FINISHED = "finished"
    """Done as asked."""
    EVICTED = "evicted"
    """Given back for want of blocks or because the worker drains."""
    CANCELLED = "cancelled"
    """The caller has gone."""
    FAILED = "failed"
    """Ended by an error on this side or at the KV's owner."""


TERMINAL = frozenset({State.FINISHED, State.EVICTED, State.CANCELLED, State.FAILED})
_ENDINGS = frozenset({State.EVICTED, State.CANCELLED, State.FAILED})

PREFILL_MOVES: dict[State, frozenset[State]] = {
    State.QUEUED: frozenset({State.FETCHING, State.PREFILLING}) | _ENDINGS,
    State.FETCHING: frozenset({State.PREFILLING}) | _ENDINGS,
    State.PREFILLING: frozenset({State.LEASED, State.QUEUED}) | _ENDINGS,
    State.LEASED: frozenset({State.FINISHED}) | _ENDINGS,
}

DECODE_MOVES: dict[State, frozenset[State]] = {
    State.QUEUED: frozenset({State.FETCHING, State.PREFILLING, State.FINISHED}) | _ENDINGS,
    State.FETCHING: frozenset({State.DECODING, State.FINISHED, State.PAUSED}) | _ENDINGS,
    State.PREFILLING: frozenset({State.DECODING, State.FINISHED, State.PAUSED}) | _ENDINGS,
    State.DECODING: frozenset({State.FINISHED, State.PAUSED}) | _ENDINGS,
    State.PAUSED: frozenset({State.FETCHING, State.PREFILLING, State.DECODING, State.FINISHED}) | _ENDINGS,
}


class FinishReason(Enum):
    """Why generation is complete."""

    STOP = "stop"
    """An end-of-sequence or stop id, or the router found a stop string."""
    LENGTH = "length"
    """max_tokens or the context is used up."""


Observer = Callable[["Sequence", State, State], None]


@dataclass(slots=True, eq=False)
class Sequence:
    """One attempt on this worker."""

    request: Request
    """What was asked."""
    moves: dict[State, frozenset[State]]
    """The role's table."""
    arrived_s: float
    """Monotonic clock."""
    observer: Observer | None = None
    """Told of every move, after it."""
    state: State = State.QUEUED
    """Changed by `move` alone."""
    is_over: bool = False
    """Whether the state is terminal on this worker; kept beside it because every step asks for every sequence."""
    token_ids: list[int] = field(default_factory=list)
    """Prompt, then output."""
    num_computed: int = 0
    """Leading tokens whose KV is in the blocks; of one that is swapped out, in host memory."""
    block_table: list[int] = field(default_factory=list)
    """Ordered block ids; one reference is held on each."""
    host_table: list[int] | None = None
    """Ordered blocks of host memory that hold its KV until it has blocks again; None: it is not swapped out."""
    block_hashes: list[bytes] = field(default_factory=list)
    """Chained hashes of the leading whole blocks of the tokens, as far as they were needed."""
    num_registered: int = 0
    """Leading blocks that the prefix cache knows."""
    num_cached: int = 0
    """Leading tokens whose KV was reused and not computed for this attempt."""
    num_borrowed: int = 0
    """Leading blocks that others held when it was admitted: they are expected to stay when it ends."""
    num_yielded: int = 0
    """Tokens of steps that shorter prompts had while this one was the first."""
    num_drafts: int = 0
    """Guesses of its next tokens that were computed."""
    num_accepted_drafts: int = 0
    """Of them those that came true."""
    num_draft_steps: int = 0
    """Steps in which it had any."""
    drafting_s: float = 0.0
    """How long these were made, its own and those of others in the same steps."""
    num_displaced: int = 0
    """How often it was swapped out here for one of a higher class."""
    num_pins: int = 0
    """Steps and transfers that touch the blocks right now: at the end of the last one an over sequence is freed."""
    finish_reason: FinishReason | None = None
    """Set when FINISHED at a decoding worker."""
    matched_token_id: int | None = None
    """The stop or end-of-sequence id, when that was the reason."""
    detail: str = ""
    """Why it was evicted or failed."""
    started_s: float = 0.0
    """When it was first admitted; 0 before."""
    paused_s: float = 0.0
    """How long it was paused, pauses that are over."""
    paused_since_s: float | None = None
    """When the pause began that is not over."""
    first_token: Sample | None = None
    """The first token sampled on, or handed to, this worker."""
    first_token_s: float = 0.0
    """When that was."""

    def __post_init__(self) -> None:
        if not self.token_ids:
            self.token_ids = [*self.request.prompt_token_ids, *self.request.output_token_ids]

    @property
    def num_tokens(self) -> int:
        """Prompt and output so far."""
        return len(self.token_ids)

    @property
    def num_pending(self) -> int:
        """Tokens whose KV is still to be computed."""
        return len(self.token_ids) - self.num_computed

    @property
    def num_outputs(self) -> int:
        """Output tokens, earlier attempts' included."""
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    @property
    def since_s(self) -> float:
        """Since when the request waits, on this worker's clock: earlier attempts and hops are counted as waiting."""
        return self.arrived_s - self.request.waited_ms / 1000.0

    def max_cached(self, *, is_fetched: bool) -> int:
        """Tokens that may be reused: a whole input when the first token comes from elsewhere; else one is computed."""
        return self.num_tokens if is_fetched else self.num_tokens - 1

    def note_pause(self, is_beginning: bool, now_s: float) -> None:
        """A pause begins or ends."""
        if is_beginning:
            self.paused_since_s = now_s
        elif self.paused_since_s is not None:
            self.paused_s += now_s - self.paused_since_s
            self.paused_since_s = None

    def served_s(self, now_s: float) -> float:
        """How long it has been served: since it was admitted, pauses left out."""
        if self.state is State.QUEUED:
            return 0.0
        until_s = now_s if self.paused_since_s is None else self.paused_since_s
        return max(0.0, until_s - self.started_s - self.paused_s)

    def move(self, target: State) -> None:
        """Changes the state; an illegal move is our bug."""
        source = self.state
        assert target in self.moves.get(source, frozenset()), f"illegal move {source.value} -> {target.value}"
        self.state = target
        self.is_over = target in TERMINAL
        if self.observer is not None:
            self.observer(self, source, target)

    def suppressed_token_ids(self, eos_token_ids: tuple[int, ...], num_more: int = 0) -> tuple[int, ...]:
        """Ids that may not be chosen next, or after `num_more` further tokens: every ending id while fewer than
        min_tokens were generated."""
        if self.num_outputs + num_more >= self.request.sampling.min_tokens:
            return ()
        return self.ending_token_ids(eos_token_ids)

    def ending_token_ids(self, eos_token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """Ids that end generation where they are chosen."""
        sampling = self.request.sampling
        return (*(() if sampling.ignore_eos else eos_token_ids), *sampling.stop_token_ids)

    def check_finished(self, eos_token_ids: tuple[int, ...], max_model_len: int) -> bool:
        """Whether the last token ends generation; notes why. With no output yet the answer is no."""
        if self.num_outputs == 0:
            return False
        sampling, last = self.request.sampling, self.token_ids[-1]
        if last in sampling.stop_token_ids or (not sampling.ignore_eos and last in eos_token_ids):
            self.finish_reason, self.matched_token_id = FinishReason.STOP, last
        elif self.num_outputs >= sampling.max_tokens or self.num_tokens >= max_model_len:
            self.finish_reason = FinishReason.LENGTH
        return self.finish_reason is not None
