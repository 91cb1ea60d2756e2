"""A real Redis or Valkey server that a test may kill, freeze, flush and start again."""

from __future__ import annotations

import signal
import socket
import subprocess

from baton.metadata_server import READY_TEXT, find_binary, server_argv
from baton.topology import LOOPBACK, choose_ports


class RedisServer:
    """One server process on a port of its own; its data dies with it."""

    def __init__(self, host: str = LOOPBACK, password: str | None = None) -> None:
        self._host = host
        (self.port,) = choose_ports(1)
        self.url = f"redis://{host}:{self.port}/0"
        self._password = password
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def is_running(self) -> bool:
        return self._process is not None

    def start(self) -> None:
        """Returns when the server takes connections."""
        argv = [*server_argv(find_binary(), self.port), *([] if self._password is None else ["-"])]
        if self._host != LOOPBACK:
            argv += ["--bind", self._host, "--protected-mode", "no"]
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdin is not None
        with self._process.stdin:
            if self._password is not None:
                self._process.stdin.write(f"requirepass {self._password}\n".encode())
        assert self._process.stdout is not None
        lines = []
        for line in self._process.stdout:
            lines.append(line)
            if READY_TEXT in line:
                return
        raise RuntimeError(f"the server did not start: {b''.join(lines)!r}")

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

    def flush(self) -> None:
        """Forgets everything."""
        with socket.create_connection((self._host, self.port)) as connection:
            connection.sendall(b"FLUSHALL\r\n")
            assert connection.recv(64).startswith(b"+OK")
