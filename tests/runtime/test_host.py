"""The limits of memory and CPU time, with and without a container."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from runtime.host import memory_limit_bytes, num_cpus

MACHINE = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1073741824\n", 2**30), ("max\n", MACHINE), ("9223372036854771712\n", MACHINE), ("", MACHINE)],
)
def test_the_lesser_of_machine_and_container(tmp_path: Path, text: str, expected: int) -> None:
    """A limit counts when it is a number below the machine's memory."""
    path = tmp_path / "memory.max"
    path.write_text(text, encoding="ascii")
    assert memory_limit_bytes((path,)) == expected


def test_without_a_container(tmp_path: Path) -> None:
    """No file, no limit but the machine's."""
    assert memory_limit_bytes((tmp_path / "none",)) == MACHINE


@pytest.mark.parametrize(
    ("text", "expected"),
    [("max 100000\n", 3), ("100000 100000\n", 1), ("150000 100000\n", 2), ("900000 100000\n", 3), ("10000 100000", 1)],
)
def test_cpus_are_as_many_as_the_quota_keeps_busy(
    tmp_path: Path, text: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 2, 5})
    path = tmp_path / "cpu.max"
    path.write_text(text, encoding="ascii")
    assert num_cpus(path) == expected
    assert num_cpus(tmp_path / "none") == 3
