"""A pool's bytes: the file, its lock, its room, and what a reader makes of it."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore import memory as memory_module
from kvstore.cache import KVCache
from kvstore.layout import KVLayout
from kvstore.memory import (
    PoolFileError,
    PoolMemory,
    PoolMemoryFull,
    SharedPool,
    unlink_dead,
)
from kvstore.planes import copy_blocks
from runtime.huge_pages import HUGE_PAGE_BYTES

LAYOUT = KVLayout(num_layers=2, block_size=16, num_kv_heads=4, head_dim=32, dtype="float32")  # 8 KiB a plane and block


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[PoolMemory]:
    memory = PoolMemory.create(LAYOUT, 8, 4, epoch=7, directory=tmp_path)
    yield memory
    memory.close()


def allocated_bytes(path: Path) -> int:
    return path.stat().st_blocks * 512


def pmd_mapped_bytes(path: Path) -> int:
    """Of a file that this process has mapped: what is in huge pages."""
    found, is_ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            is_ours = line.endswith(path.name)
        elif is_ours and line.startswith("ShmemPmdMapped:"):
            found += 1024 * int(line.split()[1])
    return found


def full_after(num_calls: int) -> Callable[[int, int, int], None]:
    """A posix_fallocate on a file system that has room for so many calls."""
    calls = iter(range(num_calls))
    real = os.posix_fallocate

    def allocate(fd: int, offset: int, length: int) -> None:
        if next(calls, None) is None:
            real(fd, offset, length // 2)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(fd, offset, length)

    return allocate


def test_shape_and_file(pool: PoolMemory, tmp_path: Path) -> None:
    assert pool.planes.shape == (4, 8, 8192)
    assert pool.planes.dtype == np.uint8
    assert pool.planes.flags.c_contiguous and pool.planes.flags.writeable
    assert pool.planes.ctypes.data % 4096 == 0
    assert pool.shared_path == tmp_path / f"baton-kv-{os.getpid()}-7"
    assert stat.S_IMODE(pool.shared_path.stat().st_mode) == 0o600
    assert pool.num_blocks == 4


def test_only_committed_blocks_take_room(pool: PoolMemory) -> None:
    assert pool.shared_path is not None
    before = allocated_bytes(pool.shared_path)
    assert 4 * LAYOUT.block_bytes <= before < 5 * LAYOUT.block_bytes
    pool.commit(6)
    assert 2 * LAYOUT.block_bytes <= allocated_bytes(pool.shared_path) - before < 3 * LAYOUT.block_bytes
    pool.commit(5)  # never shrinks
    assert pool.num_blocks == 6


def test_commit_beyond_the_ceiling(pool: PoolMemory) -> None:
    with pytest.raises(ValueError, match="at most the ceiling 8, got 9"):
        pool.commit(9)


def test_growing_keeps_bytes_in_place(pool: PoolMemory) -> None:
    pool.planes[:, 3] = 9
    address = pool.planes.ctypes.data
    pool.commit(8)
    assert pool.planes.ctypes.data == address
    assert (pool.planes[:, 3] == 9).all() and not pool.planes[:, 4:].any()


def test_full_directory_while_growing(pool: PoolMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    assert pool.shared_path is not None
    pool.planes[:, :4] = 5
    before = allocated_bytes(pool.shared_path)
    monkeypatch.setattr(os, "posix_fallocate", full_after(2))
    with pytest.raises(PoolMemoryFull, match=r"no room for 4 more blocks, 131072 bytes: No space left"):
        pool.commit(8)
    assert pool.num_blocks == 4
    # Two ranges had been taken; of a file in many pieces the file system itself keeps a block or two.
    assert allocated_bytes(pool.shared_path) < before + LAYOUT.block_bytes, "pages were kept"
    assert (pool.planes[:, :4] == 5).all()
    monkeypatch.undo()
    pool.commit(8)
    assert not pool.planes[:, 4:].any()


def test_full_directory_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "posix_fallocate", full_after(3))
    with caplog.at_level(logging.WARNING):
        memory = PoolMemory.create(LAYOUT, 8, 4, epoch=1, directory=tmp_path)
    assert memory.shared_path is None and memory.num_blocks == 4
    assert list(tmp_path.iterdir()) == []
    assert "No space left" in caplog.text
    memory.planes[:, 3] = 1
    memory.close()


@pytest.mark.parametrize("directory", ["missing", "a file"])
def test_directory_that_cannot_be_used(tmp_path: Path, directory: str, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a file").write_text("")
    memory = PoolMemory.create(LAYOUT, 2, 1, epoch=1, directory=tmp_path / directory)
    assert memory.shared_path is None
    assert "no shared memory" in caplog.text
    memory.close()


def test_no_directory_asks_for_no_file(caplog: pytest.LogCaptureFixture) -> None:
    memory = PoolMemory.create(LAYOUT, 2, 1, epoch=1, directory=None)
    assert memory.shared_path is None and not caplog.records
    memory.planes[:] = 3
    memory.close()


def test_no_memory_at_all() -> None:
    with pytest.raises(PoolMemoryFull, match=r"no room for a KV pool of \d+ blocks"):
        PoolMemory.create(LAYOUT, 2**62 // LAYOUT.block_bytes, 1, epoch=1, directory=None)


def test_ceiling_must_be_positive() -> None:
    with pytest.raises(ValueError, match="ceiling"):
        PoolMemory(LAYOUT, 0)


def test_close_removes_the_file_and_leaves_views_alive(tmp_path: Path) -> None:
    memory = PoolMemory.create(LAYOUT, 2, 2, epoch=1, directory=tmp_path)
    cache, planes = KVCache(memory), memory.planes
    memory.close()
    memory.close()
    assert list(tmp_path.iterdir()) == []
    cache.keys[0][1] = 1.0
    assert planes[0, 1].any()
    with pytest.raises(ValueError, match="ceiling 0"):
        memory.commit(1)


def test_leaving_without_close_does_not_crash(tmp_path: Path) -> None:
    """Arrays, tensors and the mapping go in whatever order the interpreter ends in; the next start cleans up."""
    code = f"""
