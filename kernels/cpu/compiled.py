"""The operations on kernels that Numba compiles for this CPU.

Owns which kernels there are, by type of elements and shape of heads, and how they are called. Does not own linear
layers. Arguments and scratch memory are kept between calls, so an object is used by one thread at a time.
"""

from __future__ import annotations

import ctypes
import logging
import struct
from collections.abc import Callable
from dataclasses import dataclass
from math import gcd
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels import SCALE_BYTES, AttentionMetadata
from kernels.cpu import attention, elementwise
from kernels.cpu.chunks import attend_chunk
from kernels.cpu.few_rows import load_tiles
from kernels.cpu.simd import widest_vector
from kernels.cpu.threads import Kernel, find_parallel, revision
from kernels.cpu.tiles import TILE
from kernels.reference import Chunk

LOG = logging.getLogger(__name__)
ELEMENTS = {
    torch.float32: np.float32(0),
    torch.bfloat16: np.uint16(0),
    torch.float16: np.int16(0),
    torch.int8: np.int8(0),
}
"""How kernels see each type: narrow floats as integers of their size."""
CHUNK_ROWS = 32
"""From so many query rows of a sequence on, they are a chunk: for the matrix unit, or torch's fused attention."""
NO_WINDOW = 1 << 40
WIDEN = struct.Struct("7q")
NORM, ADD_NORM, SILU_MUL = struct.Struct("8qf4x"), struct.Struct("5qf4x"), struct.Struct("4q")
ROPE, ATTEND, MERGE = struct.Struct("15q"), struct.Struct("11qf4x3q"), struct.Struct("5q")
ATTEND_CHUNK = struct.Struct("9qf4x3q")


def load_tiled_attention() -> Any:
    """The attention kernels for the matrix unit, for bfloat16 KV, for 8 bits, and of many rows; None where that is not
    to be had."""
    if load_tiles() is None:
        return None
    from kernels.cpu import int8_attention, tiled_attention, tiled_chunks

    return tiled_attention, int8_attention, tiled_chunks


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """How one step's attention is split."""

    items: attention.Items
    """Sequences with few rows: read in place."""
    chunks: tuple[Chunk, ...]
    """Sequences with many."""


