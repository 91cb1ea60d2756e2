"""Static batching, the baseline: what a batch is, and that no stream of others keeps it from running."""

from __future__ import annotations

from driven import Decode

from engine.request import Priority
from engine.sequence import State


def test_a_stream_of_short_answers_does_not_keep_a_batch_open():
    d = Decode(max_num_seqs=3, is_static=True)
    first = d.add(3, first=100)
    for index in range(1, 9):
        # One token each: it comes with the prompt, so that the place is free again after one step.
        d.add(3, first=100 + 100 * index, max_tokens=1)
        d.step()
    assert first.num_outputs > 1


def test_a_batch_is_as_large_as_what_runs_in_a_step():
    d = Decode(max_num_seqs=4, max_batch_size=2, is_static=True)
    a, b, c = (d.add(3, first=first, max_tokens=3) for first in (100, 200, 300))
    d.step()
    assert d.step() == [(a, 1), (b, 1)] and c.state is State.QUEUED


def test_a_running_batch_stays_closed_while_growth_waits_for_a_stopped_transfer():
    d = Decode(num_blocks=5, max_num_seqs=3, is_static=True)
    a, gone = d.add(3, first=100), d.add(15, "p", first=200)
    d.step()
    d.scheduler.end(gone, State.CANCELLED)
    d.step()
    late = d.add(3, first=300)
    assert d.step() == [], "its second block comes when the transfer has stopped"
    d.holdings.unpin(gone)
    assert d.step() == [(a, 1)] and late.state is State.QUEUED


def test_nobody_is_preempted_from_a_static_batch():
    d = Decode(max_num_seqs=2, is_static=True)
    d.add(3, first=100)
    low = d.add(3, "p", first=200, priority=Priority.LOW)
    d.step()
    high = d.add(3, first=300, priority=Priority.HIGH)
    d.step()
    assert (low.state, high.state) == (State.FETCHING, State.QUEUED)
