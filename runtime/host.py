"""What this machine, or the container this process runs in, has to give.

Owns reading the limits of memory and CPU time, and what of them this process uses; nothing is cached, nothing is set.
"""

from __future__ import annotations

import os
from pathlib import Path

CGROUP_LIMIT_FILES = (
    Path("/sys/fs/cgroup/memory.max"),  # version 2, as seen from inside a container
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),  # version 1
)
OPENMP_SETTING = ("GOMP_SPINCOUNT", "3000")
"""An environment variable of processes that compute, and its value: how often a thread looks whether the others have
come before it sleeps. About 0.1 ms: longer than threads of a step wait for each other, and short enough that a thread
whose partner has lost its CPU to another process gives up its own. Steps of two threads on busy CPUs take many times as
long with the usual value, on idle ones they do not."""
CGROUP_CPU_FILE = Path("/sys/fs/cgroup/cpu.max")


def num_cpus(cpu_file: Path = CGROUP_CPU_FILE) -> int:
    """CPUs this process can keep busy: those it may run on, or what the container's share of CPU time is worth if less.

    More threads than that would be stopped by the kernel in turn, and wait for each other.
    """
    count = len(os.sched_getaffinity(0))
    if cpu_file.is_file():
        quota, period = cpu_file.read_text(encoding="ascii").split()
        if quota != "max":
            count = min(count, -(-int(quota) // int(period)))
    return max(1, count)


def resident_bytes() -> int:
    """This process's memory in use, that shared with others included; 0 where the system does not say."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0


def memory_limit_bytes(limit_files: tuple[Path, ...] = CGROUP_LIMIT_FILES) -> int:
    """The memory this process may use with all others in its container: the machine's, or the container's if less."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in limit_files:
        if path.is_file():
            text = path.read_text(encoding="ascii").strip()
            if text.isdigit():  # "max" is no limit
                limits.append(int(text))
    return min(limits)
