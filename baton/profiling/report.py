"""How profiles are shown and kept: a table, JSON with every step, and a file for Perfetto.

Owns the three formats; docs/profile.md describes them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict

from baton.bench.report import commit, machine
from baton.perfetto import TraceFile
from baton.profiling.figures import Row, bound_of, kind_of, roofline_share
from baton.profiling.options import Limits, ProfileConfig
from baton.profiling.workers import Profile
from protos import worker_pb2
from runtime import config as configuration

MIB = 1 << 20
COLUMNS = (
    "",
    "worker",
    "steps",
    "ms",
    "tokens",
    "batch",
    "GFLOP/s",
    "of peak",
    "GB/s",
    "of peak",
    "roofline",
    "KV MiB",
    "bound by",
)
UNIT_COLUMNS = ("cube", "vector", "MTE2", "HBM GB/s")
"""Of devices that count."""
NUM_TEXT_COLUMNS = 2


def table(rows: Sequence[Row], profiles: Sequence[Profile], limits: Mapping[str, Limits]) -> str:
    """A line for each row, then one for each worker."""
    has_units = any(row.units is not None for row in rows)
    cells = [(*COLUMNS, *(UNIT_COLUMNS if has_units else ())), *(_cells(row, has_units) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for line in cells:
        padded = (
            cell.ljust(width) if index < NUM_TEXT_COLUMNS else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        lines.append("  ".join(padded).rstrip())
    last = {profile.response.worker_id: profile.response for profile in profiles}
    return "\n".join([*lines, "", *(_worker_line(each, limits.get(name)) for name, each in last.items())])


def _cells(row: Row, has_units: bool) -> tuple[str, ...]:
    units = row.units
    shown = (
        row.name,
        row.worker_id,
        str(row.num_steps),
        f"{row.step_ms:.2f}",
        f"{row.num_tokens:.0f}",
        f"{row.num_sequences:.0f}",
        _figure(row.flops_per_s, 1e9),
        _percent(row.compute_share),
        _figure(row.bytes_per_s, 1e9),
        _percent(row.bandwidth_share),
        _percent(row.roofline_share),
        f"{row.kv_bytes / MIB:.0f}",
        row.bound_by or "-",
    )
    if not has_units:
        return shown
    shares = (None, None, None) if units is None else (units.cube, units.vector, units.load)
    return (*shown, *map(_percent, shares), _figure(None if units is None else units.memory_bytes_per_s, 1e9))


def _figure(value: float | None, unit: float) -> str:
    return "-" if value is None else f"{value / unit:.1f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _worker_line(response: worker_pb2.ProfileResponse, peaks: Limits | None) -> str:
    memory = response.memory
    words = [" ".join(filter(None, (response.device, response.dtype))) or "computes nothing"]
    if peaks is not None:
        rates = f"{peaks.flops_per_s / 1e9:.0f} GFLOP/s, {peaks.bytes_per_s / 1e9:.1f} GB/s"
        words.append(f"peaks {rates} ({peaks.origin})")
    words.append(f"{memory.resident_bytes / MIB:.0f} MiB resident")
    if memory.device_total_bytes:
        used, total = memory.device_used_bytes / MIB, memory.device_total_bytes / MIB
        words.append(f"{used:.0f} of {total:.0f} MiB of the device in use")
    kv = (memory.kv_used_bytes, memory.kv_cached_bytes, memory.kv_ceiling_bytes)
    used, cached, ceiling = (value / MIB for value in kv)
    words.append(f"KV: {used:.0f} MiB used, {cached:.0f} cached, of at most {ceiling:.0f}")
    return f"{response.worker_id}: {'; '.join(words)}"


def to_json(
    config: ProfileConfig,
    rows: Sequence[Row],
    profiles: Sequence[Profile],
    limits: Mapping[str, Limits],
) -> dict[str, Any]:
    """The results as they stand in the file."""
    options = {name: str(value) if isinstance(value, Path) else value for name, value in _options(config).items()}
    return {
        "version": configuration.version(),
        "commit": commit(),
        "machine": machine(),
        "config": options,
        "peaks": {worker_id: dataclasses.asdict(peaks) for worker_id, peaks in limits.items()},
        "results": [row.to_json() for row in rows],
        "profiles": [_profile_json(profile) for profile in profiles],
    }


def _options(config: ProfileConfig) -> dict[str, Any]:
    """Without what says where secrets lie."""
    return {name: value for name, value in dataclasses.asdict(config).items() if not name.startswith("cluster_")}


def _profile_json(profile: Profile) -> dict[str, Any]:
    response = profile.response
    found: dict[str, Any] = {
        "load": profile.load,
        "worker_id": response.worker_id,
        "device": response.device,
        "dtype": response.dtype,
    }
    found |= {"memory": _message_json(response.memory), "steps": [_message_json(step) for step in response.steps]}
    for name, counted in (("units", profile.units), ("device_memory", profile.memory)):
        found[name] = None if counted is None else _message_json(counted.device_use)
    return found


def _message_json(message: Any) -> dict[str, Any]:
    """All of its fields, as numbers."""
    values: dict[str, Any] = MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    # 64-bit numbers are text in the JSON of protobuf.
    return {name: int(value) if isinstance(value, str) else value for name, value in values.items()}


def write_perfetto(profiles: Sequence[Profile], limits: Mapping[str, Limits], path: Path) -> None:
    """A process for each worker, with its steps on one track, what they achieved, and the KV that sequences held."""
    file, earliest_s = TraceFile(), min((profile.began_s for profile in profiles), default=0.0)
    for profile in profiles:
        response = profile.response
        process, peaks = f"{response.worker_id} {response.device}".strip(), limits.get(response.worker_id)
        track = file.track(process, 1, "steps")
        for step in response.steps:
            start_s = profile.began_s - earliest_s + step.began_ms / 1000
            end_s = start_s + step.duration_ms / 1000
            file.slice(track, profile.load or kind_of(step), start_s, end_s, _arguments(step, peaks))
            file.counter(process, "KV MiB", start_s, step.kv_bytes / MIB)
            for name, amount in (("GFLOP/s", step.num_flops), ("GB/s", step.num_bytes)):
                if amount:
                    file.counter(process, name, start_s, amount / 1e6 / max(step.duration_ms, 1e-6))
                    file.counter(process, name, end_s, 0.0)
    file.write(path)


def _arguments(step: worker_pb2.ProfiledStep, peaks: Limits | None) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "tokens": step.num_tokens,
        "batch": step.num_sequences,
        "prompt tokens": step.num_prompt_tokens,
        "GFLOP": step.num_flops / 1e9,
        "MB read": step.num_bytes / 1e6,
    }
    if peaks is not None and step.num_flops:
        shown |= {"roofline": f"{roofline_share(step, peaks):.1%}", "bound by": bound_of(step, peaks)}
    return shown
