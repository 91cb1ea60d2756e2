"""The pool's accounts, case by case; the state machine beside this file covers sequences of them."""

from __future__ import annotations

import pytest

from kvstore.blocks import BlockPool, OutOfBlocks, PoolCorrupted, PoolCounts

A, B, C = b"a" * 16, b"b" * 16, b"c" * 16


def test_allocate_gives_low_ids_first_in_order() -> None:
    """Neighbours in a table are neighbours in memory: transfers copy them at once."""
    pool = BlockPool(4)
    assert pool.allocate(2) == [0, 1]
    assert pool.allocate(0) == []
    assert pool.status() == PoolCounts(total=4, free=2, used=2, cached=0, ceiling=4)


def test_released_unregistered_blocks_come_back_in_table_order() -> None:
    pool = BlockPool(4)
    table = pool.allocate(3)
    pool.release(table)
    assert pool.allocate(4) == [0, 1, 2, 3]
    assert [pool.generation(block_id) for block_id in range(4)] == [2, 2, 2, 1]


def test_out_of_blocks_changes_nothing() -> None:
    pool = BlockPool(3)
    table = pool.allocate(2)
    pool.register(table[0], A)
    pool.release(table[:1])
    with pytest.raises(OutOfBlocks, match="3 blocks wanted, 2 of 3 available"):
        pool.allocate(3)
    assert pool.status() == PoolCounts(total=3, free=1, used=1, cached=1, ceiling=3)
    assert pool.match([A]) == [table[0]]


def test_registered_blocks_are_cached_and_shared_again() -> None:
    pool = BlockPool(2)
    table = pool.allocate(2)
    pool.register(table[0], A)
    pool.register(table[1], B)
    pool.release(table)
    assert (pool.num_cached, pool.num_used, pool.num_available) == (2, 0, 2)
    found = pool.match([A, B, C])
    assert found == table
    pool.share(found)
    assert (pool.num_cached, pool.num_used) == (0, 2)
    assert [pool.generation(block_id) for block_id in table] == [1, 1]
    pool.check({block_id: 1 for block_id in table})


def test_a_cached_prefix_loses_its_tail_first() -> None:
    pool = BlockPool(3)
    table = pool.allocate(3)
    for block_id, block_hash in zip(table, (A, B, C), strict=True):
        pool.register(block_id, block_hash)
    pool.release(table)
    assert pool.allocate(1) == [table[2]]
    assert pool.match([A, B, C]) == table[:2]


def test_the_least_recently_released_goes_first() -> None:
    pool = BlockPool(2)
    old, new = pool.allocate(2)
    pool.register(old, A)
    pool.register(new, B)
    pool.release([old])
    pool.release([new])
    pool.share([old])
    pool.release([old])  # used again, so no longer the oldest
    assert pool.allocate(1) == [new]
    assert pool.match([A]) == [old]


def test_free_blocks_are_taken_before_cached_ones() -> None:
    pool = BlockPool(2)
    kept = pool.allocate(1)
    pool.register(kept[0], A)
    pool.release(kept)
    assert pool.allocate(1) == [1]
    assert pool.match([A]) == kept


def test_an_evicted_block_is_not_found_and_has_a_new_generation() -> None:
    pool = BlockPool(1)
    table = pool.allocate(1)
    pool.register(table[0], A)
    pool.release(table)
    assert pool.allocate(1) == table
    assert pool.match([A]) == []
    assert pool.generation(table[0]) == 2
    assert pool.block_hash(table[0]) is None


def test_match_is_the_leading_run() -> None:
    pool = BlockPool(2)
    table = pool.allocate(2)
    pool.register(table[0], A)
    pool.register(table[1], C)
    assert pool.match([A, B, C]) == [table[0]]
    assert pool.match([B, C]) == []
    assert pool.match([]) == []


