"""Memory in huge pages (2 MiB on x86-64): weights and KV, which steps read whole, are read about twice as fast.

With pages of 4 KiB most of a step's time on virtual machines goes into address translation, since every miss of the
TLB walks two page tables. Linux gives huge pages to who asks (`transparent_hugepage=madvise` is the usual setting),
also at once for memory that is there (MADV_COLLAPSE, since 6.1). All of it is a request: where it is not granted,
everything works as before, slower. Source: Linux manual, madvise(2); Documentation/admin-guide/mm/transhuge.rst.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import re
from collections.abc import Iterator
from pathlib import Path

HUGE_PAGE_BYTES = 2 << 20
"""Of x86-64, and of arm64 with its usual pages of 4 KiB. Elsewhere requests of this size are refused or harmless."""
MALLOC_SETTING = ("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
"""An environment variable and its value: a process started with it gets all its larger memory so, at no cost."""
_MADV_COLLAPSE = 25
_RANGE = re.compile("[0-9a-f]+-[0-9a-f]+")
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.mmap.restype = ctypes.c_void_p


def map_aligned(fd: int, num_bytes: int) -> memoryview:
    """Maps a file, shared and writable, where its huge pages can be: at an address that is a multiple of their size.

    The mapping goes with the last view of it. Raises OSError as mmap does.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    room = mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES, flags=flags)
    skipped = -address_of(memoryview(room)) % HUGE_PAGE_BYTES
    view = memoryview(room)[skipped : skipped + num_bytes]
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    # In place of the empty room, which unmaps its whole range when it goes.
    mapped = _libc.mmap(address_of(view), num_bytes, protection, mmap.MAP_SHARED | _MAP_FIXED, fd, 0)
    if mapped == _MAP_FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return view


def address_of(view: memoryview) -> int:
    """Where a writable view's bytes are."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def advise(mapping: mmap.mmap) -> None:
    """Asks for huge pages wherever a private mapping is written to first."""
    with contextlib.suppress(OSError):  # a kernel without them
        mapping.madvise(mmap.MADV_HUGEPAGE)


def collapse(address: int, num_bytes: int) -> int:
    """Asks for huge pages, now and later, for what lies whole within a range; answers the bytes that have them now.

    Content stays as it is. Pages that are missing come as zeros; where all are, the system refuses.
    """
    start = -(-address // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    end = (address + num_bytes) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if end <= start:
        return 0
    _libc.madvise(start, end - start, mmap.MADV_HUGEPAGE)
    return end - start if _libc.madvise(start, end - start, _MADV_COLLAPSE) == 0 else 0


def collapse_private_memory() -> int:
    """Asks for huge pages for the memory that this process has allocated; answers the bytes that have them now.

    For a process that has loaded its weights. What it has freed goes back to the system first. Takes as long as a copy,
    unless it was started with MALLOC_SETTING: then most is there already.
    """
    with contextlib.suppress(AttributeError):  # a C library other than glibc
        _libc.malloc_trim(0)
    if 2 * _in_huge_pages() >= _private_bytes():
        return _in_huge_pages()
    for start, end in _private_ranges():
        collapse(start, end - start)
    return _in_huge_pages()


def _private_ranges() -> Iterator[tuple[int, int]]:
    """Addresses of writable memory that no file is behind and of which most is used: no stacks, no reserved room."""
    start, end, is_private = 0, 0, False
    for line in _read_lines("/proc/self/smaps"):
        words = line.split()
        if _RANGE.fullmatch(words[0]):
            start, end = (int(number, 16) for number in words[0].split("-"))
            is_private = words[1] == "rw-p" and words[4] == "0"
        elif words[0] == "Rss:" and is_private and 2 * int(words[1]) * 1024 >= end - start:
            yield start, end


def _in_huge_pages() -> int:
    return _total("AnonHugePages:")


def _private_bytes() -> int:
    return _total("Anonymous:")


def _total(name: str) -> int:
    words = [line.split() for line in _read_lines("/proc/self/smaps_rollup")]
    return sum(int(word[1]) * 1024 for word in words if word[0] == name)


def _read_lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
