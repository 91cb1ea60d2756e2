"""Products of rows with packed weights by the matrix unit of x86 CPUs (AMX), which computes 16 by 16 sums at a time.

Owns the kernels, for bfloat16 and for 8-bit weights in the orders that `rows.py` names, and the layout of their
arguments. Up to some 64 rows the reading of weights is what takes the time: each weight is read once, in order. Of more
rows, with 8-bit weights, as many as stay in the second cache meet all weights before others do. Sums of a row are the
same whatever other rows there are. Source: Intel 64 Architectures Software Developer's Manual, volume 1, chapter 18
"Programming with Intel AMX"; the instructions in LLVM's terms: IntrinsicsX86.td.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from kernels.cpu.rows import INT8_COLUMNS, INT8_DEPTH, LANES, U8
from kernels.cpu.simd import FLOAT, FUSED, INDEX, moved, narrow, pointer, widen
from kernels.cpu.threads import Kernel, num_threads, thread_index

TILE = 16
"""Rows of a tile; each holds 64 bytes."""
COLUMNS = 2 * TILE
"""Outputs computed at once, from two tiles of weights."""
ROWS = 2 * TILE
"""Rows computed at once; of more, each part of a weight is used again while it is in the cache."""
PANEL_BYTES = 3 << 18
"""Rows of so many bytes stay in the second cache, while the weights pass by."""
CONFIG_BYTES = 64
SCRATCH = CONFIG_BYTES + 4 * ROWS * COLUMNS
"""Bytes a thread needs."""
AHEAD = 4096
"""Bytes between a weight and the one that is fetched into the cache."""
FLOAT_DEPTH, FLOAT_PITCH = 32, 128
"""bfloat16: inputs of a tile, bytes between two of its rows in a packed weight."""
INT8_PITCH = 256
"""The same for 8-bit weights, which have INT8_DEPTH inputs a tile."""
SUMS, INPUTS, WEIGHTS = (0, 1, 2, 3), (4, 5), (6, 7)
"""Numbers of tiles: sums of the upper rows with both tiles of weights, then of the lower; rows; weights."""
BYTE, LONG = ir.IntType(8), ir.IntType(64)
ADDRESS = BYTE.as_pointer()
F32 = np.float32(0)


def call(builder: Any, name: str, *arguments: Any) -> None:
    """An instruction of the matrix unit; numbers in `arguments` are those of tiles."""
    values = [ir.Constant(BYTE, argument) if isinstance(argument, int) else argument for argument in arguments]
    signature = ir.FunctionType(ir.VoidType(), [value.type for value in values])
    builder.call(cgutils.get_or_insert_function(builder.module, signature, f"llvm.x86.{name}"), values)


def at(builder: Any, address: Any, offset: Any = 0) -> Any:
    moved_by = ir.Constant(LONG, offset) if isinstance(offset, int) else offset
    return builder.inttoptr(builder.add(address, moved_by), ADDRESS)


@intrinsic
def load_config(typing_context: Any, address: Any) -> Any:
    """Sets the tiles' sizes from 64 bytes at an address, and clears them."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        call(builder, "ldtilecfg", at(builder, arguments[0]))
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def release_tiles(typing_context: Any) -> Any:
    """Gives the tiles up, so that a change of threads need not save them."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        call(builder, "tilerelease")
        return context.get_dummy_value()

    return types.void(), generate


def make_product(instruction: str, pitch: int, num_inputs: int) -> Any:
    """The product of up to 16 (`num_inputs` 1) or 32 (2) rows with 32 packed columns, as an intrinsic.

    Its arguments are addresses and sizes in bytes: rows and the distance between them; weights; steps of 64 bytes of a
    row; where the sums go, [rows, 32].
    """

    @intrinsic
    def product(typing_context: Any, rows: Any, stride: Any, weights: Any, num_steps: Any, sums: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            rows, stride, weights, num_steps, sums = arguments
            distance = ir.Constant(LONG, pitch)
            inputs = [rows, builder.add(rows, builder.mul(stride, ir.Constant(LONG, TILE)))][:num_inputs]
            for tile in SUMS[: 2 * num_inputs]:
                call(builder, "tilezero", tile)
            with cgutils.for_range(builder, num_steps) as loop:
                part = builder.add(weights, builder.mul(loop.index, ir.Constant(LONG, TILE * pitch)))
                along = builder.mul(loop.index, ir.Constant(LONG, 64))
                for tile, offset in zip(WEIGHTS, (0, 64), strict=True):
                    call(builder, "tileloadd64", tile, at(builder, part, offset), distance)
                for row in range(TILE):
                    for line in (0, 64):
                        _fetch(builder, at(builder, part, AHEAD + row * pitch + line))
                for index, source in enumerate(inputs):
                    call(builder, "tileloadd64", INPUTS[index], at(builder, source, along), stride)
                    for column, weight in enumerate(WEIGHTS):
                        call(builder, instruction, SUMS[2 * index + column], INPUTS[index], weight)
            for tile in SUMS[: 2 * num_inputs]:
                place = 4 * COLUMNS * TILE * (tile // 2) + 64 * (tile % 2)
                call(builder, "tilestored64", tile, at(builder, sums, place), ir.Constant(LONG, 4 * COLUMNS))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 5), generate

    return product


def _fetch(builder: Any, address: Any) -> None:
    word = ir.IntType(32)
    signature = ir.FunctionType(ir.VoidType(), [ADDRESS, word, word, word])
    function = builder.module.declare_intrinsic("llvm.prefetch", [ADDRESS], signature)
    builder.call(function, [address, word(0), word(3), word(1)])


@intrinsic
def narrow_rows(typing_context: Any, sums: Any, num_rows: Any, to: Any, stride: Any) -> Any:
    """Rounds rows of 32 float32 at an address to bfloat16, each to `stride` bytes behind the one before."""
    wide, short = ir.VectorType(FLOAT, LANES), ir.VectorType(ir.IntType(16), COLUMNS)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        sums, num_rows, to, stride = arguments
        # LLVM 22 knows a type for the result, but takes and turns what earlier versions had.
        convert = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(short, [wide, wide]), "llvm.x86.avx512bf16.cvtne2ps2bf16.512"
        )
        with cgutils.for_range(builder, num_rows) as loop:
            row = at(builder, sums, builder.mul(loop.index, ir.Constant(LONG, 4 * COLUMNS)))
            halves = builder.bitcast(row, wide.as_pointer())
            low, high = (builder.load(builder.gep(halves, [INDEX(index)]), align=4) for index in range(2))
            place = builder.bitcast(at(builder, to, builder.mul(loop.index, stride)), short.as_pointer())
            builder.store(builder.call(convert, [high, low]), place, align=2)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


few_bfloat, many_bfloat = (make_product("tdpbf16ps", FLOAT_PITCH, num_inputs) for num_inputs in (1, 2))
few_int8, many_int8 = (make_product("tdpbssd", INT8_PITCH, num_inputs) for num_inputs in (1, 2))


@njit(error_model="numpy", forceinline=True)
def configure(address: Any, num_rows: Any) -> Any:
    """Sets the tiles' sizes for up to 32 rows; `address` is room for them."""
    config = pointer(address, U8)
    for i in range(CONFIG_BYTES):
        config[i] = np.uint8(0)
    config[0] = np.uint8(1)
    for tile in range(8):
        rows: Any = TILE
        if tile == 0 or tile == 1 or tile == 4:
            rows = min(TILE, num_rows)
        elif tile == 2 or tile == 3 or tile == 5:
            rows = max(1, num_rows - TILE)
        config[16 + 2 * tile] = np.uint8(64)
        config[48 + tile] = np.uint8(rows)
    load_config(address)


