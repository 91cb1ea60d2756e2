"""Ranks: class against waiting, and the queue that keeps their order."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st
from pools import make_request

from engine.ranking import RankedQueue, oldest
from engine.request import Priority
from engine.sequence import DECODE_MOVES, Sequence


def make(arrived_s: float, priority: Priority = Priority.NORMAL, waited_ms: int = 0) -> Sequence:
    return Sequence(make_request([1], waited_ms=waited_ms, priority=priority), DECODE_MOVES, arrived_s)


def order(*sequences: Sequence, ageing_s: float = 5.0) -> list[Sequence]:
    queue = RankedQueue(ageing_s)
    for sequence in sequences:
        queue.add(sequence)
    return list(queue)


def test_a_class_outweighs_waiting_up_to_the_ageing_constant():
    patient, urgent = make(0.0), make(4.9, Priority.HIGH)
    assert order(patient, urgent) == [urgent, patient]
    late = make(5.1, Priority.HIGH)
    assert order(patient, late) == [patient, late]


def test_waiting_of_earlier_attempts_counts():
    old, new, evicted = make(10.0), make(20.0), make(20.0, waited_ms=15_000)
    assert order(old, new, evicted) == [evicted, old, new]


def test_the_lowest_class_is_not_overtaken_by_what_comes_two_constants_later():
    low = make(0.0, Priority.LOW)
    stream = [make(float(second), Priority.HIGH) for second in range(30)]
    assert order(low, *stream).index(low) == 10, "those of the first 10 s go before it, none after"


def test_equals_keep_their_order_of_arrival():
    first, second, third = make(1.0), make(1.0), make(1.0)
    assert order(first, second, third) == [first, second, third]


def test_the_oldest_is_who_waits_longest_whatever_its_class():
    old_low, low, waited = make(1.0, Priority.LOW), make(2.0, Priority.LOW), make(9.0, waited_ms=8_500)
    assert oldest([low, old_low]) is old_low
    assert oldest([waited, low, old_low]) is waited


@given(st.lists(st.tuples(st.integers(0, 20), st.sampled_from(Priority), st.booleans()), max_size=40), st.integers())
def test_the_queue_is_a_sorted_list(entries: list[tuple[int, Priority, bool]], seed: int):
    queue = RankedQueue(3.0)
    kept: list[Sequence] = []
    for arrived_s, priority, removes in entries:
        sequence = make(float(arrived_s), priority)
        queue.add(sequence)
        kept.append(sequence)
        if removes:
            victim = random.Random(seed).choice(kept)
            queue.discard(victim)
            queue.discard(victim)
            kept.remove(victim)
    assert list(queue) == sorted(kept, key=queue.rank)
    assert len(queue) == len(kept) and all(sequence in queue for sequence in kept)
