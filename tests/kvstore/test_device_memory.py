"""A pool in a device's memory: alignment, and blocks that travel through host memory. The device here is the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from kvstore import transport
from kvstore.cache import KVCache
from kvstore.device_memory import ALIGNMENT_BYTES, DeviceMemory
from kvstore.layout import KVLayout
from kvstore.memory import BlockMemory, PoolMemory, PoolMemoryFull
from runtime import plugins

LAYOUT = KVLayout(num_layers=2, block_size=4, num_kv_heads=2, head_dim=8, dtype="float32")
CPU = torch.device("cpu")


def random_planes(num_blocks: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, (4, num_blocks, LAYOUT.plane_block_bytes), dtype=np.uint8)


def filled(memory: BlockMemory, num_blocks: int) -> np.ndarray:
    content = random_planes(num_blocks)
    memory.write_blocks(range(num_blocks), content, range(num_blocks))
    return content


def host_memory() -> PoolMemory:
    memory = PoolMemory(LAYOUT, 9)
    memory.commit(9)
    return memory


@pytest.fixture(params=["host", "device"])
def memory(request: pytest.FixtureRequest) -> Iterator[BlockMemory]:
    memory = host_memory() if request.param == "host" else DeviceMemory(LAYOUT, 9, CPU, 2)
    yield memory
    memory.close()


@pytest.mark.parametrize("ids", [[0], [8], [3, 4, 5], [5, 4, 3], [0, 2, 3, 8, 1], []])
def test_blocks_are_read_as_they_were_written(memory: BlockMemory, ids: list[int]) -> None:
    content = filled(memory, 9)
    assert np.array_equal(memory.read_blocks(ids), content[:, ids])


@pytest.mark.parametrize(("ids", "source_ids"), [([7], [0]), ([2, 3, 4], [0, 1, 2]), ([8, 0, 1], [2, 0, 1])])
def test_other_blocks_stay(memory: BlockMemory, ids: list[int], source_ids: list[int]) -> None:
    expected = filled(memory, 9).copy()
    source = random_planes(3)[:, ::-1].copy()
    source.flags.writeable = False
    memory.write_blocks(ids, source, source_ids)
    expected[:, ids] = source[:, source_ids]
    assert np.array_equal(memory.read_blocks(range(9)), expected)


def test_planes_begin_at_multiples_of_2_mib_and_as_zeros() -> None:
    memory = DeviceMemory(LAYOUT, 9, CPU, 2)
    cache = KVCache(memory)
    assert len(cache.keys) == len(cache.values) == 2
    for tensor in (*cache.keys, *cache.values):
        assert tensor.data_ptr() % ALIGNMENT_BYTES == 0
        assert tensor.shape == (11, 4, 2, 8) and tensor.dtype == torch.float32
        assert not tensor.any()
    assert cache.scratch_slots == range(36, 44)
    memory.close()


def test_tensors_and_blocks_are_the_same_bytes() -> None:
    memory = DeviceMemory(LAYOUT, 9, CPU)
    cache = KVCache(memory)
    assert cache.scratch_slots == range(36, 36)
    cache.values[1][3, 2, 1] = torch.arange(8.0)
    block = memory.read_blocks([3])[3, 0].view(np.float32).reshape(4, 2, 8)
    assert block[2, 1].tolist() == list(range(8)) and block.sum() == 28


def test_all_blocks_are_there_at_once() -> None:
    memory = DeviceMemory(LAYOUT, 9, CPU, 2)
    assert (memory.num_blocks, memory.ceiling, memory.num_ahead, memory.shared_path) == (9, 9, 0, None)
    memory.commit(9)
    with pytest.raises(ValueError, match="at most the ceiling 9, got 10"):
        memory.commit(10)
    with pytest.raises(ValueError, match="at least 1 block, got 0"):
        DeviceMemory(LAYOUT, 0, CPU)
    with pytest.raises(PoolMemoryFull, match=r"no room for a KV pool of \d+ blocks, .* GiB, on cpu"):
        DeviceMemory(LAYOUT, 2**50, CPU)
    memory.close()
    assert (memory.num_blocks, memory.ceiling) == (0, 0)


@pytest.mark.parametrize(("owner_kind", "reader_kind"), [("device", "device"), ("device", "host"), ("host", "device")])
def test_grpc_moves_blocks_between_devices(owner_kind: str, reader_kind: str) -> None:
    owner, reader = (
        host_memory() if kind == "host" else DeviceMemory(LAYOUT, 9, CPU) for kind in (owner_kind, reader_kind)
    )
    content = filled(owner, 9)
    moves = plugins.load("kvstore.transport", "grpc", "Transport")()
    connection = moves.connect({}, LAYOUT)
    source_ids, dest_ids = [4, 5, 1, 8], [0, 1, 7, 3]
    for frame in moves.serve(owner, source_ids):
        connection.receive(frame, reader, dest_ids)
    assert np.array_equal(reader.read_blocks(dest_ids), content[:, source_ids])


def test_shared_memory_is_read_into_a_device_and_not_offered_by_one(tmp_path: Path) -> None:
    owner, reader = PoolMemory.create(LAYOUT, 9, 9, epoch=1, directory=tmp_path), DeviceMemory(LAYOUT, 9, CPU)
    content = filled(owner, 9)
    moves = plugins.load("kvstore.transport", "shm", "Transport")()
    assert moves.offer(reader) is None
    both = {name: transport.load(name) for name in ("shm", "grpc")}
    assert [name for name, _ in transport.offers(both, reader)] == ["grpc"]
    connection = moves.connect(moves.offer(owner, "n"), LAYOUT, "n")
    for frame in moves.serve(owner, [2, 3]):
        connection.receive(frame, reader, [6, 0])
    assert np.array_equal(reader.read_blocks([6, 0]), content[:, [2, 3]])
    owner.close()
