"""Who gives way and has room in host memory waits there, and goes on later where it was; who has none is evicted."""

from __future__ import annotations

import pytest
from driven import Decode

from engine.request import Priority, SessionTurn
from engine.sequence import Sequence, State


def crowded(num_host_blocks: int = 9, **limits) -> tuple[Decode, Sequence, Sequence]:
    """Two that have filled a pool of six blocks, and grow."""
    d = Decode(num_blocks=6, num_host_blocks=num_host_blocks, **limits)
    old, young = d.add(11, first=100), d.add(11, first=200)
    d.step()
    assert (old.num_tokens, young.num_tokens) == (12, 12)
    return d, old, young


def step_until_over(d: Decode, *sequences: Sequence, most: int = 200) -> None:
    for _ in range(most):
        if all(sequence.is_over for sequence in sequences):
            return
        d.step()
        d.holdings.check()
    raise AssertionError([(each.state, each.num_tokens) for each in sequences])


def test_the_last_by_rank_waits_in_host_memory_while_others_grow():
    d, old, young = crowded()
    assert d.step() == [(old, 1), (young, 1)]
    assert d.step() == [], "no block for either; what the young one has is copied"
    assert (young.state, young.block_table, len(young.host_table or ())) == (State.PAUSED, [], 3)
    computed = young.num_computed
    assert d.step() == [(old, 1)]
    assert d.holdings.host_pool.num_used == 3 and d.holdings.pool.num_used == 4
    d.scheduler.end(old, State.CANCELLED)
    assert d.step() == [], "copied back"
    assert young.num_computed == computed and young.host_table is None and d.holdings.host_pool.num_used == 0
    assert d.step() == [(young, 1)], "goes on with its next token, nothing is computed again"
    assert not d.scheduler.totals.evictions and d.scheduler.totals.swaps == {"blocks": 1}


def test_all_finish_without_an_eviction_in_a_pool_for_one():
    d = Decode(num_blocks=8, num_host_blocks=99, max_num_seqs=8)
    sequences = [d.add(6, first=100 * index, max_tokens=20) for index in range(1, 6)]
    step_until_over(d, *sequences)
    assert {each.state for each in sequences} == {State.FINISHED}
    assert d.scheduler.totals.swaps["blocks"] > 3 and not d.scheduler.totals.evictions
    assert d.holdings.pool.num_used == d.holdings.host_pool.num_used == 0


@pytest.mark.parametrize("num_host_blocks", [0, 2])
def test_who_has_no_room_there_is_evicted(num_host_blocks):
    d, _old, young = crowded(num_host_blocks)
    d.step()
    d.step()
    assert (young.state, young.host_table) == (State.EVICTED, None)
    assert d.scheduler.totals.evictions == {"blocks": 1} and d.holdings.host_pool.num_used == 0


def test_those_that_pause_anyway_go_first():
    d = Decode(num_blocks=9, num_host_blocks=9, max_batch_size=2)
    a, b = d.add(11, first=100), d.add(11, first=200)
    d.step()
    high = d.add(11, first=300, priority=Priority.HIGH, waited_ms=60_000)
    d.step()
    assert b.state is State.DECODING
    d.step()
    assert (high.state, a.state, b.state) == (State.DECODING, State.DECODING, State.PAUSED)
    while b.host_table is None:
        d.step()
    assert high.block_table and a.block_table and not d.scheduler.totals.evictions


def test_a_higher_class_takes_a_seat_and_gives_it_back():
    d = Decode(num_blocks=20, num_host_blocks=9, max_num_seqs=2)
    d.add(3, first=100)
    low = d.add(6, first=200, priority=Priority.LOW)
    d.step()
    high = d.add(3, first=300, priority=Priority.HIGH, max_tokens=3)
    d.step()
    assert (low.state, low.host_table is not None) == (State.PAUSED, True)
    tokens = list(low.token_ids)
    step_until_over(d, high)
    d.step()
    d.step()
    assert low.state is State.DECODING and low.token_ids[: len(tokens)] == tokens and low.num_tokens > len(tokens)
    assert low.num_displaced == 1 and d.scheduler.totals.swaps == {"class": 1}


def test_nobody_is_displaced_beyond_the_cap():
    d = Decode(num_blocks=20, num_host_blocks=9, max_num_seqs=2, max_preemptions=2)
    d.add(3, first=100)
    low = d.add(3, first=200, priority=Priority.LOW, num_evictions=1)
    d.step()
    first = d.add(3, first=300, priority=Priority.HIGH, max_tokens=2)
    step_until_over(d, first)
    d.step()
    d.step()
    second = d.add(3, first=400, priority=Priority.HIGH)
    d.step()
    assert (low.state, second.state) == (State.DECODING, State.QUEUED), "once given back, once swapped out"


def test_one_that_was_served_long_does_not_take_the_place_back_that_an_urgent_one_took():
    """By when it came it ranks before the urgent one; being served is not waiting."""
    d = Decode(num_blocks=20, num_host_blocks=9, max_num_seqs=2)
    d.add(3, first=100)
    low = d.add(3, first=200, priority=Priority.LOW)
    d.step()
    d.now_s += 60
    high = d.add(3, first=300, priority=Priority.HIGH)
    d.step()
    for _ in range(3):
        d.step()
        assert (low.state, high.state) == (State.PAUSED, State.DECODING) and low.host_table


