"""The supervisor with real processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import redis.asyncio

from baton import metadata_server
from baton.supervisor import Change, StartFailed, Supervisor
from baton.topology import ProcessSpec, choose_ports

FAKE = str(Path(__file__).with_name("fake_child.py"))


def fake(name: str, *arguments: str, gates: bool = True, rank: int = 0) -> ProcessSpec:
    return ProcessSpec(name, (sys.executable, FAKE, *arguments), gates_readiness=gates, stop_rank=rank)


class Record:
    """Remembers all changes and lets a test wait for one."""

    def __init__(self) -> None:
        self.changes: list[Change] = []
        self._news = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()

    def __call__(self, change: Change) -> None:
        self.changes.append(change)
        task = asyncio.create_task(self._notify())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _notify(self) -> None:
        async with self._news:
            self._news.notify_all()

    def pids(self, name: str) -> list[int]:
        return [change.pid for change in self.changes if change.name == name and change.kind == "started"]

    def readies(self, name: str) -> list[int]:
        found = (c for c in self.changes if c.name == name and c.report is not None and c.report.state == "ready")
        return [change.pid for change in found]

    async def wait_for_readies(self, name: str, count: int) -> None:
        async with asyncio.timeout(20), self._news:
            await self._news.wait_for(lambda: len(self.readies(name)) >= count)


@contextlib.asynccontextmanager
async def supervising(drain_timeout_s: float = 5.0) -> AsyncIterator[tuple[Supervisor, Record]]:
    record = Record()
    supervisor = Supervisor(record, drain_timeout_s=drain_timeout_s, backoff_first_s=0.01)
    try:
        yield supervisor, record
    finally:
        await supervisor.stop()


def has_ended(pid: int, within_s: float) -> bool:
    """Waits for a process that need not be our child."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        readable, _, _ = select.select([descriptor], [], [], within_s)
        return bool(readable)
    finally:
        os.close(descriptor)


async def test_start_waits_for_those_that_gate_readiness() -> None:
    async with supervising() as (supervisor, record):
        await supervisor.start([fake("a", "serve"), fake("b", "never-ready", gates=False)])
        assert len(record.readies("a")) == 1
        assert record.readies("b") == []
    assert all(has_ended(pid, 0) for name in "ab" for pid in record.pids(name))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("fail", "model /nowhere: no such folder"), "bad: model /nowhere: no such folder"),
        (("exit", "3"), "bad: exited with code 3; its messages are above"),
        (("garbage",), "bad: "),
    ],
)
async def test_a_child_that_fails_at_start_fails_the_start(arguments: tuple[str, ...], message: str) -> None:
    async with supervising() as (supervisor, record):
        with pytest.raises(StartFailed) as caught:
            await asyncio.wait_for(supervisor.start([fake("good", "never-ready"), fake("bad", *arguments)]), 20)
        assert caught.value.message.startswith(message)
    assert all(has_ended(pid, 0) for pid in record.pids("good"))


async def test_a_command_that_does_not_exist_fails_the_start() -> None:
    async with supervising() as (supervisor, _):
        with pytest.raises(StartFailed, match="cannot start /nonexistent"):
            await supervisor.start([ProcessSpec("x", ("/nonexistent",), gates_readiness=True)])


async def start_with_mortal(supervisor: Supervisor, folder: Path) -> None:
    """A child that stays, and one that dies twice, though not before all have started."""
    fifo = folder / "lives.fifo"
    os.mkfifo(fifo)
    await supervisor.start([fake("steady", "serve"), fake("mortal", "die-after-ready-until", str(folder / "lives"))])
    await asyncio.to_thread(lambda: fifo.open("w").close())


async def test_a_dead_child_is_started_again_with_growing_delay(tmp_path: Path) -> None:
    async with supervising() as (supervisor, record):
        await start_with_mortal(supervisor, tmp_path)
        await record.wait_for_readies("mortal", 3)
        deaths = [change for change in record.changes if change.kind == "died"]
        assert [change.exit_text for change in deaths] == ["killed by SIGKILL"] * 2
        assert [change.restart_in_s for change in deaths] == [0.01, 0.02]
        assert len(set(record.pids("mortal"))) == 3
        assert len(record.pids("steady")) == 1


async def test_the_delay_begins_anew_after_a_stable_life(tmp_path: Path) -> None:
    record = Record()
    supervisor = Supervisor(record, drain_timeout_s=5, backoff_first_s=0.01, stable_s=0.0)
    try:
        await start_with_mortal(supervisor, tmp_path)
        await record.wait_for_readies("mortal", 3)
        assert [change.restart_in_s for change in record.changes if change.kind == "died"] == [0.01, 0.01]
    finally:
        await supervisor.stop()


