"""The command: profiles a service of its own or workers that run, shows and keeps the figures.

Owns the exit code: 1 when no step ran.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

from baton.profiling import report
from baton.profiling.figures import rows_of
from baton.profiling.load import Answers, drive, profile_all
from baton.profiling.options import STANDARD_OUTPUT, Limits, ProfileConfig, read_peaks
from baton.profiling.workers import Profile, WorkerCalls
from protos import worker_pb2
from runtime.doors import open_cluster
from runtime.errors import ConfigError


async def profile(config: ProfileConfig, output: TextIO) -> int:
    """Profiles and prints a table; the exit code."""
    measured, profiles = await (_watch(config) if config.address else drive(config, say))
    limits = limits_of(config, measured, profiles)
    rows = rows_of(profiles, limits)
    if config.json != STANDARD_OUTPUT:
        print(report.table(rows, profiles, limits), file=output)
    if config.json is not None:
        text = json.dumps(report.to_json(config, rows, profiles, limits), indent=2, allow_nan=False) + "\n"
        if config.json == STANDARD_OUTPUT:
            output.write(text)
        else:
            _write("--json", Path(config.json), lambda path: path.write_text(text, encoding="utf-8"))
    if config.perfetto is not None:
        _write("--perfetto", config.perfetto, lambda path: report.write_perfetto(profiles, limits, path))
        say(f"every step is in {config.perfetto}; open it at https://ui.perfetto.dev")
    if not rows:
        say(f"no step ran in {config.max_wait_s:g} s: profile workers while they are asked for something")
    return 0 if rows else 1


async def _watch(config: ProfileConfig) -> Answers:
    """Of workers that run, whatever they are asked for."""
    calling, measured = open_cluster(config).calling, []
    async with contextlib.AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(WorkerCalls(address, calling)) for address in config.address]
        if not config.peaks:
            say("measuring what the workers can do")
            measured = [await worker.measure() for worker in workers]
        say(f"waiting for {config.num_steps} steps of each, for at most {config.max_wait_s:g} s")
        return measured, await profile_all(workers, "", config)


def limits_of(
    config: ProfileConfig, measured: Sequence[worker_pb2.ProfileResponse], profiles: Sequence[Profile]
) -> dict[str, Limits]:
    """The peaks of each worker: as given, else as it measured; the tracer has none."""
    given = read_peaks(config.peaks)
    if given is not None:
        return {profile.response.worker_id: given for profile in profiles}
    limits = {}
    for response in measured:
        if response.HasField("peaks"):
            peaks = response.peaks
            threads = f" on {peaks.num_threads} threads" if peaks.num_threads else ""
            limits[response.worker_id] = Limits(peaks.bytes_per_s, peaks.flops_per_s, f"measured{threads}")
    return limits


def say(text: str) -> None:
    """What is going on, beside what is asked for."""
    print(text, file=sys.stderr, flush=True)


def _write(flag: str, path: Path, write: Callable[[Path], object]) -> None:
    try:
        write(path)
    except OSError as error:
        raise ConfigError(f"{flag}: {str(path)!r} cannot be written: {error}") from None
