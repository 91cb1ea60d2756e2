"""Calls of the kernels in `rows.py` and `tiles.py`: what they are told, and which packed weights they can read.

Owns argument and scratch memory, kept between calls; so an object is used by one thread at a time. Does not own the
choice between these kernels and oneDNN.
"""

from __future__ import annotations

import ctypes
import logging
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from kernels.cpu.linear import PackedInt8Weights, PackedWeights
    from kernels.cpu.threads import Kernel

LOG = logging.getLogger(__name__)
FEW_ROWS_FLOAT = 2
"""Up to so many rows these kernels are faster than oneDNN's: measured by tests/perf/linear_cost.py."""
FEW_ROWS_INT8 = 12
"""The same for int8."""
TILED_ROWS_FLOAT, ANY_ROWS = 64, 1 << 31
"""Where the CPU has a matrix unit: the same of bfloat16; of int8 there are no rows too many."""
FEW_ROWS_INT8_BEFORE_TILES = 4
"""There, up to so many rows are not worth a pass of their own to round them."""
ROUND, SCALE = struct.Struct("7q"), struct.Struct("9q")
FEW_INT8, FEW_FLOAT = struct.Struct("13q"), struct.Struct("11q")
TILED_INT8, TILED_FLOAT = struct.Struct("13q"), struct.Struct("10q")


def load_few_rows() -> FewRows | None:
    """The kernels; None, with the reason in the log, where Numba cannot be loaded."""
    try:
        from kernels.cpu import rows
    except ImportError as error:
        LOG.info("linear layers are left to torch, since Numba cannot be loaded: %s", error)
        return None
    return FewRows(rows)


def load_tiles() -> Any:
    """The kernels for the matrix unit; None where there is none, or where the system does not give it."""
    from llvmlite import binding

    features = binding.get_host_cpu_features()
    names = ("amx-tile", "amx-bf16", "amx-int8", "avx512bf16")
    if not all(features.get(name, False) for name in names) or not torch.cpu._init_amx():
        return None
    from kernels.cpu import tiles

    return tiles


