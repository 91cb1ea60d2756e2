"""What this machine, or the container this process runs in, has to give.

Owns reading the memory limit; nothing is cached, nothing is set.
"""

from __future__ import annotations

import os
from pathlib import Path

CGROUP_LIMIT_FILES = (
    Path("/sys/fs/cgroup/memory.max"),  # version 2, as seen from inside a container
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),  # version 1
)


def memory_limit_bytes(limit_files: tuple[Path, ...] = CGROUP_LIMIT_FILES) -> int:
    """The memory this process may use with all others in its container: the machine's, or the container's if less."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in limit_files:
        if path.is_file():
            text = path.read_text(encoding="ascii").strip()
            if text.isdigit():  # "max" is no limit
                limits.append(int(text))
    return min(limits)
