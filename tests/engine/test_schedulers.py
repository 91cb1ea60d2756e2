"""Order, bounds and victims of both schedulers, one rule at a time."""

from __future__ import annotations

import pytest
from driven import Decode, Prefill

from engine.request import Priority, Sample
from engine.sequence import State


def test_prefill_packs_chunks_of_many_prompts_into_a_step():
    p = Prefill(max_num_tokens=10, chunk_size=6)
    a, b, c = p.add(8, first=100), p.add(3, first=200), p.add(9, first=300)
    assert p.step() == [(a, 6), (b, 3), (c, 1)]
    assert p.step() == [(a, 2), (c, 6)]
    assert p.step() == [(c, 2)]
    assert [s.state for s in (a, b, c)] == [State.LEASED] * 3


def test_prefill_wants_blocks_for_what_has_credit_and_none():
    p = Prefill(max_num_tokens=8)
    p.add(9, credit=False, first=100)
    assert p.scheduler.num_wanted_blocks() == 0
    p.add(9, first=200)
    assert p.scheduler.num_wanted_blocks() == 3
    p.step()
    assert p.scheduler.num_wanted_blocks() == 0


def test_prefill_takes_the_urgent_first_unless_others_have_waited_longer():
    p = Prefill(max_num_tokens=4, chunk_size=4)
    low, normal, waited, high = (
        p.add(4, first=100, priority=Priority.LOW),
        p.add(4, first=200),
        p.add(4, first=300, waited_ms=60_000),
        p.add(4, first=400, priority=Priority.HIGH),
    )
    assert [p.step()[0][0] for _ in range(4)] == [waited, high, normal, low]


def test_short_prompts_share_the_steps_of_a_long_one():
    p = Prefill(max_num_tokens=8, chunk_size=8)
    long = p.add(40, first=1)
    assert p.step() == [(long, 8)]
    short, urgent, low = (
        p.add(6, first=100),
        p.add(2, first=200, priority=Priority.HIGH),
        p.add(3, first=300, priority=Priority.LOW),
    )
    p.scheduler.end(urgent, State.CANCELLED)
    assert p.step() == [(long, 2), (short, 6)], "they may have as much as it had; the low one has no claim to it"
    other = p.add(12, first=500)
    for _ in range(3):
        assert p.step() == [(long, 4), (other, 4)], "then half of each step"
    assert p.step() == [(long, 8)]
    assert low.num_computed == 0


def test_among_the_short_the_higher_class_comes_before_the_shorter():
    p = Prefill(max_num_tokens=8, chunk_size=8)
    patient = p.add(40, first=1, priority=Priority.LOW, waited_ms=60_000)
    normal, high, low = (
        p.add(3, first=200),
        p.add(6, first=300, priority=Priority.HIGH),
        p.add(2, first=400, priority=Priority.LOW),
    )
    assert p.step() == [(patient, 4), (high, 4)]
    assert p.step() == [(patient, 4), (high, 2), (normal, 2)]
    assert p.step() == [(patient, 5), (normal, 1), (low, 2)]


def test_an_equally_long_prompt_waits_its_turn():
    p = Prefill(max_num_tokens=8, chunk_size=8)
    a, b = p.add(16, first=1), p.add(16, first=100)
    assert [p.step() for _ in range(4)] == [[(a, 8)], [(a, 8)], [(b, 8)], [(b, 8)]]


def test_prefill_lets_nobody_overtake_one_that_lacks_blocks():
    p = Prefill(num_blocks=4, max_num_tokens=64)
    a, b, c = p.add(8, first=100), p.add(12, first=200), p.add(4, first=300)
    p.step()
    assert (a.state, b.state, c.state) == (State.LEASED, State.QUEUED, State.QUEUED)
    p.scheduler.end(a, State.FINISHED)
    p.step()
    assert b.block_table and c.block_table


