"""The pool against a naive model, over random sequences of what sequences, leases and caches do to it."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstore.blocks import NUM_LEVELS, BlockPool, OutOfBlocks, PoolCounts

HASHES = [bytes([number]) * 16 for number in range(6)]


class PoolMachine(RuleBasedStateMachine):
    """`tables` are the holders; the model keeps for each block what its content is and in which order it was let go."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: list[list[int]] = []
        self.content: dict[int, bytes | None] = {}  # a holder's registered hash, by block
        self.cached: list[int] = []  # least recently released first
        self.levels: Counter[int] = Counter()  # by block: the highest it was released with
        self.turns: dict[int, tuple[int, int]] = {}  # by cached block: when its turn to be taken back is
        self.num_released = 0
        self.generations: Counter[int] = Counter()

    @initialize(num_blocks=st.integers(2, 6), extra=st.integers(0, 3))
    def create(self, num_blocks: int, extra: int) -> None:
        self.pool = BlockPool(num_blocks, num_blocks + extra)
        self.total, self.ceiling = num_blocks, num_blocks + extra

    def held(self) -> Counter[int]:
        return Counter(block_id for table in self.tables for block_id in table)

    def free(self) -> set[int]:
        return set(range(self.total)) - set(self.held()) - set(self.cached)

    @rule(num_blocks=st.integers(0, 5))
    def allocate(self, num_blocks: int) -> None:
        free, held = self.free(), self.held()
        if num_blocks > len(free) + len(self.cached):
            before = self.pool.status()
            try:
                self.pool.allocate(num_blocks)
            except OutOfBlocks:
                assert self.pool.status() == before
                return
            raise AssertionError("gave blocks that it does not have")
        table = self.pool.allocate(num_blocks)
        num_evicted = max(0, num_blocks - len(free))
        evicted = sorted(self.cached, key=lambda block_id: self.turns[block_id])[:num_evicted]
        self.cached = [block_id for block_id in self.cached if block_id not in evicted]
        assert len(set(table)) == num_blocks
        assert not set(table) & set(held), "a block with two writers"
        assert set(table) - free == set(evicted)
        for block_id in table:
            self.generations[block_id] += 1
            self.levels[block_id] = 0
            self.content[block_id] = None
        if table:
            self.tables.append(table)

    @precondition(lambda self: self.tables)
    @rule(pick=st.integers(0, 99), length=st.integers(1, 5))
    def share_a_prefix(self, pick: int, length: int) -> None:
        prefix = self.tables[pick % len(self.tables)][:length]
        self.pool.share(prefix)
        self.tables.append(prefix)

    @rule(first=st.integers(0, len(HASHES) - 1), take=st.booleans())
    def match(self, first: int, take: bool) -> None:
        hashes = HASHES[first:]
        holders = {content: block_id for block_id, content in self.content.items() if content is not None}
        expected: list[int] = []
        for block_hash in hashes:
            if block_hash not in holders:
                break
            expected.append(holders[block_hash])
        found = self.pool.match(hashes)
        assert found == expected, "a stale or a missing block"
        if take:
            self.pool.share(found)
            self.cached = [block_id for block_id in self.cached if block_id not in found]
            self.tables += [found] if found else []

    @precondition(lambda self: self.tables)
    @rule(pick=st.integers(0, 99), first=st.integers(0, len(HASHES) - 1))
    def register(self, pick: int, first: int) -> None:
        """Completes the blocks of a table, in order, as a prompt's prefill does."""
        for block_id, block_hash in zip(self.tables[pick % len(self.tables)], HASHES[first:], strict=False):
            if self.content[block_id] is not None:
                continue
            self.pool.register(block_id, block_hash)
            if block_hash not in self.content.values():
                self.content[block_id] = block_hash

    @precondition(lambda self: self.tables)
    @rule(pick=st.integers(0, 99), keep=st.sampled_from([0, 0, 0, 1]), level=st.integers(0, NUM_LEVELS - 1))
    def release(self, pick: int, keep: int, level: int) -> None:
        table = self.tables.pop(pick % len(self.tables))
        kept, released = table[:keep], table[keep:]
        self.pool.release(released, level)
        if kept:
            self.tables.append(kept)
        held = self.held()
        for block_id in reversed(released):
            self.levels[block_id] = level = max(level, self.levels[block_id])
            if block_id not in held and self.content[block_id] is not None:
                self.cached.append(block_id)
                self.num_released += 1
                self.turns[block_id] = (self.num_released + level * self.total, level)

    @rule(first=st.integers(0, len(HASHES) - 1))
    def discard(self, first: int) -> None:
        """What is cached with such content is freed; what is held is not."""
        gone = [block_id for block_id in self.cached if self.content[block_id] in HASHES[first:]]
        assert self.pool.discard(HASHES[first:]) == len(gone)
        for block_id in gone:
            self.cached.remove(block_id)
            self.content[block_id] = None

    @precondition(lambda self: len(self.cached) > 1)
    @rule()
    def drop_cached(self) -> None:
        self.pool.drop_cached()
        self.content = dict.fromkeys(self.content)
        self.cached = []

    @precondition(lambda self: self.total < self.ceiling)
    @rule(num_blocks=st.integers(1, 3))
    def grow(self, num_blocks: int) -> None:
        added = min(num_blocks, self.ceiling - self.total)
        assert self.pool.grow(num_blocks) == added
        self.total += added

    @invariant()
    def balanced(self) -> None:
        held = self.held()
        self.pool.check(held)
        counts = PoolCounts(self.total, len(self.free()), len(held), len(self.cached), self.ceiling)
        assert self.pool.status() == counts
        assert counts.free + counts.used + counts.cached == counts.total
        for block_id in range(self.total):
            assert self.pool.ref_count(block_id) == held[block_id]
            assert self.pool.generation(block_id) == self.generations[block_id]
            assert self.pool.block_hash(block_id) == self.content.get(block_id)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
