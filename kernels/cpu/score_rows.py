"""What the attention kernels for the matrix unit share: scores of 16 heads in a row, and fetching what comes next.

Owns no kernel. A row of scores has all heads side by side, so that maxima and exponentials need no sums across lanes.
Memory is fetched while something else is computed, a few lines here and there: a CPU waits once it has asked for more
lines than it can wait for, and a block's lines at once would stop it. What an item reads is therefore fetched through
the item before it, values first.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from kernels.cpu.attention import LOWEST
from kernels.cpu.simd import FLOAT, FUSED, INDEX, fetch_line, moved
from kernels.cpu.tiles import TILE, at

WORD = ir.IntType(32)
WORDS, ROW = ir.VectorType(WORD, TILE), ir.VectorType(FLOAT, TILE)
"""Of 16 heads: whole numbers, and float32."""


def heads_at_once(num_kv: int, group: int) -> int:
    """KV heads whose query heads fit side by side into a row of scores."""
    return max(count for count in range(1, num_kv + 1) if num_kv % count == 0 and (count == 1 or count * group <= TILE))


@njit(error_model="numpy", forceinline=True)
def tile_at(table: Any, position: Any, end: Any, block_size: Any) -> Any:
    """The slot at which the 16 positions begin that `position` is among, or else the last below `end`, or the first."""
    position = max(min(position, end - 1), 0)  # a block may begin before the part of a context that ends in it
    return np.int64(table[position // block_size]) * block_size + position % block_size // TILE * TILE


@njit(error_model="numpy", forceinline=True)
def find_nothing(partials: Any, row: Any, num_heads: Any, head_dim: Any) -> None:
    """The result of a row in a part of its context that lies before its window."""
    for head in range(num_heads):
        found = moved(partials, (row * num_heads + head) * (head_dim + 2))
        for i in range(head_dim):
            found[i] = np.float32(0)
        found[head_dim] = LOWEST
        found[head_dim + 1] = np.float32(0)


def fetch_lines(builder: Any, address: Any, offsets: range) -> None:
    """Has lines fetched into the cache, at such offsets from an address."""
    for offset in offsets:
        fetch_line(builder, at(builder, address, offset))


def early_lines(num_bytes: int) -> range:
    """Offsets of the first half of the lines of a row."""
    return range(0, num_bytes // 2, 64)


def later_lines(num_bytes: int) -> range:
    """Offsets of the others."""
    return range(len(early_lines(num_bytes)) * 64, num_bytes, 64)


def row_at(builder: Any, rows: Any, index: Any) -> Any:
    """The vector at row `index` of [n, 16] words at a pointer."""
    place = builder.gep(rows, [builder.mul(index, INDEX(TILE))])
    return builder.bitcast(place, ir.VectorType(rows.type.pointee, TILE).as_pointer())


@intrinsic
def highest_of_rows(typing_context: Any, scores: Any, begin: Any, end: Any, highest: Any) -> Any:
    """The highest of each column [16] of rows begin to end - 1, of which there is at least one."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        scores, begin, end, highest = arguments
        found = cgutils.alloca_once(builder, ROW)
        builder.store(builder.load(row_at(builder, scores, begin), align=4), found)
        with cgutils.for_range_slice(builder, begin, end, INDEX(1)) as (index, _):
            row, before = builder.load(row_at(builder, scores, index), align=4), builder.load(found)
            builder.store(builder.select(builder.fcmp_ordered(">", row, before), row, before), found)
        builder.store(builder.load(found), row_at(builder, highest, INDEX(0)), align=4)
        return context.get_dummy_value()

    return types.void(scores, types.int64, types.int64, highest), generate


def constant(value: float) -> Any:
    return ir.Constant(ROW, [float(np.float32(value))] * TILE)


def exponential_of_row(builder: Any, x: Any) -> Any:
    """As `simd.exponential`, of 16 numbers that are not above 0."""

    def fused(left: Any, right: Any, more: Any) -> Any:
        return builder.fadd(builder.fmul(left, right, flags=FUSED), more, flags=FUSED)

    lowest = constant(-87.0)
    x = builder.select(builder.fcmp_ordered("<", x, lowest), lowest, x)
    rounder = constant(12582912.0)
    shifted = fused(x, constant(1.4426950408889634), rounder)
    whole = builder.fsub(shifted, rounder)
    rest = fused(whole, constant(2.12194440e-4), fused(whole, constant(-0.693359375), x))
    series = constant(1.9875691500e-4)
    for factor in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        series = fused(series, rest, constant(factor))
    series = builder.fadd(fused(builder.fmul(series, rest, flags=FUSED), rest, rest), constant(1.0))
    exponent = builder.add(builder.bitcast(shifted, WORDS), ir.Constant(WORDS, [127] * TILE))
    power = builder.shl(exponent, ir.Constant(WORDS, [23] * TILE))
    return builder.fmul(series, builder.bitcast(power, ROW))
