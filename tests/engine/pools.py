"""Small pools and sequences for scheduler tests, and a memory that shows who wrote what.

`Memory` stands for the KV tensors: each slot holds the (token, position) last written to it. A step writes its tokens
and then reads its whole block tables, so a block that was shared wrongly, freed early or written twice shows at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from engine.holdings import Holdings
from engine.planning import Plan, build_batch
from engine.request import Priority, Request, SamplingParams, SessionTurn
from engine.scheduling import Limits
from engine.sequence import Sequence as Record
from engine.sequence import State
from kvstore.blocks import BlockPool
from kvstore.hashing import PrefixHasher

BLOCK_SIZE = 4
EOS = 9
_IDS: Iterator[int] = itertools.count(1)


def make_holdings(num_blocks: int, ceiling: int | None = None, num_host_blocks: int = 0) -> Holdings:
    hasher = PrefixHasher("model", "layout", BLOCK_SIZE)
    return Holdings(BlockPool(num_blocks, ceiling), hasher, BLOCK_SIZE, num_host_blocks)


def make_limits(**changes: Any) -> Limits:
    defaults: dict[str, Any] = {
        "max_model_len": 28,
        "max_num_seqs": 4,
        "max_num_tokens": 8,
        "chunk_size": 8,
        "eos_token_ids": (EOS,),
    }
    return Limits(**{**defaults, **changes})


def make_request(
    prompt: Sequence[int],
    outputs: Sequence[int] = (),
    priority: Priority = Priority.NORMAL,
    waited_ms: int = 0,
    tenant: str = "",
    num_evictions: int = 0,
    session: SessionTurn | None = None,
    **sampling: Any,
) -> Request:
    return Request(
        attempt_id=next(_IDS).to_bytes(16, "big"),
        request_id="r",
        prompt_token_ids=tuple(prompt),
        output_token_ids=tuple(outputs),
        sampling=SamplingParams(**{"max_tokens": 8, **sampling}),
        priority=priority,
        waited_ms=waited_ms,
        tenant=tenant,
        num_evictions=num_evictions,
        session=session,
    )


def make_sequence(prompt: Sequence[int], moves: Any, arrived_s: float = 0.0, **request: Any) -> Record:
    return Record(make_request(prompt, **request), moves, arrived_s)


class Memory:
    """What every slot of a pool holds."""

    def __init__(self) -> None:
        self._slots: dict[int, tuple[int, int]] = {}
        self._host_slots: dict[int, tuple[int, int]] = {}

    def swap(self, holdings: Holdings) -> None:
        """Makes the copies to host memory and back that were ordered, and says so."""
        for copy in (swap.copy for swap in holdings.swaps):
            assert len(copy.block_ids) == len(copy.host_ids)
            for block, host_block in zip(copy.block_ids, copy.host_ids, strict=True):
                assert holdings.pool.ref_count(block) > 0, "a block was freed under a copy"
                assert copy.direction == "out" or holdings.pool.ref_count(block) == 1, "a copy to what others read"
                assert holdings.host_pool.ref_count(host_block) == 1
                for offset in range(BLOCK_SIZE):
                    here, there = block * BLOCK_SIZE + offset, host_block * BLOCK_SIZE + offset
                    if copy.direction == "out":
                        _copy(self._slots, here, self._host_slots, there)
                    else:
                        _copy(self._host_slots, there, self._slots, here)
        holdings.copied()

    def write_block(self, sequence: Record, index: int, num_tokens: int) -> None:
        """Writes the block `index` of a sequence as a transfer of `num_tokens` positions does."""
        begin = index * BLOCK_SIZE
        for position in range(begin, min(begin + BLOCK_SIZE, num_tokens)):
            slot = sequence.block_table[index] * BLOCK_SIZE + position - begin
            self._slots[slot] = (sequence.token_ids[position], position)

    def run(self, batch: Any, contexts: list[list[int]]) -> None:
        """Writes a batch, then checks that each of its sequences reads its own tokens (`contexts`)."""
        for slot, token, position in zip(batch.slots, batch.token_ids, batch.positions, strict=True):
            self._slots[slot] = (token, position)
        for table, length, context in zip(batch.block_tables, batch.context_lens, contexts, strict=True):
            read = [self._slots.get(table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE) for p in range(length)]
            assert read == [(token, position) for position, token in enumerate(context)], "KV of someone else"


def _copy(source: dict[int, tuple[int, int]], at: int, to: dict[int, tuple[int, int]], place: int) -> None:
    to.pop(place, None)
    if at in source:
        to[place] = source[at]


class Step:
    """A plan on its way through the device."""

    def __init__(self, plan: Plan, holdings: Holdings) -> None:
        self.plan, self._holdings = plan, holdings
        self._generations = self._tables()
        self.batch = build_batch(plan, BLOCK_SIZE, (EOS,))
        self._contexts = [
            [*part.sequence.token_ids, *part.drafts][:n]
            for part, n in zip(plan.slices, self.batch.context_lens, strict=True)
        ]

    def _tables(self) -> dict[int, int]:
        pool = self._holdings.pool
        blocks = {block for part in self.plan.slices for block in part.sequence.block_table}
        assert all(pool.ref_count(block) > 0 for block in blocks), "a block was freed under a step"
        return {block: pool.generation(block) for block in blocks}

    def check_writers(self) -> None:
        """What the step writes belongs to one sequence alone and nobody can find it."""
        pool = self._holdings.pool
        for slot in self.batch.slots:
            assert pool.ref_count(slot // BLOCK_SIZE) == 1, "a block with two writers"
            assert pool.block_hash(slot // BLOCK_SIZE) is None, "writes to a block that others may read"
        assert len(set(self.batch.slots)) == len(self.batch.slots)

    def run(self, memory: Memory) -> None:
        assert self._tables() == self._generations, "a block changed hands under a step"
        memory.run(self.batch, self._contexts)


def check_plan(plan: Plan, limits: Limits, holding: int) -> None:
    """The bounds of one step."""
    num_tokens = sum(part.num_tokens + len(part.drafts) for part in plan.slices)
    assert plan.num_tokens == num_tokens <= limits.max_num_tokens
    assert holding <= limits.max_num_seqs
    sequences = [part.sequence for part in plan.slices]
    assert len({id(sequence) for sequence in sequences}) == len(sequences)
    for part in plan.slices:
        sequence = part.sequence
        assert 0 < part.num_tokens <= min(limits.chunk_size, sequence.num_pending)
        assert part.samples == (part.num_tokens == sequence.num_pending)
        num_computed = sequence.num_computed + part.num_tokens + len(part.drafts)
        assert num_computed <= len(sequence.block_table) * BLOCK_SIZE
        assert not sequence.is_over and sequence.state in (State.PREFILLING, State.DECODING)
