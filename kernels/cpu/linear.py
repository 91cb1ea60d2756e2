"""Linear layers: weights that oneDNN has reordered once, or rounded to 8 bits and reordered, or plain ones.

Owns the choice, which follows from what this CPU and this build of torch can do and is made for each layer at load;
what a quantised layer computes is defined by `kernels.reference`. A layer is held in one form only, which serves every
number of rows. Products of few rows are bound by the reading of weights and are left to `few_rows.py`, where Numba is
there and the order of the packed weight is one that it understands. Invariant: 8-bit results do not depend on the path.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels import Quantization, reference
from kernels.cpu.few_rows import FEW_ROWS_INT8, FewRows
from kernels.reference import round_inputs, round_weight

LOG = logging.getLogger(__name__)
WIDENED_ROWS = 8
"""From so many rows on it pays to widen a weight for them (measured with AVX2)."""
WIDENED_BYTES = 4 * 2**20
"""Of a weight that is widened at once: what a core's caches hold, or little more."""
NO_SCALARS: list[float] = []
"""The fused operation after a product takes none: there is no such operation."""


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """A weight in oneDNN's own order."""

    weight: Tensor  # [N, K], opaque
    """The plain weight is not kept beside it."""
    bias: Tensor | None  # [N]
    """None where the layer has none."""
    num_out: int
    """N."""
    num_in: int
    """K."""
    address: int = 0
    """Of its bytes, where `few_rows` can read them; otherwise 0."""
    max_rows: int = 0
    """Up to so many rows are multiplied by `few_rows`."""


@dataclass(frozen=True, slots=True)
class PackedInt8Weights:
    """A weight rounded to 8 bits, in oneDNN's own order."""

    values: Tensor  # [N, K], opaque
    """-127 to 127."""
    scales: Tensor  # [N] float32
    """What the values of an output are multiplied with."""
    sums: Tensor  # [N] float32
    """Of each output's values."""
    bias: Tensor | None  # [N] float32
    """None where the layer has none."""
    num_in: int
    """K."""
    address: int = 0
    """Of its bytes, where `few_rows` can read them; otherwise 0."""
    max_few_rows: int = 0
    """Up to so many rows are rounded and multiplied at once by `few_rows`."""
    max_rows: int = 0
    """Up to so many rows are multiplied by `few_rows`."""


@dataclass(frozen=True, slots=True)
class WidenedWeights:
    """A plain weight of a type whose products this CPU lacks: many rows are multiplied in float32, a part of the weight
    at a time. Its part is widened once for all rows; torch would do it for each, which takes five times as long."""

    plain: reference.LinearWeights
    """As it is."""


def can_pack(dtype: torch.dtype) -> bool:
    """Whether packed weights of this type are known to pay here: x86 with the vector units that oneDNN has kernels for.

    On arm64 oneDNN hands over to a library whose packed form is bound to one number of rows.
    """
    if not torch.backends.mkldnn.is_available() or not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        return False
    return has_products(dtype)


