"""Which drafts there may be, whatever they cost, and what becomes of them; what pays is test_speculation_pays."""

from __future__ import annotations

import pytest
from drafting import Scripted, samples_of, take_no_time
from pools import EOS, make_holdings, make_limits, make_sequence

from decode_svc.scheduler import DecodeScheduler
from engine.lengths import OutputLengths
from engine.planning import build_batch
from engine.sequence import DECODE_MOVES, Sequence, State
from engine.step_time import StepTimes, load_of


def true_token(sequence: Sequence, position: int) -> int:
    return 10_000 + position


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