def test_the_first_holder_of_a_hash_keeps_it() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.register(first, A)
    pool.register(second, A)
    assert (pool.block_hash(first), pool.block_hash(second)) == (A, None)
    pool.release([second])
    assert (pool.num_free, pool.num_cached) == (1, 0)  # a duplicate is worth nothing
    pool.register(first, A)  # again: nothing changes
    assert pool.match([A]) == [first]


def test_drop_cached_forgets_all_reuse() -> None:
    pool = BlockPool(3)
    held, cached = pool.allocate(2)
    pool.register(held, A)
    pool.register(cached, B)
    pool.release([cached])
    pool.drop_cached()
    assert pool.status() == PoolCounts(total=3, free=2, used=1, cached=0, ceiling=3)
    assert pool.match([A]) == pool.match([B]) == []
    pool.release([held])
    assert pool.num_free == 3
    pool.check({})


def test_grow_stops_at_the_ceiling() -> None:
    pool = BlockPool(1, ceiling=4)
    assert pool.grow(2) == 2
    assert pool.allocate(3) == [0, 1, 2]
    assert pool.grow(5) == 1
    assert pool.grow(1) == 0
    assert pool.allocate(1) == [3]
    pool.check()


def test_double_free_is_found_at_once() -> None:
    pool = BlockPool(2)
    table = pool.allocate(1)
    pool.release(table)
    with pytest.raises(PoolCorrupted, match="block 0 is released but nobody holds it"):
        pool.release(table)


def test_releasing_a_cached_block_is_found_at_once() -> None:
    pool = BlockPool(1)
    table = pool.allocate(1)
    pool.register(table[0], A)
    pool.release(table)
    with pytest.raises(PoolCorrupted, match="nobody holds it"):
        pool.release(table)


def test_sharing_a_free_block_is_found_at_once() -> None:
    with pytest.raises(PoolCorrupted, match="block 1 is free"):
        BlockPool(2).share([1])


@pytest.mark.parametrize("block_id", [-1, 2])
def test_ids_that_do_not_exist(block_id: int) -> None:
    pool = BlockPool(2)
    for call in (pool.ref_count, pool.generation, pool.block_hash):
        with pytest.raises(PoolCorrupted, match=f"block {block_id} does not exist"):
            call(block_id)
    for change in (pool.share, pool.release):
        with pytest.raises(PoolCorrupted, match="does not exist"):
            change([block_id])


def test_registering_what_nobody_holds() -> None:
    with pytest.raises(PoolCorrupted, match="nobody holds it"):
        BlockPool(1).register(0, A)


def test_registering_other_content() -> None:
    """Complete content never changes: a second hash for the same block means that somebody wrote to it."""
    pool = BlockPool(1)
    pool.allocate(1)
    pool.register(0, A)
    with pytest.raises(PoolCorrupted, match="block 0 holds"):
        pool.register(0, B)


def test_sizes_that_cannot_be() -> None:
    for num_blocks, ceiling in ((-1, None), (3, 2)):
        with pytest.raises(ValueError, match="num_blocks"):
            BlockPool(num_blocks, ceiling)
    with pytest.raises(ValueError, match="negative"):
        BlockPool(1).allocate(-1)
    with pytest.raises(ValueError, match="negative"):
        BlockPool(1).grow(-1)


@pytest.mark.parametrize(
    ("accounted", "message"),
    [
        ({}, "block 0 has 2 references and none is accounted for"),
        ({0: 1}, "block 0 has 2 references and 1 are accounted for"),
        ({0: 2, 1: 1}, "block 1 has 0 references and 1 are accounted for"),
        ({0: 2, 9: 1}, "block 9 does not exist"),
    ],
)
def test_check_finds_leaks_and_thefts(accounted: dict[int, int], message: str) -> None:
    pool = BlockPool(2)
    pool.share(pool.allocate(1))
    pool.check({0: 2, 1: 0})
    with pytest.raises(PoolCorrupted, match=message):
        pool.check(accounted)


def _hash_of_free(pool: BlockPool) -> None:
    pool._by_hash[B] = 2


