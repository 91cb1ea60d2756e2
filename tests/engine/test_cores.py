"""Who may use which CPUs when: own ones always, others' only while those have no steps."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.batch import Batch
from engine.cores import LINGER_S, CoreBoard, LendingRunner, create_board
from engine.request import Sample

SHARES = (frozenset({0}), frozenset({1, 2}), frozenset({3}))


class Clock:
    """Moves when told to."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def boards(tmp_path: Path, clock: Clock) -> list[CoreBoard]:
    create_board(tmp_path / "board", len(SHARES))
    boards = [CoreBoard(tmp_path / "board", slot, SHARES, clock) for slot in range(len(SHARES))]
    clock.now_s += 1
    return boards


def test_a_worker_alone_with_work_gets_everything(boards: list[CoreBoard]) -> None:
    assert boards[0].begin_step() == {0, 1, 2, 3}


def test_who_has_a_step_keeps_its_own(boards: list[CoreBoard]) -> None:
    boards[1].begin_step()
    assert boards[0].begin_step() == {0, 3}
    assert boards[2].begin_step() == {3}, "the others are busy"


def test_between_two_steps_nothing_is_lent(boards: list[CoreBoard], clock: Clock) -> None:
    boards[1].begin_step()
    boards[1].end_step()
    clock.now_s += LINGER_S / 2
    assert boards[0].begin_step() == {0, 3}
    boards[0].end_step()
    clock.now_s += LINGER_S
    assert boards[0].begin_step() == {0, 1, 2, 3}


def test_what_two_workers_own_is_lent_when_both_are_idle(tmp_path: Path, clock: Clock) -> None:
    shares = (frozenset({0}), frozenset({1}), frozenset({1}))
    create_board(tmp_path / "board", 3)
    boards = [CoreBoard(tmp_path / "board", slot, shares, clock) for slot in range(3)]
    clock.now_s += 1
    boards[1].begin_step()
    assert boards[0].begin_step() == {0}
    assert boards[2].begin_step() == {1}, "its own, even so"
    for board in boards[1:]:
        board.end_step()
    clock.now_s += 1
    assert boards[0].begin_step() == {0, 1}


def test_a_new_worker_in_the_place_of_one_that_was_killed_within_a_step_lends(
    boards: list[CoreBoard], clock: Clock, tmp_path: Path
) -> None:
    boards[1].begin_step()
    clock.now_s += 1000
    assert boards[0].begin_step() == {0, 3}, "nobody knows what it does"
    CoreBoard(tmp_path / "board", 1, SHARES, clock)
    clock.now_s += 1
    assert boards[0].begin_step() == {0, 1, 2, 3}


def test_a_board_of_other_workers_is_refused(tmp_path: Path) -> None:
    create_board(tmp_path / "board", 2)
    with pytest.raises(ValueError, match="16 bytes, 24 are needed"):
        CoreBoard(tmp_path / "board", 0, SHARES)


def test_processes_see_each_other(tmp_path: Path) -> None:
    path = tmp_path / "board"
    create_board(path, 2)
    shares = (frozenset({0}), frozenset({1}))
    program = f"""
from pathlib import Path
from engine.cores import CoreBoard
board = CoreBoard(Path({str(path)!r}), 1, ({{0}}, {{1}}))
print("made", flush=True)
for line in iter(input, "end"):
    board.begin_step() if line == "begin" else board.end_step()
    print("done", flush=True)
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdin is not None and other.stdout is not None
        assert other.stdout.readline() == "made\n"
        late = CoreBoard(path, 0, shares, lambda: 1e12)
        for line, cpus in (("begin", {0}), ("stop", {0, 1})):
            other.stdin.write(line + "\n")
            other.stdin.flush()
            assert other.stdout.readline() == "done\n"
            assert late.begin_step() == cpus
        other.stdin.write("end\n")


class Failing:
    """A runner that notes where it runs, and can fail."""

    def __init__(self) -> None:
        self.affinities: list[set[int]] = []
        self.affinities_at_end: list[set[int]] = []
        self.meanwhile: Callable[[], object] = lambda: None
        self.fails = False

    def call_between_layers(self, call: Callable[[], None]) -> None:
        self.between_layers = call

    def run(self, batch: Batch) -> list[Sample]:
        self.affinities.append(os.sched_getaffinity(0))
        self.meanwhile()
        self.between_layers()
        self.affinities_at_end.append(os.sched_getaffinity(0))
        if self.fails:
            raise RuntimeError("the device is gone")
        return []


def two_shares() -> tuple[frozenset[int], ...]:
    mine = os.sched_getaffinity(0)
    if len(mine) < 2:
        return (frozenset(mine), frozenset(mine))
    first, second, *_ = sorted(mine)
    return (frozenset({first}), frozenset({second}))


def test_a_step_gives_back_what_its_owner_wants_and_takes_no_more(tmp_path: Path) -> None:
    shares = two_shares()
    create_board(tmp_path / "board", 2)
    clock = Clock()
    boards = [CoreBoard(tmp_path / "board", slot, shares, clock) for slot in range(2)]
    inner, numbers = Failing(), list[int]()
    runner = LendingRunner(inner, boards[0], numbers.append)

    def steps() -> None:
        clock.now_s += 1
        inner.meanwhile = boards[1].begin_step
        runner.run(Batch())
        inner.meanwhile = lambda: (boards[1].end_step(), setattr(clock, "now_s", clock.now_s + 1))
        runner.run(Batch())
        inner.meanwhile = lambda: None
        runner.run(Batch())

    thread = threading.Thread(target=steps)
    thread.start()
    thread.join()
    both = shares[0] | shares[1]
    assert inner.affinities == [both, shares[0], both]
    assert inner.affinities_at_end == [shares[0], shares[0], both], "back at once; more only with the next step"
    assert numbers == ([2, 1, 2] if len(both) > 1 else [1])


def test_steps_run_where_they_may_and_other_threads_stay_where_they_are(tmp_path: Path) -> None:
    mine, shares = os.sched_getaffinity(0), two_shares()
    create_board(tmp_path / "board", 2)
    clock = Clock()
    boards = [CoreBoard(tmp_path / "board", slot, shares, clock) for slot in range(2)]
    inner, numbers = Failing(), list[int]()
    runner = LendingRunner(inner, boards[0], numbers.append)

    def steps() -> None:
        clock.now_s += 1
        runner.run(Batch())
        boards[1].begin_step()
        runner.run(Batch())
        runner.run(Batch())
        inner.fails = True
        with pytest.raises(RuntimeError, match="the device is gone"):
            runner.run(Batch())

    thread = threading.Thread(target=steps)
    thread.start()
    thread.join()
    both = shares[0] | shares[1]
    assert inner.affinities == [both, shares[0], shares[0], shares[0]]
    assert numbers == ([len(both), 1] if len(both) > 1 else [1]), "told only when it changes"
    assert os.sched_getaffinity(0) == mine
    clock.now_s += 1
    assert boards[1].begin_step() == both, "a step that failed is over, too"
