"""The bytes of a KV pool: an address range as large as the pool may ever get, of which a leading part is usable.

Owns the mapping, the file behind it (`baton-kv-<pid>-<epoch>`, where readers on the same host find it) and that file's
format: a header page, then the planes. Large planes begin with a huge page each, and their blocks become usable by
whole huge pages. It knows nothing of references or content, and nothing of torch.
Invariants: bytes never move; in a file, blocks below `num_blocks` have their pages (a full file system is an error when
growing, not a signal when writing); the file's lock is held as long as its owner lives, so an unlocked file is dead.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import secrets
import stat
import struct
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kvstore.layout import KVLayout
from kvstore.planes import HEADER_BYTES, Planes, copy_blocks, file_bytes, has_huge_pages, plane_ranges, view_planes
from runtime import huge_pages
from runtime.errors import BatonError

DEFAULT_DIRECTORY = Path("/dev/shm")
"""Where pool files go: memory, not a disk."""
FILE_PREFIX = "baton-kv-"
"""Names of pool files start so."""
SECRET_BYTES = 32
"""Size of a pool file's secret."""

_HEADER = struct.Struct(f"<8s{SECRET_BYTES}sQQ")  # magic, secret, ceiling, num_blocks
_MAGIC = b"batonkv1"

logger = logging.getLogger(__name__)


class PoolMemoryFull(BatonError):
    """There is no room for the blocks asked for."""

    reason = "POOL_MEMORY_FULL"


class PoolFileError(BatonError):
    """Another worker's pool file is not there or is not what it should be."""

    reason = "POOL_FILE"


class BlockMemory(ABC):
    """A pool's bytes, wherever they are: this machine's memory (`PoolMemory`) or a device's (`device_memory.py`)."""

    device_kind = "cpu"
    """Whose memory it is, as torch calls it."""

    def __init__(self, layout: KVLayout, ceiling: int, shared_path: Path | None = None) -> None:
        """Raises ValueError for a ceiling below 1."""
        if ceiling < 1:
            raise ValueError(f"ceiling: must be at least 1 block, got {ceiling}")
        self.layout = layout
        """What a block is."""
        self.ceiling = ceiling
        """Blocks that there may ever be."""
        self.num_blocks = 0
        """Blocks that are usable: ids below this."""
        self.shared_path = shared_path
        """The file, where readers on this host find it; None when the bytes are this process's own."""
        self.secret = secrets.token_bytes(SECRET_BYTES)
        """Stands in the file's header: who knows it can read the file."""

    @abstractmethod
    def commit(self, num_blocks: int) -> None:
        """Makes the blocks below `num_blocks` usable, or some more; a smaller number than now changes nothing."""

    @property
    @abstractmethod
    def num_ahead(self) -> int:
        """Free blocks at which growing should begin, because it takes long; 0 where it does not."""

    def read_blocks(self, block_ids: Sequence[int]) -> Planes:
        """A copy of blocks, ids already checked: [num_planes, len(block_ids), plane_block_bytes]."""
        packed = self.host_planes(len(block_ids))
        self.copy_blocks(block_ids, packed, range(len(block_ids)))
        return packed

    def host_planes(self, num_blocks: int) -> Planes:
        """Memory of this machine that blocks are copied to best: [num_planes, num_blocks, plane_block_bytes]. Raises
        MemoryError or RuntimeError without room."""
        return np.empty((self.layout.num_planes, num_blocks, self.layout.plane_block_bytes), dtype=np.uint8)

    @abstractmethod
    def copy_blocks(self, block_ids: Sequence[int], destination: Planes, destination_ids: Sequence[int]) -> None:
        """Copies blocks, ids already checked, to `destination_ids` of [num_planes, blocks, plane_block_bytes]; they are
        there when this returns."""

    @abstractmethod
    def write_blocks(self, block_ids: Sequence[int], source: Planes, source_ids: Sequence[int]) -> None:
        """Copies blocks `source_ids` of [num_planes, blocks, plane_block_bytes] into `block_ids`, already checked."""

    @abstractmethod
    def plane_addresses(self) -> list[int]:
        """Where each plane begins, until the pool is closed; its blocks follow each other."""

    @abstractmethod
    def close(self) -> None:
        """Gives up the bytes."""


