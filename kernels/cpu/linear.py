"""Linear layers on weights that oneDNN has reordered once, at load.

Owns the choice between packed and plain weights, which follows from what this CPU and this build of torch can do; a
layer is held in one form only. Does not own quantised layers. Invariant: a packed weight serves every number of rows.
Where a row's sums are added in an order that depends on the number of rows, that is oneDNN's choice: see
docs/architecture.md for what holds.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NO_SCALARS: list[float] = []
"""The fused operation after the product takes none: there is no such operation."""


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """A weight in oneDNN's own order."""

    weight: Tensor  # [N, K], opaque
    """The plain weight is not kept beside it."""
    bias: Tensor | None  # [N]
    """None where the layer has none."""
    num_out: int
    """N."""


def can_pack(dtype: torch.dtype) -> bool:
    """Whether packed weights of this type are known to pay here: x86 with the vector units that oneDNN has kernels for.

    On arm64 oneDNN hands over to a library whose packed form is bound to one number of rows.
    """
    if not torch.backends.mkldnn.is_available() or not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return dtype == torch.float32


def pack(weight: Tensor, bias: Tensor | None) -> PackedWeights:
    """Reorders a weight [N, K]; the caller drops the plain one."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
    return PackedWeights(packed, bias, weight.shape[0])


def multiply_packed(x: Tensor, weights: PackedWeights) -> Tensor:
    """x [T, K] times the weight, plus bias: [T, N]."""
    if not x.shape[0]:
        return x.new_empty(0, weights.num_out)
    product: Tensor = torch.ops.mkldnn._linear_pointwise.default(
        x, weights.weight, weights.bias, "none", NO_SCALARS, ""
    )  # [T, N]
    return product
