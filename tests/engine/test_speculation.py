"""How many drafts: as many as pay by virtual costs, none where they lose, and tokens that never depend on it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from drafting import AFTER_WRONG_DRAFT, WRONG_DRAFT, MadeByTests, Scripted, samples_of, take_no_time
from pools import EOS, make_holdings, make_limits, make_sequence

from decode_svc.scheduler import DecodeScheduler
from engine.drafters import Drafter
from engine.lengths import OutputLengths
from engine.planning import build_batch
from engine.sequence import DECODE_MOVES, Sequence, State
from engine.step_time import StepTimes, load_of

Cost = Callable[[int, int], float]
"""Milliseconds of a step by its sequences and its drafts."""
NUM_TOKENS = 800
"""Of each answer in a measurement."""
WARM_UP_STEPS = 20
"""First steps of a worker, in which times become known; they are not measured."""


def true_token(sequence: Sequence, position: int) -> int:
    return 10_000 + position


class Chancy(MadeByTests):
    """Guesses that come true by chance."""

    def __init__(self, rate: Callable[[int], float], seed: int = 0) -> None:
        """`rate` of a sequence's number of outputs."""
        self._rate, self._random = rate, random.Random(seed)
        self.num_asked = 0

    def propose(self, sequence: Sequence, most: int) -> tuple[int, ...]:
        self.num_asked += 1
        drafts = []
        for index in range(most):
            if self._random.random() >= self._rate(sequence.num_outputs):
                return (*drafts, *[WRONG_DRAFT] * (most - index))
            drafts.append(true_token(sequence, sequence.num_tokens + index))
        return tuple(drafts)


@dataclass
class Measured:
    """A pool that has generated."""

    duration_ms: float = 0.0
    num_tokens: int = 0
    lengths: list[int] = field(default_factory=list)
    """Drafts of the first sequence in each step."""

    @property
    def rate(self) -> float:
        """Tokens a millisecond."""
        return self.num_tokens / self.duration_ms