def test_prefill_takes_back_what_a_lower_class_has_not_begun_on():
    p = Prefill(max_num_seqs=3, max_num_tokens=8, chunk_size=8)
    running = p.add(24, first=1)
    first, last = p.add(20, first=100, priority=Priority.LOW), p.add(20, first=200, priority=Priority.LOW)
    p.step()
    high = p.add(24, first=300, priority=Priority.HIGH)
    assert p.step() == [(high, 8)]
    assert (running.num_computed, first.state, last.state) == (8, State.PREFILLING, State.QUEUED)
    assert not last.block_table and last.num_cached == last.num_computed == 0
    while p.step():
        pass
    assert [each.state for each in (running, first, high)] == [State.LEASED] * 3
    p.scheduler.end(high, State.FINISHED)
    p.step()
    assert last.state is State.PREFILLING, "it waited for its turn and lost nothing"


@pytest.mark.parametrize(
    "seats, lower", [(2, Priority.HIGH), (1, Priority.LOW)], ids=["an equal", "one that has begun"]
)
def test_prefill_takes_nothing_back_from(seats, lower):
    p = Prefill(max_num_seqs=seats, max_num_tokens=8, chunk_size=8)
    holding = [p.add(24, first=100 * index + 1, priority=lower) for index in range(seats)]
    p.step()
    high = p.add(4, first=500, priority=Priority.HIGH)
    p.step()
    assert {each.state for each in holding} == {State.PREFILLING} and high.state is State.QUEUED


def test_prefill_takes_nothing_back_in_vain():
    p = Prefill(num_blocks=10, max_num_tokens=8, chunk_size=8)
    p.add(24, first=1)
    low = p.add(12, first=100, priority=Priority.LOW)
    p.step()
    high = p.add(20, first=300, priority=Priority.HIGH)
    p.step()
    assert (low.state, high.state) == (State.PREFILLING, State.QUEUED)


def test_prefill_seats_count_leases():
    p = Prefill(max_num_seqs=1)
    a, b = p.add(4, first=100), p.add(4, first=200)
    p.step()
    assert p.step() == [] and a.state is State.LEASED
    p.scheduler.end(a, State.FINISHED)
    assert p.step() == [(b, 4)]


def test_prefill_reuses_a_cached_prefix_but_always_computes_one_token():
    p = Prefill(max_num_tokens=64)
    a, b = p.add(8), p.add(8)
    p.step()
    assert b.num_cached == 0, "nothing was cached when it was admitted"
    p.scheduler.end(a, State.FINISHED)
    c = p.add(8)
    assert p.step() == [(c, 4)] and c.num_cached == 4


def test_a_cancel_between_plan_and_commit_keeps_the_blocks_until_the_commit():
    p = Prefill()
    a = p.add(8)
    plan = p.scheduler.plan(0.0)
    p.scheduler.end(a, State.CANCELLED)
    assert p.holdings.pool.num_used == 2
    assert p.scheduler.commit(plan, [Sample(1)], 0.0) == []
    assert (p.holdings.pool.num_used, p.holdings.pool.num_cached) == (0, 0), "half-known content is not kept"


def test_decode_rows_come_before_prefill_chunks():
    d = Decode(max_num_tokens=6, chunk_size=6)
    a = d.add(3, first=100)
    d.step()
    b = d.add(20, first=200)
    assert d.step() == [(a, 1), (b, 5)]


def test_short_prompts_share_what_decode_rows_leave_of_a_step():
    d = Decode(max_num_tokens=9, chunk_size=9)
    running = d.add(1, first=100)
    d.step()
    long, short = d.add(30, first=200), d.add(3, first=300)
    assert d.step() == [(running, 1), (long, 5), (short, 3)]
    assert d.step() == [(running, 1), (short, 1), (long, 7)]


def test_decode_prefers_blocks_for_the_old_and_evicts_the_youngest_of_the_lowest_class():
    d = Decode(num_blocks=6)
    a, b, c = d.add(7, first=100), d.add(7, first=200), d.add(7, first=300, priority=Priority.HIGH)
    d.step()
    assert [s.state for s in (a, b, c)] == [State.DECODING] * 3
    # Each grows out of its second block now; there is none left.
    d.step()
    d.step()
    assert b.state is State.EVICTED and "block" in b.detail
    assert a.state is c.state is State.DECODING


