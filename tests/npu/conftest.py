"""An NPU that every test of this folder may use: simulated operators, and a stand-in for the module torch_npu."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

# Schedulers with drafts; tiny models and what drives them; workers on real sockets.
sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
sys.path.insert(0, str(Path(__file__).parents[1] / "model"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tracer"))

from simulated_device import SimulatedNpu, torch_npu
from simulated_host import Npu
from simulated_operators import SimulatedOperators
from simulated_profiler import SimulatedProfiler

from kernels.npu import counting, opening


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--torch-npu-wheel", action="append", default=[], help="wheel file of torch-npu to compare with")


@pytest.fixture(scope="session")
def operators() -> SimulatedOperators:
    """Registered once in a process."""
    operators = SimulatedOperators()
    operators.register()
    return operators


@pytest.fixture
def npu(operators: SimulatedOperators, monkeypatch: pytest.MonkeyPatch) -> Iterator[Npu]:
    """A host with one NPU, whose tensors lie in the memory of this machine."""
    device, profiler = SimulatedNpu(), SimulatedProfiler()
    monkeypatch.setitem(sys.modules, "torch_npu", torch_npu(device, profiler))
    monkeypatch.setattr(counting, "analyse", profiler.analyse)
    monkeypatch.setattr(opening, "version", lambda name: torch.__version__.partition("+")[0])
    monkeypatch.setattr(opening, "npu_device", lambda index: torch.device("cpu"))
    operators.num_calls.clear()
    yield Npu(operators, device, profiler)
    operators.refused.clear()
