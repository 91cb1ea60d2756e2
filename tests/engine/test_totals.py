"""What schedulers count: each ending, eviction, pause and token once, by its cause."""

from __future__ import annotations

from driven import Decode, Prefill

from engine.request import Priority
from engine.sequence import State


def test_prompts_and_endings_of_the_prefill_pool() -> None:
    """A prompt counts with all its tokens when its last chunk is computed, and not before."""
    p = Prefill(chunk_size=8, max_num_tokens=8)
    done, left = p.add(12), p.add(5, first=100)
    p.step()
    assert p.scheduler.totals.num_prompt_tokens == 0
    p.step()
    p.step()
    assert p.scheduler.totals.num_prompt_tokens == 17
    p.scheduler.end(done, State.FINISHED)
    for _ in range(2):
        p.scheduler.end(left, State.CANCELLED)
    assert p.scheduler.totals.endings == {State.FINISHED: 1, State.CANCELLED: 1}


def test_tokens_of_the_decode_pool() -> None:
    """Inputs that were computed elsewhere are no prompt tokens here; first tokens that came with them are generated."""
    d = Decode()
    d.add(10, first=100)
    fetched = d.add(20, "p", first=200)
    d.step()
    assert (d.scheduler.totals.num_prompt_tokens, d.scheduler.totals.num_generated_tokens) == (10, 1)
    d.arrive(fetched)
    assert (d.scheduler.totals.num_prompt_tokens, d.scheduler.totals.num_generated_tokens) == (10, 2)
    d.step()
    assert d.scheduler.totals.num_generated_tokens == 4


def test_evictions_have_a_cause() -> None:
    """For want of blocks, and for a higher class."""
    d = Decode(num_blocks=4)
    d.add(7, first=100)
    d.add(7, first=200)
    while not d.scheduler.totals.endings:
        d.step()
    assert d.scheduler.totals.evictions == {"blocks": 1} and d.scheduler.totals.endings == {State.EVICTED: 1}
    d = Decode(max_num_seqs=2)
    d.add(3, first=100)
    d.add(3, first=200, priority=Priority.LOW)
    d.step()
    d.add(3, first=300, priority=Priority.HIGH)
    d.step()
    assert d.scheduler.totals.evictions == {"class": 1} and d.scheduler.totals.endings == {State.EVICTED: 1}


def test_a_pause_counts_when_it_begins() -> None:
    d = Decode(max_batch_size=1)
    d.add(3, first=100)
    d.add(3, first=200)
    d.step()
    for _ in range(3):
        d.step()
    assert d.scheduler.totals.num_pauses == 1


def test_reuse_is_counted_in_tokens() -> None:
    """Whole blocks of an input that were there, of all that was admitted."""
    d = Decode()
    first = d.add(9, first=100)
    d.step()
    d.scheduler.end(first, State.FINISHED)
    d.add(9, first=100)
    d.step()
    holdings = d.holdings
    assert (holdings.num_wanted_tokens, holdings.num_reused_tokens) == (18, 8)
    assert (holdings.num_wanted_session_tokens, holdings.num_reused_session_tokens) == (0, 0)
