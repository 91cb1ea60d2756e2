"""What one step will run: slices of sequences under a token budget, and the packed batch made of them.

Pure functions over sequences and a block size. Which sequences, and in what order, is the schedulers' business.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.batch import Batch, SampleRow
from engine.sequence import Sequence
from engine.step_time import StepTimes, load_of_slices

LOWER_CLASSES_PART = 0.25
"""By which part a step with prompts of a higher class may become longer for those of lower ones."""


class Slice(NamedTuple):  # not a dataclass: one is made for each sequence at every step
    """A sequence's part in a step."""

    sequence: Sequence
    """Whose tokens."""
    num_tokens: int
    """How many of its pending tokens, from the first."""
    samples: bool
    """Whether the slice reaches the sequence's last token, so that the next one is sampled."""
    drafts: tuple[int, ...] = ()
    """Guesses of the tokens that follow, computed as well; a token is sampled after each of them."""


@dataclass(slots=True)
class Plan:
    """One step. Between plan and commit its sequences' blocks may not be freed."""

    slices: list[Slice] = field(default_factory=list)
    """In packing order."""
    num_tokens: int = 0
    """Packed rows: the sum over the slices and their drafts."""
    drafting_s: float = 0.0
    """How long it took to decide on drafts and to make them, so far."""
    verifying_s: float = 0.0
    """How long the step took but for making drafts, if it had any; known once it has run."""

    def add(self, sequence: Sequence, num_tokens: int) -> None:
        """Takes a slice in and pins the sequence's blocks until the step's commit."""
        sequence.num_pins += 1
        self.slices.append(Slice(sequence, num_tokens, num_tokens == sequence.num_pending))
        self.num_tokens += num_tokens

    def draft(self, index: int, drafts: tuple[int, ...]) -> None:
        """Has a slice that samples compute drafts as well, for which there are blocks."""
        part = self.slices[index]
        assert part.samples and not part.drafts, "drafts follow a sequence's last token, once"
        self.slices[index] = part._replace(drafts=drafts)
        self.num_tokens += len(drafts)


def take_drafts(plan: Plan, batch: Batch, duration_s: float) -> None:
    """Notes in a plan which drafts its step, which took so long, has made itself."""
    plan.drafting_s += batch.drafting_s
    if not batch.num_draft_rows:
        return
    plan.verifying_s = duration_s - batch.drafting_s
    for index, part in enumerate(plan.slices):
        if part.drafts:
            end = batch.query_starts[index + 1]
            plan.slices[index] = part._replace(drafts=tuple(batch.token_ids[end - len(part.drafts) : end]))


def fill(plan: Plan, sequences: Iterable[Sequence], chunk_size: int, budget: int) -> None:
    """Gives each sequence, in order, up to `chunk_size` of its pending tokens until `budget` tokens are planned."""
    for sequence in sequences:
        num_tokens = min(sequence.num_pending, chunk_size, budget - plan.num_tokens)
        if num_tokens <= 0:
            return
        plan.add(sequence, num_tokens)


def fill_shared(
    plan: Plan,
    prompts: list[Sequence],
    chunk_size: int,
    budget: int,
    overdue_since_s: float = -math.inf,
    step_times: StepTimes | None = None,
) -> None:
    """Fills a plan with chunks of prompts, given by rank, up to `budget` tokens.

    What is left of the budget belongs to the first, but shorter ones of its class or above, by class and then shortest
    first, may have half of it, and more as long as they have had no more than it has had: short prompts are not stuck
    behind a long one, and the long one takes at most twice its time. Of what a class of these gets, half belongs to the
    one that has waited longest once it waits since `overdue_since_s` or earlier, so that no stream of shorter ones
    keeps it out. The rest, equally long as the first or of a lower class, get what these leave; but beside a higher
    class that ranks before them only as much as makes the step longer by `LOWER_CLASSES_PART`, where `step_times` know:
    who is urgent waits for the whole step.
    """
    if not prompts:
        return
    first, others = prompts[0], prompts[1:]
    shorter = [
        other
        for other in others
        if other.num_pending < first.num_pending and other.request.priority >= first.request.priority
    ]
    num_owed = first.num_computed - first.num_cached - first.num_yielded
    _fill_beside(plan, first, shorter, chunk_size, budget, num_owed)
    num_before = plan.num_tokens
    for priority in sorted({other.request.priority for other in shorter}, reverse=True):
        equals = [other for other in shorter if other.request.priority == priority]
        longest_waiting = equals[0]
        equals.sort(key=lambda other: other.num_pending)  # stable: equals in length stay by rank
        if longest_waiting.since_s <= overdue_since_s:
            equals.remove(longest_waiting)
            _fill_beside(plan, longest_waiting, equals, chunk_size, budget)
        fill(plan, equals, chunk_size, budget)
    first.num_yielded += plan.num_tokens - num_before
    _fill_rest(plan, prompts, chunk_size, budget, step_times)


