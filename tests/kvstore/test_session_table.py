"""What a worker remembers of sessions: turns, whose blocks are whose, and when it forgets."""

from __future__ import annotations

from kvstore.blocks import BlockPool
from kvstore.hashing import unpack_token_ids
from kvstore.sessions import SessionTable

A, B, C, D = (letter * 16 for letter in (b"a", b"b", b"c", b"d"))
KEY, OTHER = b"k" * 16, b"o" * 16
TTL_S = 60.0


class Kept:
    """A table over a pool in which blocks of some contents are cached."""

    def __init__(self, *hashes: bytes, max_tokens: int = 1000) -> None:
        self.now_s = 100.0
        self.pool = BlockPool(8)
        blocks = self.pool.allocate(len(hashes))
        for block_id, block_hash in zip(blocks, hashes, strict=True):
            self.pool.register(block_id, block_hash)
        self.pool.release(blocks)
        self.table = SessionTable(self.pool, max_tokens, clock=lambda: self.now_s)

    def cached(self) -> set[bytes]:
        return {each for each in (A, B, C, D) if self.pool.match([each])}


def test_a_later_turn_replaces_an_earlier_one_and_never_the_other_way() -> None:
    kept = Kept(A, B)
    kept.table.keep(KEY, 1, [1, 2], [A], TTL_S)
    kept.table.keep(KEY, 2, [1, 2, 3], [A, B], TTL_S)
    kept.table.keep(KEY, 1, [9], [], TTL_S)
    found = kept.table.find(KEY)
    assert found is not None and (found.fence, unpack_token_ids(found.token_ids)) == (2, (1, 2, 3))
    assert kept.table.find(OTHER) is None and len(kept.table) == 1
    assert kept.cached() == {A, B}


def test_the_end_of_a_session_frees_its_blocks() -> None:
    kept = Kept(A, B, C)
    kept.table.keep(KEY, 1, [1], [A, B], TTL_S)
    assert kept.table.forget(KEY) and not kept.table.forget(KEY)
    assert kept.cached() == {C} and kept.table.find(KEY) is None


def test_what_another_session_has_too_or_somebody_uses_is_not_freed() -> None:
    kept = Kept(A, B, C)
    kept.table.keep(KEY, 1, [1], [A, B, C], TTL_S)
    kept.table.keep(OTHER, 1, [1], [A], TTL_S)
    kept.pool.share(kept.pool.match([B]))
    assert kept.table.forget(KEY)
    assert kept.cached() == {A, B}
    assert kept.table.forget(OTHER)
    assert kept.cached() == {B}


def test_what_a_turn_did_not_go_on_from_is_freed() -> None:
    kept = Kept(A, B, C, D)
    kept.table.keep(KEY, 1, [1], [A, B], TTL_S)
    kept.table.keep(KEY, 2, [1], [A, C], TTL_S)
    assert kept.cached() == {A, C, D}


def test_time_runs_out_and_frees() -> None:
    kept = Kept(A, B)
    kept.table.keep(KEY, 1, [1], [A], TTL_S)
    kept.now_s += TTL_S / 2
    kept.table.keep(OTHER, 1, [2], [B], TTL_S)
    kept.now_s += TTL_S / 2
    assert kept.table.find(KEY) is None and kept.cached() == {B}
    assert kept.table.find(OTHER) is not None and len(kept.table) == 1


def test_a_short_life_behind_a_long_one_is_over_all_the_same() -> None:
    kept = Kept(A)
    kept.table.keep(OTHER, 1, [2], [], 10 * TTL_S)
    kept.table.keep(KEY, 1, [1], [A], TTL_S)
    kept.now_s += TTL_S
    assert kept.table.find(KEY) is None


def test_tokens_are_bounded_and_the_longest_unused_go() -> None:
    kept = Kept(A, max_tokens=10)
    kept.table.keep(KEY, 1, range(6), [A], TTL_S)
    kept.table.keep(OTHER, 1, range(4), [], TTL_S)
    assert len(kept.table) == 2
    kept.table.keep(OTHER, 2, range(5), [], TTL_S)
    assert kept.table.find(KEY) is None and kept.table.find(OTHER) is not None
    assert kept.cached() == {A}, "its blocks are prefix cache like any other"
