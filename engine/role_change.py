"""The command line with which a drained worker starts again in another role.

The process replaces itself: its id, its supervisor and its address stay, its epoch is a new one. Every worker takes the
same options, so only the module and `--role` differ. Owns no process: whoever ends the worker executes the line, and
tells it to the supervisor, which uses it when that process dies.
"""

from __future__ import annotations

from collections.abc import Sequence

from protos import inference_pb2
from runtime.errors import FailedPrecondition

MODULES: dict[inference_pb2.WorkerRole, tuple[str, str]] = {
    inference_pb2.WORKER_ROLE_PREFILL: ("prefill_svc", "decode"),
    inference_pb2.WORKER_ROLE_DECODE: ("decode_svc", "decode"),
    inference_pb2.WORKER_ROLE_MIXED: ("decode_svc", "mixed"),
}
"""Module and --role, which the prefill module does not look at."""


def command_line(argv: Sequence[str], next_role: inference_pb2.WorkerRole, port: int) -> list[str]:
    """`argv`, this process's own, changed to `next_role` and to the port that it has now.

    Raises FailedPrecondition unless the process was started as `python -m prefill_svc` or `decode_svc`.
    """
    known = {module for module, _ in MODULES.values()}
    index = argv.index("-m") + 1 if "-m" in argv[:-1] else 0
    if argv[index] not in known:
        raise FailedPrecondition(f"next_role: only what runs as python -m {' or '.join(sorted(known))} can change it")
    module, role = MODULES[next_role]
    # Of a flag that is given twice the last one holds.
    return [*argv[:index], module, *argv[index + 1 :], f"--role={role}", f"--port={port}"]
