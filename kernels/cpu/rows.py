"""Kernels of linear layers: products of few rows with packed weights, and rounding of rows to 8 bits.

Owns the orders of packed weights that the products understand, and the layout of the kernels' arguments. Does not own
packing, which is oneDNN's. Few rows are bound by the reading of weights: each part of a weight is read once, in order,
and used for all rows while it is in the cache. Invariants: a row's result follows from that row alone; 8-bit results
equal those of `kernels.reference` bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from kernels.cpu.simd import FLOAT, FUSED, INDEX, add_product, moved, narrow, pointer, splat, widen
from kernels.cpu.threads import Kernel, num_threads, thread_index

LANES = 16
MAX_FEW_ROWS = 16
"""Rows that a product of few rows has room for."""
INT8_COLUMNS, INT8_DEPTH = 64, 64
"""Packed int8 weights: 64 outputs by as many inputs as a multiple of 64 holds, 4 of which stand together."""
FLOAT_COLUMNS, FLOAT_DEPTH = {2: 32, 4: 64}, {2: 32, 4: 16}
"""Packed weights of 16 and of 32 bits, by bytes: so many outputs by as many inputs as a multiple of the other number
holds, 2 of which stand together where they are of 16 bits."""
INT8_SCRATCH = 4 * (INT8_COLUMNS + 2 * MAX_FEW_ROWS)
"""Bytes a thread needs beside the rounded rows."""
AHEAD = 1024
"""Bytes between a weight and the one that is fetched into the cache."""
I8, U8, I32, F32 = np.int8(0), np.uint8(0), np.int32(0), np.float32(0)
ELEMENTS = {torch.float32: np.float32(0), torch.bfloat16: np.uint16(0), torch.float16: np.int16(0)}
"""How kernels see each type: narrow floats as integers of their size."""
NUM_STEPS = np.float32(253)
SMALLEST_SPREAD = np.float32(1e-30)
ROUNDER = np.float32(12582912.0)
"""Adding it leaves no bits below one, so that the sum is rounded, halves to even."""


@intrinsic
def order_of_float(typing_context: Any, value: Any) -> Any:
    """An int32 for a float32, or back: in the order of the numbers, and with NaNs at the ends.

    Thus a search for the largest needs no care for NaNs, and is done on many lanes at once.
    """
    word = ir.IntType(32)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        bits = builder.bitcast(arguments[0], word)
        ordered = builder.xor(bits, builder.and_(builder.ashr(bits, word(31)), word(0x7FFFFFFF)))
        return ordered if value == types.float32 else builder.bitcast(ordered, FLOAT)

    return (types.int32 if value == types.float32 else types.float32)(value), generate


@intrinsic
def float_of_whole(typing_context: Any, value: Any) -> Any:
    """The float32 nearest to an int32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.sitofp(arguments[0], FLOAT)

    return types.float32(types.int32), generate


def fetch_ahead_of(builder: Any, address: Any, num_bytes: int) -> None:
    """Asks for the cache lines of `num_bytes` bytes that lie AHEAD of an address."""
    byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
    signature = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
    function = builder.module.declare_intrinsic("llvm.prefetch", [byte], signature)
    for offset in range(AHEAD, AHEAD + num_bytes, 64):
        at = builder.gep(builder.bitcast(address, byte), [INDEX(offset)])
        builder.call(function, [at, word(0), word(3), word(1)])


def store_all(builder: Any, address: Any, vectors: Sequence[Any]) -> None:
    """Writes vectors one behind the other."""
    to = builder.bitcast(address, vectors[0].type.as_pointer())
    for index, vector in enumerate(vectors):
        builder.store(vector, builder.gep(to, [INDEX(index)]), align=4)


@intrinsic
def multiply_int8_block(typing_context: Any, values: Any, weights: Any, num_quads: Any, sums: Any) -> Any:
    """sums [64] int32 = values [4 num_quads] uint8 times packed weights [num_quads, 64, 4] int8."""
    word, vector = ir.IntType(32), ir.VectorType(ir.IntType(32), LANES)
    parts = range(INT8_COLUMNS // LANES)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        values, weights, num_quads, sums = arguments
        values, weights = builder.bitcast(values, word.as_pointer()), builder.bitcast(weights, vector.as_pointer())
        # LLVM 22 sees bytes in the last two, but takes and turns what earlier versions had.
        product = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(vector, [vector] * 3), "llvm.x86.avx512.vpdpbusd.512"
        )
        totals = [cgutils.alloca_once_value(builder, ir.Constant(vector, [0] * LANES)) for _ in parts]
        with cgutils.for_range(builder, num_quads) as loop:
            quad = builder.load(builder.gep(values, [loop.index]), align=1)
            first = builder.insert_element(ir.Constant(vector, ir.Undefined), quad, ir.Constant(word, 0))
            spread = builder.shuffle_vector(first, first, ir.Constant(vector, [0] * LANES))
            row = builder.gep(weights, [builder.mul(loop.index, INDEX(len(parts)))])
            fetch_ahead_of(builder, row, 4 * INT8_COLUMNS)
            for part, total in zip(parts, totals, strict=True):
                weight = builder.load(builder.gep(row, [INDEX(part)]), align=1)
                builder.store(builder.call(product, [builder.load(total), spread, weight]), total)
        store_all(builder, sums, [builder.load(total) for total in totals])
        return context.get_dummy_value()

    return types.void(values, weights, num_quads, sums), generate