def has_products(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies numbers of this type as they are. Elsewhere torch widens them one by one."""
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return dtype == torch.float32


def can_pack_int8() -> bool:
    """Whether this CPU has instructions for products of 8-bit numbers. Without them oneDNN's sums may overflow."""
    return torch.backends.mkldnn.is_available() and torch.cpu._is_vnni_supported()


class LinearLayers:
    """Prepares layers and runs them; used by one thread at a time."""

    def __init__(self, few_rows: FewRows | None) -> None:
        """`few_rows` is None where Numba does not run."""
        self._few_rows = few_rows
        self._reported: set[str] = set()
        self._plain = reference.Ops(torch.device("cpu"))
        # oneDNN is told of one scale and one zero for the whole weight; the real ones come after its product.
        self._one, self._zero = torch.ones(1), torch.zeros(1, dtype=torch.int32)

    def prepare(self, weight: Tensor, bias: Tensor | None, quantization: Quantization) -> object:
        """See `kernels.Ops.prepare_linear`."""
        if quantization == "int8" and can_pack_int8():
            quantised = self._pack_int8(weight, bias)
            self._report("int8 by oneDNN", has_kernels=bool(quantised.address))
            return quantised
        if quantization == "none" and can_pack(weight.dtype):
            packed = self._pack(weight, bias)
            self._report(f"{weight.dtype} reordered for oneDNN", has_kernels=bool(packed.address))
            return packed
        plain = self._plain.prepare_linear(weight, bias, quantization)
        if isinstance(plain, reference.LinearWeights) and not has_products(weight.dtype):
            self._report(f"{weight.dtype} by plain torch, {WIDENED_ROWS} rows and more in float32", has_kernels=False)
            return WidenedWeights(plain)
        self._report(f"{weight.dtype}, quantisation {quantization}, by plain torch", has_kernels=False)
        return plain

    def multiply(self, x: Tensor, prepared: object) -> Tensor:
        """See `kernels.Ops.linear`."""
        if isinstance(prepared, PackedInt8Weights):
            return self._multiply_int8(x, prepared)
        if not isinstance(prepared, PackedWeights):
            if isinstance(prepared, WidenedWeights):
                return self._multiply_widened(x, prepared.plain)
            return self._plain.linear(x, prepared)
        num_rows = x.shape[0]
        if not num_rows:
            return x.new_empty(0, prepared.num_out)
        if self._few_rows is not None and num_rows <= prepared.max_rows:
            return self._few_rows.multiply_float(x, prepared)
        return multiply_packed(x, prepared)

    def _report(self, way: str, has_kernels: bool) -> None:
        """Once for each way that layers go."""
        text = f"{way}, few rows by compiled kernels" if has_kernels else way
        if text not in self._reported:
            self._reported.add(text)
            LOG.info("linear layers: %s", text)

    def _pack(self, weight: Tensor, bias: Tensor | None) -> PackedWeights:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
        prepared = PackedWeights(packed, bias, *weight.shape)
        if self._few_rows is None or not self._few_rows.fits_float(prepared):
            return prepared
        readable = replace(prepared, address=address_of(packed), max_rows=self._few_rows.max_rows_float(prepared))
        x = _probe(prepared.num_in, weight.dtype)  # [1, K]
        expected = multiply_packed(x, prepared).float()  # [1, N]
        difference = self._few_rows.multiply_float(x, readable).float() - expected
        # The order is right, or most outputs are far from what they should be.
        return readable if float(difference.abs().max()) <= 0.02 * float(expected.abs().max()) else prepared

    def _pack_int8(self, weight: Tensor, bias: Tensor | None) -> PackedInt8Weights:
        values, scales = round_weight(weight)
        packed = torch.ops.onednn.qlinear_prepack(values, None)
        prepared = PackedInt8Weights(
            packed, scales, values.sum(dim=1).float(), None if bias is None else bias.float(), weight.shape[1]
        )
        if self._few_rows is None or not self._few_rows.fits_int8(prepared):
            return prepared
        max_few_rows, max_rows = self._few_rows.max_rows_int8(prepared)
        readable = replace(prepared, address=address_of(packed), max_few_rows=max_few_rows, max_rows=max_rows)
        # As many rows as take each of the ways.
        some = _probe(prepared.num_in, weight.dtype).expand(FEW_ROWS_INT8 + 1, -1)  # [T, K]
        for x in (some[:1], some):
            if not torch.equal(self._multiply_int8(x, readable), self._multiply_int8(x, prepared)):
                return prepared
        return readable

    def _multiply_int8(self, x: Tensor, weights: PackedInt8Weights) -> Tensor:
        num_rows = x.shape[0]
        if not num_rows:
            return x.new_empty(0, weights.scales.shape[0])
        if self._few_rows is None:
            values, scales, middles = round_inputs(x)  # [T, K], [T], [T]
            products = self._product_int8(values, weights)  # [T, N]
            products = products.add_(middles[:, None] * weights.sums).mul_(weights.scales).mul_(scales[:, None])
            return (products if weights.bias is None else products.add_(weights.bias)).to(x.dtype)
        if num_rows <= weights.max_few_rows:
            return self._few_rows.multiply_int8(x, weights)
        values, scales, middles = self._few_rows.round_inputs(x)
        if num_rows <= weights.max_rows:
            return self._few_rows.multiply_values(values, scales, middles, weights, x.dtype)
        return self._few_rows.scale(self._product_int8(values, weights), scales, middles, weights, x.dtype)

    def _multiply_widened(self, x: Tensor, weights: reference.LinearWeights) -> Tensor:
        num_rows, (num_out, num_in) = x.shape[0], weights.weight.shape
        if num_rows < WIDENED_ROWS:
            return self._plain.linear(x, weights)
        wide, product = x.float(), x.new_empty(num_rows, num_out)
        step = max(1, WIDENED_BYTES // (4 * num_in))
        for first in range(0, num_out, step):
            part, bias = weights.weight[first : first + step], weights.bias
            bias_part = None if bias is None else bias[first : first + step].float()
            product[:, first : first + step] = torch.nn.functional.linear(wide, part.float(), bias_part)
        return product

    def _product_int8(self, values: Tensor, weights: PackedInt8Weights) -> Tensor:
        """values [T, K] int8 times a weight's: [T, N] float32, whole numbers."""
        product: Tensor = torch.ops.onednn.qlinear_pointwise.default(
            values, 1.0, 0, weights.values, self._one, self._zero, None,
            1.0, 0, torch.float32, "none", NO_SCALARS, "",
        )  # fmt: skip
        return product


def address_of(packed: Tensor) -> int:
    """Where an opaque tensor's bytes are."""
    return int(torch.ops.mkldnn.data_ptr(packed))


def multiply_packed(x: Tensor, weights: PackedWeights) -> Tensor:
    """x [T, K] times a packed weight, plus bias, by oneDNN: [T, N]."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise.default(
        x, weights.weight, weights.bias, "none", NO_SCALARS, ""
    )
    return product


def _probe(size: int, dtype: torch.dtype) -> Tensor:
    """A row [1, size] in which inputs that a wrong order could confuse differ."""
    return torch.sin(torch.arange(size, dtype=torch.float32) * 1.7)[None].to(dtype)
