"""Blocks that go to host memory and come back, whatever memory the pool is in."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvstore.device_memory import DeviceMemory
from kvstore.layout import KVLayout
from kvstore.memory import BlockMemory, PoolMemory
from kvstore.swap import SwapCopy, SwapSpace

LAYOUT = KVLayout(num_layers=2, block_size=4, num_kv_heads=2, head_dim=8, dtype="bfloat16")


def memory_of(kind: str) -> BlockMemory:
    if kind == "device":
        return DeviceMemory(LAYOUT, 9, torch.device("cpu"), 2)
    memory = PoolMemory(LAYOUT, 9)
    memory.commit(9)
    return memory


@pytest.mark.parametrize("kind", ["host", "device"])
def test_blocks_come_back_as_they_went_wherever_they_come_to(kind: str) -> None:
    memory = memory_of(kind)
    content = np.random.default_rng(1).integers(0, 256, (4, 9, LAYOUT.plane_block_bytes), dtype=np.uint8)
    memory.write_blocks(range(9), content, range(9))
    space = SwapSpace(memory, 6)
    space.copy(SwapCopy([3, 4, 5, 0], [1, 2, 5, 0], "out"))
    space.copy(SwapCopy([8], [3], "out"))
    zeros = np.zeros_like(content)
    memory.write_blocks(range(9), zeros, range(9))
    space.copy(SwapCopy([7, 6, 0, 1], [1, 2, 5, 0], "in"))
    space.copy(SwapCopy([2], [3], "in"))
    space.copy(SwapCopy([], [], "in"))
    expected = zeros
    expected[:, [7, 6, 0, 1, 2]] = content[:, [3, 4, 5, 0, 8]]
    assert np.array_equal(memory.read_blocks(range(9)), expected)
    memory.close()
