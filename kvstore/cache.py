"""A pool's bytes as the tensors that a model reads and writes. The one file of this package with torch.

Owns views, no memory: they share the bytes of PoolMemory, which must outlive them in use, and never move or grow. Rows
at or above the pool's `num_blocks` must not be touched.
"""

from __future__ import annotations

import torch

from kvstore.memory import PoolMemory

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "uint8": torch.uint8,
}
"""The element types of kvstore.layout as torch names them."""


class KVCache:
    """Keys and values by layer, zero-copy over a pool's memory."""

    def __init__(self, memory: PoolMemory) -> None:
        layout = memory.layout
        self.layout = layout
        """What a block holds."""
        shape = (memory.ceiling, layout.block_size, layout.num_kv_heads, layout.head_dim)
        planes = [torch.from_numpy(plane).view(DTYPES[layout.dtype]).view(shape) for plane in memory.planes]
        self.keys: list[torch.Tensor] = planes[0::2]  # per layer [ceiling, block_size, num_kv_heads, head_dim]
        """Keys, one tensor a layer."""
        self.values: list[torch.Tensor] = planes[1::2]  # per layer [ceiling, block_size, num_kv_heads, head_dim]
        """Values, one tensor a layer."""
