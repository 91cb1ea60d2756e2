"""One step's work as the runner sees it: packed tokens of several sequences, no padding.

Prefill chunks, decode rows, prefix hits and draft verification are one case: sequence b computes its tokens
`context_lens[b] - n .. context_lens[b] - 1`, where n is the number of its packed tokens, and attends to everything
before them through its block table. Plain Python: schedulers, the tracer and tests use it without torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from engine.request import Sample, SamplingParams

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class SampleRow:
    """Asks for one token after a packed row."""

    row: int
    """Index into the packed tokens: a sequence's last token, or a draft after it."""
    position: int
    """Position of the token to be sampled; with the seed it fixes the draw."""
    sampling: SamplingParams
    """How it is chosen."""
    suppressed_token_ids: tuple[int, ...] = ()
    """Ids that cannot be chosen here: end-of-sequence and stop ids below min_tokens."""
    prompt_token_ids: tuple[int, ...] = ()
    """For the repetition penalty; empty when no penalty is set."""
    output_token_ids: tuple[int, ...] = ()
    """For all penalties; a snapshot, empty when no penalty is set."""


@dataclass(slots=True)
class Batch:
    """T packed tokens of B sequences."""

    token_ids: list[int] = field(default_factory=list)  # [T]
    positions: list[int] = field(default_factory=list)  # [T]
    slots: list[int] = field(default_factory=list)  # [T], block * block_size + offset: where each token's KV goes
    query_starts: list[int] = field(default_factory=lambda: [0])  # [B + 1]
    context_lens: list[int] = field(default_factory=list)  # [B], this step's tokens included
    block_tables: list[list[int]] = field(default_factory=list)  # [B], each as long as its context needs
    sample_rows: list[SampleRow] = field(default_factory=list)  # [S], S <= B + num_draft_rows
    num_draft_rows: int = 0
    """Packed tokens that are guesses, after the known ones of their sequences."""
    drafting_s: float = 0.0
    """How long it took to make guesses within the step; known once it has run."""
    num_draft_passes: int = 0
    """Runs of a drafting model that the step made to have them."""

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.token_ids)

    @property
    def num_sequences(self) -> int:
        """B."""
        return len(self.context_lens)


class Runner(Protocol):
    """Computes batches. `run` is called from one thread only, never two at a time."""

    def run(self, batch: Batch) -> list[Sample]:
        """Writes the KV of every packed token to its slot and answers one sample for each of `batch.sample_rows`."""
        ...

    def call_between_layers(self, call: Callable[[], None]) -> None:
        """From now on steps call this now and then, where another number of threads may go on."""
        ...

    def call_aside(self, call: Callable[[], Answer]) -> Answer:
        """Calls something else in the place of a step: by the same thread, on the cores that a step would have."""
        ...