class PoolMemory(BlockMemory):
    """A pool's bytes: `planes` is uint8 [num_planes, ceiling, plane_block_bytes], C order."""

    def __init__(self, layout: KVLayout, ceiling: int, *, shared_path: Path | None = None) -> None:
        """Reserves address space for `ceiling` blocks; none is usable before `commit`.

        With `shared_path` the bytes are a new file, mode 0600; its directory must exist. Raises OSError if the file
        exists or cannot be made, or if the space cannot be reserved.
        """
        super().__init__(layout, ceiling, shared_path)
        self._fd: int | None = None
        mapping = self._map(file_bytes(layout, ceiling))
        self._mapping: memoryview | None = mapping
        self.planes = view_planes(mapping, layout, ceiling)
        self._write_header(mapping)

    @classmethod
    def create(
        cls,
        layout: KVLayout,
        ceiling: int,
        initial_blocks: int,
        *,
        epoch: int,
        directory: Path | None = DEFAULT_DIRECTORY,
    ) -> PoolMemory:
        """A pool with `initial_blocks` usable, in a file in `directory` if that works, else in this process's memory.

        Why a file did not work is logged: it means that readers on this host cannot use shared memory. Files of dead
        owners in the directory are removed first. `directory` None asks for no file. Raises PoolMemoryFull if there is
        no memory at all.
        """
        if directory is not None:
            path = directory / f"{FILE_PREFIX}{os.getpid()}-{epoch:x}"
            try:
                unlink_dead(directory)
                memory = cls(layout, ceiling, shared_path=path)
                try:
                    memory.commit(initial_blocks)
                except BaseException:
                    memory.close()
                    raise
                return memory
            except (OSError, PoolMemoryFull) as error:
                logger.warning("no shared memory for the KV pool, so KV moves over the network: %s", error)
        try:
            memory = cls(layout, ceiling)
        except OSError as error:
            gib = layout.block_bytes * ceiling / 2**30
            raise PoolMemoryFull(f"no room for a KV pool of {ceiling} blocks, {gib:.1f} GiB: {error}") from error
        memory.commit(initial_blocks)
        return memory

    def commit(self, num_blocks: int) -> None:
        """Makes the blocks below `num_blocks` usable, or some more; a smaller number than now changes nothing.

        Raises PoolMemoryFull, with nothing changed and the pages given back, if the file system has no room.
        """
        if num_blocks > self.ceiling:
            raise ValueError(f"num_blocks: at most the ceiling {self.ceiling}, got {num_blocks}")
        if num_blocks <= self.num_blocks:
            return
        assert self._mapping is not None, "a closed pool has a ceiling of 0"
        num_blocks = self._fill_pages(num_blocks)
        if self._fd is not None:
            self._allocate_pages(self._fd, self._mapping, num_blocks)
        self.num_blocks = num_blocks
        self._write_header(self._mapping)

    @property
    def num_ahead(self) -> int:
        """Blocks of one huge page in each plane: making them usable takes long, so it should begin before they are
        needed. 0 where planes are not of huge pages."""
        size = self.layout.plane_block_bytes
        return (
            -(-huge_pages.HUGE_PAGE_BYTES // size) if self.ceiling and has_huge_pages(self.layout, self.ceiling) else 0
        )

    def copy_blocks(self, block_ids: Sequence[int], destination: Planes, destination_ids: Sequence[int]) -> None:
        """As the base says."""
        copy_blocks(self.planes, block_ids, destination, destination_ids)

    def write_blocks(self, block_ids: Sequence[int], source: Planes, source_ids: Sequence[int]) -> None:
        """As the base says."""
        copy_blocks(source, source_ids, self.planes, block_ids)

    def plane_addresses(self) -> list[int]:
        """As the base says."""
        return [plane.ctypes.data for plane in self.planes]

    def close(self) -> None:
        """Removes the file and gives up the bytes; they go when the last array or tensor over them goes."""
        self._drop_file()
        self.num_blocks = self.ceiling = 0
        self.planes = self.planes[:, :0].copy()
        self._mapping = None

    def _map(self, num_bytes: int) -> memoryview:
        if self.shared_path is None:
            mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            huge_pages.advise(mapping)
            return memoryview(mapping)
        self._fd = _create_locked(self.shared_path)
        try:
            os.ftruncate(self._fd, num_bytes)
            os.posix_fallocate(self._fd, 0, _HEADER.size)
            return huge_pages.map_aligned(self._fd, num_bytes)
        except OSError:
            self._drop_file()
            raise

    def _fill_pages(self, num_blocks: int) -> int:
        """So many blocks, or as many as the last huge page of each plane has room for."""
        size, page = self.layout.plane_block_bytes, huge_pages.HUGE_PAGE_BYTES
        if not has_huge_pages(self.layout, self.ceiling):
            return num_blocks
        return min(self.ceiling, -(-num_blocks * size // page) * page // size)

    def _allocate_pages(self, fd: int, mapping: memoryview, num_blocks: int) -> None:
        ranges = plane_ranges(self.layout, self.ceiling, self.num_blocks, num_blocks)
        try:
            for start, length in ranges:
                if has_huge_pages(self.layout, self.ceiling):
                    _allocate_huge_pages(fd, mapping, start, start + length)
                os.posix_fallocate(fd, start, length)
        except OSError as error:
            for start, length in ranges:
                _give_back_pages(fd, start, length)
            wanted = (num_blocks - self.num_blocks) * self.layout.block_bytes
            raise PoolMemoryFull(
                f"{self.shared_path}: no room for {num_blocks - self.num_blocks} more blocks, {wanted} bytes: "
                f"{error.strerror}"
            ) from error

    def _write_header(self, mapping: memoryview) -> None:
        _HEADER.pack_into(mapping, 0, _MAGIC, self.secret, self.ceiling, self.num_blocks)

    def _drop_file(self) -> None:
        if self._fd is None or self.shared_path is None:
            return
        self.shared_path.unlink(missing_ok=True)
        os.close(self._fd)
        self._fd = None


class SharedPool:
    """The pool file of another process, a worker whose KV is read, or the one whose rank this is. `planes` as in
    PoolMemory; they may be written to by ranks alone."""

    def __init__(self, path: Path, layout: KVLayout, is_writable: bool = False) -> None:
        """Maps the file at `path`. Raises PoolFileError if there is none or it does not fit `layout`."""
        self.layout = layout
        self._is_writable = is_writable
        if not path.name.startswith(FILE_PREFIX):
            raise PoolFileError(f"{path}: not the name of a pool file")
        try:
            access = os.O_RDWR if is_writable else os.O_RDONLY
            fd = os.open(path, access | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except (OSError, ValueError) as error:  # ValueError: a path with a null character
            raise PoolFileError(f"{path}: {error}") from error
        try:
            self._map(path, fd)
        finally:
            os.close(fd)

    def _map(self, path: Path, fd: int) -> None:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size < HEADER_BYTES:
            raise PoolFileError(f"{path}: not a pool file")
        magic, secret, ceiling, _ = _HEADER.unpack(os.pread(fd, _HEADER.size, 0))
        if magic != _MAGIC:
            raise PoolFileError(f"{path}: not a pool file")
        expected = file_bytes(self.layout, ceiling)
        if ceiling < 1 or status.st_size != expected:
            raise PoolFileError(f"{path}: {status.st_size} bytes, a pool of this layout and ceiling has {expected}")
        self.secret: bytes = secret
        """As in PoolMemory."""
        self.ceiling: int = ceiling
        """Blocks the file has space for."""
        self._mapping: mmap.mmap | memoryview = (
            huge_pages.map_aligned(fd, expected)
            if self._is_writable
            else mmap.mmap(fd, expected, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        )
        self.planes = view_planes(self._mapping, self.layout, ceiling)

    @property
    def num_blocks(self) -> int:
        """Blocks that have memory now; reading others could end the process, so nobody may."""
        num_blocks: int = _HEADER.unpack_from(self._mapping, 0)[3]
        return min(num_blocks, self.ceiling)


def unlink_dead(directory: Path) -> list[Path]:
    """Removes pool files whose owner is gone and answers them. Files it may not open are left to their user.

    The lock is the proof, not the process id in the name: ids mean nothing across containers. A directory that does
    not exist has no files.
    """
    removed: list[Path] = []
    for path in sorted(directory.glob(f"{FILE_PREFIX}*")):
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            logger.debug("left %s alone: %s", path, error)
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
            removed.append(path)
        except BlockingIOError:
            logger.debug("left %s alone: its owner lives", path)
        finally:
            os.close(fd)
    return removed


def _create_locked(path: Path) -> int:
    """Makes a file that no `unlink_dead` can take away: one may run between making and locking, so look again."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)
        if os.fstat(fd).st_nlink:
            return fd
        os.close(fd)


def _allocate_huge_pages(fd: int, mapping: memoryview, start: int, end: int) -> None:
    """Takes them where the system gives them: where a page is there already, the only one of its huge page."""
    address, page = huge_pages.address_of(mapping), huge_pages.HUGE_PAGE_BYTES
    for first in range(start // page * page, end, page):
        os.posix_fallocate(fd, first, 1)
        huge_pages.collapse(address + first, page)


def _give_back_pages(fd: int, start: int, length: int) -> None:
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE  # a page shared with a usable block stays
    last = (start + length) // mmap.PAGESIZE * mmap.PAGESIZE
    if last <= first:
        return
    try:
        with mmap.mmap(fd, last - first, flags=mmap.MAP_SHARED, offset=first) as mapping:
            mapping.madvise(mmap.MADV_REMOVE)
    except OSError as error:
        logger.warning("%d bytes of the pool file stay allocated unused: %s", last - first, error)