@intrinsic
def multiply_float_block(typing_context: Any, values: Any, weights: Any, num_pairs: Any, sums: Any) -> Any:
    """sums [columns] = values [2 num_pairs], all float32, times a block of packed weights.

    bfloat16 weights are [num_pairs, 32, 2], float32 ones [num_pairs, 2, 64]: 4 chains of sums in either case.
    """
    is_wide = weights.dtype == types.float32
    floats, words = ir.VectorType(FLOAT, LANES), ir.VectorType(ir.IntType(32), LANES)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        values, weights, num_pairs, sums = arguments
        weights = builder.bitcast(weights, words.as_pointer())
        totals = [cgutils.alloca_once_value(builder, ir.Constant(floats, [0.0] * LANES)) for _ in range(4)]

        def add(total: Any, factor: Any, bits: Any) -> None:
            weight = builder.bitcast(bits, floats)
            builder.store(add_product(builder, builder.load(total), factor, weight), total)

        with cgutils.for_range(builder, num_pairs) as loop:
            pair = builder.gep(values, [builder.mul(loop.index, INDEX(2))])
            even, odd = (splat(builder, builder.load(builder.gep(pair, [INDEX(i)])), LANES) for i in range(2))
            num_vectors = 8 if is_wide else 2
            row = builder.gep(weights, [builder.mul(loop.index, INDEX(num_vectors))])
            fetch_ahead_of(builder, row, 64 * num_vectors)
            for index in range(num_vectors):
                bits = builder.load(builder.gep(row, [INDEX(index)]), align=2)
                if is_wide:
                    add(totals[index % 4], even if index < 4 else odd, bits)
                else:
                    add(totals[index], even, builder.shl(bits, ir.Constant(words, [16] * LANES)))
                    add(totals[2 + index], odd, builder.and_(bits, ir.Constant(words, [0xFFFF0000] * LANES)))
        results = [builder.load(total) for total in totals]
        if not is_wide:
            results = [builder.fadd(results[index], results[2 + index]) for index in range(2)]
        store_all(builder, sums, results)
        return context.get_dummy_value()

    return types.void(values, weights, num_pairs, sums), generate


@njit(forceinline=True)
def range_of(x: Any, size: Any) -> Any:
    """Steps a unit, scale and middle of a row's numbers: see `kernels.reference.round_inputs`."""
    lowest = highest = np.int32(0)
    for i in range(size):
        order = order_of_float(widen(x[i]))
        lowest, highest = min(lowest, order), max(highest, order)
    low, high = order_of_float(lowest), order_of_float(highest)
    spread = high - low
    if spread < SMALLEST_SPREAD:
        spread = SMALLEST_SPREAD
    steps = (np.float32(1) / spread) * NUM_STEPS
    middle = ((high + low) * np.float32(0.5) * steps + ROUNDER) - ROUNDER
    return steps, spread / NUM_STEPS, middle


@njit(forceinline=True)
def rounded(number: Any, steps: Any, middle: Any) -> Any:
    """The value of a number as an int32."""
    return np.int32(((number * steps + ROUNDER) - ROUNDER) - middle)


def make_round(element: Any, revision: int) -> Kernel:
    """Rounds rows to 8 bits. Arguments: x, its row stride, values, scales, middles, rows, size."""

    def round_rows(a: Any) -> None:
        assert revision
        x, stride, values = pointer(a[0], element), a[1], pointer(a[2], I8)
        scales, middles, num_rows, size = pointer(a[3], F32), pointer(a[4], F32), a[5], a[6]
        for row in range(np.int64(thread_index()), num_rows, np.int64(num_threads())):
            own = moved(x, row * stride)
            to = moved(values, row * size)
            steps, scales[row], middle = range_of(own, size)
            middles[row] = middle
            for i in range(size):
                to[i] = np.int8(rounded(widen(own[i]), steps, middle))

    return Kernel(round_rows, set())


