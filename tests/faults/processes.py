"""A whole system as real processes, of which a test may kill, stop and restart any.

`System` starts Redis, workers and a router on ports that stay theirs, so that a process that is started again is found
where it was. `Process` is one of them; what it reports on its status socket is read here.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

from redis_process import RedisServer

from baton.topology import choose_ports
from runtime.status import Report, parse_report

ROOT = Path(__file__).parents[2]
START_S = 30.0
SILENCE_S = 1.5
"""How long the router takes a silent worker for alive; workers report at least once a second."""


class Process:
    """One process of the system."""

    def __init__(self, module: str, name: str, port: int, *flags: str) -> None:
        """`module` is run with -m, or as a file if it is one."""
        self.name, self.port = name, port
        self.address = f"127.0.0.1:{port}"
        self.is_stopped = False
        program = [module] if module.endswith(".py") else ["-m", module]
        self._argv = [sys.executable, "-P", *program, "--model=tracer", f"--port={port}", *flags]
        self._popen: subprocess.Popen[bytes] | None = None
        self._reports: socket.socket
        self._unread = b""

    @property
    def is_running(self) -> bool:
        return self._popen is not None and self._popen.poll() is None

    @property
    def pid(self) -> int:
        assert self._popen is not None
        return self._popen.pid

    def start(self) -> None:
        """Returns at once; `until` waits."""
        self._reports, child = socket.socketpair()
        self._reports.settimeout(START_S)
        self._unread = b""
        with child:
            self._popen = subprocess.Popen(
                [*self._argv, f"--status-fd={child.fileno()}", "--log-level=warning"],
                cwd=ROOT,
                pass_fds=[child.fileno()],
            )

    def until(self, state: str) -> Report:
        """Waits for a report."""
        while True:
            while b"\n" in self._unread:
                line, _, self._unread = self._unread.partition(b"\n")
                report = parse_report(line.decode())
                if report.state == state:
                    return report
                assert report.state != "failed", f"{self.name}: {report.error}"
            piece = self._reports.recv(4096)
            assert piece, f"{self.name} ended before it was {state}"
            self._unread += piece

    def kill(self) -> None:
        """Ends it without a goodbye."""
        assert self._popen is not None
        self._popen.kill()
        self._popen.wait()
        self._reports.close()

    def stop(self) -> None:
        """It keeps its connections and does nothing."""
        assert self._popen is not None
        self.is_stopped = True
        self._popen.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Ends `stop`."""
        assert self._popen is not None
        self.is_stopped = False
        self._popen.send_signal(signal.SIGCONT)

    def terminate(self) -> None:
        """Asks it to end in good order."""
        assert self._popen is not None
        self._popen.terminate()

    def wait(self, limit_s: float) -> int:
        """Waits for its end and answers the exit code."""
        assert self._popen is not None
        code = self._popen.wait(limit_s)
        self._reports.close()
        return code


class System:
    """Redis, two prefill and two decode workers, a router."""

    def __init__(self, *worker_flags: str) -> None:
        self.redis = RedisServer()
        ports = iter(choose_ports(5))
        shared = (f"--redis-url={self.redis.url}", "--drain-timeout-s=0.3")
        sizes = ("--num-kv-blocks=320", "--chunk-size=64", "--max-num-seqs=32", *worker_flags)
        self.prefills = [
            Process("prefill_svc", f"p{i}", next(ports), f"--worker-id=p{i}", *shared, *sizes) for i in (0, 1)
        ]
        self.decodes = [
            Process("decode_svc", f"d{i}", next(ports), f"--worker-id=d{i}", *shared, *sizes) for i in (0, 1)
        ]
        self._router_flags = (
            *shared,
            f"--prefill-workers={','.join(each.address for each in self.prefills)}",
            f"--decode-workers={','.join(each.address for each in self.decodes)}",
            f"--worker-silence-s={SILENCE_S}",
        )
        self.router = self.new_router("r0", next(ports))

    @property
    def workers(self) -> list[Process]:
        return [*self.prefills, *self.decodes]

    def new_router(self, name: str, port: int, *flags: str) -> Process:
        """Another router over the same workers, not started."""
        return Process("router", name, port, f"--router-id={name}", *self._router_flags, *flags)

    def start(self) -> None:
        """Starts what does not run and returns when all of it listens."""
        if not self.redis.is_running:
            self.redis.start()
        missing = [process for process in (*self.workers, self.router) if not process.is_running]
        for process in missing:
            process.start()
        for process in missing:
            process.until("listening")
        for process in self.workers:
            if process.is_stopped:
                process.go_on()

    def end(self) -> None:
        """Kills everything."""
        for process in (self.router, *self.workers):
            if process.is_running:
                process.kill()
        self.redis.kill()