import sys
from pathlib import Path
from kvstore.cache import KVCache
from kvstore.layout import KVLayout
from kvstore.memory import PoolMemory, SharedPool
memory = PoolMemory.create(KVLayout(2, 16, 4, 32, "float32"), 8, 4, epoch=1, directory=Path({str(tmp_path)!r}))
cache, view, shared = KVCache(memory), memory.planes[1:], SharedPool(memory.shared_path, memory.layout)
sys.modules["kept"] = (view, shared.planes, cache)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert len(unlink_dead(tmp_path)) == 1
    assert list(tmp_path.iterdir()) == []


def test_unlink_dead_leaves_the_living_alone(pool: PoolMemory, tmp_path: Path) -> None:
    dead = tmp_path / "baton-kv-1-1"  # process 1 lives, in whatever container; nobody holds this file
    dead.write_bytes(b"x")
    other = tmp_path / "somebody-elses"
    other.write_bytes(b"x")
    (tmp_path / "baton-kv-link").symlink_to(other)
    (tmp_path / "baton-kv-folder").mkdir()
    assert unlink_dead(tmp_path) == [dead]
    assert pool.shared_path is not None and pool.shared_path.exists()
    assert other.exists()


def test_creating_while_another_process_cleans_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cleaner may find the new file before it is locked and remove it: the creator notices and makes another."""
    path = tmp_path / "baton-kv-1-1"
    real, calls = fcntl.flock, []

    def flock(fd: int, operation: int) -> None:
        if not calls:
            path.unlink()
        calls.append(fd)
        real(fd, operation)

    monkeypatch.setattr(memory_module.fcntl, "flock", flock)
    memory = PoolMemory(LAYOUT, 2, shared_path=path)
    monkeypatch.undo()
    assert len(calls) == 2
    assert unlink_dead(tmp_path) == []
    memory.close()


def test_an_existing_file_is_never_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "baton-kv-1-1"
    path.write_bytes(b"precious")
    with pytest.raises(FileExistsError):
        PoolMemory(LAYOUT, 2, shared_path=path)
    assert path.read_bytes() == b"precious"


def test_shared_pool_sees_growth_and_bytes(pool: PoolMemory) -> None:
    assert pool.shared_path is not None
    shared = SharedPool(pool.shared_path, LAYOUT)
    assert (shared.secret, shared.ceiling, shared.num_blocks) == (pool.secret, 8, 4)
    pool.commit(5)
    pool.planes[3, 4] = 77
    assert shared.num_blocks == 5
    assert (shared.planes[3, 4] == 77).all()
    with pytest.raises(ValueError, match="read-only"):
        shared.planes[0, 0] = 1


def test_shared_pool_refuses_what_is_not_one(pool: PoolMemory, tmp_path: Path) -> None:
    assert pool.shared_path is not None
    short, foreign, cut = (tmp_path / f"baton-kv-{name}" for name in ("short", "foreign", "cut"))
    short.write_bytes(b"batonkv1")
    foreign.write_bytes(bytes(10000))
    content = pool.shared_path.read_bytes()
    cut.write_bytes(content[:-1])
    link = tmp_path / "baton-kv-link"
    link.symlink_to(pool.shared_path)
    fifo = tmp_path / "baton-kv-fifo"
    os.mkfifo(fifo)
    other = tmp_path / "other"
    other.write_bytes(content)
    for path, message in (
        (tmp_path / "baton-kv-none", "No such file"),
        (short, "not a pool file"),
        (foreign, "not a pool file"),
        (fifo, "not a pool file"),
        (cut, "a pool of this layout and ceiling has"),
        (link, "symbolic link"),
        (other, "not the name of a pool file"),
    ):
        with pytest.raises(PoolFileError, match=message):
            SharedPool(path, LAYOUT)
    with pytest.raises(PoolFileError, match="this layout"):
        SharedPool(pool.shared_path, KVLayout(3, 16, 4, 32, "float32"))


@pytest.mark.parametrize(
    ("source_ids", "destination_ids"),
    [
        ([], []),
        ([2], [0]),
        ([0, 1, 2, 3], [4, 5, 6, 7]),
        ([3, 2, 1, 0], [4, 5, 6, 7]),
        ([0, 1, 2, 3], [7, 5, 6, 0]),
        ([1, 2, 5, 6], [0, 1, 2, 4]),
        ([4, 4, 4], [0, 1, 2]),
    ],
)
def test_copy_blocks_copies_those_and_no_others(source_ids: list[int], destination_ids: list[int]) -> None:
    generator = np.random.default_rng(1)
    source = generator.integers(0, 256, (4, 8, 64), dtype=np.uint8)
    destination = generator.integers(0, 256, (4, 8, 64), dtype=np.uint8)
    expected = destination.copy()
    for source_id, destination_id in zip(source_ids, destination_ids, strict=True):
        expected[:, destination_id] = source[:, source_id]
    copy_blocks(source, source_ids, destination, destination_ids)
    assert (destination == expected).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "uint8", "int8"])
def test_cache_is_the_memory(dtype: str, tmp_path: Path) -> None:
    layout = KVLayout(num_layers=3, block_size=4, num_kv_heads=2, head_dim=8, dtype=dtype)
    memory = PoolMemory.create(layout, 5, 5, epoch=1, directory=tmp_path)
    cache = KVCache(memory)
    assert len(cache.keys) == len(cache.values) == 3
    width = 12 if dtype == "int8" else 8  # a scale of four bytes behind each head
    assert cache.keys[0].shape == (5, 4, 2, width)
    assert cache.layout == layout
    tensors = [each for pair in zip(cache.keys, cache.values, strict=True) for each in pair]
    for plane, tensor in enumerate(tensors):
        assert tensor.data_ptr() == memory.planes[plane].ctypes.data
        assert str(tensor.dtype) == f"torch.{dtype}"
        tensor[2, 3, 1, 7] = plane + 1
    for plane in range(6):
        written = memory.planes[plane, 2].reshape(4, 2, width, -1)
        assert written[3, 1, 7].any()
        written[3, 1, 7] = 0
        assert not memory.planes[plane].any()
    memory.close()


# Huge pages

ROOMY = KVLayout(num_layers=1, block_size=16, num_kv_heads=3, head_dim=64, dtype="bfloat16")  # 6 KiB a plane and block


def test_large_planes_begin_with_a_huge_page_and_blocks_come_by_whole_ones() -> None:
    memory = PoolMemory.create(ROOMY, 4097, 1, epoch=7, directory=Path("/dev/shm"))
    try:
        assert [plane.ctypes.data % HUGE_PAGE_BYTES for plane in memory.planes] == [0, 0]
        assert memory.num_blocks == HUGE_PAGE_BYTES // 6144
        assert pmd_mapped_bytes(memory.shared_path) in (0, 2 * HUGE_PAGE_BYTES), "granted, or not where not allowed"
        memory.planes[:, 340] = 7
        memory.commit(342)
        assert memory.num_blocks == 2 * HUGE_PAGE_BYTES // 6144
        assert (memory.planes[:, 340] == 7).all() and not memory.planes[:, 341:682].any()
        assert allocated_bytes(memory.shared_path) <= 2 * 2 * HUGE_PAGE_BYTES + 4096
        reader = SharedPool(memory.shared_path, ROOMY)
        assert np.array_equal(reader.planes[:, :682], memory.planes[:, :682])
        memory.commit(4097)
        assert memory.num_blocks == 4097
        memory.planes[:, 4096] = 9
        assert (reader.planes[:, 4096] == 9).all() and (reader.planes[:, 340] == 7).all()
    finally:
        memory.close()