def make_scale(element: Any, revision: int) -> Kernel:
    """From products of whole numbers to outputs.

    Arguments: products, scales and middles of rows; sums, scales and bias (or 0) of columns; output, rows, size.
    """

    def scale_rows(a: Any) -> None:
        assert revision
        products, scales, middles = pointer(a[0], F32), pointer(a[1], F32), pointer(a[2], F32)
        column_sums, column_scales, bias = pointer(a[3], F32), pointer(a[4], F32), pointer(a[5], F32)
        has_bias, output, num_rows, size = a[5] != 0, pointer(a[6], element), a[7], a[8]
        for row in range(np.int64(thread_index()), num_rows, np.int64(num_threads())):
            own, to = moved(products, row * size), moved(output, row * size)
            scale, middle = scales[row], middles[row]
            if has_bias:
                for i in range(size):
                    product = (own[i] + middle * column_sums[i]) * column_scales[i] * scale
                    to[i] = narrow(product + bias[i], element)
            else:
                for i in range(size):
                    to[i] = narrow((own[i] + middle * column_sums[i]) * column_scales[i] * scale, element)

    return Kernel(scale_rows, set())


def make_few_int8(element: Any, revision: int) -> Kernel:
    """Few rows, rounded to 8 bits, times packed int8 weights.

    Arguments: x, its row stride, rows, inputs, padded inputs; weights, sums, scales and bias (or 0) of columns; output,
    outputs; scratch and its bytes a thread.
    """

    def few_int8(a: Any) -> None:
        assert revision
        x, stride, num_rows, size, padded = pointer(a[0], element), a[1], a[2], a[3], a[4]
        weights, column_sums, column_scales = pointer(a[5], I8), pointer(a[6], F32), pointer(a[7], F32)
        bias, has_bias, output, num_out = pointer(a[8], F32), a[8] != 0, pointer(a[9], element), a[10]
        thread, threads = np.int64(thread_index()), np.int64(num_threads())
        scratch = a[11] + thread * a[12]
        totals, values = pointer(scratch, I32), pointer(scratch + INT8_SCRATCH, U8)
        scales = moved(pointer(scratch, F32), INT8_COLUMNS)
        middles = moved(scales, MAX_FEW_ROWS)
        for row in range(num_rows):
            own, to = moved(x, row * stride), moved(values, row * padded)
            steps, scales[row], middle = range_of(own, size)
            middles[row] = middle
            # The instruction wants one side without sign; the 128 are taken off again with the column's sum.
            for i in range(size):
                to[i] = np.uint8(rounded(widen(own[i]), steps, middle) + np.int32(128))
            for i in range(size, padded):
                to[i] = np.uint8(128)
        num_blocks = (num_out + INT8_COLUMNS - 1) // INT8_COLUMNS
        for block in range(num_blocks * thread // threads, num_blocks * (thread + 1) // threads):
            first = block * INT8_COLUMNS
            sums, column_scale, shift = moved(column_sums, first), moved(column_scales, first), moved(bias, first)
            for row in range(num_rows):
                part = moved(weights, first * padded)
                multiply_int8_block(moved(values, row * padded), part, padded // 4, totals)
                to, scale, middle = moved(output, row * num_out + first), scales[row], middles[row]
                for i in range(min(INT8_COLUMNS, num_out - first)):
                    product = float_of_whole(totals[i] - np.int32(128) * np.int32(sums[i]))
                    product = (product + middle * sums[i]) * column_scale[i] * scale
                    if has_bias:
                        product += shift[i]
                    to[i] = narrow(product, element)

    return Kernel(few_int8, set())


def make_few_float(element: Any, revision: int) -> Kernel:
    """Few rows times packed weights of their own type.

    Arguments: x, its row stride, rows, inputs, padded inputs; weights, bias or 0; output, outputs; scratch and its
    bytes a thread.
    """

    columns = FLOAT_COLUMNS[np.dtype(type(element)).itemsize]

    def few_float(a: Any) -> None:
        assert revision
        x, stride, num_rows, size, padded = pointer(a[0], element), a[1], a[2], a[3], a[4]
        weights, bias, has_bias = pointer(a[5], element), pointer(a[6], element), a[6] != 0
        output, num_out = pointer(a[7], element), a[8]
        thread, threads = np.int64(thread_index()), np.int64(num_threads())
        totals = pointer(a[9] + thread * a[10], F32)
        values = moved(totals, columns)
        for row in range(num_rows):
            own, to = moved(x, row * stride), moved(values, row * padded)
            for i in range(size):
                to[i] = widen(own[i])
            for i in range(size, padded):
                to[i] = np.float32(0)
        num_blocks = (num_out + columns - 1) // columns
        for block in range(num_blocks * thread // threads, num_blocks * (thread + 1) // threads):
            first = block * columns
            for row in range(num_rows):
                part = moved(weights, first * padded)
                multiply_float_block(moved(values, row * padded), part, padded // 2, totals)
                to = moved(output, row * num_out + first)
                for i in range(min(columns, num_out - first)):
                    total = totals[i]
                    if has_bias:
                        total += widen(bias[first + i])
                    to[i] = narrow(total, element)

    return Kernel(few_float, set(FUSED))
