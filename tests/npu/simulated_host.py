"""What tests see of the simulated machine."""

from __future__ import annotations

from dataclasses import dataclass

from simulated_device import SimulatedNpu
from simulated_operators import SimulatedOperators
from simulated_profiler import SimulatedProfiler


@dataclass(frozen=True)
class Npu:
    """A host with NPUs."""

    operators: SimulatedOperators
    """Its operators, with their counts."""
    device: SimulatedNpu
    """Its devices."""
    profiler: SimulatedProfiler
    """What counts there."""
