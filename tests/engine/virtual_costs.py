"""A decode pool whose steps take what a function says: what its decisions on drafts are worth, without a machine.

Owns costs, texts and the run: so many sequences at once, each of a text that is known, followed by others when they
end, as in a service. The pool learns from times with noise; what counts is the time without.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drafting import AFTER_WRONG_DRAFT, WRONG_DRAFT, MadeByTests, samples_of, take_no_time
from pools import EOS, make_holdings, make_limits, make_sequence

from decode_svc.scheduler import DecodeScheduler
from engine.drafters import UNKNOWN, Drafter
from engine.lengths import OutputLengths
from engine.planning import build_batch
from engine.request import Sample
from engine.sequence import DECODE_MOVES, Sequence
from engine.step_time import load_of

RECORDED = Path(__file__).with_name("recorded_texts.json")
FIRST_COUNTED = 10_000
DRIFT_STEPS = 60
"""Steps for which a machine is as fast as it is, on average."""

Cost = Callable[[int, int, int], float]
"""Milliseconds of a step by its sequences, its drafts, and the runs of a drafting model."""


def reading_weights(num_sequences: int, num_drafts: int, num_passes: int = 0) -> float:
    """A device whose steps take as long as reading weights, until there are many rows."""
    num_rows = num_sequences + num_drafts
    return 10 + 0.05 * num_rows + 0.3 * max(0, num_rows - 64) + 3 * num_passes


def two_cores(num_sequences: int, num_drafts: int, num_passes: int = 0) -> float:
    """As measured with a model of 135 million weights: another way to multiply from 65 rows on."""
    num_rows = num_sequences + num_drafts
    return 24 + 0.8 * num_rows + (20 if num_rows > 64 else 0) + (13 + 0.4 * num_sequences) * num_passes


def dear_drafts(num_sequences: int, num_drafts: int, num_passes: int = 0) -> float:
    """As measured in float32 without AVX-512: a draft costs nearly what a row does, logits and all, and the reading of
    weights as much as twenty."""
    return 97 + 5.5 * num_sequences + 4.2 * num_drafts + (60 + 4 * num_sequences) * num_passes


def always_dear(num_sequences: int, num_drafts: int, num_passes: int = 0) -> float:
    """Rows cost from the first on."""
    return 2 + 1.0 * (num_sequences + num_drafts) + num_passes * (2 + num_sequences)


COSTS: dict[str, Cost] = {
    "reading weights": reading_weights,
    "two cores": two_cores,
    "dear drafts": dear_drafts,
    "always dear": always_dear,
}


@dataclass(frozen=True, slots=True)
class Text:
    """A request and its answer."""

    prompt: tuple[int, ...]
    """Token ids."""
    answer: tuple[int, ...]
    """The same."""


def recorded(name: str) -> list[Text]:
    """What a model of 135 million weights said, greedily, to texts of `baton.bench.texts`."""
    return [Text(tuple(prompt), tuple(answer)) for prompt, answer in json.loads(RECORDED.read_text())[name]]


def counted(num_texts: int, num_tokens: int) -> list[Text]:
    """Texts of which only places are known."""
    return [
        Text((100 + index,) * 3, tuple(range(FIRST_COUNTED, FIRST_COUNTED + num_tokens))) for index in range(num_texts)
    ]


class Chancy(MadeByTests):
    """Guesses that come true by chance, which depends on the number of outputs and on how many came true before it."""

    def __init__(self, rate: Callable[[int, int], float], is_model: bool = False, seed: int = 0) -> None:
        """A model guesses while the step runs."""
        self._rate, self.has_passes, self._random = rate, is_model, random.Random(seed)
        self.num_asked = 0

    def propose(self, sequence: Sequence, most: int) -> tuple[int, ...]:
        self.num_asked += 1
        return (UNKNOWN,) * most if self.has_passes else self.guess(sequence, most)

    def guess(self, sequence: Sequence, most: int) -> tuple[int, ...]:
        num_right, num_outputs = 0, sequence.num_outputs
        while num_right < most and self._random.random() < self._rate(num_outputs, num_right):
            num_right += 1
        right = (FIRST_COUNTED + num_outputs + index for index in range(num_right))
        return (*right, *[WRONG_DRAFT] * (most - num_right))


@dataclass
class Measured:
    """A pool that has generated."""

    duration_ms: float = 0.0
    num_tokens: int = 0
    num_drafts: int = 0
    num_right: int = 0
    lengths: list[int] = field(default_factory=list)
    """Drafts of the first sequence in each step."""

    @property
    def rate(self) -> float:
        """Tokens a millisecond."""
        return self.num_tokens / self.duration_ms


class VirtualPool:
    """One that decodes texts; what it was told of the times is off by `noise`, and by as much more for `drift` steps
    at a time."""

    def __init__(
        self,
        texts: list[Text],
        batch_size: int,
        cost: Cost,
        drafter: Drafter | None,
        *,
        is_fixed: bool = False,
        noise: float = 0.02,
        drift: float = 0.0,
        seed: int = 1,
        **limits: Any,
    ) -> None:
        length = max(len(text.prompt) + len(text.answer) for text in texts) + 32
        holdings = make_holdings(batch_size * (length // 4 + 8))
        merged = {"max_model_len": length, "max_num_seqs": batch_size, "max_num_tokens": 1024, "chunk_size": 8}
        merged |= limits
        expected = OutputLengths(prior_tokens=64)
        self.scheduler = DecodeScheduler(holdings, make_limits(**merged), 1 << 30, expected, drafter)
        if is_fixed:
            take_no_time(self.scheduler)
        self._answers: dict[Sequence, tuple[int, ...]] = {}
        for text in texts:
            sequence = make_sequence(text.prompt, DECODE_MOVES, max_tokens=len(text.answer), ignore_eos=True)
            self._answers[sequence] = text.answer
            self.scheduler.add(sequence, "another worker")
        self._batch_size, self._cost, self._drafter = batch_size, cost, drafter
        self._chance, self._noise, self._drift, self._speed = random.Random(seed), noise, drift, 1.0
        self.measured = Measured()

    def run(self, num_unmeasured: int = 0) -> Measured:
        """Decodes for as long as all places are taken; the first steps do not count."""
        for _ in range(num_unmeasured):
            self.step()
        self.measured = Measured()
        while self.step():
            pass
        measured, speculation = self.measured, self.scheduler.speculation
        if speculation is not None:
            measured.num_drafts, measured.num_right = speculation.num_drafts, speculation.num_accepted
        return measured

    def step(self) -> bool:
        """Answers whether there is more to do with all places taken."""
        plan, num_passes = self.scheduler.plan(0.0), 0
        for sequence in self.scheduler.take_fetches():
            self.scheduler.received(sequence)
            self.scheduler.fetched(sequence, Sample(self._true_token(sequence, sequence.num_tokens)), 0.0)
        if not plan.slices:
            return bool(self.scheduler.live())
        for index, part in enumerate(plan.slices):
            if UNKNOWN in part.drafts:
                assert isinstance(self._drafter, Chancy)
                drafts = self._drafter.guess(part.sequence, len(part.drafts))
                plan.slices[index] = part._replace(drafts=drafts)
                num_passes = max(num_passes, len(drafts))
        batch = build_batch(plan, self.scheduler.holdings.block_size, (EOS,))
        batch.num_draft_passes = num_passes
        duration_ms = self._cost(len(plan.slices), batch.num_draft_rows, num_passes)
        if self.scheduler.step_times is not None:
            self.scheduler.step_times.observe(load_of(batch), duration_ms * self._factor())
        samples = [sample for part in plan.slices for sample in samples_of(part, self._true_token)]
        lengths = [len(part.drafts) for part in plan.slices]
        new_tokens = self.scheduler.commit(plan, samples, 0.0)
        assert AFTER_WRONG_DRAFT not in [token.sample.token_id for token in new_tokens]
        if self.scheduler.num_queued == 0 and len(plan.slices) < self._batch_size:
            return False
        self.measured.duration_ms += duration_ms
        self.measured.num_tokens += len(new_tokens)
        self.measured.lengths.append(lengths[0])
        return True

    def _factor(self) -> float:
        """What a time is off by."""
        if self._chance.random() < 1 / DRIFT_STEPS:
            self._speed = 1 + abs(self._chance.gauss(0, self._drift))
        return self._speed * (1 + self._chance.gauss(0, self._noise))

    def _true_token(self, sequence: Sequence, position: int) -> int:
        answer = self._answers[sequence]
        return answer[min(position - len(sequence.request.prompt_token_ids), len(answer) - 1)]


def measure(
    texts: list[Text], batch_size: int, cost: Cost, drafter: Drafter | None, num_unmeasured: int = 0, **options: Any
) -> Measured:
    """Decodes texts to their ends."""
    pool = VirtualPool(texts, batch_size, cost, drafter, **options)
    measured = pool.run(num_unmeasured)
    while pool.scheduler.live():
        pool.step()
    assert pool.scheduler.holdings.pool.num_used == 0
    return measured