async def test_a_child_that_became_another_program_is_started_as_that(tmp_path: Path) -> None:
    """Again and again: what it became is what it is."""
    lives, fifo = tmp_path / "lives", tmp_path / "lives.fifo"
    os.mkfifo(fifo)
    async with supervising() as (supervisor, record):
        await supervisor.start([fake("steady", "serve"), fake("changed", "goes-on-as", str(lives))])
        await asyncio.to_thread(lambda: fifo.open("w").close())
        for count in (2, 3):
            await record.wait_for_readies("changed", count)
            assert lives.read_text().split() == list(map(str, record.pids("changed")[1:]))
            os.kill(record.pids("changed")[-1], signal.SIGKILL)


async def test_stop_ends_lower_ranks_first(tmp_path: Path) -> None:
    ends = tmp_path / "ends"
    async with supervising() as (supervisor, record):
        await supervisor.start([fake(f"rank{rank}", "record-end", str(ends), rank=rank) for rank in (2, 0, 1)])
        expected = [record.pids(f"rank{rank}")[0] for rank in (0, 1, 2)]
    assert [int(pid) for pid in ends.read_text().split()] == expected


async def test_a_child_that_ignores_sigterm_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.supervisor.KILL_MARGIN_S", 0.2)
    async with supervising(drain_timeout_s=0.1) as (supervisor, record):
        await supervisor.start([fake("stubborn", "ignore-term")])
        await asyncio.wait_for(supervisor.stop(), 5)
        assert has_ended(record.pids("stubborn")[0], 0)


async def test_stop_when_interrupted_kills_at_once() -> None:
    async with supervising(drain_timeout_s=60) as (supervisor, record):
        await supervisor.start([fake("stubborn", "ignore-term")])
        stopping = asyncio.create_task(supervisor.stop())
        await asyncio.sleep(0)
        stopping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stopping
        assert has_ended(record.pids("stubborn")[0], 5)


async def test_processes_of_a_child_die_with_it(tmp_path: Path) -> None:
    async with supervising() as (supervisor, _):
        await supervisor.start([fake("parent", "grandchild", str(tmp_path / "pid"))])
        grandchild = int((tmp_path / "pid").read_text())
        assert not has_ended(grandchild, 0)
    assert has_ended(grandchild, 5)


async def test_children_start_in_a_session_of_their_own() -> None:
    async with supervising() as (supervisor, record):
        await supervisor.start([fake("a", "serve")])
        assert os.getsid(record.pids("a")[0]) != os.getsid(0)


async def test_cpus_are_set() -> None:
    cpu = min(os.sched_getaffinity(0))
    async with supervising() as (supervisor, record):
        spec = fake("a", "serve")
        await supervisor.start([ProcessSpec(spec.name, spec.argv, gates_readiness=True, cpus=frozenset({cpu}))])
        assert os.sched_getaffinity(record.pids("a")[0]) == {cpu}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
async def test_no_child_outlives_the_supervisor(number: signal.Signals) -> None:
    """The supervisor is a process of its own here, with a fake child, a stubborn one's group, and a real Redis."""
    program = Path(__file__).with_name("supervise.py")
    (port,) = choose_ports(1)
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(program), str(port), stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None
    line = await asyncio.wait_for(process.stdout.readline(), 30)
    pids = [int(word) for word in line.split()]
    assert len(pids) == 3
    assert not any(has_ended(pid, 0) for pid in pids)
    os.kill(process.pid, number)
    await asyncio.wait_for(process.wait(), 20)
    assert all(has_ended(pid, 10) for pid in pids)


async def test_redis_is_started_answers_and_comes_back_when_killed() -> None:
    (port,) = choose_ports(1)
    async with supervising() as (supervisor, record):
        await supervisor.start([metadata_server.process_spec(port)])
        client = redis.asyncio.Redis(host="127.0.0.1", port=port)
        info = await client.info()
        os.kill(info["process_id"], signal.SIGKILL)
        await record.wait_for_readies("redis", 2)
        again = await client.info()
        assert again["process_id"] != info["process_id"]
        await client.aclose()
    assert has_ended(again["process_id"], 5)


async def test_redis_on_a_taken_port_fails_with_the_servers_words() -> None:
    (port,) = choose_ports(1)
    listener = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", port)
    async with listener, supervising() as (supervisor, _):
        with pytest.raises(StartFailed, match=f"redis: the server at 127.0.0.1:{port} ended by itself, saying: "):
            await supervisor.start([metadata_server.process_spec(port)])
