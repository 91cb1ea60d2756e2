"""The ranks of a worker live and die with it: none goes on without the others, and none is left over."""

from __future__ import annotations

import os
import queue
import select
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import Process

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))
sys.path.insert(0, str(Path(__file__).parents[1] / "model"))

from cluster import LIMIT_S
from served import descendants
from tiny_models import family_config, random_weights, write_folder

from baton import cli
from baton.topology import choose_ports
from engine.ranks import Ranks, RankTask
from engine.worker import FAILED_EXIT_CODE
from kvstore.layout import KVLayout

END_LIMIT_S = 5.0


class Watched:
    """A process that is not this one's child, by a descriptor that is readable when it has ended."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._fd = os.pidfd_open(pid)

    def has_ended(self, limit_s: float) -> bool:
        """Whether it ends within that time."""
        return bool(select.select([self._fd], [], [], limit_s)[0])

    def close(self) -> None:
        os.close(self._fd)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = family_config("llama-gqa-tied")
    return write_folder(tmp_path_factory.mktemp("model"), config, random_weights(config))


@pytest.fixture
def worker(model: Path) -> Iterator[Process]:
    """A mixed worker of two ranks, ready."""
    port = choose_ports(1)[0]
    flags = (f"--model={model}", "--role=mixed", "--worker-id=w", "--tensor-parallel-size=2", "--num-kv-blocks=16")
    process = Process("decode_svc", "w", port, *flags)
    process.start()
    process.until("ready")
    yield process
    if process.is_running:
        process.kill()


@pytest.fixture
def rank(worker: Process) -> Iterator[Watched]:
    """Its other rank."""
    (pid,) = descendants(worker.pid)
    watched = Watched(pid)
    yield watched
    watched.close()


def test_a_rank_that_is_killed_ends_the_worker(worker: Process, rank: Watched) -> None:
    """At once, with the reason, and non-zero, so that it is started again."""
    os.kill(rank.pid, signal.SIGKILL)
    with pytest.raises(AssertionError, match="rank 1 was killed by signal 9"):
        worker.until("draining")
    assert worker.wait(END_LIMIT_S) == FAILED_EXIT_CODE


def test_a_worker_that_is_killed_takes_its_ranks_along(worker: Process, rank: Watched) -> None:
    worker.kill()
    assert rank.has_ended(END_LIMIT_S)


def test_a_worker_that_ends_in_good_order_ends_its_ranks(worker: Process, rank: Watched) -> None:
    """Signals to all of its group are the worker's business alone."""
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(rank.pid, number)
    assert not rank.has_ended(0.2)
    worker.terminate()
    assert worker.wait(LIMIT_S) == 0
    assert rank.has_ended(0)


def test_a_worker_that_takes_another_role_has_ranks_of_its_own(worker: Process, rank: Watched) -> None:
    assert cli.run(["drain", worker.address, "--next-role=decode"]) == 0
    worker.until("ready")
    assert rank.has_ended(END_LIMIT_S)
    (new,) = descendants(worker.pid)
    assert new != rank.pid
    worker.terminate()
    assert worker.wait(LIMIT_S) == 0


def test_a_rank_that_cannot_load_ends_the_worker(model: Path) -> None:
    """It says why in its log; the worker hears of the end alone."""
    failures: queue.SimpleQueue[str] = queue.SimpleQueue()
    ranks = Ranks(2, "w", "error", failures.put)
    layout = KVLayout(3, 16, 2, 16, "float32", num_ranks=2)
    task = RankTask(str(model / "nowhere"), "float32", "none", "cpu", 1, layout, 16, None, rank=1)
    try:
        ranks.start([task])
        assert failures.get(timeout=LIMIT_S) == "rank 1 ended with exit code 1"
    finally:
        ranks.close()
