"""CPU operations: those of the reference, and faster ones in their place."""

from __future__ import annotations

from torch import Tensor

from kernels import Quantization, reference
from kernels.cpu import linear, quantised


class Ops(reference.Ops):
    """What runs on `torch.device("cpu")`."""

    def prepare_linear(self, weight: Tensor, bias: Tensor | None, quantization: Quantization = "none") -> object:
        if quantization == "int8" and quantised.can_multiply_int8():
            return quantised.pack_int8(weight, bias)
        if quantization == "none" and linear.can_pack(weight.dtype):
            return linear.pack(weight, bias)
        return super().prepare_linear(weight, bias, quantization)

    def linear(self, x: Tensor, prepared: object) -> Tensor:
        if isinstance(prepared, linear.PackedWeights):
            return linear.multiply_packed(x, prepared)
        if isinstance(prepared, quantised.PackedInt8Weights):
            return quantised.multiply_int8(x, prepared)
        return super().linear(x, prepared)
