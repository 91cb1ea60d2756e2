"""`baton serve`: Redis, routers and workers of one machine as supervised processes.

Life: choose ports and CPUs; draw the secret by which the processes know each other, Redis included, into a file that
is theirs alone; start Redis unless one is named; start routers and workers together; wait until every
router says that a prefill-decode pair is proven; run until a signal; end routers, then workers, then Redis.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO

from baton import metadata_server
from baton.options import ServeConfig
from baton.progress import Progress
from baton.supervisor import Change, StartFailed, Supervisor
from baton.topology import LOOPBACK, Topology, choose_ports, plan_topology
from engine.cores import create_board
from runtime.rpc import wait_for_shutdown_signal

SECRET_BYTES = 32


@dataclass(frozen=True, slots=True)
class RunningSystem:
    """A system that is ready."""

    topology: Topology
    """Its processes and the routers' addresses."""
    supervisor: Supervisor
    """What keeps it running."""
    cluster_secret_file: Path
    """What its workers ask of callers, `baton drain` for one."""


@contextlib.asynccontextmanager
async def running(config: ServeConfig, on_change: Callable[[Change], None]) -> AsyncIterator[RunningSystem]:
    """A ready system for as long as the block runs. StartFailed, ConfigError or Unavailable when it cannot start."""
    supervisor = Supervisor(on_change, drain_timeout_s=config.drain_timeout_s)
    num_workers = config.num_prefill + config.num_decode + config.num_mixed
    redis_port, *ports = choose_ports(1 + num_workers + config.num_routers)
    redis_url = config.redis_url or f"redis://{LOOPBACK}:{redis_port}/0"
    with tempfile.TemporaryDirectory(prefix="baton-") as folder:
        # The ranks of a worker keep their cores: they wait for each other in every layer.
        lends_cores = config.lend_cores and num_workers > 1 and (config.tensor_parallel_size or 1) == 1
        core_board = Path(folder, "cores") if lends_cores else None
        if core_board is not None:
            create_board(core_board, num_workers)
        secret_file = Path(folder, "secret")
        _write_secret(secret_file)
        cluster_secret_file = config.cluster_secret_file or secret_file
        config = replace(config, cluster_secret_file=cluster_secret_file)
        starts_redis = config.redis_url is None
        if starts_redis:
            config = replace(config, redis_url=redis_url, redis_password_file=secret_file)
        topology = plan_topology(config, redis_url, _usable_cpus(), ports, secrets.token_hex(3), core_board)
        try:
            if starts_redis:
                metadata_server.find_binary()
                await supervisor.start([metadata_server.process_spec(redis_port, secret_file)])
            await supervisor.start(topology.processes)
            yield RunningSystem(topology, supervisor, cluster_secret_file)
        finally:
            await supervisor.stop()


async def serve(config: ServeConfig, output: TextIO) -> int:
    """Runs a system until SIGTERM or SIGINT; the exit code. What is wrong at the start is shown once."""
    progress = Progress(output)
    serving = asyncio.create_task(_serve_until_cancelled(config, progress, output))
    stop = asyncio.create_task(wait_for_shutdown_signal())
    await asyncio.wait([serving, stop], return_when=asyncio.FIRST_COMPLETED)
    if not serving.done():
        progress.abandon_loading()
        print("stopping; again to stop at once", file=output, flush=True)
    stop.cancel()
    serving.cancel()
    try:
        await serving
    except asyncio.CancelledError:
        return 0
    except StartFailed as error:
        progress.abandon_loading()
        print(error.message, file=sys.stderr, flush=True)
        return 1
    return 0


async def _serve_until_cancelled(config: ServeConfig, progress: Progress, output: TextIO) -> None:
    async with running(config, progress.on_change) as system:
        progress.finish_loading()
        address = system.topology.addresses[0]
        hint = "" if address == "127.0.0.1:50051" else f" --address {address}"
        # The tracer has no chat template.
        chat = "" if config.model == "tracer" else f"baton chat{hint}   or   "
        print(f'ready: {chat}baton generate{hint} "..."', file=output)
        drain = f"baton drain ADDRESS --cluster-secret-file {system.cluster_secret_file}"
        print(f"to empty a worker, or to change its role: {drain}", file=output, flush=True)
        await system.supervisor.wait_for_failure()


def _write_secret(path: Path) -> None:
    """In a file of the user alone: nobody else on this machine may call what is started here."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_urlsafe(SECRET_BYTES) + "\n")


def _usable_cpus() -> set[int]:
    """CPUs this process may use; empty where the system does not pin."""
    return os.sched_getaffinity(0) if sys.platform == "linux" else set()
