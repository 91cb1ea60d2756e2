"""Host memory for KV that makes room on a device: its bytes, and the copies to it and back.

Owns bytes alone. Whose they are is accounted by `engine/holdings.py`, in a block pool of their own; how a device
copies, and to what kind of memory best, its `BlockMemory` knows. No torch. Copies are made between two steps by the
thread that runs them: nothing that computes on the device writes to a block while it is copied.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvstore.memory import BlockMemory

DIRECTIONS: tuple[Literal["out", "in"], ...] = ("out", "in")
"""Of copies, as metrics name them."""


@dataclass(frozen=True, slots=True)
class SwapCopy:
    """Blocks of one sequence that are to be copied."""

    block_ids: list[int]
    """Blocks of the device's pool, in order."""
    host_ids: list[int]
    """As many blocks of the host's memory."""
    direction: Literal["out", "in"]
    """Out of the device to the host, or back in."""


class SwapSpace:
    """Memory for `num_blocks` blocks beside a device's pool."""

    def __init__(self, memory: BlockMemory, num_blocks: int) -> None:
        """Raises MemoryError or RuntimeError without room for them."""
        self.num_blocks = num_blocks
        """Blocks that it holds: ids below this."""
        self._memory = memory
        self._planes = memory.host_planes(num_blocks)

    def copy(self, copy: SwapCopy) -> None:
        """Makes a copy; it is done when this returns."""
        if copy.direction == "out":
            self._memory.copy_blocks(copy.block_ids, self._planes, copy.host_ids)
        else:
            self._memory.write_blocks(copy.block_ids, self._planes, copy.host_ids)
