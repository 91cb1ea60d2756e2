"""A pool's bytes as the tensors that a model reads and writes. Beside `device_memory.py` the one file here with torch.

Owns views, no memory: they share the bytes of a pool, which must outlive them in use, and never move or grow. Of a
pool in shared memory that several ranks use, each sees its own planes.
Rows at or above the pool's `num_blocks` must not be touched, but for scratch blocks, which are nobody's.
"""

from __future__ import annotations

import torch

from kvstore.device_memory import DeviceMemory
from kvstore.layout import DTYPE_BYTES
from kvstore.memory import BlockMemory, PoolMemory, SharedPool

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "uint8": torch.uint8,
    "int8": torch.int8,
}
"""The element types of kvstore.layout as torch names them."""


class KVCache:
    """Keys and values by layer, zero-copy over a pool's memory."""

    def __init__(self, memory: BlockMemory | SharedPool, rank: int = 0) -> None:
        layout = memory.layout
        self.layout = layout
        """What a block holds."""
        if isinstance(memory, DeviceMemory):
            bytes_of_planes, num_scratch_blocks = memory.planes, memory.num_scratch_blocks
        else:
            assert isinstance(memory, PoolMemory | SharedPool)
            num_own = layout.num_planes // layout.num_ranks
            own = memory.planes[rank * num_own : (rank + 1) * num_own]
            bytes_of_planes, num_scratch_blocks = [torch.from_numpy(plane) for plane in own], 0
        width = layout.head_bytes // DTYPE_BYTES[layout.dtype]  # head_dim, and the bytes of a scale where there is one
        shape = (-1, layout.block_size, layout.heads_per_plane, width)
        planes = [plane.view(DTYPES[layout.dtype]).view(shape) for plane in bytes_of_planes]
        self.keys: list[torch.Tensor] = planes[0::2]  # per layer [num_blocks, block_size, heads_per_plane, width]
        """Keys, one tensor a layer; num_blocks is the ceiling and the scratch blocks after it."""
        self.values: list[torch.Tensor] = planes[1::2]  # per layer [num_blocks, block_size, heads_per_plane, width]
        """Values, one tensor a layer."""
        first_scratch = memory.ceiling * layout.block_size
        self.scratch_slots = range(first_scratch, first_scratch + num_scratch_blocks * layout.block_size)
        """Slots whose KV nobody reads."""
