"""What profiles ask of a model that is loaded: what a step of it has to do, and what its device can do and has counted.

Owns the measurement of peaks, by the operations that steps themselves use: reading of a tensor much larger than any
cache, and one linear layer of many rows, in the model's own types. It takes about a second of the device, in which no
step can run; nothing of it happens before somebody asks. Used by the thread that runs steps, but for `work`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.batch import Batch
from engine.model_runner import ModelRunner
from engine.work import Work, step_work
from kernels import Counted, DeviceCounter, MemoryBytes, Ops, Quantization
from kvstore.layout import DTYPE_BYTES
from runtime import huge_pages

HOST_READ_BYTES = 256 << 20
DEVICE_READ_BYTES = 1 << 30
"""More than the last caches of hosts, and of devices with memory of their own, hold for long."""
HOST_LINEAR_SIZE = 1024
DEVICE_LINEAR_SIZE = 8192
"""Rows, inputs and outputs."""
NUM_ROUNDS = 7
MIN_ROUND_S = 0.02
"""Rounds are that long at least, so that starting and waiting do not count."""


@dataclass(frozen=True, slots=True)
class Peaks:
    """What a device can do."""

    flops_per_s: float
    """Multiplications and additions of a product of matrices."""
    bytes_per_s: float
    """Read from its memory."""
    num_threads: int
    """That computed them; 0 on devices of another kind than CPUs."""


class ModelMeasures:
    """One loaded model, as profiles see it."""

    def __init__(self, runner: ModelRunner, quantization: Quantization) -> None:
        self._runner = runner
        self._quantization = quantization
        self.device = str(runner.ops.device)
        """Where it computes: "cpu", "npu:0"."""
        self.dtype = str(runner.model.dtype).removeprefix("torch.") if quantization == "none" else quantization
        """What its layers compute in."""

    def work(self, batch: Batch) -> Work:
        """What a step has to do."""
        runner, layout = self._runner, self._runner.cache.layout
        kv_element_bytes = layout.head_bytes / layout.head_dim  # scales, where there are any, included
        element_bytes = runner.model.dtype.itemsize
        weight_bytes = DTYPE_BYTES.get(self.dtype, 1)
        return step_work(runner.model.spec, batch, element_bytes, weight_bytes, kv_element_bytes)

    def peaks(self) -> Peaks:
        """Measures what the device can do."""
        return measure_peaks(self._runner.ops, self._runner.model.dtype, self._quantization)

    def memory_bytes(self) -> MemoryBytes | None:
        """Of the device; None where it uses the host's."""
        return self._runner.ops.memory_bytes()

    def new_counter(self, counted: Counted) -> DeviceCounter | None:
        """Has the device count; None where it cannot."""
        return self._runner.ops.new_counter(counted)


def measure_peaks(ops: Ops, dtype: torch.dtype, quantization: Quantization = "none") -> Peaks:
    """The best of some rounds each, on as many threads as torch has now."""
    device, is_host = ops.device, ops.device.type == "cpu"
    num_bytes, size = (HOST_READ_BYTES, HOST_LINEAR_SIZE) if is_host else (DEVICE_READ_BYTES, DEVICE_LINEAR_SIZE)
    with torch.inference_mode():
        large = torch.empty(num_bytes // 4, dtype=torch.float32, device=device)
        if is_host:
            huge_pages.collapse(large.data_ptr(), num_bytes)
        large.fill_(1.0)
        bytes_per_s = num_bytes / _least_s(large.sum)
        del large
        rows, weight = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))  # [size, size] each
        prepared = ops.prepare_linear(weight, None, quantization)
        flops_per_s = 2.0 * size**3 / _least_s(lambda: ops.linear(rows, prepared))
    return Peaks(flops_per_s, bytes_per_s, torch.get_num_threads() if is_host else 0)


def _least_s(call: Callable[[], Tensor]) -> float:
    """Seconds of a call in the best round."""
    _round_s(call, 1)
    num_calls = 1
    while (taken_s := _round_s(call, num_calls)) < MIN_ROUND_S:
        num_calls = max(2 * num_calls, int(num_calls * MIN_ROUND_S / max(taken_s, 1e-6)))
    return min(_round_s(call, num_calls) for _ in range(NUM_ROUNDS)) / num_calls


def _round_s(call: Callable[[], Tensor], num_calls: int) -> float:
    started_s = time.perf_counter()
    for _ in range(num_calls):
        result = call()
    result.flatten()[0].item()  # devices answer before they have computed
    return time.perf_counter() - started_s
