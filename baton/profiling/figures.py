"""From steps to rows: what was achieved, what part of the peaks that is, and what bounds it.

Owns the arithmetic of shares. The roofline of a step is the longer of the two times that its arithmetic and its bytes
take at the peaks; a step's share is its roofline by the time it took. Figures of a row are medians over its steps, so
that a hiccup does not move them. Where the device has counted, its own units say what bounds.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from baton.profiling.options import Limits
from baton.profiling.workers import Profile
from protos import worker_pb2

Bound = Literal["compute", "bandwidth", "neither"]
LEAST_SHARE = 1 / 3
"""Of the roofline, below which neither peak can be said to bound: the time goes elsewhere."""


@dataclass(frozen=True, slots=True)
class UnitShares:
    """How busy a device's units were, as it counted: parts of the time in which kernels ran."""

    cube: float
    """The unit for products of matrices."""
    vector: float
    """The vector units."""
    load: float
    """The transfer from the device's memory to its cores (MTE2)."""
    memory_bytes_per_s: float
    """Read and written in the device's memory."""


@dataclass(frozen=True, slots=True)
class Row:
    """Steps of one kind at one worker."""

    name: str
    """The load, or what the steps were."""
    worker_id: str
    """Whose."""
    num_steps: int
    """How many."""
    step_ms: float
    """What one took."""
    num_tokens: float
    """Packed rows of one."""
    num_sequences: float
    """Its batch."""
    flops_per_s: float | None
    """Multiplications and additions achieved; None where nothing is computed."""
    bytes_per_s: float | None
    """Of weights and KV that had to be read."""
    compute_share: float | None
    """Of the peak of computing; None where peaks are not known."""
    bandwidth_share: float | None
    """Of the peak of reading."""
    roofline_share: float | None
    """The greater of the two."""
    kv_bytes: float
    """KV that sequences held."""
    units: UnitShares | None
    """None where the device does not count."""
    bound_by: Bound | None
    """The verdict."""

    def to_json(self) -> dict[str, Any]:
        """As it stands in the file."""
        return asdict(self)


def kind_of(step: worker_pb2.ProfiledStep) -> str:
    """What a step was, where no load was named: steps of a kind are alike to a factor of two."""
    if not step.num_prompt_tokens:
        return f"decode {_rounded(step.num_sequences)}"
    num_decoding = step.num_tokens - step.num_prompt_tokens
    prompt = f"prefill {_rounded(step.num_prompt_tokens)}"
    return f"{prompt} + decode {_rounded(num_decoding)}" if num_decoding else prompt


def rows_of(profiles: Iterable[Profile], limits: Mapping[str, Limits]) -> list[Row]:
    """A row for each load, or kind of steps, and worker; `limits` are the peaks by worker id."""
    rows = []
    for profile in profiles:
        kinds: dict[str, list[worker_pb2.ProfiledStep]] = {}
        for step in profile.response.steps:
            kinds.setdefault(profile.load or kind_of(step), []).append(step)
        # What the device counted is of all steps together.
        units = _unit_shares(profile) if len(kinds) == 1 else None
        worker_id = profile.response.worker_id
        rows += [_row(name, worker_id, kinds[name], limits.get(worker_id), units) for name in sorted(kinds)]
    return rows


def bound_of(step: worker_pb2.ProfiledStep, peaks: Limits) -> Bound:
    """By the roofline."""
    if roofline_share(step, peaks) < LEAST_SHARE:
        return "neither"
    return "compute" if compute_share(step, peaks) > bandwidth_share(step, peaks) else "bandwidth"


def compute_share(step: worker_pb2.ProfiledStep, peaks: Limits) -> float:
    """Achieved arithmetic by the peak."""
    return step.num_flops / peaks.flops_per_s / _seconds(step)


def bandwidth_share(step: worker_pb2.ProfiledStep, peaks: Limits) -> float:
    """Achieved reading by the peak."""
    return step.num_bytes / peaks.bytes_per_s / _seconds(step)


def roofline_share(step: worker_pb2.ProfiledStep, peaks: Limits) -> float:
    """The least time that both peaks allow by the time it took."""
    return max(compute_share(step, peaks), bandwidth_share(step, peaks))


def _row(
    name: str,
    worker_id: str,
    steps: Sequence[worker_pb2.ProfiledStep],
    peaks: Limits | None,
    units: UnitShares | None,
) -> Row:
    def middle(value: Callable[[worker_pb2.ProfiledStep], float]) -> float:
        return statistics.median(map(value, steps))

    is_counted = any(step.num_flops for step in steps)
    known = peaks if is_counted else None
    bound: Bound | None = None
    if units is not None:
        bound = "bandwidth" if units.load > max(units.cube, units.vector) else "compute"
    elif known is not None:
        bound = statistics.mode(bound_of(step, known) for step in steps)
    return Row(
        name=name,
        worker_id=worker_id,
        num_steps=len(steps),
        step_ms=middle(lambda step: step.duration_ms),
        num_tokens=middle(lambda step: step.num_tokens),
        num_sequences=middle(lambda step: step.num_sequences),
        flops_per_s=middle(lambda step: step.num_flops / _seconds(step)) if is_counted else None,
        bytes_per_s=middle(lambda step: step.num_bytes / _seconds(step)) if is_counted else None,
        compute_share=None if known is None else middle(lambda step: compute_share(step, known)),
        bandwidth_share=None if known is None else middle(lambda step: bandwidth_share(step, known)),
        roofline_share=None if known is None else middle(lambda step: roofline_share(step, known)),
        kv_bytes=middle(lambda step: step.kv_bytes),
        units=units,
        bound_by=bound,
    )


def _unit_shares(profile: Profile) -> UnitShares | None:
    """What the device counted; None where it did not, or no kernel ran."""
    if profile.units is None or profile.memory is None:
        return None
    units, memory = profile.units.device_use, profile.memory.device_use
    if not units.kernels_s or not memory.kernels_s:
        return None
    return UnitShares(
        cube=units.cube_s / units.kernels_s,
        vector=units.vector_s / units.kernels_s,
        load=units.load_s / units.kernels_s,
        memory_bytes_per_s=(memory.read_bytes + memory.written_bytes) / memory.kernels_s,
    )


def _seconds(step: worker_pb2.ProfiledStep) -> float:
    return max(step.duration_ms, 1e-6) / 1000


def _rounded(count: int) -> str:
    """ "1", "2", "3-4", "5-8": the range between powers of two."""
    upper = 1 << (count - 1).bit_length()
    return str(count) if upper <= 2 else f"{upper // 2 + 1}-{upper}"
