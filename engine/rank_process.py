"""`python -m engine.rank_process FD`: a rank other than 0, child of a worker (`ranks.py`), which holds the other end.

1. Read what to load from the pipe; load it; meet the other ranks.
2. Compute each batch that comes, and forget the result: rank 0 samples.
3. End when the pipe does, at once, whatever is being computed; end when a step fails, which ends the worker.

Takes no signal that is meant for the worker: it ends with that. Owns no scheduling and no blocks.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import sys
import threading
from multiprocessing.connection import Connection

from engine.batch import Batch
from engine.ranks import RankTask
from runtime import logs
from runtime.errors import BatonError

LOG = logging.getLogger(__name__)


def main(pipe: Connection) -> int:
    """Runs until the pipe ends; answers the exit code of a rank that failed."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    task: RankTask
    name, log_level, task = pipe.recv()
    logs.configure(log_level, name)
    batches: queue.SimpleQueue[Batch] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(pipe, batches), daemon=True).start()
    # torch takes seconds: the worker's end is watched for from before.
    from engine.rank_model import load_rank

    try:
        model = load_rank(task)
        while True:
            model.logits(batches.get())
    except BatonError as error:
        LOG.error("%s", error.message)
    except Exception:
        LOG.exception("a step failed")
    return 1


def _read(pipe: Connection, batches: queue.SimpleQueue[Batch]) -> None:
    """A thread, because the other one may be in the middle of a step that never ends now."""
    try:
        while True:
            batches.put(pipe.recv())
    except (EOFError, ConnectionError):
        os._exit(0)


if __name__ == "__main__":
    # Nothing is worth a tidy end that might be waited for.
    os._exit(main(Connection(int(sys.argv[1]), writable=False)))
