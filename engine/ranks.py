"""The processes of a model that several ranks compute, as rank 0, which is the worker itself, has them.

1. `start` begins a process for each other rank (`rank_process.py`), a fresh one, and tells it what to load.
2. Each step's batch goes to all of them, down a pipe each; they compute it along with rank 0, and answer nothing.
3. A pipe that ends tells a rank that the worker is gone, however it went: it ends at once. A rank that ends ends the
   worker at once, by `on_failure`; so does a step that fails here, since the others are in the middle of it.

Owns those processes and their pipes. Knows no torch, and nothing of what ranks compute.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from engine.batch import Batch, SampleRow
from engine.request import SamplingParams
from kvstore.layout import KVLayout
from runtime import logs
from runtime.errors import ConfigError

if TYPE_CHECKING:
    from engine.config import WorkerConfig

END_LIMIT_S = 5.0
"""How long a rank may take to end when its pipe has."""
ANYHOW = SamplingParams()


@dataclass(frozen=True, slots=True)
class RankTask:
    """What a rank is to load."""

    model: str
    """As the worker is told."""
    dtype: str
    """What it computes in, as the worker found it."""
    quantization: Literal["none", "int8"]
    """As the worker is told."""
    device: str
    """Its own."""
    num_threads: int
    """On a CPU, threads that it computes with."""
    layout: KVLayout
    """Of the pool, the planes of all ranks."""
    num_blocks: int
    """Blocks that the pool may ever have."""
    pool_file: Path | None
    """Where the pool lies, in host memory; None: the rank's part of it lies in its device."""
    rank: int = 0
    """Its place."""
    meeting_file: Path = Path()
    """Where the ranks find each other."""


def open_ranks(config: WorkerConfig, role: str, name: str, on_failure: Callable[[str], None]) -> Ranks | None:
    """Those of a worker, not started yet; None where it is one process. Raises ConfigError for a role that it cannot
    have."""
    size = config.tensor_parallel_size
    if size == 1:
        return None
    if config.device != "cpu" and role != "mixed":
        raise ConfigError(
            f"--tensor-parallel-size: KV of several ranks does not leave {config.device}, so that the role must be "
            f"mixed; got {size}, role {role}"
        )
    return Ranks(size, name, config.log_level, on_failure)


class Ranks:
    """All ranks but rank 0."""

    def __init__(self, num_ranks: int, name: str, log_level: logs.Level, on_failure: Callable[[str], None]) -> None:
        """`name` is the worker's. `on_failure` is called, in any thread, with what happened."""
        self.num_ranks = num_ranks
        """Rank 0 included."""
        self._name = name
        self._log_level = log_level
        self.fail = on_failure
        """Ends the worker, since ranks do not agree any more where they are."""
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pipes: list[Connection] = []
        self._watches: list[threading.Thread] = []
        self._is_closing = False

    def start(self, tasks: list[RankTask]) -> None:
        """Starts a process for each task. They load while the caller does."""
        for task in tasks:
            theirs, ours = Pipe(duplex=False)
            # As this process finds its modules; spawned, since a device cannot be used in a forked child.
            isolated = ["-P"] if sys.flags.safe_path else []
            process = subprocess.Popen(
                [sys.executable, *isolated, "-m", "engine.rank_process", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
            watch = threading.Thread(target=self._watch, args=(process, task.rank), daemon=True)
            self._watches.append(watch)
            watch.start()
            ours.send((f"{self._name}-rank{task.rank}", self._log_level, task))

    def send(self, batch: Batch) -> None:
        """Has all of them compute a batch, and nothing be sampled from it."""
        bare = [SampleRow(row.row, row.position, ANYHOW) for row in batch.sample_rows]
        message = pickle.dumps(replace(batch, sample_rows=bare))
        for pipe in self._pipes:
            pipe.send_bytes(message)

    def close(self) -> None:
        """Ends them."""
        self._is_closing = True
        for pipe in self._pipes:
            pipe.close()
        for process, watch in zip(self._processes, self._watches, strict=True):
            watch.join(END_LIMIT_S)
            if watch.is_alive():
                process.kill()
                watch.join()

    def _watch(self, process: subprocess.Popen[bytes], rank: int) -> None:
        code = process.wait()
        if not self._is_closing:
            how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            self.fail(f"rank {rank} {how}")