def test_the_oldest_is_not_evicted_though_its_class_is_the_lowest():
    d = Decode(num_blocks=4)
    old = d.add(7, first=100, priority=Priority.LOW)
    young = d.add(7, first=200, priority=Priority.HIGH)
    for _ in range(4):
        d.step()
    assert young.state is State.EVICTED and old.state is State.DECODING


def test_one_that_was_ready_and_is_then_evicted_for_the_oldest_is_not_run():
    d = Decode(num_blocks=4)
    old = d.add(7, first=100, priority=Priority.LOW)
    young = d.add(5, first=200, priority=Priority.HIGH)
    d.step()
    d.step()
    # The young one comes first and has room; the old one then needs its blocks.
    assert d.step() == [(old, 1)]
    assert (old.state, young.state) == (State.DECODING, State.EVICTED)


def test_empty_reservations_go_before_those_that_hold_something():
    d = Decode(num_blocks=7)
    old = d.add(7, first=100)
    d.step()
    fetching, empty = d.add(7, "p", first=200), d.add(6, "p", first=300, waited_ms=500)
    d.step()
    assert (fetching.state, empty.state) == (State.FETCHING, State.FETCHING)
    d.scheduler.received(fetching)
    for _ in range(5):
        d.step()
        for sequence in (fetching, empty):
            if sequence.is_over and sequence.num_pins:
                d.holdings.unpin(sequence)
    assert (old.state, fetching.state, empty.state) == (State.DECODING, State.FETCHING, State.EVICTED)


def test_growth_waits_for_blocks_that_a_stopped_transfer_gives_back():
    d = Decode(num_blocks=4)
    old = d.add(7, first=100)
    d.step()
    fetching = d.add(7, "p", first=200)
    other = None
    d.step()
    assert fetching.state is State.QUEUED or fetching.state is State.FETCHING
    for _ in range(3):
        other = d.step()
    if fetching.is_over:
        assert fetching.block_table, "freed under a transfer"
        assert other == [], "nothing can run until the transfer has stopped"
        d.holdings.unpin(fetching)
        assert d.step() == [(old, 1)]


def test_empty_reservations_are_bounded_for_each_source():
    d = Decode(reserved=10, max_num_seqs=9)
    first, second = d.add(6, "p", first=100), d.add(6, "p", first=200)
    third, fourth = d.add(6, "p", first=300), d.add(5, "p", first=400)
    other, local = d.add(6, "q", first=500), d.add(6, first=600)
    d.step()
    assert [s.state for s in (first, second, third, other, local)] == [
        State.FETCHING,
        State.FETCHING,
        State.QUEUED,
        State.FETCHING,
        State.DECODING,
    ]
    assert fourth.state is State.QUEUED, "it would fit, and keep the third out for ever if more like it came"
    d.scheduler.received(first)
    d.step()
    assert (third.state, fourth.state) == (State.FETCHING, State.QUEUED)
    d.scheduler.received(second)
    d.step()
    assert fourth.state is State.FETCHING


def test_a_long_prompt_that_has_received_nothing_keeps_no_short_ones_out():
    d = Decode(reserved=10, max_num_seqs=9)
    long, short, longer = d.add(40, "p", first=100), d.add(6, "p", first=200), d.add(50, "p", first=300)
    last = d.add(4, "p", first=400)
    d.step()
    assert (long.state, short.state) == (State.FETCHING, State.FETCHING)
    assert longer.state is State.QUEUED, "the pool would be lent to prompts that are computed one after the other"
    assert last.state is State.QUEUED
    d.scheduler.received(long)
    d.step()
    assert (longer.state, last.state) == (State.FETCHING, State.FETCHING)


def test_one_reservation_of_any_size_is_let_in():
    d = Decode(reserved=1)
    big = d.add(50, "p")
    d.step()
    assert big.state is State.FETCHING


def test_admission_leaves_what_is_expected_of_those_that_run():
    d = Decode(num_blocks=5, expected=6)
    a = d.add(3, first=100)
    d.step()
    b = d.add(11, first=200)
    d.step()
    assert b.state is State.QUEUED, "3 of 4 free blocks are needed, but soon the other will need 3 itself"
    d.scheduler.end(a, State.CANCELLED)
    d.step()
    assert b.block_table


