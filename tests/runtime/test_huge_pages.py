"""Huge pages change where bytes are, never what they are; and aligned mappings are the file, for as long as needed."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from runtime import huge_pages
from runtime.huge_pages import HUGE_PAGE_BYTES, address_of, collapse, map_aligned

NUM_BYTES = 3 * HUGE_PAGE_BYTES + 12_288


@pytest.fixture
def fd() -> Iterator[int]:
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        file.truncate(NUM_BYTES)
        yield file.fileno()


def pmd_mapped_bytes() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("ShmemPmdMapped", "AnonHugePages")))


def test_an_aligned_mapping_is_the_file(fd: int) -> None:
    view = map_aligned(fd, NUM_BYTES)
    assert len(view) == NUM_BYTES
    assert address_of(view) % HUGE_PAGE_BYTES == 0
    view[NUM_BYTES - 3 :] = b"end"
    os.pwrite(fd, b"begin", 0)
    assert os.pread(fd, 3, NUM_BYTES - 3) == b"end"
    assert bytes(view[:5]) == b"begin"


def test_the_mapping_goes_with_its_last_view(fd: int) -> None:
    name = os.readlink(f"/proc/self/fd/{fd}")
    array = np.frombuffer(map_aligned(fd, NUM_BYTES), dtype=np.uint8)[100:]
    assert name in Path("/proc/self/maps").read_text()
    array[0] = 1
    del array
    gc.collect()
    assert name not in Path("/proc/self/maps").read_text()


def test_a_file_that_cannot_be_mapped_is_an_error() -> None:
    reading, writing = os.pipe()
    with pytest.raises(OSError):
        map_aligned(reading, NUM_BYTES)
    os.close(reading)
    os.close(writing)


def test_collapsing_keeps_content_and_clears_what_was_missing(fd: int) -> None:
    view = map_aligned(fd, NUM_BYTES)
    content = os.urandom(HUGE_PAGE_BYTES)
    os.pwrite(fd, content, 4096)
    before = pmd_mapped_bytes()
    granted = collapse(address_of(view) + 4096, NUM_BYTES - 4096)
    # The first huge page begins before the range and the last ends behind it. A system may refuse.
    assert granted in (0, 2 * HUGE_PAGE_BYTES)
    assert pmd_mapped_bytes() - before >= granted
    assert bytes(view[4096 : 4096 + HUGE_PAGE_BYTES]) == content
    assert not any(view[4096 + HUGE_PAGE_BYTES :])


def test_a_range_without_a_whole_huge_page_is_left_alone(fd: int) -> None:
    view = map_aligned(fd, NUM_BYTES)
    assert collapse(address_of(view) + 4096, HUGE_PAGE_BYTES) == 0


def test_a_process_gets_its_private_memory_in_huge_pages() -> None:
    code = """
import hashlib, os
from runtime import huge_pages
held = [bytearray(os.urandom(1 << 20)) for _ in range(24)]
before = hashlib.sha256(b"".join(held)).digest()
print(huge_pages.collapse_private_memory(), hashlib.sha256(b"".join(held)).digest() == before)
"""
    path = os.pathsep.join(sys.path)
    run = [sys.executable, "-P", "-c", code]
    for setting in ({}, dict([huge_pages.MALLOC_SETTING])):
        environment = {"PATH": os.environ["PATH"], "PYTHONPATH": path, **setting}
        output = subprocess.run(run, env=environment, capture_output=True, text=True, check=True).stdout.split()
        assert output[1] == "True"
        modes = Path("/sys/kernel/mm/transparent_hugepage/enabled")
        if modes.exists() and "[never]" not in modes.read_text():
            assert int(output[0]) >= 16 << 20