class FewRows:
    """Runs the kernels."""

    def __init__(self, rows: Any) -> None:
        """`rows` is the module of the kernels, which needs Numba."""
        from llvmlite import binding

        from kernels.cpu.threads import revision

        self._rows = rows
        features = binding.get_host_cpu_features()
        self._tiles = load_tiles()
        self._has_vectors = bool(features.get("avx512f", False))
        self._has_int8_products = bool(features.get("avx512vnni", False))
        self._revision = revision()
        self._kernels: dict[tuple[object, ...], Kernel] = {}
        self._arguments = ctypes.create_string_buffer(FEW_INT8.size)
        self._at = ctypes.addressof(self._arguments)
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def fits_float(self, weights: PackedWeights) -> bool:
        """Whether a weight has the size that the known order would give it."""
        size = weights.weight.dtype.itemsize
        num_in = _padded(weights.num_in, self._rows.FLOAT_DEPTH[size])
        num_bytes = size * num_in * _padded(weights.num_out, self._rows.FLOAT_COLUMNS[size])
        is_known = weights.weight.dtype in (torch.float32, torch.bfloat16)
        return is_known and self._has_vectors and torch.ops.mkldnn._nbytes(weights.weight) == num_bytes

    def fits_int8(self, weights: PackedInt8Weights) -> bool:
        """Whether a weight has the size that the known order would give it."""
        depth, columns = self._rows.INT8_DEPTH, self._rows.INT8_COLUMNS
        num_out = _padded(weights.scales.shape[0], columns)
        # Behind the values oneDNN keeps an int32 for each output.
        num_bytes = _padded(weights.num_in, depth) * num_out + 4 * num_out
        return self._has_int8_products and torch.ops.mkldnn._nbytes(weights.values) == num_bytes

    def max_rows_float(self, weights: PackedWeights) -> int:
        """Up to so many rows `multiply_float` is the faster way."""
        return TILED_ROWS_FLOAT if self._is_tiled_float(weights) else FEW_ROWS_FLOAT

    def max_rows_int8(self, weights: PackedInt8Weights) -> tuple[int, int]:
        """Up to so many rows `multiply_int8` is the fastest way, and up to so many `multiply_values`."""
        if self._tiles is None or weights.num_in % self._rows.INT8_DEPTH:
            return FEW_ROWS_INT8, 0
        return FEW_ROWS_INT8_BEFORE_TILES, ANY_ROWS

    def _is_tiled_float(self, weights: PackedWeights) -> bool:
        is_known = weights.weight.dtype == torch.bfloat16 and self._tiles is not None
        return is_known and weights.num_in % self._tiles.FLOAT_DEPTH == 0

    # For those who call the kernels themselves.

    @property
    def has_tiles(self) -> bool:
        """Whether this CPU has a matrix unit that the kernels use."""
        return self._tiles is not None

    def is_tiled(self, weights: PackedWeights | PackedInt8Weights) -> bool:
        """Whether `tiled_kernel` multiplies with a weight."""
        return weights.max_rows in (TILED_ROWS_FLOAT, ANY_ROWS)

    def tiled_kernel(self, is_int8: bool, dtype: torch.dtype) -> Kernel:
        """What multiplies with weights that are tiled: its arguments are TILED_INT8 or TILED_FLOAT."""
        return self._kernel(self._tiles.make_tiled_int8 if is_int8 else self._tiles.make_tiled_float, dtype)

    def round_kernel(self, dtype: torch.dtype) -> Kernel:
        """What rounds rows to 8 bits: its arguments are ROUND."""
        return self._kernel(self._rows.make_round, dtype)

    @property
    def tile_share(self) -> int:
        """Bytes that each thread needs as scratch of `tiled_kernel`."""
        return _padded(self._tiles.SCRATCH, 64)

    # Calls

    def multiply_float(self, x: Tensor, weights: PackedWeights) -> Tensor:
        """Rows x [T, K] times a weight that `fits_float`, plus bias: [T, N]."""
        num_rows, num_in = x.shape
        x = _dense(x)
        if self._is_tiled_float(weights):
            return self._multiply_tiled(x, weights)
        padded = _padded(num_in, self._rows.FLOAT_DEPTH[x.dtype.itemsize])
        output = torch.empty((num_rows, weights.num_out), dtype=x.dtype)
        scratch = self._scratch_for(4 * (self._rows.FLOAT_COLUMNS[x.dtype.itemsize] + num_rows * padded))
        FEW_FLOAT.pack_into(
            self._arguments, 0,
            x.data_ptr(), x.stride(0), num_rows, num_in, padded, weights.address, _address(weights.bias),
            output.data_ptr(), weights.num_out, self._scratch.data_ptr(), scratch,
        )  # fmt: skip
        self._kernel(self._rows.make_few_float, x.dtype)(self._at, weights.num_out * padded)
        return output

    def _multiply_tiled(self, x: Tensor, weights: PackedWeights) -> Tensor:
        num_rows, num_in = x.shape
        output = torch.empty((num_rows, weights.num_out), dtype=x.dtype)
        scratch = self._scratch_for(self._tiles.SCRATCH)
        TILED_FLOAT.pack_into(
            self._arguments, 0,
            x.data_ptr(), x.stride(0), num_rows, num_in, weights.address, _address(weights.bias),
            output.data_ptr(), weights.num_out, self._scratch.data_ptr(), scratch,
        )  # fmt: skip
        self._kernel(self._tiles.make_tiled_float, x.dtype)(self._at, weights.num_out * num_in)
        return output

    def multiply_values(
        self, values: Tensor, scales: Tensor, middles: Tensor, weights: PackedInt8Weights, dtype: torch.dtype
    ) -> Tensor:
        """Rounded rows [T, K] times a weight that `fits_int8`, plus bias: [T, N]. Needs a matrix unit."""
        num_rows, num_in = values.shape
        num_out = weights.scales.shape[0]
        output = torch.empty((num_rows, num_out), dtype=dtype)
        scratch = self._scratch_for(self._tiles.SCRATCH)
        TILED_INT8.pack_into(
            self._arguments, 0,
            values.data_ptr(), num_rows, num_in, scales.data_ptr(), middles.data_ptr(), weights.address,
            weights.sums.data_ptr(), weights.scales.data_ptr(), _address(weights.bias),
            output.data_ptr(), num_out, self._scratch.data_ptr(), scratch,
        )  # fmt: skip
        self._kernel(self._tiles.make_tiled_int8, dtype)(self._at, num_out * num_in)
        return output

    def multiply_int8(self, x: Tensor, weights: PackedInt8Weights) -> Tensor:
        """Few rows x [T, K], rounded to 8 bits, times a weight that `fits_int8`, plus bias: [T, N]."""
        num_rows, num_in = x.shape
        x = _dense(x)
        num_out, padded = weights.scales.shape[0], _padded(num_in, self._rows.INT8_DEPTH)
        output = torch.empty((num_rows, num_out), dtype=x.dtype)
        scratch = self._scratch_for(self._rows.INT8_SCRATCH + num_rows * padded)
        FEW_INT8.pack_into(
            self._arguments, 0,
            x.data_ptr(), x.stride(0), num_rows, num_in, padded,
            weights.address, weights.sums.data_ptr(), weights.scales.data_ptr(), _address(weights.bias),
            output.data_ptr(), num_out, self._scratch.data_ptr(), scratch,
        )  # fmt: skip
        self._kernel(self._rows.make_few_int8, x.dtype)(self._at, num_out * padded)
        return output

    def round_inputs(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """As `kernels.reference.round_inputs`."""
        num_rows, num_in = x.shape
        x = _dense(x)
        values = torch.empty((num_rows, num_in), dtype=torch.int8)
        scales, middles = torch.empty(num_rows), torch.empty(num_rows)
        ROUND.pack_into(
            self._arguments, 0,
            x.data_ptr(), x.stride(0), values.data_ptr(), scales.data_ptr(), middles.data_ptr(), num_rows, num_in,
        )  # fmt: skip
        self._kernel(self._rows.make_round, x.dtype)(self._at, x.numel())
        return values, scales, middles

    def scale(
        self, products: Tensor, scales: Tensor, middles: Tensor, weights: PackedInt8Weights, dtype: torch.dtype
    ) -> Tensor:
        """Outputs [T, N] from products [T, N] of whole numbers."""
        output = torch.empty(products.shape, dtype=dtype)
        SCALE.pack_into(
            self._arguments, 0,
            products.data_ptr(), scales.data_ptr(), middles.data_ptr(), weights.sums.data_ptr(),
            weights.scales.data_ptr(), _address(weights.bias), output.data_ptr(), *products.shape,
        )  # fmt: skip
        self._kernel(self._rows.make_scale, dtype)(self._at, products.numel())
        return output

    def _scratch_for(self, num_bytes: int) -> int:
        """Makes room for each thread; answers the bytes between their shares: whole cache lines."""
        share = _padded(num_bytes, 64)
        total = share * torch.get_num_threads()
        if self._scratch.numel() < total:
            self._scratch = torch.empty(total, dtype=torch.uint8)
        return share

    def _kernel(self, make: Callable[..., Any], dtype: torch.dtype) -> Kernel:
        key = (make, dtype)
        kernel = self._kernels.get(key)
        if kernel is None:
            kernel = self._kernels[key] = make(self._rows.ELEMENTS[dtype], self._revision)
        return kernel


def _padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _dense(x: Tensor) -> Tensor:
    """The same rows, each of them without gaps."""
    return x if x.stride(1) == 1 else x.contiguous()


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
