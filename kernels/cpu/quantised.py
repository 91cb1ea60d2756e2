"""Linear layers in 8-bit integers, through oneDNN: products of int8 with int8 summed in int32.

Owns the packed form of quantised weights; what is computed is defined by `kernels.reference`. Sums of integers have no
rounding, so results equal the reference's bit for bit, whatever the number of rows. Invariant: only the 8-bit form of
a weight is kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.reference import quantise_rows

NO_SCALARS: list[float] = []
"""The fused operation after the product takes none: there is no such operation."""


@dataclass(frozen=True, slots=True)
class PackedInt8Weights:
    """An 8-bit weight in oneDNN's own order."""

    values: Tensor  # [N, K], opaque
    """-127 to 127."""
    scales: Tensor  # [N] float32
    """What the values of an output are multiplied with."""
    zero_points: Tensor  # [N] int32
    """Zeros: oneDNN asks for them."""
    bias: Tensor | None  # [N] float32
    """None where the layer has none."""


def can_multiply_int8() -> bool:
    """Whether this CPU has instructions for such products. Without them oneDNN's sums may overflow."""
    return torch.backends.mkldnn.is_available() and torch.cpu._is_vnni_supported()


def pack_int8(weight: Tensor, bias: Tensor | None) -> PackedInt8Weights:
    """Quantises and reorders a weight [N, K]; the caller drops the given one."""
    values, scales = quantise_rows(weight)
    return PackedInt8Weights(
        values=torch.ops.onednn.qlinear_prepack(values, None),
        scales=scales,
        zero_points=torch.zeros(weight.shape[0], dtype=torch.int32),
        bias=None if bias is None else bias.float(),
    )


def multiply_int8(x: Tensor, weights: PackedInt8Weights) -> Tensor:
    """x [T, K], rounded to 8 bits, times the weight, plus bias: [T, N]."""
    if not x.shape[0]:
        return x.new_empty(0, weights.scales.shape[0])
    values, scales = quantise_rows(x)  # [T, K], [T]
    product: Tensor = torch.ops.onednn.qlinear_pointwise.default(
        values,
        1.0,
        0,
        weights.values,
        weights.scales,
        weights.zero_points,
        None,
        1.0,
        0,
        torch.float32,
        "none",
        NO_SCALARS,
        "",
    )  # [T, N] float32
    product.mul_(scales[:, None])
    if weights.bias is not None:
        product.add_(weights.bias)
    return product.to(x.dtype)