class CompiledOps:
    """Implements the operations of `kernels.Ops` by the same names, linear layers and embedding apart."""

    def __init__(self) -> None:
        self._arguments = ctypes.create_string_buffer(ATTEND.size)
        self._at = ctypes.addressof(self._arguments)
        self.revision = revision()
        """See `threads.revision`."""
        self._widest_vector = widest_vector()
        tiled: tuple[Any, ...] = load_tiled_attention() or (None,)
        self._tiles, self._chunks = tiled[:-1], tiled[-1]
        threads = "torch's threads" if find_parallel() is not None else "one thread"
        LOG.info("CPU kernels are compiled, for vectors of %d float32, on %s", self._widest_vector, threads)
        self._kernels: dict[tuple[object, ...], Kernel] = {}
        self._scratch = torch.empty(0)
        self._partials = torch.empty(0)
        self._chunk_bytes = torch.empty(0, dtype=torch.uint8)

    def prepare(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        dtype: torch.dtype,
        kept: torch.dtype,
    ) -> None:
        """Compiles what a model of this shape needs, whose KV is kept in a type."""
        for make in (
            elementwise.make_norm,
            elementwise.make_add_norm,
            elementwise.make_silu_mul,
        ):
            self.kernel(make, dtype)
        self.kernel(elementwise.make_rope, dtype, kept)
        if kept == torch.int8:
            self.kernel(elementwise.make_widen, dtype)
        self.attend_kernel(num_heads, num_kv_heads, head_dim, block_size, dtype, kept)
        self.kernel(attention.make_merge, dtype, head_dim)
        if dtype == torch.bfloat16 and self._chunks is not None and self._chunks.fits(head_dim, block_size):
            self.kernel(self._chunks.make_tiled_chunk, dtype, head_dim, num_heads // num_kv_heads, num_kv_heads)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `kernels.Ops`; x is [T, H] or [T, heads, H]."""
        output = torch.empty(x.shape, dtype=x.dtype)
        num_heads, head_stride = (1, 0) if x.dim() == 2 else (x.shape[1], x.stride(1))
        assert x.stride(-1) == 1 and weight.is_contiguous()
        NORM.pack_into(
            self._arguments, 0,
            x.data_ptr(), output.data_ptr(), weight.data_ptr(),
            x.shape[0], x.stride(0), num_heads, head_stride, x.shape[-1], eps,
        )  # fmt: skip
        self.kernel(elementwise.make_norm, x.dtype)(self._at, x.numel())
        return output

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """See `kernels.Ops`; in place."""
        assert x.is_contiguous() and residual.is_contiguous() and weight.is_contiguous()
        num_rows, size = x.shape
        ADD_NORM.pack_into(
            self._arguments, 0, x.data_ptr(), residual.data_ptr(), weight.data_ptr(), num_rows, size, eps
        )
        self.kernel(elementwise.make_add_norm, x.dtype)(self._at, 2 * num_rows * size)
        return x, residual

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """See `kernels.Ops`."""
        assert gate_up.is_contiguous()
        num_rows, size = gate_up.shape
        output = torch.empty((num_rows, size // 2), dtype=gate_up.dtype)
        SILU_MUL.pack_into(self._arguments, 0, gate_up.data_ptr(), output.data_ptr(), num_rows, size // 2)
        self.kernel(elementwise.make_silu_mul, gate_up.dtype)(self._at, num_rows * size)
        return output

    def rope_and_write_kv(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cosine: Tensor,
        sine: Tensor,
        slots: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
    ) -> Tensor:
        """See `kernels.Ops`; the query is turned in place."""
        num_rows, num_heads, head_dim = query.shape
        num_kv_heads = key.shape[1]
        for rows in (query, key, value):
            assert rows.stride(1) == head_dim and rows.stride(2) == 1
        assert cosine.is_contiguous() and sine.is_contiguous() and slots.is_contiguous()
        ROPE.pack_into(
            self._arguments, 0,
            query.data_ptr(), key.data_ptr(), value.data_ptr(), query.stride(0), key.stride(0), value.stride(0),
            cosine.data_ptr(), sine.data_ptr(), slots.data_ptr(), key_cache.data_ptr(), value_cache.data_ptr(),
            num_rows, num_heads, num_kv_heads, head_dim // 2,
        )  # fmt: skip
        size = num_rows * (num_heads + 2 * num_kv_heads) * head_dim
        self.kernel(elementwise.make_rope, query.dtype, key_cache.dtype)(self._at, size)
        return query

    def plan_attention(self, metadata: AttentionMetadata) -> AttentionPlan:
        """See `kernels.Ops`."""
        few: list[tuple[int, int]] = []
        chunks: list[Chunk] = []
        row = 0
        for sequence, num_rows in enumerate(metadata.query_lens_list):
            if num_rows < CHUNK_ROWS:
                few.append((sequence, row))
            else:
                context_len = metadata.context_lens_list[sequence]
                blocks = metadata.block_tables[sequence, : -(-context_len // metadata.block_size)].long()  # [m]
                chunks.append(Chunk(row, num_rows, context_len, blocks))
            row += num_rows
        return AttentionPlan(attention.split_into_items(metadata, few), tuple(chunks))

    def paged_attention(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        metadata: AttentionMetadata,
        scale: float,
        window: int | None,
    ) -> Tensor:
        """See `kernels.Ops`."""
        plan = metadata.plan
        assert isinstance(plan, AttentionPlan)
        output = torch.empty(query.shape, dtype=query.dtype)  # [T, Hq, D]
        if plan.items.pieces:
            self._attend_items(query, key_cache, value_cache, metadata, plan.items, scale, window, output)
        for chunk in plan.chunks:
            rows = slice(chunk.first_row, chunk.first_row + chunk.num_rows)
            if self._has_tiled_chunk(query, block_size=key_cache.shape[1]):
                self._attend_tiled(query[rows], key_cache, value_cache, chunk, scale, window, output[rows])
                continue
            output[rows] = attend_chunk(query[rows], key_cache, value_cache, chunk, scale, window, self._copy_context)
        return output

    def _has_tiled_chunk(self, query: Tensor, block_size: int) -> bool:
        """Whether the matrix unit attends over chunks of such a model."""
        is_known = query.dtype == torch.bfloat16 and self._chunks is not None
        return is_known and self._chunks.fits(query.shape[2], block_size)

    def _attend_tiled(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        chunk: Chunk,
        scale: float,
        window: int | None,
        output: Tensor,
    ) -> None:
        """As `chunks.attend_chunk`, into `output` [n, Hq, D]."""
        num_rows, num_heads, head_dim = query.shape
        num_kv_heads, block_size, blocks = key_cache.shape[2], key_cache.shape[1], chunk.blocks.contiguous()
        if key_cache.dtype == torch.int8:  # a copy, which is one block
            key_cache = self._copy_context(key_cache, blocks, chunk.context_len, query.dtype)
            value_cache = self._copy_context(value_cache, blocks, chunk.context_len, query.dtype)
            blocks, block_size = torch.zeros(1, dtype=torch.int64), NO_WINDOW
        assert query.stride(1) == head_dim and query.stride(2) == 1
        num_threads, share = torch.get_num_threads(), self._chunks.scratch_bytes(head_dim)
        num_bytes = num_threads * share + self._chunks.turned_bytes(num_kv_heads, head_dim, chunk.context_len)
        if self._chunk_bytes.numel() < num_bytes:
            self._chunk_bytes = torch.empty(num_bytes, dtype=torch.uint8)
        scratch = self._chunk_bytes.data_ptr()
        ATTEND_CHUNK.pack_into(
            self._arguments, 0,
            query.data_ptr(), query.stride(0), num_rows, chunk.context_len - num_rows,
            key_cache.data_ptr(), value_cache.data_ptr(), blocks.data_ptr(), block_size, output.data_ptr(),
            scale, NO_WINDOW if window is None else window, scratch + num_threads * share, scratch,
        )  # fmt: skip
        group = num_heads // num_kv_heads
        attend = self.kernel(self._chunks.make_tiled_chunk, query.dtype, head_dim, group, num_kv_heads)
        attend(self._at, num_rows * chunk.context_len * head_dim)

    def _copy_context(self, cache: Tensor, blocks: Tensor, length: int, dtype: torch.dtype) -> Tensor:
        """The first `length` positions of blocks [m] int64, one after the other: [length, Hkv, D]."""
        if cache.dtype != torch.int8:
            return cache[blocks].flatten(0, 1)[:length]
        _, block_size, num_kv_heads, width = cache.shape
        head_dim = width - SCALE_BYTES
        padded = -(-length // TILE) * TILE  # kernels read whole tiles
        output = torch.empty((padded, num_kv_heads, head_dim), dtype=dtype)[:length]
        blocks = blocks.contiguous()
        WIDEN.pack_into(
            self._arguments, 0,
            cache.data_ptr(), blocks.data_ptr(), output.data_ptr(), length, block_size, num_kv_heads, head_dim,
        )  # fmt: skip
        self.kernel(elementwise.make_widen, dtype)(self._at, output.numel())
        return output

    def _attend_items(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        metadata: AttentionMetadata,
        items: attention.Items,
        scale: float,
        window: int | None,
        output: Tensor,
    ) -> None:
        _, num_heads, head_dim = query.shape
        _, block_size, num_kv_heads, _ = key_cache.shape
        tables = metadata.block_tables
        assert query.stride(1) == head_dim and query.stride(2) == 1 and tables.is_contiguous()
        num_floats = torch.get_num_threads() * self.scratch_floats(num_heads, num_kv_heads, head_dim)
        if self._scratch.numel() < num_floats:
            self._scratch = torch.empty(num_floats)
        num_floats = items.num_partials * num_heads * (head_dim + 2)
        if self._partials.numel() < num_floats:
            self._partials = torch.empty(num_floats)
        ATTEND.pack_into(
            self._arguments, 0,
            query.data_ptr(), key_cache.data_ptr(), value_cache.data_ptr(), query.stride(0), output.data_ptr(),
            num_kv_heads, block_size, tables.data_ptr(), tables.stride(0),
            items.pieces.buffer_info()[0], len(items.pieces) // attention.ITEM_WORDS, scale,
            NO_WINDOW if window is None else window, self._partials.data_ptr(), self._scratch.data_ptr(),
        )  # fmt: skip
        attend = self.attend_kernel(num_heads, num_kv_heads, head_dim, block_size, query.dtype, key_cache.dtype)
        attend(self._at, items.num_reads * 2 * num_kv_heads * head_dim)
        if items.merges:
            MERGE.pack_into(
                self._arguments, 0, items.merges.buffer_info()[0], len(items.merges) // attention.MERGE_WORDS,
                self._partials.data_ptr(), output.data_ptr(), num_heads,
            )  # fmt: skip
            self.kernel(attention.make_merge, query.dtype, head_dim)(self._at, num_floats)

    def attend_kernel(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        dtype: torch.dtype,
        kept: torch.dtype,
    ) -> Kernel:
        """What attends over contexts in place."""
        group = num_heads // num_kv_heads
        if self._tiles and dtype == torch.bfloat16:
            whole, rounded = self._tiles
            if kept == torch.int8 and rounded.fits(num_kv_heads, group, head_dim, block_size):
                return self.kernel(rounded.make_int8_attend, dtype, head_dim, group, num_kv_heads)
            if kept == torch.bfloat16 and whole.fits(num_kv_heads, group, head_dim, block_size):
                return self.kernel(whole.make_tiled_attend, dtype, head_dim, group, num_kv_heads)
        # Vectors split a head evenly, and the keys of a block.
        lanes = gcd(self._widest_vector, head_dim, block_size)
        return self.kernel(attention.make_attend, dtype, kept, head_dim, group, lanes)

    def scratch_floats(self, num_heads: int, num_kv_heads: int, head_dim: int) -> int:
        """float32 elements that each thread of it needs."""
        needed = attention.scratch_floats(num_heads, head_dim)
        if not self._tiles:
            return needed
        group = num_heads // num_kv_heads
        return max(needed, *(int(tiles.scratch_floats(num_kv_heads, group, head_dim)) for tiles in self._tiles))

    def kernel(self, make: Callable[..., Kernel], *made_for: torch.dtype | int) -> Kernel:
        """A kernel for types of elements, and whatever else it is made for."""
        key = (make, *made_for)
        kernel = self._kernels.get(key)
        if kernel is None:
            kernel = self._kernels[key] = make(
                *(ELEMENTS[part] if isinstance(part, torch.dtype) else part for part in made_for), self.revision
            )
        return kernel
