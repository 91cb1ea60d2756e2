"""Sessions at a worker: what a turn that ends well leaves behind, and who gives way when blocks are short."""

from __future__ import annotations

import pytest
from pools import make_holdings, make_request

from engine.holdings import Holdings
from engine.request import Priority, SessionTurn
from engine.sequence import DECODE_MOVES, Sequence, State
from kvstore.hashing import unpack_token_ids

TTL_S = 60.0


def turn(
    holdings: Holdings,
    tokens: range,
    session: bytes = b"",
    priority: Priority = Priority.NORMAL,
    end: State = State.FINISHED,
    fence: int = 1,
) -> Sequence:
    """A request that is computed and over."""
    kept = SessionTurn(session, fence, TTL_S) if session else None
    sequence = Sequence(make_request(tokens, priority=priority, session=kept), DECODE_MOVES, 0.0)
    assert holdings.admit(sequence, len(tokens), len(tokens) - 1)
    sequence.move(State.PREFILLING)
    sequence.num_computed = len(tokens)
    holdings.register_computed(sequence)
    sequence.move(end)
    holdings.free(sequence)
    return sequence


def is_cached(holdings: Holdings, tokens: range) -> bool:
    """Whether all whole blocks of the tokens could be reused."""
    probe = Sequence(make_request(tokens), DECODE_MOVES, 0.0)
    return len(holdings.cached_prefix(probe, len(tokens))) == len(tokens) // 4


def test_a_turn_that_ends_well_is_remembered_with_its_whole_blocks() -> None:
    holdings = make_holdings(8)
    turn(holdings, range(10), session=b"s")
    kept = holdings.sessions.find(b"s")
    assert kept is not None and unpack_token_ids(kept.token_ids) == tuple(range(10))
    assert len(kept.block_hashes) == 2
    assert holdings.sessions.forget(b"s")
    assert holdings.pool.num_cached == 0 and holdings.pool.num_free == 8


@pytest.mark.parametrize("end", [State.CANCELLED, State.EVICTED, State.FAILED])
def test_a_turn_that_does_not_leaves_the_session_as_it_was(end: State) -> None:
    holdings = make_holdings(8)
    turn(holdings, range(8), session=b"s")
    turn(holdings, range(16), session=b"s", end=end, fence=2)
    kept = holdings.sessions.find(b"s")
    assert kept is not None and kept.fence == 1


def test_a_request_without_a_session_is_not_remembered() -> None:
    holdings = make_holdings(8)
    turn(holdings, range(8))
    assert len(holdings.sessions) == 0


def test_idle_sessions_give_way_by_class_the_oldest_first() -> None:
    """And what belongs to none before them."""
    holdings = make_holdings(5)
    first = {
        "high": (range(100, 104), Priority.HIGH),
        "old": (range(200, 204), Priority.NORMAL),
        "low": (range(300, 304), Priority.LOW),
        "new": (range(400, 404), Priority.NORMAL),
    }
    for name, (tokens, priority) in first.items():
        turn(holdings, tokens, session=name.encode(), priority=priority)
    turn(holdings, range(500, 504))
    gone = []
    for begin in range(1000, 1500, 100):
        running = Sequence(make_request(range(begin, begin + 4)), DECODE_MOVES, 0.0)
        assert holdings.admit(running, 4, 3), "what is idle never keeps out what runs"
        gone.append({name for name, (tokens, _) in first.items() if not is_cached(holdings, tokens)})
    assert gone == [set(), {"low"}, {"low", "old"}, {"low", "old", "new"}, set(first)]
