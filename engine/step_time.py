"""What a step takes, learned from the steps that ran: milliseconds by what the step holds.

Owns recursive least squares with forgetting, in its information form: the sums that define the fit decay with each
step, and two sweeps over the coefficients bring them closer to it, each held at 0 or above, because no step becomes
shorter by holding more. What recent steps say nothing about keeps its coefficient; but that of drafts goes back to what
is believed at first, which is little, so that a few unlucky steps do not end drafting. Knows no scheduler and no clock.
A step that takes surprisingly long is cut to a few times the usual deviation, so that a hiccup moves little and a
lasting change is followed within some hundred steps. `predict_ms` answers None until there is enough to go by.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise

from engine.batch import Batch

WARM_UP_STEPS = 3
"""First steps, which pay for pages and caches, and are not counted."""
MIN_STEPS = 8
"""Counted steps from which on there are predictions."""
FORGETTING = 0.99
"""Weight of what was known, at each step: some hundred steps are remembered."""
EARLY_FORGETTING = 0.9
"""The same until there are predictions: the very first steps are forgotten sooner."""
SURPRISED_FORGETTING = 0.97
"""The same at a step that was cut: if such steps go on, what was known holds no more."""
MAX_DEVIATIONS = 4.0
"""Usual deviations from the prediction to which a surprising step is cut."""
MIN_DEVIATION = 0.02
"""Part of the prediction that is always usual."""
DEVIATION_GAIN = 0.05
"""Weight of a step in the usual deviation."""
MIN_FAMILIAR_STEPS = 4.0
"""Steps like this one, by each thing it holds, below which nothing about it is a surprise."""
MAX_SWEEPS = 30
SETTLED = 0.01
"""Part of a step below which a sweep's largest change, over all steps remembered, ends it."""
FEW_ROWS = 64
"""Rows of one token and of drafts above which further ones may cost more, and the first one much: up to about so many,
the reading of weights takes longer than the products, and devices have other ways to multiply."""
DRAFT_ROW_PART = 0.01
"""What a draft is believed to add to a step at first, as part of it; at most a quarter of what a sequence has of it."""
DRAFT_PASS_PART = 0.25
"""The same of a run of a drafting model."""
BELIEF = 0.0005
"""Weight of that: of a step that holds a full measure of it, 64 drafts or 8 runs, the weight is 1."""
ABOVE_BELIEF = 0.1
"""Weight of the belief that rows above FEW_ROWS cost no more than others."""
FIRST_ABOVE_BELIEF = 2.0
"""And that the first of them does not: such steps may be few, and each is off by more than drafts cost."""

