"""What Baton uses of the module torch_npu, on a machine without an NPU: devices, their memory, recorded graphs.

A recording notes every operator that runs and replays it over the same tensors, as a device does; what the host passed
as lists stays as it was then, unless `update` exchanges it. What a device cannot record is refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from contracts import require
from simulated_profiler import SimulatedProfiler
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

FUSED = "npu::npu_fused_infer_attention_score"
HOST_READS = ("aten::_local_scalar_dense", "aten::item", "aten::nonzero", "aten::lift_fresh", "aten::equal")
"""Operators that stop for the host, or bring something from it."""
HOST_LISTS = ("atb::_npu_paged_attention", "atb::_npu_paged_attention_splitfuse")
"""Operators whose lengths a replay would not follow."""


@dataclass
class Call:
    """One operator, as it was recorded."""

    operator: Any
    args: Sequence[Any]
    kwargs: dict[str, Any]
    results: list[Any]

    @property
    def name(self) -> str:
        """Without the overload."""
        return str(self.operator.name()).partition(".")[0]

    def run(self) -> None:
        """Computes it again into the tensors it made."""
        results, _ = tree_flatten(self.operator(*self.args, **self.kwargs))
        for old, new in zip(self.results, results, strict=True):
            if isinstance(old, torch.Tensor) and old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
                old.copy_(new)


class NPUGraph:
    """A recording."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.num_replays = 0
        self.is_recorded = self.follows_lists = self.is_updated = False

    def update(self, cpu_update_input: list[dict[str, Any]]) -> None:
        """Exchanges host arguments of the attention calls: the same for all of them, or one dict each."""
        require(self.is_recorded, "update: nothing is recorded")
        require(self.follows_lists, "update: recorded without auto_dispatch_capture")
        attention = [call for call in self.calls if call.name == FUSED]
        changes = cpu_update_input * len(attention) if len(cpu_update_input) == 1 else cpu_update_input
        require(len(changes) == len(attention), f"update: {len(attention)} calls, {len(changes)} dicts")
        for call, changed in zip(attention, changes, strict=True):
            unknown = changed.keys() - call.kwargs.keys()
            require(not unknown, f"update: {unknown} were not given by name")
            call.kwargs.update(changed)
        self.is_updated = True

    def replay(self) -> None:
        """Runs it."""
        require(self.is_recorded, "replay: nothing is recorded")
        waits = self.follows_lists and any(call.name == FUSED for call in self.calls)
        require(self.is_updated or not waits, "replay: attention waits for an update, once for each replay")
        self.is_updated = False
        self.num_replays += 1
        for call in self.calls:
            call.run()


class Recorder(TorchDispatchMode):
    """Notes calls."""

    def __init__(self, graph: NPUGraph) -> None:
        super().__init__()
        self._graph = graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # What the host passes is what it is now, whatever becomes of its lists.
        args, kwargs = tree_map(lambda value: value, (list(args), dict(kwargs or {})))
        call = Call(func, args, kwargs, [])
        require(call.name not in HOST_READS, f"{call.name} waits for the host and cannot be recorded")
        require(call.name not in HOST_LISTS, f"{call.name}: its lengths would stay what they were")
        if call.name == FUSED:
            require(len(args) == 3 and "block_table" in kwargs, "query, key and value by position, all else by name")
        results = func(*args, **kwargs)
        call.results = tree_flatten(results)[0]
        self._graph.calls.append(call)
        return results


@dataclass
class SimulatedNpu:
    """`torch_npu.npu`, for one host."""

    num_devices: int = 1
    device_name: str = "Ascend910B3"
    free_bytes: int = 60 << 30
    total_bytes: int = 64 << 30
    entered: list[torch.device | int] = field(default_factory=list)
    """Arguments of `set_device`."""
    jit_compile: bool = True
    """As `set_compile_mode` left it."""
    config: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(allow_internal_format=False))
    NPUGraph = NPUGraph
    graphs: list[NPUGraph] = field(default_factory=list)
    """Those recorded."""

    def device_count(self) -> int:
        return self.num_devices

    def get_device_name(self, index: int) -> str:
        return self.device_name

    def set_device(self, device: torch.device | int) -> None:
        self.entered.append(device)

    def set_compile_mode(self, jit_compile: bool) -> None:
        self.jit_compile = jit_compile

    def mem_get_info(self, index: int) -> tuple[int, int]:
        return self.free_bytes, self.total_bytes

    def synchronize(self) -> None:
        """All is done at once."""

    def graph_pool_handle(self) -> tuple[int, int]:
        return (0, 1)

    @contextlib.contextmanager
    def graph(self, graph: NPUGraph, pool: Any = None, stream: Any = None, **options: Any) -> Iterator[None]:
        auto_dispatch_capture = options.pop("auto_dispatch_capture", False)
        require(not options and not graph.is_recorded, f"a graph is recorded once, without {sorted(options)}")
        with Recorder(graph):
            yield
        graph.is_recorded, graph.follows_lists = True, auto_dispatch_capture
        self.graphs.append(graph)


def torch_npu(npu: SimulatedNpu, profiler: SimulatedProfiler) -> SimpleNamespace:
    """The module, as far as it is used."""
    return SimpleNamespace(npu=npu, profiler=profiler)
