"""Drafts that a step makes itself, by another model that runs over the batch's own rows, before they are checked.

Owns the passes: one for each place of the longest run of drafts, in which every sequence that still lacks one computes
the token before it. Drafts are drawn as the target draws, by (seed, position) and the same settings, so that two models
that agree draft what is sampled. Owns no model, and no KV: rows go where the batch says, at the same block ids.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise

from engine.batch import Answer, Batch, Runner, SampleRow
from engine.drafters import UNKNOWN
from engine.request import Sample


@dataclass(slots=True)
class Backlog:
    """What the drafting model has not computed yet; filled between steps, emptied by a step."""

    behind: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """By the slot of a row that is followed by drafts: tokens directly before it."""
    chunks: Batch = field(default_factory=Batch)
    """Tokens of sequences that get no drafts yet."""


class DraftingRunner(Runner):
    """Runs steps on one model after their drafts on another."""

    def __init__(self, runner: Runner, drafting: Runner, block_size: int, backlog: Backlog | None = None) -> None:
        self._runner = runner
        self._drafting = drafting
        self._block_size = block_size
        self._backlog = backlog or Backlog()

    def run(self, batch: Batch) -> list[Sample]:
        """As the runner itself, with tokens in place of drafts that were UNKNOWN."""
        started_s, backlog = time.perf_counter(), self._backlog
        behind, backlog.behind = backlog.behind, {}
        chunks, backlog.chunks = backlog.chunks, Batch()
        if chunks.num_tokens:
            self._drafting.run(chunks)
        if batch.num_draft_rows:
            self._fill(batch, behind)
        batch.drafting_s = time.perf_counter() - started_s
        return self._runner.run(batch)

    def call_between_layers(self, call: Callable[[], None]) -> None:
        """Of both models."""
        self._drafting.call_between_layers(call)
        self._runner.call_between_layers(call)

    def call_aside(self, call: Callable[[], Answer]) -> Answer:
        """As the runner itself."""
        return self._runner.call_aside(call)

    def _fill(self, batch: Batch, behind: dict[int, tuple[int, ...]]) -> None:
        rows = {sample_row.row: sample_row for sample_row in batch.sample_rows}
        # (sequence, the row whose next one is drafted, the row after its last one)
        places = [
            (sequence, end - batch.token_ids[begin:end].count(UNKNOWN) - 1, end)
            for sequence, (begin, end) in enumerate(pairwise(batch.query_starts))
            if batch.token_ids[end - 1] == UNKNOWN
        ]
        while places:
            batch.num_draft_passes += 1
            step = Batch()
            for sequence, row, _ in places:
                missing = behind.pop(batch.slots[row], ())
                tokens, first = (*missing, batch.token_ids[row]), batch.positions[row] - len(missing)
                add_tokens(step, tokens, first, batch.block_tables[sequence], self._block_size)
                step.sample_rows.append(replace(rows[row], row=step.num_tokens - 1))
            for (_, row, end), sample in zip(places, self._drafting.run(step), strict=True):
                batch.token_ids[row + 1] = sample.token_id
                if rows[row].output_token_ids:
                    for later in range(row + 1, end):
                        rows[later] = _with_draft(rows[later], row - later, sample.token_id)
            places = [(sequence, row + 1, end) for sequence, row, end in places if row + 2 < end]
        batch.sample_rows = [rows[sample_row.row] for sample_row in batch.sample_rows]


def add_tokens(batch: Batch, token_ids: tuple[int, ...], first: int, table: list[int], block_size: int) -> None:
    """Packs tokens of a sequence from position `first` on."""
    end = first + len(token_ids)
    batch.token_ids += token_ids
    batch.positions += range(first, end)
    batch.slots += [table[p // block_size] * block_size + p % block_size for p in range(first, end)]
    batch.query_starts.append(batch.num_tokens)
    batch.context_lens.append(end)
    batch.block_tables.append(table[: -(-end // block_size)])


def _with_draft(sample_row: SampleRow, place: int, token_id: int) -> SampleRow:
    """With a draft in the history that penalties look at: -1 is its last place."""
    history = list(sample_row.output_token_ids)
    history[place] = token_id
    return replace(sample_row, output_token_ids=tuple(history))
