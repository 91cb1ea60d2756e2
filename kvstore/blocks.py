"""The accounts of a KV pool: which blocks exist, who holds them, whose content may be reused. No storage, no torch.

Owns references, generations and the index from content hash to block. It does not know sequences, leases or bytes.
Invariants: free + cached + used = total; a block is in exactly one of the three; a hash points at one block and that
block is not free; whatever breaks this is `PoolCorrupted`, after which the pool must not be used any more.

| a block is         | references | hash | who may write its content       | it goes on by                         |
|--------------------|------------|------|---------------------------------|---------------------------------------|
| free               | 0          | no   | nobody                          | allocate: generation + 1              |
| used, being filled | 1          | no   | the one that allocated it       | register, or release: free            |
| used, complete     | 1 and more | yes  | nobody: others read it          | share, or last release: cached        |
| used, a duplicate  | 1 and more | no   | nobody: its owner registered it | last release: free                    |
| cached             | 0          | yes  | nobody                          | share: used; allocate: generation + 1 |

What is cached is taken back oldest first. A retention level, given at release, counts as age: a level is worth as many
later releases as the pool has blocks. So what is worth more stays longer, and nothing that nobody uses stays for ever.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from runtime.errors import BatonError


class OutOfBlocks(BatonError):
    """Fewer blocks are available than were asked for. For schedulers, not for clients: they plan around it."""

    reason = "OUT_OF_BLOCKS"


class PoolCorrupted(BatonError):
    """The accounts contradict themselves or their user: a bug. The worker must not answer from this pool any more."""

    reason = "POOL_CORRUPTED"


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """A pool at one moment; `free + used + cached == total`."""

    total: int
    """Blocks that exist."""
    free: int
    """Blocks that hold nothing."""
    used: int
    """Blocks that someone holds a reference to."""
    cached: int
    """Blocks that nobody holds but whose content may be reused."""
    ceiling: int
    """Blocks the pool may grow to."""


NUM_LEVELS = 4
"""Retention levels: 0 is for what nobody asked to keep, sessions have one for each class of priority."""


class BlockPool:
    """Block ids 0 to `num_total - 1`. Every operation is O(1) a block; one event loop owns it, there are no locks."""

    __slots__ = (
        "_by_hash",
        "_cached",
        "_ceiling",
        "_free",
        "_generations",
        "_hashes",
        "_levels",
        "_num_released",
        "_refs",
    )

    def __init__(self, num_blocks: int, ceiling: int | None = None) -> None:
        """Starts with `num_blocks` free blocks; may grow to `ceiling` (default: not at all)."""
        ceiling = num_blocks if ceiling is None else ceiling
        if not 0 <= num_blocks <= ceiling:
            raise ValueError(f"num_blocks: must be between 0 and the ceiling {ceiling}, got {num_blocks}")
        self._ceiling = ceiling
        self._refs: list[int] = []  # by block id
        self._generations: list[int] = []  # by block id
        self._hashes: list[bytes | None] = []  # by block id; set while the block is the registered holder of that hash
        self._by_hash: dict[bytes, int] = {}
        self._free: list[int] = []  # a stack: memory touched last is used first
        self._levels: list[int] = []  # by block id: the highest it was released with since it was allocated
        # By level: block id -> its turn to be taken back, in releases since the start; least recently released first.
        self._cached: tuple[OrderedDict[int, int], ...] = tuple(OrderedDict() for _ in range(NUM_LEVELS))
        self._num_released = 0
        self.grow(num_blocks)

    @property
    def num_total(self) -> int:
        """Blocks that exist."""
        return len(self._refs)

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks without references whose content may be reused."""
        return sum(map(len, self._cached))

    @property
    def num_used(self) -> int:
        """Blocks with references."""
        return len(self._refs) - len(self._free) - self.num_cached

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can give: free and cached."""
        return len(self._free) + self.num_cached

    @property
    def ceiling(self) -> int:
        """Blocks the pool may grow to."""
        return self._ceiling

    def allocate(self, num_blocks: int) -> list[int]:
        """Takes blocks with one reference each, a new generation and no hash: free ones, then cached ones in turn.

        Raises OutOfBlocks and changes nothing if fewer are available.
        """
        if num_blocks < 0:
            raise ValueError(f"num_blocks: must not be negative, got {num_blocks}")
        if num_blocks > self.num_available:
            raise OutOfBlocks(f"{num_blocks} blocks wanted, {self.num_available} of {self.num_total} available")
        block_ids: list[int] = []
        for _ in range(num_blocks):
            if self._free:
                block_id = self._free.pop()
            else:
                first_level = min(filter(None, self._cached), key=lambda level: next(iter(level.values())))
                block_id, _ = first_level.popitem(last=False)
                self._forget(block_id)
            if self._refs[block_id] != 0:
                raise PoolCorrupted(f"block {block_id} is held {self._refs[block_id]} times and was available")
            self._refs[block_id] = 1
            self._levels[block_id] = 0
            self._generations[block_id] += 1
            block_ids.append(block_id)
        return block_ids

    def share(self, block_ids: Sequence[int]) -> None:
        """Adds one reference to each block; cached ones become used. Raises PoolCorrupted for a free block."""
        for block_id in block_ids:
            if self.ref_count(block_id) == 0:
                cached = self._cached[self._levels[block_id]]
                if block_id not in cached:
                    raise PoolCorrupted(f"block {block_id} is free and cannot be shared")
                del cached[block_id]
            self._refs[block_id] += 1

    def release(self, block_ids: Sequence[int], level: int = 0) -> None:
        """Drops one reference of each block. `block_ids` is a block table or the end of one, in order.

        The table is walked from its end, so that a cached prefix loses its tail before its head. A block without
        references is kept for reuse if its content is registered, else it is free. `level` is how much it is worth;
        a block that was worth more before still is. Raises PoolCorrupted for a block that nobody holds.
        """
        for block_id in reversed(block_ids):
            references = self.ref_count(block_id)
            if references == 0:
                raise PoolCorrupted(f"block {block_id} is released but nobody holds it")
            self._refs[block_id] = references - 1
            # Passed on towards the head: a block is worth no less than what follows on it.
            self._levels[block_id] = level = max(level, self._levels[block_id])
            if references > 1:
                continue
            if self._hashes[block_id] is None:
                self._free.append(block_id)
            else:
                self._num_released += 1
                self._cached[level][block_id] = self._num_released + level * self.num_total

    def register(self, block_id: int, block_hash: bytes) -> None:
        """Says that a block's content is complete and has this hash, so that others may find and share it.

        If another block has the hash already, that one stays the holder and this one stays unregistered. Raises
        PoolCorrupted if nobody holds the block or it has another hash.
        """
        if self.ref_count(block_id) == 0:
            raise PoolCorrupted(f"block {block_id} is registered but nobody holds it")
        known = self._hashes[block_id]
        if known is not None and known != block_hash:
            raise PoolCorrupted(f"block {block_id} holds {known.hex()} and is registered as {block_hash.hex()}")
        if self._by_hash.setdefault(block_hash, block_id) == block_id:
            self._hashes[block_id] = block_hash

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """The blocks of the longest leading run of `hashes` that is present. No references are taken: share at once."""
        block_ids: list[int] = []
        for block_hash in hashes:
            block_id = self._by_hash.get(block_hash)
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def discard(self, hashes: Iterable[bytes]) -> int:
        """Frees the cached blocks that have these hashes; answers how many. What somebody holds stays as it is."""
        num_before = len(self._free)
        for block_hash in hashes:
            block_id = self._by_hash.get(block_hash)
            if block_id is not None and self._cached[self._levels[block_id]].pop(block_id, None) is not None:
                self._forget(block_id)
                self._free.append(block_id)
        return len(self._free) - num_before

    def ref_count(self, block_id: int) -> int:
        """References to a block. Raises PoolCorrupted for an id that does not exist."""
        if not 0 <= block_id < len(self._refs):
            raise PoolCorrupted(f"block {block_id} does not exist: the pool has {len(self._refs)}")
        return self._refs[block_id]

    def generation(self, block_id: int) -> int:
        """How often the block was given to someone. Raises PoolCorrupted for an id that does not exist."""
        self.ref_count(block_id)
        return self._generations[block_id]

    def block_hash(self, block_id: int) -> bytes | None:
        """The hash under which others find this block; None if they do not. Raises PoolCorrupted as `ref_count`."""
        self.ref_count(block_id)
        return self._hashes[block_id]

    def drop_cached(self) -> None:
        """Forgets all reuse: cached blocks become free, used ones can no longer be found."""
        self._by_hash.clear()
        self._hashes = [None] * len(self._refs)
        for level in self._cached:
            self._free.extend(reversed(level))
            level.clear()

    def grow(self, num_blocks: int) -> int:
        """Adds free blocks, at most up to the ceiling; answers how many. Their memory must be usable already."""
        if num_blocks < 0:
            raise ValueError(f"num_blocks: must not be negative, got {num_blocks}")
        first = len(self._refs)
        num_added = min(num_blocks, self._ceiling - first)
        self._refs.extend([0] * num_added)
        self._generations.extend([0] * num_added)
        self._hashes.extend([None] * num_added)
        self._levels.extend([0] * num_added)
        self._free[:0] = range(first + num_added - 1, first - 1, -1)  # below what is free already: low ids go first
        return num_added

    def status(self) -> PoolCounts:
        """The counts now."""
        return PoolCounts(self.num_total, self.num_free, self.num_used, self.num_cached, self._ceiling)

    def check(self, accounted: Mapping[int, int] | None = None) -> None:
        """Audits the pool, in time proportional to its size. Raises PoolCorrupted naming what is wrong.

        `accounted` maps block ids to the references their holders know of (zeros may be left out): a difference is a
        leak or a theft.
        """
        self._check_places()
        self._check_hashes()
        if accounted is None:
            return
        for block_id, expected in accounted.items():
            if self.ref_count(block_id) != expected:
                raise PoolCorrupted(
                    f"block {block_id} has {self._refs[block_id]} references and {expected} are accounted for"
                )
        for block_id, references in enumerate(self._refs):
            if references and block_id not in accounted:
                raise PoolCorrupted(f"block {block_id} has {references} references and none is accounted for")

    def _check_places(self) -> None:
        free = set(self._free)
        if len(free) != len(self._free):
            raise PoolCorrupted("a block is on the free list twice")
        for block_id, references in enumerate(self._refs):
            is_cached = block_id in self._cached[self._levels[block_id]]
            places = (block_id in free) + is_cached + (references > 0)
            if places != 1 or references < 0:
                raise PoolCorrupted(
                    f"block {block_id} has {references} references, free: {block_id in free}, "
                    f"cached: {is_cached}; exactly one of used, free and cached must hold"
                )
        num_used = sum(references > 0 for references in self._refs)
        if len(free) + self.num_cached + num_used != len(self._refs):
            raise PoolCorrupted(
                f"{len(free)} free + {self.num_cached} cached + {num_used} used blocks are not {len(self._refs)}"
            )

    def _check_hashes(self) -> None:
        free = set(self._free)
        for block_hash, block_id in self._by_hash.items():
            if block_id in free or self._hashes[block_id] != block_hash:
                raise PoolCorrupted(f"hash {block_hash.hex()} points at block {block_id}, which does not hold it")
        for block_id, known in enumerate(self._hashes):
            if known is not None and self._by_hash.get(known) != block_id:
                raise PoolCorrupted(f"block {block_id} has hash {known.hex()}, which points elsewhere")
        for block_id in chain.from_iterable(self._cached):
            if self._hashes[block_id] is None:
                raise PoolCorrupted(f"block {block_id} is cached without a hash")

    def _forget(self, block_id: int) -> None:
        block_hash = self._hashes[block_id]
        if block_hash is None or self._by_hash.pop(block_hash, None) != block_id:
            raise PoolCorrupted(f"block {block_id} is cached and not the holder of its hash")
        self._hashes[block_id] = None