def measure(
    batch_size: int,
    cost: Cost,
    drafter: Drafter | None,
    *,
    is_fixed: bool = False,
    noise: float = 0.02,
    num_tokens: int = NUM_TOKENS,
    **limits: object,
) -> Measured:
    """Generates `num_tokens` for each of a batch; steps take what `cost` says, give or take."""
    length = num_tokens + 32
    holdings = make_holdings(batch_size * (length // 4 + 8))
    merged = {"max_model_len": length, "max_num_seqs": batch_size, "max_num_tokens": 1024, "chunk_size": 8, **limits}
    scheduler = DecodeScheduler(holdings, make_limits(**merged), 0, OutputLengths(prior_tokens=64), drafter)
    if is_fixed:
        take_no_time(scheduler)
    for index in range(batch_size):
        scheduler.add(make_sequence([100 + index] * 3, DECODE_MOVES, max_tokens=num_tokens), None)
    measured, chance, num_steps = Measured(), random.Random(1), 0
    while live := scheduler.live():
        plan = scheduler.plan(0.0)
        batch = build_batch(plan, holdings.block_size, (EOS,))
        duration_ms = cost(len(plan.slices), batch.num_draft_rows)
        if scheduler.step_times is not None:
            scheduler.step_times.observe(load_of(batch), duration_ms * (1 + chance.gauss(0, noise)))
        is_prompt = any(each.state is State.PREFILLING for each in live)
        samples = [sample for part in plan.slices for sample in samples_of(part, true_token)]
        new_tokens = scheduler.commit(plan, samples, 0.0)
        assert AFTER_WRONG_DRAFT not in [token.sample.token_id for token in new_tokens]
        num_steps += not is_prompt
        # Only while all are there: a service would fill the seats of those that end first.
        if num_steps > WARM_UP_STEPS and len(live) == batch_size:
            measured.duration_ms += duration_ms
            measured.num_tokens += len(new_tokens)
            measured.lengths.append(len(plan.slices[0].drafts))
    assert holdings.pool.num_used == 0
    return measured


def reading_weights(num_sequences: int, num_drafts: int) -> float:
    """A device whose steps take as long as reading weights, until there are many rows."""
    num_rows = num_sequences + num_drafts
    return 10 + 0.05 * num_rows + 0.3 * max(0, num_rows - 64)


def two_cores(num_sequences: int, num_drafts: int) -> float:
    """As measured with a model of 135 million weights: another way to multiply from 65 rows on."""
    num_rows = num_sequences + num_drafts
    return 24 + 0.8 * num_rows + (20 if num_rows > 64 else 0)


def always_dear(num_sequences: int, num_drafts: int) -> float:
    """Rows cost from the first on."""
    return 2 + 1.0 * (num_sequences + num_drafts)


COSTS: dict[str, Cost] = {"reading weights": reading_weights, "two cores": two_cores, "always dear": always_dear}


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("batch_size", [1, 4, 16, 32])
@pytest.mark.parametrize("cost", COSTS)
def test_it_is_about_as_fast_as_the_best_fixed_length_and_never_slower_than_none(cost, batch_size, rate):
    none = measure(batch_size, COSTS[cost], None)
    fixed = {
        length: measure(batch_size, COSTS[cost], Chancy(lambda _: rate), is_fixed=True, draft_length=length).rate
        for length in (1, 2, 3, 5, 8)
    }
    adaptive = measure(batch_size, COSTS[cost], Chancy(lambda _: rate), draft_length=8)
    assert adaptive.rate >= 0.98 * none.rate
    assert adaptive.rate >= 0.94 * max(fixed.values()), fixed


class NowAndThen(Chancy):
    """Has a guess for a few sequences only, a right one."""

    def propose(self, sequence: Sequence, most: int) -> tuple[int, ...]:
        return super().propose(sequence, most) if sequence.token_ids[0] % 10 == 9 else ()


@pytest.mark.parametrize("batch_size", [16, 32])
def test_those_without_a_guess_do_not_keep_others_from_drafting(batch_size):
    none = measure(batch_size, two_cores, None)
    measured = measure(batch_size, two_cores, NowAndThen(lambda _: 0.95), draft_length=8)
    assert measured.rate > 1.03 * none.rate


def test_what_never_pays_is_hardly_tried():
    drafter = Chancy(lambda _: 0.0)
    measured = measure(1, always_dear, drafter)
    assert drafter.num_asked < 0.06 * len(measured.lengths)
    assert sum(measured.lengths[200:]) <= 3


def test_drafts_begin_when_a_text_begins_to_repeat_itself_and_end_when_it_does_not():
    def rate(num_outputs: int) -> float:
        return 0.9 if 200 <= num_outputs < 400 else 0.0

    lengths = measure(1, always_dear, Chancy(rate)).lengths
    before, after = lengths[40:190], lengths[-150:]
    assert sum(before) < 0.1 * len(before) and sum(after) < 0.1 * len(after)
    assert max(lengths) >= 3


def test_few_changes_where_times_and_guesses_are_steady():
    lengths = measure(4, reading_weights, Chancy(lambda _: 0.7), noise=0.05).lengths[50:]
    assert sum(one != other for one, other in pairwise(lengths)) < 0.2 * len(lengths)


def test_a_step_is_not_made_longer_than_its_target():
    lengths = measure(1, always_dear, Chancy(lambda _: 1.0), target_step_ms=5.5, noise=0.0).lengths
    assert max(lengths[60:]) == 2


class Driven:
    """One sequence whose drafts cost nothing."""

    def __init__(self, script=(99,), expected=64, num_blocks=40, **limits):
        self.holdings = make_holdings(num_blocks)
        merged = {"max_model_len": 4 * num_blocks, "max_num_tokens": 64, "chunk_size": 64, **limits}
        self.drafter = Scripted(true_token, script)
        self.scheduler = DecodeScheduler(
            self.holdings, make_limits(**merged), 0, OutputLengths(prior_tokens=expected), self.drafter
        )
        take_no_time(self.scheduler)

    def add(self, **request) -> Sequence:
        sequence = make_sequence(range(1, 4), DECODE_MOVES, **{"max_tokens": 99, **request})
        self.scheduler.add(sequence, None)
        return sequence

    def step(self, model=true_token):
        plan = self.scheduler.plan(0.0)
        samples = [sample for part in plan.slices for sample in samples_of(part, model)]
        self.scheduler.commit(plan, samples, 0.0)
        return [part.drafts for part in plan.slices]


def lengths(steps):
    return [len(drafts) for step in steps for drafts in step]


def test_no_more_than_half_of_what_is_expected_and_never_past_the_end():
    pool = Driven(script=(0,), expected=6)
    sequence = pool.add(max_tokens=8)
    # Expected are 6 more, or as many as may still come.
    assert lengths([pool.step() for _ in range(8)]) == [0, 3, 3, 2, 2, 1, 1, 0]
    assert sequence.state is State.FINISHED and sequence.num_outputs == 8


def test_a_right_draft_that_ends_the_sequence_is_the_last():
    pool = Driven()

    def ends(sequence: Sequence, position: int) -> int:
        return EOS if position == 6 else true_token(sequence, position)

    pool.drafter._true_token = ends
    sequence = pool.add()
    pool.step(ends)
    (drafts,) = pool.step(ends)
    assert drafts == (10_004, 10_005, EOS), "nothing is drafted after an end"
    assert sequence.state is State.FINISHED and sequence.matched_token_id == EOS
    assert sequence.token_ids[3:] == [10_003, 10_004, 10_005, EOS]
    assert sequence.num_computed == sequence.num_tokens - 1, "as without drafts"


def test_rows_know_the_drafts_before_them():
    pool = Driven()
    pool.add(repetition_penalty=1.2, min_tokens=3, stop_token_ids=(77,))
    pool.step()
    plan = pool.scheduler.plan(0.0)
    batch = build_batch(plan, 4, (EOS,))
    assert batch.token_ids == [10_003, *range(10_004, 10_009)] and batch.num_draft_rows == 5
    assert [row.position for row in batch.sample_rows] == [4, 5, 6, 7, 8, 9]
    assert [row.row for row in batch.sample_rows] == [0, 1, 2, 3, 4, 5]
    assert [row.output_token_ids for row in batch.sample_rows] == [
        tuple(range(10_003, n)) for n in range(10_004, 10_010)
    ]
    assert [row.suppressed_token_ids for row in batch.sample_rows] == [(EOS, 77)] * 2 + [()] * 4


def test_blocks_that_are_short_cut_drafts_and_evict_nobody():
    pool = Driven(script=(0,), expected=2, num_blocks=3, max_num_seqs=2)
    first, second = pool.add(max_tokens=4), pool.add(max_tokens=4)
    taken = [pool.step() for _ in range(2)]
    assert first.state is second.state is State.DECODING
    # Two hold a block each, full with the next token; the third block goes to the first that drafts.
    assert lengths(taken[1:2]) == [1, 0]
    assert pool.holdings.pool.num_free == 1, "and is given back"
    assert first.state is second.state is State.DECODING


def test_no_drafts_beside_prompts():
    pool = Driven(max_num_seqs=2)
    pool.add()
    pool.step()
    assert lengths([pool.step()]) == [5]
    pool.add()
    assert lengths([pool.step()]) == [0, 0]


def test_a_sequence_whose_drafts_are_wrong_too_often_gets_shorter_ones():
    pool = Driven(script=(0,), acceptance_threshold=0.6)
    pool.add()
    found = lengths([pool.step() for _ in range(30)])
    assert found[1:6] == [5, 4, 3, 2, 1] and sum(found[6:]) <= 2
    pool = Driven(script=(9,), acceptance_threshold=0.6, num_blocks=80)
    pool.add()
    assert lengths([pool.step() for _ in range(10)])[1:] == [5] * 9


def test_nothing_is_kept_of_what_is_over():
    pool = Driven()
    sequence = pool.add()
    for _ in range(3):
        pool.step()
    assert pool.drafter.known and pool.scheduler.speculation._records
    assert (sequence.num_drafts, sequence.num_accepted_drafts) == (10, 10)
    pool.scheduler.end(sequence, State.CANCELLED)
    assert not pool.drafter.known and not pool.scheduler.speculation._records
    assert (pool.scheduler.speculation.num_drafts, pool.scheduler.speculation.num_accepted) == (10, 10)


def test_a_router_that_found_a_stop_string_during_the_step_ends_it_there():
    pool = Driven()
    sequence = pool.add()
    pool.step()
    pool.step()
    plan = pool.scheduler.plan(0.0)
    pool.scheduler.finish(sequence, 2)
    pool.scheduler.commit(plan, [sample for part in plan.slices for sample in samples_of(part, true_token)], 0.0)
    assert sequence.token_ids[3:] == [10_003, 10_004] and pool.holdings.pool.num_used == 0
    pool.holdings.pool.check(pool.holdings.references())


def test_drafts_make_steps_longer_by_what_they_cost():
    times = StepTimes()
    pool = Driven(script=(2,), draft_length=4, num_blocks=90)
    pool.add(max_tokens=300)
    for _ in range(60):
        plan = pool.scheduler.plan(0.0)
        batch = build_batch(plan, 4, (EOS,))
        times.observe(load_of(batch), 8 + 0.5 * batch.num_draft_rows)
        samples = [sample for part in plan.slices for sample in samples_of(part, true_token)]
        pool.scheduler.commit(plan, samples, 0.0)
        if len(pool.scheduler.live()) == 0:
            break
    load = load_of(batch)
    assert load.num_draft_rows == 4 or load.num_draft_rows == 0
    assert times.predict_ms(load) == pytest.approx(8 + 0.5 * load.num_draft_rows, rel=0.1)