def _fill_rest(plan: Plan, prompts: list[Sequence], chunk_size: int, budget: int, step_times: StepTimes | None) -> None:
    """Gives what is left to those that have nothing, by rank; see `fill_shared`."""
    planned, highest = {part.sequence for part in plan.slices}, prompts[0].request.priority
    others, lower = list[Sequence](), list[Sequence]()
    for prompt in prompts:
        if prompt not in planned:
            (lower if prompt.request.priority < highest else others).append(prompt)
        highest = max(highest, prompt.request.priority)
    fill(plan, others, chunk_size, budget)
    if lower and step_times is not None:
        load = load_of_slices((part.num_tokens, part.sequence.num_computed) for part in plan.slices)
        step_ms, left = step_times.predict_ms(load), budget - plan.num_tokens
        if step_ms is not None:
            target_ms = (1 + LOWER_CLASSES_PART) * step_ms
            left = step_times.num_prompt_tokens_within(target_ms, load, lower[0].num_computed, left)
        budget = plan.num_tokens + left
    fill(plan, lower, chunk_size, budget)


def _fill_beside(
    plan: Plan, one: Sequence, others: list[Sequence], chunk_size: int, budget: int, num_owed: int = 0
) -> None:
    """Gives one what is left, but for what others can use of the half that is open to them, or of `num_owed`."""
    left = budget - plan.num_tokens
    num_open = max(left // 2, min(left, num_owed))
    fill(plan, [one], chunk_size, budget - min(num_open, sum(min(other.num_pending, chunk_size) for other in others)))


def build_batch(plan: Plan, block_size: int, eos_token_ids: tuple[int, ...]) -> Batch:
    """Packs a plan. The batch holds copies, so that the event loop may change sequences while the step runs."""
    batch = Batch()
    for part in plan.slices:
        sequence, drafts, begin = part.sequence, part.drafts, part.sequence.num_computed
        end = begin + part.num_tokens + len(drafts)
        table = sequence.block_table
        batch.token_ids.extend(sequence.token_ids[begin : begin + part.num_tokens])
        batch.token_ids.extend(drafts)
        batch.num_draft_rows += len(drafts)
        batch.positions.extend(range(begin, end))
        batch.slots.extend(table[p // block_size] * block_size + p % block_size for p in range(begin, end))
        batch.query_starts.append(len(batch.token_ids))
        batch.context_lens.append(end)
        batch.block_tables.append(table[: -(-end // block_size)])
        if part.samples:
            first = len(batch.token_ids) - 1 - len(drafts)
            for num_before in range(len(drafts) + 1):
                row = _sample_row(sequence, first + num_before, drafts[:num_before], eos_token_ids)
                batch.sample_rows.append(row)
    return batch


def _sample_row(sequence: Sequence, row: int, drafts: tuple[int, ...], eos_token_ids: tuple[int, ...]) -> SampleRow:
    """What is asked after a row, should the drafts before it have come true."""
    request, sampling = sequence.request, sequence.request.sampling
    counts_outputs = sampling.presence_penalty != 0 or sampling.frequency_penalty != 0
    counts_all = sampling.repetition_penalty != 1
    return SampleRow(
        row=row,
        position=sequence.num_tokens + len(drafts),
        sampling=sampling,
        suppressed_token_ids=sequence.suppressed_token_ids(eos_token_ids, len(drafts)),
        prompt_token_ids=request.prompt_token_ids if counts_all else (),
        output_token_ids=(
            (*sequence.token_ids[len(request.prompt_token_ids) :], *drafts) if counts_outputs or counts_all else ()
        ),
    )