def test_what_comes_later_does_not_overtake_one_that_waits_for_blocks():
    d, old, young = crowded()
    d.step()
    d.step()
    later = d.add(2, first=300)
    d.step()
    assert (young.host_table is not None, later.state) == (True, State.QUEUED)
    d.scheduler.end(old, State.CANCELLED)
    d.step()
    assert young.block_table and not later.is_over


def test_prompts_that_are_half_computed_wait_there_as_well():
    d = Decode(num_blocks=9, num_host_blocks=9, max_num_tokens=5, chunk_size=2, max_num_seqs=4)
    old = d.add(11, first=100)
    while old.state is not State.DECODING:
        d.step()
    prompt = d.add(19, first=200)
    while prompt.host_table is None:
        d.step()
    num_computed = prompt.num_computed
    assert (prompt.state, prompt.first_token, num_computed > 0) == (State.PAUSED, None, True)
    d.scheduler.end(old, State.CANCELLED)
    d.step()
    assert prompt.state is State.PREFILLING and prompt.num_computed == num_computed + 2
    step_until_over(d, prompt)
    assert prompt.state is State.FINISHED and not d.scheduler.totals.evictions


def test_what_the_prefix_cache_still_has_is_not_copied_back():
    d, old, young = crowded()
    d.step()
    d.step()
    assert young.num_registered == 0
    generations = [d.holdings.pool.generation(block) for block in range(6)]
    d.step()  # the old one takes the block that was released first, the last of the young one's
    d.scheduler.end(old, State.CANCELLED)
    plan = d.scheduler.plan(d.now_s)
    (swap,) = d.holdings.swaps
    assert not plan.slices and swap.sequence is young
    assert len(swap.copy.block_ids) == 1 and young.num_registered == 2
    d.memory.swap(d.holdings)
    changed = [d.holdings.pool.generation(block) - before for block, before in enumerate(generations)]
    assert sorted(changed) == [0, 0, 0, 0, 1, 2] or sum(changed) > 0


def test_shared_blocks_stay_with_those_that_share_them():
    d = Decode(num_blocks=8, num_host_blocks=9)
    a = d.add(9, first=100)
    d.step()
    b, c = d.add(9, first=100), d.add(11, first=300)
    d.step()
    assert b.block_table[:2] == a.block_table[:2]
    while c.host_table is None and b.host_table is None:
        d.step()
    for _ in range(4):
        d.step()
    assert a.state is State.DECODING and d.holdings.pool.ref_count(a.block_table[0]) >= 1


@pytest.mark.parametrize("state", [State.CANCELLED, State.EVICTED, State.FAILED, State.FINISHED])
@pytest.mark.parametrize("moment", ["going", "there", "coming"])
def test_whatever_ends_it_nothing_is_left(moment, state):
    d, old, young = crowded()
    d.step()
    plan = d.scheduler.plan(d.now_s)
    assert not plan.slices and d.holdings.swaps
    if moment != "going":
        d.memory.swap(d.holdings)
    if moment == "coming":
        d.scheduler.end(old, State.CANCELLED)
        d.scheduler.plan(d.now_s)
        assert d.holdings.swaps and young.block_table and young.host_table
    if state is State.FINISHED:
        d.scheduler.finish(young, 1)
    else:
        d.scheduler.end(young, state)
    assert bool(young.block_table) == (moment != "there"), "blocks stay as long as they are copied"
    d.memory.swap(d.holdings)
    assert not young.block_table and young.host_table is None and young.num_pins == 0
    d.scheduler.end(old, State.CANCELLED)
    d.holdings.check()
    assert d.holdings.pool.num_used == d.holdings.host_pool.num_used == 0
    assert not d.scheduler.live()


def test_a_turn_that_ends_in_host_memory_is_remembered():
    d = Decode(num_blocks=6, num_host_blocks=9)
    old = d.add(11, first=100)
    young = d.add(11, first=200, session=SessionTurn(b"k" * 16, 1, 60.0))
    for _ in range(3):
        d.step()
    assert young.host_table and not young.block_table
    d.scheduler.finish(young, 1)
    kept = d.holdings.sessions.find(b"k" * 16)
    assert kept is not None and len(kept.block_hashes) == 3
    d.scheduler.end(old, State.CANCELLED)
    d.holdings.check()


def test_drafters_forget_whose_blocks_change():
    d, _old, young = crowded()
    forgotten: list[Sequence] = []

    class Noting:
        def forget(self, sequence):
            forgotten.append(sequence)

        def add_to(self, plan):
            pass

    d.scheduler.speculation = Noting()  # type: ignore[assignment]
    d.step()
    d.step()
    assert forgotten == [young] and young.host_table


def test_one_alone_in_a_pool_that_cannot_grow_is_given_back():
    d = Decode(num_blocks=3, num_host_blocks=9, max_model_len=99)
    alone = d.add(10, first=100)
    while not alone.is_over:
        d.step()
    assert alone.state is State.EVICTED and not d.scheduler.totals.swaps
