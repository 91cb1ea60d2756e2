"""`baton serve` as a user starts it: the real command in a process group of its own, and what can be seen of it.

Owns the process, its output and its end; `Served.close` leaves nothing behind however a test ended. Waiting is reading:
lines of its output, health reports of the router, load reports of the workers.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.topology import choose_ports
from runtime.doors import Pass

BATON = str(Path(sys.executable).with_name("baton"))
SHARED_MEMORY = Path("/dev/shm")
START_LIMIT_S = 90.0
STOP_LIMIT_S = 60.0


class Served:
    """A running system; ready when the constructor returns."""

    def __init__(self, folder: Path, *flags: str, model: str = "smollm2") -> None:
        """Starts `baton serve` in `folder`; AssertionError with its messages if it does not become ready."""
        self.address = f"127.0.0.1:{choose_ports(1)[0]}"
        """Of the first router."""
        self.pids: dict[str, int] = {}
        """Process ids by name, as they were printed last."""
        self._errors = folder / "serve.stderr"
        self._lines: list[str] = []
        self._news = threading.Condition()
        self._ended = False
        started_s = time.monotonic()
        self.process = subprocess.Popen(
            # What a worker takes while idle would take CPU time from other tests.
            [
                BATON,
                "serve",
                model,
                f"--port={self.address.rpartition(':')[2]}",
                "--expected-sequence-tokens=64",
                *flags,
            ],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._errors.open("w"),
            text=True,
            start_new_session=True,
        )
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()
        try:
            self.wait_for_line("ready:", START_LIMIT_S)
            wait_until_serving(self.address, START_LIMIT_S)
        except BaseException:
            self.close()
            raise
        self.ready_s = time.monotonic() - started_s
        """From the command to health SERVING of baton.v1.Inference."""

    def wait_for_line(self, start: str, limit_s: float, count: int = 1) -> None:
        """Returns when `count` lines that begin so were printed; AssertionError if that does not happen."""
        with self._news:
            self._news.wait_for(lambda: self._ended or self._count(start) >= count, limit_s)
            assert self._count(start) >= count, f"{start!r} was not printed: {self._lines}\n{self.errors()}"

    def wait_for_output(self, text: str, limit_s: float) -> None:
        """Returns when `text` was printed; AssertionError if that does not happen."""
        with self._news:
            assert self._news.wait_for(lambda: any(text in line for line in self._lines), limit_s), f"no {text!r}"

    def errors(self) -> str:
        """Everything on its standard error so far."""
        return self._errors.read_text()

    def flag(self, process: str, name: str) -> str:
        """What a process was told by the flag --`name`."""
        words = Path(f"/proc/{self.pids[process]}/cmdline").read_text().split("\0")
        return next(word.partition("=")[2] for word in words if word.startswith(f"--{name}="))

    def shown(self) -> Pass:
        """What workers ask of callers."""
        secret = Path(self.flag("decode-0", "cluster-secret-file")).read_text().strip()
        return Pass(bearer=lambda: secret)

    def output(self) -> str:
        """Everything on its standard output so far."""
        with self._news:
            return "".join(self._lines)

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP_LIMIT_S)

    def close(self) -> None:
        """Ends what is left."""
        left = [self.process.pid, *descendants(self.process.pid)]
        if self.process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.stop()
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self._reading.join()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._news:
                self._lines.append(line)
                words = line.split()
                if words[1:2] == ["pid"]:
                    self.pids[words[0]] = int(words[2])
                self._news.notify_all()
        with self._news:
            self._ended = True
            self._news.notify_all()

    def _count(self, start: str) -> int:
        return sum(line.startswith(start) for line in self._lines)


def wait_until_serving(address: str, limit_s: float, service: str = "Inference") -> None:
    """Returns when what listens at `address` reports SERVING for baton.v1.`service`."""
    with grpc.insecure_channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service=f"baton.v1.{service}")
        watch = health_pb2_grpc.HealthStub(channel).Watch(request, timeout=limit_s, wait_for_ready=True)
        for report in watch:
            if report.status == health_pb2.HealthCheckResponse.SERVING:
                watch.cancel()
                return
    raise AssertionError(f"the health watch of {address} ended")


def descendants(pid: int) -> list[int]:
    """Ids of all processes that come from `pid`, which itself is left out."""
    children: dict[int, list[int]] = {}
    for child, parent in _processes():
        children.setdefault(parent, []).append(child)
    found, todo = [], [pid]
    while todo:
        found += (more := children.get(todo.pop(), []))
        todo += more
    return found


def is_alive(pid: int) -> bool:
    """Whether there is such a process and it has not ended; one that nobody waited for has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def pool_files(pids: list[int]) -> list[Path]:
    """Shared-memory files that belong to these processes."""
    return [path for pid in pids for path in SHARED_MEMORY.glob(f"baton-kv-{pid}-*")]


def _processes() -> Iterator[tuple[int, int]]:
    """(process id, parent's id) of everything that runs."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                yield int(folder.name), int((folder / "stat").read_text().rpartition(")")[2].split()[1])