_NUM_FEATURES = 9  # of a step: 1, what StepLoad counts, draft rows above FEW_ROWS, and whether there are any
_DRAFT_ROWS, _DRAFT_PASSES, _ABOVE, _FIRST_ABOVE = 5, 6, 7, 8  # among them
_ORDER = (8, 7, 0, 1, 2, 3, 4, 5, 6)  # of a sweep: what many rows cost is not taken for the cost of each


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What makes a step long."""

    num_sequences: int = 0
    """Sequences with one token each: their rows."""
    num_context_tokens: int = 0
    """Tokens whose KV those rows read."""
    num_prompt_tokens: int = 0
    """Tokens of chunks of more than one."""
    num_prompt_pairs: int = 0
    """Sum over the tokens of these chunks of what each looks at."""
    num_draft_rows: int = 0
    """Drafts that follow rows of one token."""
    num_draft_passes: int = 0
    """Runs of a drafting model for them."""

    def with_chunk(self, num_tokens: int, num_computed: int) -> StepLoad:
        """The same and a chunk after `num_computed` tokens."""
        return StepLoad(
            self.num_sequences,
            self.num_context_tokens,
            self.num_prompt_tokens + num_tokens,
            self.num_prompt_pairs + num_tokens * (num_computed + num_tokens // 2),
            self.num_draft_rows,
            self.num_draft_passes,
        )


def load_of_slices(slices: Iterable[tuple[int, int]]) -> StepLoad:
    """What a step without drafts holds, by the tokens of each sequence and those computed before: a row where it is one
    token, else a chunk."""
    load, num_rows, num_context_tokens = StepLoad(), 0, 0
    for num_tokens, num_computed in slices:
        if num_tokens == 1:
            num_rows, num_context_tokens = num_rows + 1, num_context_tokens + num_computed + 1
        else:
            load = load.with_chunk(num_tokens, num_computed)
    return StepLoad(num_rows, num_context_tokens, load.num_prompt_tokens, load.num_prompt_pairs)


def load_of(batch: Batch) -> StepLoad:
    """What a batch holds."""
    if batch.num_tokens == batch.num_sequences + batch.num_draft_rows:
        num_rows, num_passes = batch.num_draft_rows, batch.num_draft_passes
        return StepLoad(batch.num_sequences, sum(batch.context_lens), 0, 0, num_rows, num_passes)
    assert not batch.num_draft_rows, "no prompts beside drafts"
    lengths = [end - begin for begin, end in pairwise(batch.query_starts)]
    computed = map(int.__sub__, batch.context_lens, lengths)
    return load_of_slices(zip(lengths, computed, strict=True))


class StepTimes:
    """A model of one worker's steps."""

    def __init__(self) -> None:
        self._sums = [[0.0] * _NUM_FEATURES for _ in range(_NUM_FEATURES)]  # decayed, of feature x feature
        self._targets = [0.0] * _NUM_FEATURES  # decayed, of feature x milliseconds
        self._coefficients = [0.0] * _NUM_FEATURES
        self._deviation_ms = 0.0  # decayed mean of what predictions were off by
        self._num_seen = 0

    def observe(self, load: StepLoad, duration_ms: float) -> None:
        """A step has run."""
        self._num_seen += 1
        if self._num_seen <= WARM_UP_STEPS:
            return
        features, keep = _features(load), FORGETTING if self.is_known else EARLY_FORGETTING
        predicted_ms = self._value(features)
        off_ms = duration_ms - predicted_ms
        if self.is_known and self._is_familiar(features):
            limit_ms = MAX_DEVIATIONS * max(self._deviation_ms, MIN_DEVIATION * predicted_ms)
            if abs(off_ms) > limit_ms:
                off_ms, keep = math.copysign(limit_ms, off_ms), SURPRISED_FORGETTING
            self._deviation_ms += DEVIATION_GAIN * (abs(off_ms) - self._deviation_ms)
        self._count(load, features, predicted_ms + off_ms, keep)

    def predict_ms(self, load: StepLoad) -> float | None:
        """What a step with this load takes; None while too few have run."""
        return self._value(_features(load)) if self.is_known else None

    def with_drafts(self, load: StepLoad) -> Callable[[int, int], float]:
        """What a step with this load takes in milliseconds, by its number of drafts and of runs of a drafting model for
        them. While too few have run, what it is believed to take, a step without drafts being 1."""
        if not self.is_known:
            row_part = _row_part(load)
            return lambda num_drafts, num_passes: 1 + row_part * num_drafts + DRAFT_PASS_PART * num_passes
        plain_ms, num_few = self._value(_features(load)), max(0, FEW_ROWS - load.num_sequences)
        row_ms, pass_ms, above_ms, first_above_ms = self._coefficients[_DRAFT_ROWS:]

        def duration_ms(num_drafts: int, num_passes: int) -> float:
            duration_ms = plain_ms + row_ms * num_drafts / 64 + pass_ms * num_passes / 8
            num_above = num_drafts - num_few
            return duration_ms if num_above <= 0 else duration_ms + above_ms * num_above / 64 + first_above_ms

        return duration_ms

    def num_prompt_tokens_within(self, target_ms: float, load: StepLoad, num_computed: int, most: int) -> int:
        """Tokens of a chunk after `num_computed`, at most `most`, that a step with `load` can take as well without
        exceeding the target; `most` while too few have run."""
        if not self.is_known:
            return most
        fit, too_many = 0, most + 1
        while too_many - fit > 1:
            middle = (fit + too_many) // 2
            if self._value(_features(load.with_chunk(middle, num_computed))) <= target_ms:
                fit = middle
            else:
                too_many = middle
        return fit

    @property
    def is_known(self) -> bool:
        """Whether enough steps have run."""
        return self._num_seen >= WARM_UP_STEPS + MIN_STEPS

    def _value(self, features: tuple[float, ...]) -> float:
        return sum(map(float.__mul__, self._coefficients, features))

    def _is_familiar(self, features: tuple[float, ...]) -> bool:
        """Whether steps that are remembered held as much of all that this one holds."""
        return all(
            self._sums[index][index] >= MIN_FAMILIAR_STEPS * feature * feature for index, feature in enumerate(features)
        )

    def _count(self, load: StepLoad, features: tuple[float, ...], duration_ms: float, keep: float) -> None:
        coefficients, targets = self._coefficients, self._targets
        for index, feature in enumerate(features):
            row = self._sums[index]
            self._sums[index] = [keep * known + feature * other for known, other in zip(row, features, strict=True)]
            targets[index] = keep * targets[index] + feature * duration_ms
        plain_ms = sum(map(float.__mul__, coefficients[:_DRAFT_ROWS], features))
        beliefs = {
            _DRAFT_ROWS: (BELIEF, 64 * plain_ms * _row_part(load)),
            _DRAFT_PASSES: (BELIEF, 8 * plain_ms * DRAFT_PASS_PART),
            _ABOVE: (ABOVE_BELIEF, 0.0),
            _FIRST_ABOVE: (FIRST_ABOVE_BELIEF, 0.0),
        }
        for _ in range(MAX_SWEEPS):
            change_ms = 0.0
            for index in _ORDER:
                row = self._sums[index]
                weight, missing = row[index], targets[index] - sum(map(float.__mul__, row, coefficients))
                if index in beliefs:
                    belief, believed_ms = beliefs[index]
                    weight, missing = weight + belief, missing + belief * (believed_ms - coefficients[index])
                if weight > 1e-12:  # else nothing remembered held any of it
                    change = max(-coefficients[index], missing / weight)
                    coefficients[index] += change
                    change_ms = max(change_ms, abs(change) * math.sqrt(row[index]))
            if change_ms < SETTLED * duration_ms:
                break


def _row_part(load: StepLoad) -> float:
    return min(DRAFT_ROW_PART, 0.25 / max(1, load.num_sequences))


def _features(load: StepLoad) -> tuple[float, ...]:
    num_above = max(0, load.num_draft_rows - max(0, FEW_ROWS - load.num_sequences))
    # About 1 each for a full step, so that no sweep has to cross scales.
    return (
        1.0,
        load.num_sequences / 64,
        load.num_prompt_tokens / 512,
        load.num_context_tokens / 65536,
        load.num_prompt_pairs / 524288,
        load.num_draft_rows / 64,
        load.num_draft_passes / 8,
        num_above / 64,
        1.0 if num_above else 0.0,
    )
