"""Whom decode pauses, and takes seats and blocks from: never more than helps, never for one that ranks behind."""

from __future__ import annotations

from driven import Decode

from engine.request import Priority
from engine.sequence import State


def test_nothing_is_kept_for_the_growth_of_victims():
    d = Decode(num_blocks=5, expected=4, max_num_seqs=3, max_batch_size=1)
    d.add(5, first=100, priority=Priority.LOW)
    normal = d.add(3, first=200)
    d.step()
    high = d.add(3, first=300, priority=Priority.HIGH)
    d.step()
    # The low one is expected to need three blocks, each of the others two.
    assert (normal.state, high.state) == (State.EVICTED, State.DECODING)


def test_nobody_is_preempted_for_blocks_that_others_share():
    d = Decode(num_blocks=8, max_num_seqs=9)
    d.add(9, first=100)
    d.step()
    low = d.add(10, first=100, priority=Priority.LOW)
    d.step()
    assert low.num_cached == 8
    high = d.add(20, first=300, priority=Priority.HIGH)
    d.step()
    assert (low.state, high.state) == (State.DECODING, State.QUEUED), "of its three blocks two would stay"


def test_a_prefix_that_others_hold_need_not_be_made_room_for():
    d = Decode(num_blocks=8, max_num_seqs=9)
    d.add(9, first=100)
    d.step()
    low = d.add(9, first=200, priority=Priority.LOW)
    d.step()
    high = d.add(20, first=100, priority=Priority.HIGH)
    d.step()
    assert (low.state, high.state) == (State.EVICTED, State.DECODING)
    assert high.num_cached == 8


def test_no_second_victim_while_the_transfer_of_the_first_is_being_stopped():
    d = Decode(num_blocks=9, max_num_seqs=9)
    d.add(3, first=100)
    d.step()
    spared, victim = d.add(11, first=200, priority=Priority.LOW), d.add(11, "p", first=300, priority=Priority.LOW)
    d.step()
    high = d.add(11, first=400, priority=Priority.HIGH)
    for _ in range(3):
        d.step()
        assert (victim.state, spared.state, high.state) == (State.EVICTED, State.DECODING, State.QUEUED)
    d.holdings.unpin(victim)
    d.step()
    assert (spared.state, high.state) == (State.DECODING, State.DECODING)


def step_until_one_is_evicted(d: Decode) -> None:
    live = d.scheduler.live()
    while not any(sequence.is_over for sequence in live):
        d.step()


def test_growth_of_a_lower_class_does_not_take_the_reservation_of_a_higher():
    d = Decode(num_blocks=7)
    low = [d.add(3, first=100), d.add(7, first=200, priority=Priority.LOW)][1]
    d.step()
    high = d.add(7, "p", first=300, priority=Priority.HIGH)
    d.step()
    step_until_one_is_evicted(d)
    assert (low.state, high.state) == (State.EVICTED, State.FETCHING)


def test_growth_spares_a_lower_class_that_has_waited_longer_than_classes_weigh():
    d = Decode(num_blocks=8)
    patient = [d.add(6, first=100), d.add(6, first=200, priority=Priority.LOW, waited_ms=500)][1]
    d.step()
    d.now_s += 60
    urgent = d.add(5, "p", first=300, priority=Priority.HIGH)
    d.step()
    d.scheduler.received(urgent)
    step_until_one_is_evicted(d)
    assert (patient.state, urgent.state) == (State.DECODING, State.EVICTED)


def test_those_that_rank_behind_the_batch_pause_with_their_kv():
    d = Decode(max_batch_size=2)
    a, b, low = d.add(3, first=100), d.add(3, first=200), d.add(3, first=300, priority=Priority.LOW)
    d.step()
    assert d.step() == [(a, 1), (b, 1)] and low.state is State.PAUSED
    high = d.add(3, first=400, priority=Priority.HIGH)
    d.step()
    assert d.step() == [(high, 1), (a, 1)], "the highest first; the others keep what they have"
    assert (b.state, low.state) == (State.PAUSED, State.PAUSED) and b.block_table and low.block_table
    computed = b.num_computed
    for sequence in (high, a):
        d.scheduler.end(sequence, State.CANCELLED)
    assert d.step() == [(b, 1), (low, 1)], "resumed without computing anything again"
    assert b.num_computed == computed + 1


def test_a_higher_class_takes_the_seat_of_the_youngest_of_the_lowest():
    d = Decode(max_num_seqs=3)
    oldest, low, normal = (
        d.add(3, first=100, priority=Priority.LOW),
        d.add(3, first=200, priority=Priority.LOW),
        d.add(3, first=300),
    )
    d.step()
    high = d.add(3, first=400, priority=Priority.HIGH)
    d.step()
    assert (low.state, high.state) == (State.EVICTED, State.DECODING) and "higher class" in low.detail
    assert oldest.state is normal.state is State.DECODING


def test_what_had_waited_as_long_as_classes_are_apart_keeps_its_seat():
    d = Decode(max_num_seqs=2, ageing_s=5.0)
    d.add(3, first=100, priority=Priority.HIGH, waited_ms=20_000)
    patient = d.add(3, first=200, priority=Priority.LOW, waited_ms=10_500)
    d.step()
    d.now_s += 60
    high = d.add(3, first=300, priority=Priority.HIGH)
    d.step()
    assert (patient.state, high.state) == (State.DECODING, State.QUEUED)
    d.now_s += 0.6
    d.step()
    assert (patient.state, high.state) == (State.EVICTED, State.DECODING), "now this one has waited, too"


def test_an_equal_never_takes_a_seat():
    d = Decode(max_num_seqs=1)
    running, waiting = d.add(3, first=100), d.add(3, first=200, waited_ms=9_000)
    d.step()
    other = d.add(3, first=300)
    d.step()
    states = [running.state, waiting.state, other.state]
    assert states.count(State.DECODING) == 1 and states.count(State.QUEUED) == 2


def test_nobody_is_preempted_beyond_the_cap():
    d = Decode(max_num_seqs=2, max_preemptions=2)
    d.add(3, first=100)
    capped = d.add(3, first=200, priority=Priority.LOW, num_evictions=2)
    d.step()
    high = d.add(3, first=300, priority=Priority.HIGH)
    d.step()
    assert (capped.state, high.state) == (State.DECODING, State.QUEUED)


def test_nobody_is_preempted_in_vain():
    d = Decode(num_blocks=6, max_num_seqs=9)
    d.add(7, first=100)
    low = d.add(3, first=200, priority=Priority.LOW)
    d.step()
    high = d.add(17, first=300, priority=Priority.HIGH)
    d.step()
    assert (low.state, high.state) == (State.DECODING, State.QUEUED), "its blocks would not be enough"


def test_a_higher_class_takes_blocks():
    d = Decode(num_blocks=6, max_num_seqs=9)
    d.add(3, first=100)
    low = d.add(7, first=200, priority=Priority.LOW)
    d.step()
    high = d.add(15, first=300, priority=Priority.HIGH)
    d.step()
    assert (low.state, high.state) == (State.EVICTED, State.DECODING)
