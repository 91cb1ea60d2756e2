"""The service under load: started here or found at an address, its CPU time, and its workers' load over time.

Owns the processes it started. CPU time is read from /proc for whole sessions, because each process of a service leads
a session of its own, so what it starts itself is counted with it. Where a process was restarted, or there is no /proc,
CPU time is unknown rather than wrong.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from baton.client import AsyncClient
from baton.options import ServeConfig
from baton.serving import running
from baton.supervisor import Change
from protos import inference_pb2
from runtime.errors import BatonError

PROC = Path("/proc")
POLL_S = 0.2
"""Between two looks at the workers' load."""
SETTLED_S = 1.0
"""A service has settled once its pools have had the same sizes for so long."""
MAX_SETTLING_S = 20.0
"""Longest wait for that."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A worker's load at one time."""

    time_s: float
    """When."""
    service: str
    """Which service of the scenario; one that compares configurations has several."""
    worker_id: str
    """Which worker."""
    role: str
    """Its part: prefill, decode or mixed."""
    num_running: int
    """Sequences that hold KV."""
    num_queued: int
    """Sequences that wait."""
    num_used_blocks: int
    """KV blocks in use."""


@dataclass(frozen=True, slots=True)
class System:
    """A service and, where it was started here, its processes."""

    addresses: tuple[str, ...]
    """Of its routers."""
    pids: Mapping[str, int]
    """Process ids by name; empty where the service is someone else's."""

    def cpu_times_s(self) -> dict[int, float] | None:
        """CPU seconds so far by process id; None where they cannot be known."""
        return session_cpu_times_s(self.pids.values()) if self.pids else None

    def router_pids(self) -> list[int]:
        """Process ids of the routers."""
        return [pid for name, pid in self.pids.items() if name.startswith("router-")]


@contextlib.asynccontextmanager
async def started(config: ServeConfig, on_change: Callable[[Change], None]) -> AsyncIterator[System]:
    """A service of this measurement's own, for as long as the block runs."""
    pids: dict[str, int] = {}

    def note(change: Change) -> None:
        if change.kind == "started":
            pids[change.name] = change.pid
        on_change(change)

    async with running(config, note) as system:
        yield System(tuple(system.topology.addresses), pids)


async def until_settled(client: AsyncClient) -> None:
    """Waits until workers have taken the memory that they take while idle: what is measured is a service that is up."""
    started_s = same_since_s = time.monotonic()
    sizes: list[int] = []
    while time.monotonic() < min(same_since_s + SETTLED_S, started_s + MAX_SETTLING_S):
        now = [status.load.pool.total for status in await client.workers()]
        if now != sizes:
            sizes, same_since_s = now, time.monotonic()
        await asyncio.sleep(POLL_S)


def session_cpu_times_s(pids: Iterable[int]) -> dict[int, float] | None:
    """CPU seconds of each session that one of `pids` leads; None without /proc."""
    if not PROC.is_dir():
        return None
    wanted = set(pids)
    ticks: dict[int, int] = {}
    for folder in PROC.iterdir():
        if not folder.name.isdigit():
            continue
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            session = int(fields[3])
            if session in wanted:
                ticks[session] = ticks.get(session, 0) + sum(map(int, fields[11:15]))
    return {session: count / os.sysconf("SC_CLK_TCK") for session, count in ticks.items()}


def cpu_between_s(
    before: Mapping[int, float] | None, after: Mapping[int, float] | None, pids: set[int] | None = None
) -> float | None:
    """CPU seconds spent between two readings, by `pids` or all; None unless the same processes are in both."""
    if before is None or after is None or before.keys() != after.keys():
        return None
    chosen = before.keys() if pids is None else pids & before.keys()
    return sum(after[pid] - before[pid] for pid in chosen)


def machine_times_s() -> tuple[float, float] | None:
    """CPU seconds of this machine so far, busy and in all; None without /proc. Waiting for a disk is not busy; time
    that the host gave to others is, since nobody here had it."""
    path = PROC / "stat"
    if not path.exists():
        return None
    ticks = list(map(int, path.read_text().splitlines()[0].split()[1:9]))  # user nice system idle iowait irq ...
    clock = os.sysconf("SC_CLK_TCK")
    return (sum(ticks) - ticks[3] - ticks[4]) / clock, sum(ticks) / clock


def busy_between(before: tuple[float, float] | None, after: tuple[float, float] | None) -> float | None:
    """The part of the time between two readings in which CPUs were busy; None if no time has passed."""
    if before is None or after is None or after[1] <= before[1]:
        return None
    return (after[0] - before[0]) / (after[1] - before[1])


async def poll(client: AsyncClient, service: str, samples: list[Sample]) -> None:
    """Notes every worker's load again and again, until cancelled. A look that fails leaves a hole in the timeline."""
    while True:
        with contextlib.suppress(BatonError):
            now_s = time.monotonic()
            samples += [_sample(now_s, service, status) for status in await client.workers()]
        await asyncio.sleep(POLL_S)


def _sample(now_s: float, service: str, status: inference_pb2.WorkerStatus) -> Sample:
    role = inference_pb2.WorkerRole.Name(status.role).removeprefix("WORKER_ROLE_").lower()
    load = status.load
    return Sample(now_s, service, status.worker_id, role, load.num_running, load.num_queued, load.pool.used)
