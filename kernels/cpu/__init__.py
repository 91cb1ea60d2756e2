"""CPU operations: those of the reference, and faster ones in their place."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import Quantization, reference
from kernels.cpu.few_rows import load_few_rows
from kernels.cpu.linear import LinearLayers


class Ops(reference.Ops):
    """What runs on `torch.device("cpu")`."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._linear = LinearLayers(load_few_rows())

    # Linear layers.

    def prepare_linear(self, weight: Tensor, bias: Tensor | None, quantization: Quantization = "none") -> object:
        return self._linear.prepare(weight, bias, quantization)

    def linear(self, x: Tensor, prepared: object) -> Tensor:
        return self._linear.multiply(x, prepared)
