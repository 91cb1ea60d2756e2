"""Linear layers on an NPU: weights in its fractal format, and products of 8-bit numbers.

Owns the two forms of a weight. With "int8" a row of inputs is scaled by its largest magnitude when it is computed
(`npu_dynamic_quant`), each output's weights at load; the CPU's kernels spread a row over its range instead, so the
two give other numbers and their workers are not paired. A tensor in fractal format must never be viewed or sliced.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import Quantization
from kernels.reference import round_weight

FRACTAL_NZ = 29
"""Number of the format in which the matrix unit reads weights at full speed."""
MAX_QUANTISED_SIZE = 65535
"""Inputs and outputs that the 8-bit product can have."""


@dataclass(frozen=True, slots=True)
class HalfWeights:
    """A weight as it was given."""

    weight: Tensor  # [N, K]
    """In fractal format, unless it is float32."""
    bias: Tensor | None  # [N]
    """None where the layer has none."""


@dataclass(frozen=True, slots=True)
class Int8Weights:
    """A weight rounded to 8 bits."""

    values: Tensor  # [K, N] int8
    """In fractal format."""
    scales: Tensor  # [N] float32
    """What the values of an output are multiplied with."""
    bias: Tensor | None  # [N]
    """None where the layer has none."""


def prepare_weight(weight: Tensor, bias: Tensor | None, quantization: Quantization) -> HalfWeights | Int8Weights:
    """Takes over a weight [N, K]; the copy in fractal format is another tensor, so a tied embedding stays readable."""
    if quantization == "int8" and max(weight.shape) <= MAX_QUANTISED_SIZE:
        values, scales = round_weight(weight)  # [N, K], [N]
        return Int8Weights(to_fractal(values.T.contiguous()), scales, bias)
    return HalfWeights(weight if weight.dtype == torch.float32 else to_fractal(weight.contiguous()), bias)


def to_fractal(weight: Tensor) -> Tensor:
    """The same numbers in fractal format."""
    fractal: Tensor = torch.ops.npu.npu_format_cast(weight, FRACTAL_NZ)
    return fractal


def multiply(x: Tensor, weights: HalfWeights | Int8Weights) -> Tensor:
    """x [T, K] times a weight, plus its bias: [T, N]."""
    if isinstance(weights, HalfWeights):
        return F.linear(x, weights.weight, weights.bias)
    values, scales = torch.ops.npu.npu_dynamic_quant(x.contiguous())  # [T, K] int8, [T] float32
    product: Tensor = torch.ops.npu.npu_quant_matmul(
        values, weights.values, weights.scales, pertoken_scale=scales, output_dtype=x.dtype
    )  # [T, N]
    return product if weights.bias is None else product + weights.bias