def _free_twice(pool: BlockPool) -> None:
    pool._free.append(2)


def _free_and_used(pool: BlockPool) -> None:
    pool._free.append(0)


def _nowhere(pool: BlockPool) -> None:
    pool._free.remove(2)


def _negative(pool: BlockPool) -> None:
    pool._refs[2] = -1


def _cached_without_hash(pool: BlockPool) -> None:
    del pool._by_hash[A]
    pool._hashes[1] = None


def _hash_elsewhere(pool: BlockPool) -> None:
    pool._hashes[0] = A


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_hash_of_free, "points at block 2, which does not hold it"),
        (_free_twice, "on the free list twice"),
        (_free_and_used, "block 0 has 1 references, free: True"),
        (_nowhere, "block 2 has 0 references, free: False, cached: False"),
        (_negative, "block 2 has -1 references"),
        (_cached_without_hash, "block 1 is cached without a hash"),
        (_hash_elsewhere, "block 0 has hash 61.* which points elsewhere"),
    ],
)
def test_check_finds_damage(damage, message: str) -> None:  # type: ignore[no-untyped-def]
    pool = BlockPool(3)
    _, cached = pool.allocate(2)
    pool.register(cached, A)
    pool.release([cached])
    pool.check({0: 1})
    damage(pool)
    with pytest.raises(PoolCorrupted, match=message):
        pool.check({0: 1})


def cached_at(pool: BlockPool, *contents: tuple[bytes, int]) -> list[int]:
    """Blocks of these contents, let go one after another at these levels."""
    blocks = pool.allocate(len(contents))
    for block_id, (block_hash, level) in zip(blocks, contents, strict=True):
        pool.register(block_id, block_hash)
        pool.release([block_id], level)
    return blocks


def test_a_lower_level_goes_first_though_it_is_younger() -> None:
    pool = BlockPool(3)
    high, low, lower = cached_at(pool, (A, 2), (B, 1), (C, 0))
    assert [pool.allocate(1) for _ in range(3)] == [[lower], [low], [high]]


def test_a_level_is_worth_as_many_releases_as_the_pool_has_blocks() -> None:
    """Nothing that nobody uses is kept for ever."""
    for num_others, is_kept in ((3, True), (4, False)):
        pool = BlockPool(4)
        (kept,) = cached_at(pool, (A, 1))
        for _ in range(num_others):
            pool.discard([B])
            (younger,) = cached_at(pool, (B, 0))
        cached_at(pool, (C, 0))
        pool.share([younger])  # so that the last one is next, or the one that is kept
        pool.allocate(pool.num_free)
        assert (pool.allocate(1) != [kept]) == is_kept


def test_what_was_worth_more_before_still_is_and_so_is_what_it_follows_on() -> None:
    pool = BlockPool(4)
    table = pool.allocate(2)
    pool.register(table[0], A)
    pool.register(table[1], B)
    pool.share(table[1:])
    pool.release(table[1:], 3)
    pool.release(table, 1)
    cached_at(pool, (C, 2))
    pool.allocate(pool.num_free)
    assert pool.allocate(1) != table[1:] and pool.match([A, B]) == table
    pool.check()


def test_an_allocated_block_is_worth_nothing_yet() -> None:
    pool = BlockPool(2)
    cached_at(pool, (A, 3))
    pool.allocate(2)
    pool.release([0, 1])
    first, second = cached_at(pool, (B, 0), (C, 1))
    assert pool.allocate(1) == [first] and pool.match([C]) == [second]


def test_discard_frees_what_nobody_holds() -> None:
    pool = BlockPool(3)
    _, second = cached_at(pool, (A, 2), (B, 0))
    pool.share([second])
    assert pool.discard([A, B, C]) == 1
    assert pool.match([A]) == [] and pool.match([B]) == [second]
    assert pool.status() == PoolCounts(total=3, free=2, used=1, cached=0, ceiling=3)
    pool.check({second: 1})
