"""Attention of many query rows of one sequence, by torch's own fused attention on a copy of the context, where the
matrix unit (`tiled_chunks.py`) does not do it.

Worth the copy from some dozens of rows on, since torch multiplies matrices there. The rows' own positions and those
before them are two calls, so that only the first needs a causal mask, and are joined by the logarithms of their sums.
Invariant: what a row sums over, and in which order, follows from its own sequence's chunk alone.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kernels.reference import Chunk

fused_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def attend_chunk(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    chunk: Chunk,
    scale: float,
    window: int | None,
    copy_context: Callable[[Tensor, Tensor, int, torch.dtype], Tensor],
) -> Tensor:
    """The last n positions of one sequence, query [n, Hq, D], to all of its context: [n, Hq, D].

    `copy_context` takes a cache, ids of blocks and a number of positions, and answers those positions [L, Hkv, D].
    """
    num_rows, num_heads, head_dim = query.shape
    num_kv_heads = key_cache.shape[2]
    group = num_heads // num_kv_heads
    block_size = key_cache.shape[1]
    earlier = chunk.context_len - num_rows
    # With a window, nothing before the first row's is read.
    first_block = 0 if window is None else max(0, earlier + 1 - window) // block_size
    blocks, start = chunk.blocks[first_block:], first_block * block_size
    length, earlier = chunk.context_len - start, earlier - start

    def by_kv_head(cache: Tensor) -> Tensor:
        rows = copy_context(cache, blocks, length, query.dtype)  # [L, Hkv, D]
        return rows.transpose(0, 1)[:, None].expand(num_kv_heads, group, length, head_dim)

    queries = query.unflatten(1, (num_kv_heads, group)).permute(1, 2, 0, 3)  # [Hkv, Hq / Hkv, n, D]
    keys, values = by_kv_head(key_cache), by_kv_head(value_cache)
    if window is not None:
        positions = torch.arange(length)  # [L]
        own = positions[earlier:, None]  # [n, 1]
        hidden = (positions > own) | (positions <= own - window)  # [n, L]
        mask = torch.zeros(hidden.shape, dtype=query.dtype).masked_fill_(hidden, -torch.inf)
        attended, _ = fused_attention(queries, keys, values, 0.0, False, attn_mask=mask, scale=scale)
    else:
        attended, sums = fused_attention(queries, keys[:, :, earlier:], values[:, :, earlier:], 0.0, True, scale=scale)
        if earlier:
            before, sums_before = fused_attention(
                queries, keys[:, :, :earlier], values[:, :, :earlier], 0.0, False, scale=scale
            )
            share = torch.sigmoid(sums_before - sums)[..., None]  # [Hkv, Hq / Hkv, n, 1] float32
            attended = torch.lerp(attended.float(), before.float(), share)
    joined: Tensor = attended.permute(2, 0, 1, 3).reshape(num_rows, num_heads, head_dim)
    return joined.to(query.dtype)