@njit(error_model="numpy", forceinline=True)
def rows_of_panel(row_bytes: Any) -> Any:
    """Rows that are multiplied with all weights before others are."""
    return max(1, PANEL_BYTES // (ROWS * row_bytes)) * ROWS


def make_tiled_float(element: Any, revision: int) -> Kernel:
    """Rows times packed bfloat16 weights.

    Arguments: x, its row stride, rows, inputs; weights, bias or 0; output, outputs; scratch and its bytes a thread.
    """

    def tiled_float(a: Any) -> None:
        assert revision
        x, stride, num_rows, size, weights = a[0], 2 * a[1], a[2], a[3], a[4]
        bias, has_bias, output, num_out = pointer(a[5], element), a[5] != 0, pointer(a[6], element), a[7]
        thread, threads = np.int64(thread_index()), np.int64(num_threads())
        scratch = a[8] + thread * a[9]
        sums, totals = scratch + CONFIG_BYTES, pointer(scratch + CONFIG_BYTES, F32)
        num_blocks, num_steps = (num_out + COLUMNS - 1) // COLUMNS, size // FLOAT_DEPTH
        configured = np.int64(0)
        for block in range(num_blocks * thread // threads, num_blocks * (thread + 1) // threads):
            first = block * COLUMNS
            columns, part = min(COLUMNS, num_out - first), weights + block * num_steps * TILE * FLOAT_PITCH
            for row in range(0, num_rows, ROWS):
                rows = min(ROWS, num_rows - row)
                if rows != configured:
                    configure(scratch, rows)
                    configured = rows
                if rows > TILE:
                    many_bfloat(x + row * stride, stride, part, num_steps, sums)
                else:
                    few_bfloat(x + row * stride, stride, part, num_steps, sums)
                if columns == COLUMNS and not has_bias:
                    narrow_rows(sums, rows, a[6] + 2 * (row * num_out + first), 2 * num_out)
                    continue
                for r in range(rows):
                    to, own = moved(output, (row + r) * num_out + first), moved(totals, r * COLUMNS)
                    for i in range(columns):
                        to[i] = narrow(own[i] + (widen(bias[first + i]) if has_bias else np.float32(0)), element)
        release_tiles()

    return Kernel(tiled_float, set(FUSED))


def make_tiled_int8(element: Any, revision: int) -> Kernel:
    """Rows of 8-bit values times packed 8-bit weights, to outputs.

    Arguments: values, rows, inputs; scales and middles of rows; weights; sums, scales and bias (or 0) of columns;
    output, outputs; scratch and its bytes a thread.
    """

    def tiled_int8(a: Any) -> None:
        assert revision
        values, num_rows, size = a[0], a[1], a[2]
        scales, middles, weights = pointer(a[3], F32), pointer(a[4], F32), a[5]
        column_sums, column_scales, bias = pointer(a[6], F32), pointer(a[7], F32), pointer(a[8], F32)
        has_bias, output, num_out = a[8] != 0, pointer(a[9], element), a[10]
        thread, threads = np.int64(thread_index()), np.int64(num_threads())
        scratch = a[11] + thread * a[12]
        sums, totals = scratch + CONFIG_BYTES, pointer(scratch + CONFIG_BYTES, np.int32(0))
        num_blocks, num_steps = (num_out + COLUMNS - 1) // COLUMNS, size // INT8_DEPTH
        configured = np.int64(0)
        panel = rows_of_panel(size)
        for top in range(0, num_rows, panel):
            for block in range(num_blocks * thread // threads, num_blocks * (thread + 1) // threads):
                first = block * COLUMNS
                columns = min(COLUMNS, num_out - first)
                # Packed weights have 64 columns side by side: two blocks.
                part = weights + (first // INT8_COLUMNS) * INT8_COLUMNS * size + first % INT8_COLUMNS * 4
                own_sums, own_scales = moved(column_sums, first), moved(column_scales, first)
                shift = moved(bias, first)
                for row in range(top, min(num_rows, top + panel), ROWS):
                    rows = min(ROWS, num_rows - row)
                    if rows != configured:
                        configure(scratch, rows)
                        configured = rows
                    if rows > TILE:
                        many_int8(values + row * size, size, part, num_steps, sums)
                    else:
                        few_int8(values + row * size, size, part, num_steps, sums)
                    for r in range(rows):
                        to, own = moved(output, (row + r) * num_out + first), moved(totals, r * COLUMNS)
                        scale, middle = scales[row + r], middles[row + r]
                        if has_bias:
                            for i in range(columns):
                                product = (np.float32(own[i]) + middle * own_sums[i]) * own_scales[i] * scale
                                to[i] = narrow(product + shift[i], element)
                        else:
                            for i in range(columns):
                                product = (np.float32(own[i]) + middle * own_sums[i]) * own_scales[i] * scale
                                to[i] = narrow(product, element)
        release_tiles()

    return Kernel(tiled_int8, set())
