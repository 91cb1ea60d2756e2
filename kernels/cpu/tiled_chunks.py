"""Attention of many query rows of one sequence by the matrix unit of x86 CPUs (AMX), over bfloat16 KV as it lies.

Owns one kernel. It first turns the values of the context, so that the unit can sum over positions. Then 32 query rows
of a head meet KEYS positions at a time: their scores have a row for each key and a column for each query, so that
maxima, exponentials and sums are those of 16 queries side by side, and no lane meets another. Weights are rounded to
bfloat16, all sums are float32. Parts of the context begin at multiples of KEYS, wherever a chunk begins: so a row's
result does not depend on how a prompt was cut. Source: as for `tiles.py`; sums by parts as in FlashAttention-2 (Dao,
2023).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from kernels.cpu.attention import F32
from kernels.cpu.score_rows import ROW, WORD, WORDS, constant
from kernels.cpu.simd import FUSED, INDEX, float_of_bits, moved, narrow, pointer
from kernels.cpu.threads import Kernel, barrier, num_threads, thread_index
from kernels.cpu.tiles import CONFIG_BYTES, INPUTS, LONG, SUMS, TILE, WEIGHTS, at, call, configure, release_tiles

QUERIES = 2 * TILE
"""Query rows of a head that are computed at once."""
KEYS = 128
"""Positions that they meet at once: their scores stay in the first cache."""
STEP = 32
"""Elements, or positions, that one product sums over."""
ROW_BYTES = 4 * QUERIES
HIDDEN = np.float32(-(2.0**100))
"""Score of a position that a query does not see: weighs nothing beside any other. Finite, since a query may see none of
a part; a power of two, since its distance to itself is to be 0 however products are rounded."""
POWERS = (0.0096004093, 0.0559169762, 0.2402371913, 0.6931219697, 1.0)
"""Of the series that is near 2 to the power of -0.5 to 0.5, and exact at 0: where none is higher, nothing is scaled."""
U16, U32, I64 = np.uint16(0), np.uint32(0), np.int64(0)


def fits(head_dim: int, block_size: int) -> bool:
    """Whether there is a kernel for these shapes."""
    return head_dim % STEP == 0 and block_size % TILE == 0


def scratch_bytes(head_dim: int) -> int:
    """Of one thread: configuration, queries, scores, weights, sums, and two numbers of each query."""
    return CONFIG_BYTES + QUERIES * (2 * head_dim + 4 * KEYS + 2 * KEYS + 4 * head_dim) + 2 * ROW_BYTES


def turned_bytes(num_kv: int, head_dim: int, length: int) -> int:
    """Of the turned values of a context."""
    return 2 * num_kv * head_dim * -(-length // STEP) * STEP


@intrinsic(prefer_literal=True)
def score_keys(typing_context: Any, upper: Any, lower: Any, stride: Any, queries: Any, scores: Any, num: Any) -> Any:
    """Scores [32, 32] of twice 16 keys at two addresses, `stride` bytes apart, and the queries at an address, which lie
    [2, `num` x 16, 16] in pairs of elements."""
    num_steps = num.literal_value

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        upper, lower, stride, queries, scores = arguments[:5]
        for tile in SUMS:
            call(builder, "tilezero", tile)
        for step in range(num_steps):
            for tile, keys in zip(INPUTS, (upper, lower), strict=True):
                call(builder, "tileloadd64", tile, at(builder, keys, 64 * step), stride)
            for half, tile in enumerate(WEIGHTS):
                place = at(builder, queries, 1024 * (half * num_steps + step))
                call(builder, "tileloadd64", tile, place, LONG(64))
            multiply_tiles(builder)
        for tile, place in tiles_at(builder, scores, 0):
            call(builder, "tilestored64", tile, place, LONG(ROW_BYTES))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5, num), generate


def tiles_at(builder: Any, sums: Any, offset: int) -> list[tuple[int, Any]]:
    """The tiles of sums, and where in [rows, 32] float32 each has its place."""
    return [(tile, at(builder, sums, offset + ROW_BYTES * TILE * (tile // 2) + 64 * (tile % 2))) for tile in SUMS]


def multiply_tiles(builder: Any) -> None:
    for index, row in enumerate(INPUTS):
        for half, column in enumerate(WEIGHTS):
            call(builder, "tdpbf16ps", SUMS[2 * index + half], row, column)


@intrinsic(prefer_literal=True)
def add_values(typing_context: Any, turned: Any, weights: Any, num_steps: Any, sums: Any, head_dim: Any) -> Any:
    """sums [head_dim, 32] += turned values [steps, head_dim, 32] times weights [steps x 16, 32], pairs of bfloat16. All
    are addresses."""
    size = head_dim.literal_value

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        turned, weights, num_steps, sums = arguments[:4]
        for first in range(0, size, 2 * TILE):
            places = tiles_at(builder, sums, ROW_BYTES * first)
            for tile, place in places:
                call(builder, "tileloadd64", tile, place, LONG(ROW_BYTES))
            with cgutils.for_range(builder, num_steps) as loop:
                values = builder.add(turned, builder.mul(loop.index, LONG(64 * size)))
                pairs = builder.add(weights, builder.mul(loop.index, LONG(ROW_BYTES * TILE)))
                for half, tile in enumerate(INPUTS):
                    call(builder, "tileloadd64", tile, at(builder, values, 64 * (first + TILE * half)), LONG(64))
                for half, tile in enumerate(WEIGHTS):
                    call(builder, "tileloadd64", tile, at(builder, pairs, 64 * half), LONG(ROW_BYTES))
                multiply_tiles(builder)
            for tile, place in places:
                call(builder, "tilestored64", tile, place, LONG(ROW_BYTES))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4, head_dim), generate


def power_of_two(builder: Any, x: Any) -> Any:
    """2 to the power of 16 numbers, within a hundred-thousandth; 0 far below 0."""
    module = builder.module
    nearest = cgutils.get_or_insert_function(module, ir.FunctionType(ROW, [ROW]), "llvm.rint.v16f32")
    arguments = [ROW, ROW, ROW, ir.IntType(16), WORD]
    scale = cgutils.get_or_insert_function(
        module, ir.FunctionType(ROW, arguments), "llvm.x86.avx512.mask.scalef.ps.512"
    )
    whole = builder.call(nearest, [x])
    rest, series = builder.fsub(x, whole), constant(POWERS[0])
    for factor in POWERS[1:]:
        series = builder.fadd(builder.fmul(series, rest, flags=FUSED), constant(factor), flags=FUSED)
    return builder.call(scale, [series, whole, series, ir.IntType(16)(-1), WORD(4)])


@intrinsic(prefer_literal=True)
def weigh_keys(
    typing_context: Any,
    scores: Any,
    num_keys: Any,
    scale: Any,
    weights: Any,
    highest: Any,
    totals: Any,
    sums: Any,
    head_dim: Any,
) -> Any:
    """2 to the power of scaled distances of scores [keys, 32] to the highest of each query so far, as bfloat16 pairs of
    keys 2 i and 2 i + 1: [keys / 2, 32] words at `weights`. Brings up to date `highest` [32] and the sums of weights,
    `totals` [32]; where one is higher than before, `totals` and `sums` [head_dim, 32] are scaled by that."""
    size = head_dim.literal_value

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        scores, num_keys, scale, weights, highest, totals, sums = arguments[:7]
        shorts = ir.VectorType(ir.IntType(16), 2 * TILE)
        convert = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(shorts, [ROW, ROW]), "llvm.x86.avx512bf16.cvtne2ps2bf16.512"
        )
        side_by_side = ir.Constant(
            ir.VectorType(WORD, 2 * TILE), [lane + half for lane in range(TILE) for half in (0, TILE)]
        )
        first = builder.insert_element(ir.Constant(ROW, ir.Undefined), scale, WORD(0))
        factor = builder.shuffle_vector(first, first, ir.Constant(WORDS, [0] * TILE))
        halves = (0, 1)

        def place(rows: Any, index: Any, half: int, kind: Any = ROW) -> Any:
            to = builder.gep(rows, [builder.add(builder.mul(index, INDEX(QUERIES)), INDEX(half * TILE))])
            return builder.bitcast(to, kind.as_pointer())

        def load(rows: Any, index: Any, half: int) -> Any:
            return builder.load(place(rows, index, half), align=4)

        before = [load(highest, INDEX(0), half) for half in halves]
        found = [cgutils.alloca_once(builder, ROW) for _ in halves]
        for half in halves:
            builder.store(before[half], found[half])
        with cgutils.for_range(builder, num_keys) as loop:
            for half in halves:
                row, most = load(scores, loop.index, half), builder.load(found[half])
                builder.store(builder.select(builder.fcmp_ordered(">", row, most), row, most), found[half])
        tops = [builder.load(found[half]) for half in halves]
        higher = [builder.fcmp_ordered(">", tops[half], before[half]) for half in halves]
        bits = [builder.bitcast(each, ir.IntType(TILE)) for each in higher]
        with builder.if_then(builder.icmp_unsigned("!=", builder.or_(*bits), ir.IntType(TILE)(0))):
            less = [power_of_two(builder, builder.fmul(builder.fsub(before[h], tops[h]), factor)) for h in halves]
            for half in halves:
                builder.store(tops[half], place(highest, INDEX(0), half), align=4)
                builder.store(
                    builder.fmul(load(totals, INDEX(0), half), less[half]), place(totals, INDEX(0), half), align=4
                )
            with cgutils.for_range(builder, INDEX(size)) as loop:
                for half in halves:
                    to = place(sums, loop.index, half)
                    builder.store(builder.fmul(builder.load(to, align=4), less[half]), to, align=4)
        offsets = [builder.fmul(top, factor) for top in tops]

        def weight(index: Any, half: int) -> Any:
            scaled = builder.fmul(load(scores, index, half), factor, flags=FUSED)
            return power_of_two(builder, builder.fsub(scaled, offsets[half], flags=FUSED))

        for half in halves:
            builder.store(load(totals, INDEX(0), half), found[half])
        with cgutils.for_range(builder, builder.sdiv(num_keys, INDEX(2))) as loop:
            key = builder.mul(loop.index, INDEX(2))
            for half in halves:
                low, high = weight(key, half), weight(builder.add(key, INDEX(1)), half)
                builder.store(builder.fadd(builder.load(found[half]), builder.fadd(low, high)), found[half])
                both = builder.call(convert, [high, low])
                pairs = builder.bitcast(builder.shuffle_vector(both, both, side_by_side), WORDS)
                builder.store(pairs, place(weights, loop.index, half, WORDS), align=4)
        for half in halves:
            builder.store(builder.load(found[half]), place(totals, INDEX(0), half), align=4)
        return context.get_dummy_value()

    numbers = (types.int64, types.float32)
    return types.void(scores, *numbers, weights, highest, totals, sums, head_dim), generate


@njit(error_model="numpy", forceinline=True)
def slot_of(table: Any, block_size: Any, position: Any) -> Any:
    """Where a position lies."""
    return table[position // block_size] * block_size + position % block_size


def make_tiled_chunk(element: Any, head_dim: int, group: int, num_kv: int, revision: int) -> Kernel:
    """The kernel for `group` query heads of each of `num_kv` KV heads.

    Arguments: queries, elements between their rows, rows, positions before them; keys; values; blocks (int64), their
    size; output; scale, window; room for turned values, and for `scratch_bytes` of each thread.
    """
    num_heads, width, num_pairs = num_kv * group, num_kv * head_dim, head_dim // 2
    num_steps = head_dim // STEP
    share = scratch_bytes(head_dim)

    def tiled_chunk(a: Any) -> None:
        assert revision
        query_stride, num_rows, earlier = a[1], a[2], a[3]
        values, table, block_size = pointer(a[5], U16), pointer(a[6], I64), a[7]
        window, turned = a[10], pointer(a[11], U16)
        scale = float_of_bits(np.int32(a[9])) * np.float32(1.4426950408889634)
        thread, threads = np.int64(thread_index()), np.int64(num_threads())
        length = earlier + num_rows
        start = max(0, earlier + 1 - window) // KEYS * KEYS
        num_parts = (length - start + STEP - 1) // STEP
        for index in range(thread, num_parts * num_kv, threads):
            part, kv = index // num_kv, index % num_kv
            to = moved(turned, (kv * num_parts + part) * STEP * head_dim)
            for p in range(STEP):
                position = start + part * STEP + p
                if position < length:
                    row = moved(values, slot_of(table, block_size, position) * width + kv * head_dim)
                    for i in range(head_dim):
                        to[i * STEP + p] = row[i]
                else:
                    for i in range(head_dim):
                        to[i * STEP + p] = np.uint16(0)
        barrier()

        scratch = a[12] + thread * share
        queries_at = scratch + CONFIG_BYTES
        scores_at = queries_at + 2 * QUERIES * head_dim
        weights_at = scores_at + ROW_BYTES * KEYS
        sums_at = weights_at + ROW_BYTES * KEYS // 2
        queries, scores, weights = pointer(queries_at, U32), pointer(scores_at, F32), pointer(weights_at, U32)
        sums, packed = pointer(sums_at, F32), pointer(queries_at, U32)
        highest = moved(sums, QUERIES * head_dim)
        totals = moved(highest, QUERIES)
        configure(scratch, QUERIES)
        num_tiles, last_tile = (num_rows + QUERIES - 1) // QUERIES, (length - 1) // TILE * TILE
        for index in range(thread, num_tiles * num_heads, threads):
            first_row, head = index // num_heads * QUERIES, index % num_heads
            kv = head // group
            rows, position = min(QUERIES, num_rows - first_row), earlier + first_row
            for q in range(QUERIES):
                to = moved(queries, q // TILE * num_pairs * TILE + q % TILE)
                if q < rows:
                    row = pointer(a[0] + 2 * ((first_row + q) * query_stride + head * head_dim), U32)
                    for i in range(num_pairs):
                        to[i * TILE] = row[i]
                else:
                    for i in range(num_pairs):
                        to[i * TILE] = np.uint32(0)
            for q in range(QUERIES):
                highest[q] = HIDDEN
                totals[q] = np.float32(0)
            for i in range(QUERIES * head_dim):
                sums[i] = np.float32(0)
            end = min(length, position + QUERIES)
            for begin in range(max(0, position + 1 - window) // KEYS * KEYS, end, KEYS):
                num_keys = (min(KEYS, end - begin) + STEP - 1) // STEP * STEP
                for p in range(begin, begin + num_keys, STEP):
                    upper = slot_of(table, block_size, min(p, last_tile)) * width + kv * head_dim
                    lower = slot_of(table, block_size, min(p + TILE, last_tile)) * width + kv * head_dim
                    score_keys(
                        a[4] + 2 * upper,
                        a[4] + 2 * lower,
                        2 * width,
                        queries_at,
                        scores_at + ROW_BYTES * (p - begin),
                        num_steps,
                    )
                for p in range(max(begin, position + 1), begin + num_keys):  # after some queries
                    for q in range(min(QUERIES, p - position)):
                        scores[(p - begin) * QUERIES + q] = HIDDEN
                for p in range(begin, min(begin + num_keys, position + QUERIES - window)):  # before their windows
                    for q in range(max(0, p - position + window), QUERIES):
                        scores[(p - begin) * QUERIES + q] = HIDDEN
                weigh_keys(scores, num_keys, scale, weights, highest, totals, sums, head_dim)
                place = (kv * num_parts + (begin - start) // STEP) * STEP * head_dim
                add_values(a[11] + 2 * place, weights_at, num_keys // STEP, sums_at, head_dim)
            for q in range(QUERIES):
                totals[q] = np.float32(1) / totals[q]
            for i in range(num_pairs):
                for q in range(QUERIES):
                    low = narrow(sums[2 * i * QUERIES + q] * totals[q], U16)
                    high = narrow(sums[(2 * i + 1) * QUERIES + q] * totals[q], U16)
                    packed[i * QUERIES + q] = np.uint32(low) | np.uint32(high) << np.uint32(16)
            for q in range(rows):
                out = pointer(a[8] + 2 * ((first_row + q) * num_heads + head) * head_dim, U32)
                for i in range(num_pairs):
                    out[i] = packed[i * QUERIES + q]
        release_tiles()

    return Kernel(tiled_chunk, set(FUSED))
