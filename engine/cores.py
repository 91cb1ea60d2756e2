"""Cores that the workers of one machine lend each other, so that a pool without work does not leave its share unused.

1. Each worker owns CPUs. The board is a small file that all of them map: for each, when its last step ended.
2. Before a step a worker writes that it is busy, and takes its own CPUs and those of workers that have no steps.
3. Between layers it looks whether the owners still have none, and gives back what they want. So an owner that gets
   work shares its CPUs for a few layers of a borrower's step at most.

Owns the board, how many threads torch computes with and where the thread that runs steps may run. Helper threads of an
OpenMP team inherit its place when the team grows, and end when it shrinks. A worker that was killed within a step
counts as busy until it is started again: its CPUs are idle then, never taken from others.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from engine.batch import Answer, Batch, Runner
from engine.request import Sample

SLOT_BYTES = 8
LINGER_S = 0.02
"""How long a worker without a step keeps its CPUs: longer than it takes from one step to the next."""


def create_board(path: Path, num_workers: int) -> None:
    """Makes the file, of workers that have no steps yet."""
    path.write_bytes(bytes(SLOT_BYTES * num_workers))


class CoreBoard:
    """The board as one worker sees it."""

    def __init__(
        self,
        path: Path,
        slot: int,
        shares: Sequence[frozenset[int]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`shares` are the CPUs of each worker, by slot; `slot` is this one. The clock is one for all processes of a
        machine. Raises OSError when the file cannot be mapped, ValueError when it is not of as many workers."""
        self._shares = shares
        self._slot = slot
        self._clock = clock
        self._lenders: list[int] = []  # to this worker's step
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        if len(self._map) != SLOT_BYTES * len(shares):
            raise ValueError(f"{path}: {len(self._map)} bytes, {SLOT_BYTES * len(shares)} are needed")
        self._busy_until_s = memoryview(self._map).cast("d")
        self.end_step()

    def begin_step(self) -> frozenset[int]:
        """Says that this worker is busy, and answers the CPUs it may use until `end_step`."""
        self._busy_until_s[self._slot] = math.inf
        idle_since_s = self._clock() - LINGER_S
        own = self._shares[self._slot]
        lent, needed, self._lenders = set[int](), set[int](), []
        for slot, share in enumerate(self._shares):
            if slot == self._slot:
                continue
            if self._busy_until_s[slot] < idle_since_s:
                lent.update(share)
                self._lenders.append(slot)
            else:
                needed.update(share)
        # Workers may share CPUs: one of them at work is enough to keep them.
        return own | (lent - needed)

    def is_wanted_back(self) -> bool:
        """Whether a worker whose CPUs this step took is busy by now."""
        return any(self._busy_until_s[slot] == math.inf for slot in self._lenders)

    def end_step(self) -> None:
        """Says that no step runs here now."""
        self._busy_until_s[self._slot] = self._clock()

    def close(self) -> None:
        """Lets go of the file."""
        self._busy_until_s.release()
        self._map.close()


class LendingRunner(Runner):
    """A runner whose steps use the CPUs that are to be had."""

    def __init__(self, runner: Runner, board: CoreBoard, set_num_threads: Callable[[int], None]) -> None:
        self._runner = runner
        self._board = board
        self._set_num_threads = set_num_threads
        self._cpus: frozenset[int] = frozenset()
        runner.call_between_layers(self._give_back)

    def run(self, batch: Batch) -> list[Sample]:
        """As the runner itself."""
        return self._with_cores(lambda: self._runner.run(batch))

    def call_aside(self, call: Callable[[], Answer]) -> Answer:
        """As the runner itself."""
        return self._with_cores(lambda: self._runner.call_aside(call))

    def call_between_layers(self, call: Callable[[], None]) -> None:
        """Beside what it does there itself."""

        def both() -> None:
            self._give_back()
            call()

        self._runner.call_between_layers(both)

    def _with_cores(self, call: Callable[[], Answer]) -> Answer:
        cpus = self._board.begin_step()
        try:
            self._use(cpus)
            return call()
        finally:
            self._board.end_step()

    def _give_back(self) -> None:
        if self._board.is_wanted_back():
            self._use(self._cpus & self._board.begin_step())  # less at most, while a step runs

    def _use(self, cpus: frozenset[int]) -> None:
        if cpus != self._cpus:
            os.sched_setaffinity(0, cpus)  # of the calling thread alone
            self._set_num_threads(len(cpus))
            self._cpus = cpus


@contextlib.contextmanager
def running_on(cpus: frozenset[int]) -> Iterator[None]:
    """Lets this thread run on `cpus`, if any are given, while torch is imported.

    Its OpenMP counts then how many CPUs there are. With more threads than that, lent CPUs included, it would put them
    to sleep at every barrier.
    """
    before = os.sched_getaffinity(0)
    try:
        if cpus:
            with contextlib.suppress(OSError):  # some are not this process's: it never gets them lent either
                os.sched_setaffinity(0, cpus)
        yield
    finally:
        os.sched_setaffinity(0, before)