def test_admission_counts_on_blocks_that_others_give_back_before_they_are_needed():
    d = Decode(num_blocks=4, expected=20)
    short = d.add(3, first=100, max_tokens=3)
    d.step()
    # It will hold 2 blocks for one more step; the other holds 2 and needs 4 only when they are back.
    long = d.add(7, first=200, max_tokens=8)
    d.step()
    assert (short.state, long.state) == (State.DECODING, State.DECODING)
    other = d.add(3, first=300)
    while not long.is_over:
        d.step()
        assert other.state is State.QUEUED or long.is_over
    assert (short.state, long.state) == (State.FINISHED, State.FINISHED)


def test_alone_one_is_let_in_whatever_is_expected_of_it():
    d = Decode(num_blocks=3, expected=400, max_model_len=400)
    only = d.add(11)
    d.step()
    assert only.state is State.DECODING


def test_admission_counts_on_memory_that_could_be_had():
    d = Decode(num_blocks=4, expected=8)
    d.add(3, first=100)
    d.step()
    other = d.add(3, first=200)
    d.holdings.max_blocks = 5
    d.step()
    assert other.state is State.QUEUED, "three blocks each"
    d.holdings.max_blocks = 6
    d.step()
    assert other.state is State.DECODING


def test_a_static_batch_is_held_until_its_longest_member_ends():
    d = Decode(max_num_seqs=2, is_static=True)
    short, long = d.add(3, first=100, max_tokens=2), d.add(3, first=200, max_tokens=4)
    late = d.add(3, first=300)
    d.step()
    assert d.step() == [(short, 1), (long, 1)] and short.state is State.FINISHED
    assert d.step() == [(long, 1)] and late.state is State.QUEUED
    assert d.step() == [(long, 1)] and long.state is State.FINISHED
    d.step()
    assert late.state is State.DECODING


def test_a_static_batch_waits_for_all_its_members():
    d = Decode(is_static=True)
    here, there = d.add(3, first=100), d.add(3, "p", first=200)
    d.step()
    assert d.step() == [] and here.state is State.DECODING
    d.arrive(there)
    assert d.step() == [(here, 1), (there, 1)]


def test_seats():
    d = Decode(max_num_seqs=2)
    a, b, c = d.add(3, first=100), d.add(3, "p", first=200), d.add(3, first=300)
    d.step()
    assert (a.state, b.state, c.state) == (State.DECODING, State.FETCHING, State.QUEUED)
    d.arrive(b)
    d.step()
    assert c.state is State.QUEUED
    d.scheduler.end(a, State.CANCELLED)
    d.step()
    assert c.state is State.DECODING


@pytest.mark.parametrize("token, state", [(9, State.FINISHED), (1, State.DECODING)])
def test_a_first_token_that_ends_takes_no_seat(token, state):
    d = Decode()
    a = d.add(3, "p")
    d.step()
    new = d.scheduler.fetched(a, Sample(token), 1.0)
    assert (new.position, a.state) == (3, state)
    assert d.holdings.pool.num_used == 1, "the transfer still holds it"
    d.holdings.unpin(a)
    assert d.holdings.pool.num_used == (0 if state is State.FINISHED else 1)


def test_a_whole_cached_input_needs_no_bytes_but_its_owner():
    d = Decode()
    a = d.add(8, "p")
    d.step()
    d.arrive(a)
    d.scheduler.end(a, State.CANCELLED)
    again, alone = d.add(8, "p"), d.add(8)
    plan = d.scheduler.plan(9.0)
    assert (again.num_cached, alone.num_cached) == (8, 4)
    assert [(part.sequence, part.num_tokens) for part in plan.slices] == [(alone, 4)]
    d.scheduler.commit(plan, [Sample(1)], 9.0)


def test_output_that_is_complete_ends_on_arrival():
    d = Decode()
    done, full = d.add(3, outputs=(1, 9)), d.add(3, "p", outputs=(1, 1), max_tokens=2)
    assert (done.state, full.state) == (State.FINISHED, State.FINISHED)
    assert d.scheduler.live() == [] and d.step() == []
