"""A pool's bytes in the memory of a device: one tensor for each plane, taken whole at the start.

Planes begin at multiples of 2 MiB, which direct transfers between devices ask for; without those, blocks travel through
a buffer in host memory. After the pool's blocks come a few that no sequence owns, for rows of a recorded step that
stand for nobody. Blocks begin as zeros: what an operator reads past a context is a number, and weighs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvstore.layout import KVLayout
from kvstore.memory import BlockMemory, PoolMemoryFull
from kvstore.planes import Planes, neighbours

ALIGNMENT_BYTES = 2 << 20


class DeviceMemory(BlockMemory):
    """All blocks are usable from the start."""

    def __init__(self, layout: KVLayout, ceiling: int, device: torch.device, num_scratch_blocks: int = 0) -> None:
        """Raises PoolMemoryFull if the device has no room."""
        super().__init__(layout, ceiling)
        self.num_scratch_blocks = num_scratch_blocks
        """Blocks from `ceiling` on that are nobody's."""
        num_blocks = ceiling + num_scratch_blocks
        try:
            planes = [_aligned(num_blocks * layout.plane_block_bytes, device) for _ in range(layout.num_planes)]
        except (RuntimeError, MemoryError) as error:
            gib = layout.block_bytes * num_blocks / 2**30
            raise PoolMemoryFull(f"no room for a KV pool of {ceiling} blocks, {gib:.1f} GiB, on {device}") from error
        self.planes = [plane.view(num_blocks, layout.plane_block_bytes) for plane in planes]
        """Bytes [ceiling + num_scratch_blocks, plane_block_bytes] int8 of each plane."""
        self.num_blocks = ceiling
        self.device_kind = device.type
        self._device = device

    def commit(self, num_blocks: int) -> None:
        """As the base says: nothing is left to do."""
        if num_blocks > self.ceiling:
            raise ValueError(f"num_blocks: at most the ceiling {self.ceiling}, got {num_blocks}")

    @property
    def num_ahead(self) -> int:
        """As the base says."""
        return 0

    def host_planes(self, num_blocks: int) -> Planes:
        """As the base says: pinned, so that the device reads and writes it by itself."""
        shape = (self.layout.num_planes, num_blocks, self.layout.plane_block_bytes)
        return torch.empty(shape, dtype=torch.int8, pin_memory=self._device.type != "cpu").numpy().view(np.uint8)

    def copy_blocks(self, block_ids: Sequence[int], destination: Planes, destination_ids: Sequence[int]) -> None:
        """As the base says; waits for the device."""
        places = torch.from_numpy(destination.view(np.int8))  # [num_planes, blocks, plane_block_bytes]
        for first, to, length in neighbours(block_ids, destination_ids):
            for plane, place in zip(self.planes, places, strict=True):
                place[to : to + length].copy_(plane[first : first + length])

    def write_blocks(self, block_ids: Sequence[int], source: Planes, source_ids: Sequence[int]) -> None:
        """As the base says; the device has them when this returns."""
        for first, to, length in neighbours(source_ids, block_ids):
            content = source[:, first : first + length]
            if not content.flags.writeable:
                content = content.copy()  # torch takes no memory that is read-only, as messages and others' pools are
            for plane, blocks in zip(self.planes, torch.from_numpy(content.view(np.int8)), strict=True):
                plane[to : to + length].copy_(blocks)

    def plane_addresses(self) -> list[int]:
        """As the base says."""
        return [plane.data_ptr() for plane in self.planes]

    def close(self) -> None:
        """As the base says; they go when the last tensor over them goes."""
        self.num_blocks = self.ceiling = 0
        self.planes = []


def _aligned(num_bytes: int, device: torch.device) -> Tensor:
    """Zeros [num_bytes] int8, at a multiple of the alignment."""
    room = torch.zeros(num_bytes + ALIGNMENT_BYTES, dtype=torch.int8, device=device)
    skipped = -room.data_ptr() % ALIGNMENT_BYTES
    return room[skipped : skipped + num_bytes]
