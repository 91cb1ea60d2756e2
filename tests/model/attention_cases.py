"""Packed batches over paged KV for tests of attention: the shapes that models and schedulers bring."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from kernels import AttentionMetadata, Ops
from kernels.cpu.compiled import CHUNK_ROWS
from kernels.reference import round_kv

BLOCK_SIZE = 16
TOLERANCES = {torch.float32: 3e-6, torch.bfloat16: 1e-2, torch.float16: 1.5e-3}
"""Largest difference to float32 arithmetic: one rounding of the result, for bfloat16 chunks of the weights too."""
MIXED = [
    (1, 1),
    (1, 16),
    (1, 17),
    (5, 5),
    (1, 256),
    (1, 257),
    (8, 300),
    (9, 700),
    (1, 1030),
    (CHUNK_ROWS, 90),
    (2, 513),
]
"""Sequences (query rows, context) around the sizes of blocks, of parts of a context and of items."""


@dataclass(frozen=True)
class Case:
    """A packed batch over a cache in which whatever no sequence owns is NaN."""

    query: torch.Tensor  # [T, Hq, D]
    keys: torch.Tensor  # [num_blocks, block_size, Hkv, D], rounded D + 4
    values: torch.Tensor  # [num_blocks, block_size, Hkv, D]
    sequences: list[tuple[int, int, list[int]]]  # (query rows, context, table)

    def to(self, dtype: torch.dtype) -> Case:
        return replace(self, query=self.query.to(dtype), keys=self.keys.to(dtype), values=self.values.to(dtype))

    def rounded(self) -> Case:
        """KV in 8 bits; what is NaN stays so, head by head."""
        return replace(self, keys=round_kv(self.keys), values=round_kv(self.values))

    def only(self, index: int, last_rows: int | None = None) -> Case:
        """One sequence alone, perhaps only its last rows."""
        starts = [0]
        for rows, _, _ in self.sequences:
            starts.append(starts[-1] + rows)
        rows, context, table = self.sequences[index]
        kept = last_rows or rows
        return replace(
            self, query=self.query[starts[index + 1] - kept : starts[index + 1]], sequences=[(kept, context, table)]
        )

    def attend(self, ops: Ops, window: int | None = None) -> torch.Tensor:
        metadata = self.metadata()
        metadata = replace(metadata, plan=ops.plan_attention(metadata))
        scale = self.query.shape[2] ** -0.5
        return ops.paged_attention(self.query, self.keys, self.values, metadata, scale, window)

    def metadata(self) -> AttentionMetadata:
        block_size = self.keys.shape[1]
        places = [(table, range(context - rows, context)) for rows, context, table in self.sequences]
        longest = max(len(table) for table, _ in places)
        row_counts = [rows for rows, _, _ in self.sequences]
        return AttentionMetadata(
            query_starts=torch.tensor([0, *row_counts]).cumsum(0).int(),
            context_lens=torch.tensor([context for _, context, _ in self.sequences], dtype=torch.int32),
            block_tables=torch.tensor([t + [0] * (longest - len(t)) for t, _ in places], dtype=torch.int32),
            slots=torch.tensor([t[p // block_size] * block_size + p % block_size for t, own in places for p in own]),
            positions=torch.tensor([p for _, own in places for p in own]),
            query_lens_list=tuple(row_counts),
            context_lens_list=tuple(context for _, context, _ in self.sequences),
            block_size=block_size,
        )


def make_case(
    sequences: list[tuple[int, int]],
    num_heads: int = 9,
    num_kv_heads: int = 3,
    head_dim: int = 64,
    block_size: int = BLOCK_SIZE,
) -> Case:
    """Random float32 numbers at bfloat16 precision, so that all types see the same."""
    generator = torch.Generator().manual_seed(len(sequences) + head_dim)
    counts = [-(-context // block_size) for _, context in sequences]
    ids = torch.randperm(sum(counts) + 2, generator=generator).tolist()
    shape = (len(ids), block_size, num_kv_heads, head_dim)
    keys, values = torch.full(shape, math.nan), torch.full(shape, math.nan)
    described = []
    for (rows, context), count in zip(sequences, counts, strict=True):
        table = [ids.pop() for _ in range(count)]
        for cache in (keys, values):
            content = torch.randn(count * block_size, num_kv_heads, head_dim, generator=generator).bfloat16().float()
            content[context:] = math.nan
            cache[table] = content.view(count, *shape[1:])
        described.append((rows, context, table))
    num_rows = sum(rows for rows, _ in sequences)
    query = torch.randn(num_rows, num_heads, head_dim, generator=generator).bfloat16().float()
    return Case(query, keys, values, described)


SHAPES = [(9, 3, 64, torch.float32), (2, 2, 80, torch.float32), (8, 1, 96, torch.float32), (9, 3, 64, torch.float16)]
SHAPES += [(9, 3, 64, torch.bfloat16), (8, 1, 96, torch.bfloat16)]
# More heads than a tile has columns, more elements than registers hold, as many query heads as fit, and one too many.
SHAPES += [(32, 8, 64, torch.bfloat16), (6, 2, 128, torch.bfloat16), (16, 1, 32, torch.bfloat16)]
SHAPES += [(17, 1, 32, torch.bfloat16), (2, 2, 80, torch.bfloat16)]
