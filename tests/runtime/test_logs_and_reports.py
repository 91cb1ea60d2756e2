"""What a process has besides configuration and gRPC: plug-ins, logs, status reports, signals."""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime import logs, plugins, rpc, status
from runtime.errors import ConfigError


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    folder = tmp_path / "example_plugins"
    folder.mkdir()
    for name in ("__init__", "base", "_inside", "alpha", "beta"):
        (folder / f"{name}.py").write_text(f"VALUE = {name!r}\n")
    (folder / "broken.py").write_text("raise RuntimeError('imported')\n")
    (folder / "nested").mkdir()
    (folder / "nested" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    return "example_plugins"


def test_plugins_are_the_files_of_their_package(package: str) -> None:
    assert plugins.available(package) == ["alpha", "beta", "broken"]
    assert plugins.load(package, "alpha", "VALUE") == "alpha"


@pytest.mark.parametrize("name", ["gamma", "", "base", "_inside", "__init__", "nested", "alpha.VALUE", "../alpha"])
def test_an_unknown_plugin_is_refused_with_those_that_exist(package: str, name: str) -> None:
    with pytest.raises(ConfigError, match="available: alpha, beta, broken"):
        plugins.load(package, name, "VALUE")


def test_a_bug_in_a_plugin_is_not_hidden(package: str) -> None:
    with pytest.raises(RuntimeError, match="imported"):
        plugins.load(package, "broken", "VALUE")
    with pytest.raises(AttributeError):
        plugins.load(package, "alpha", "OTHER")


@pytest.fixture
def restored_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.mark.usefixtures("restored_logging")
def test_logs_are_single_lines_with_process_and_module(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("debug", "worker-1")
    logs.configure("info", "worker-1")
    log = logging.getLogger("some.module")
    log.debug("hidden")
    log.info("said by %s", "a\nforged line")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(" INFO worker-1 some.module: said by a\\nforged line")


@pytest.mark.usefixtures("restored_logging")
def test_logs_keep_tracebacks(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("info", "worker-1")
    try:
        raise ValueError("why")
    except ValueError:
        logging.getLogger("m").exception("failed")
    assert "ValueError: why" in capsys.readouterr().err.splitlines()


def test_reports_arrive_as_lines() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        reporter = status.StatusReporter(theirs.fileno(), on_orphaned=lambda: None)
        reporter.loading(0.41234, "weights")
        reporter.listening("127.0.0.1:5")
        reporter.ready()
        reporter.draining()
        reporter.failed("why\nnot")
        lines = ours.recv(4096).decode().splitlines()
    assert json.loads(lines[0]) == {"state": "loading", "progress": 0.412, "detail": "weights"}
    assert [status.parse_report(line) for line in lines] == [
        status.Report("loading", progress=0.412, detail="weights"),
        status.Report("listening", address="127.0.0.1:5"),
        status.Report("ready"),
        status.Report("draining"),
        status.Report("failed", error="why\nnot"),
    ]


@pytest.mark.parametrize(
    "line", ["", "text", "[]", "{}", '{"state": "happy"}', '{"state": "loading", "progress": "x"}']
)
def test_what_is_no_report_is_refused(line: str) -> None:
    with pytest.raises(ValueError):
        status.parse_report(line)


def test_without_a_descriptor_reports_go_nowhere() -> None:
    reporter = status.StatusReporter(None)
    assert not reporter.enabled
    reporter.ready()


def test_a_plain_pipe_takes_reports() -> None:
    read, write = os.pipe()
    status.StatusReporter(write).ready()
    assert os.read(read, 100) == b'{"state": "ready"}\n'
    os.close(read)
    os.close(write)


def test_a_closed_descriptor_is_refused() -> None:
    read, write = os.pipe()
    os.close(read)
    os.close(write)
    with pytest.raises(ConfigError, match=f"--status-fd: {write} is not an open descriptor"):
        status.StatusReporter(write)


def test_the_end_of_the_supervisor_is_noticed_and_reporting_goes_on() -> None:
    orphaned = threading.Event()
    ours, theirs = socket.socketpair()
    with theirs:
        reporter = status.StatusReporter(theirs.fileno(), on_orphaned=orphaned.set)
        assert not orphaned.is_set()
        ours.close()
        assert orphaned.wait(5)
        reporter.ready()
        assert not reporter.enabled


def test_an_orphan_that_is_busy_ends_itself() -> None:
    """Busy in the main thread, as while loading; a process that has no handler for SIGTERM ends at once."""
    program = "import sys, threading\nfrom runtime.status import StatusReporter\n"
    program += "StatusReporter(int(sys.argv[1])).ready()\nthreading.Event().wait()\n"
    ours, theirs = socket.socketpair()
    child = subprocess.Popen([sys.executable, "-c", program, str(theirs.fileno())], pass_fds=[theirs.fileno()])
    theirs.close()
    assert ours.recv(100) == b'{"state": "ready"}\n'
    ours.close()
    assert child.wait(10) == -signal.SIGTERM


async def test_the_first_signal_is_returned_and_handlers_are_restored() -> None:
    before = signal.getsignal(signal.SIGTERM)
    waiting = asyncio.create_task(rpc.wait_for_shutdown_signal())
    asyncio.get_running_loop().call_soon(os.kill, os.getpid(), signal.SIGTERM)
    assert await asyncio.wait_for(waiting, 5) is signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_process_that_does_not_end_is_ended_and_says_what_it_waits_for() -> None:
    """Coroutines of the gRPC library, whose frames have no lines, among it."""
    code = """
import asyncio
import grpc.aio
from runtime.status import end_by_force

async def waits_for_ever():
    await asyncio.Event().wait()

async def main():
    server = grpc.aio.server()
    server.add_insecure_port("127.0.0.1:0")
    await server.start()
    end_by_force(0.2)
    await asyncio.create_task(waits_for_ever())

asyncio.run(main())
"""
    run = [sys.executable, "-P", "-c", code]
    ended = subprocess.run(run, capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == 1
    assert "not ended within 0.2 s" in ended.stderr and "in waits_for_ever" in ended.stderr
    assert "in _server_main_loop" in ended.stderr
