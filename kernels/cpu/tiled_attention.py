"""Attention to bfloat16 KV by the matrix unit of x86 CPUs (AMX), with the items and arguments of `attention.py`.

Owns one kernel. Scores are products of tiles: 16 keys, as they lie in a block, times the queries of up to 16 heads, in
pairs of elements as the instruction wants them, with zeros where a head does not read a key's head. A row of scores so
has all heads side by side: maxima and exponentials need no sums across lanes. Values are added up two positions at a
time, by the product of bfloat16 pairs, with weights rounded to bfloat16. All sums are float32. Query rows of an item
are taken one by one, so a row's result is the same whatever rows there are beside it. A key that is no number makes,
times zero, scores of heads that do not read it so: those are computed again. Source: as for `tiles.py`; sums by parts
as in FlashAttention-2 (Dao, 2023).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from kernels.cpu.attention import F32, I32, ITEM_WORDS, LOWEST, PARTITION, own_items
from kernels.cpu.simd import FLOAT, FUSED, INDEX, fetch_ahead, float_of_bits, moved, narrow, pointer, widen
from kernels.cpu.threads import Kernel, thread_index
from kernels.cpu.tiles import CONFIG_BYTES, LONG, TILE, at, call, configure, release_tiles

SCORES, KEYS, QUERIES = 0, 1, 2
"""Numbers of tiles; queries have all from the last on, and reload what does not fit."""
LAST_TILE = 7
STEP = 32
"""Elements of a key that one product takes."""
U16, U32 = np.uint16(0), np.uint32(0)
WORD, SHORT = ir.IntType(32), ir.IntType(16)
ROW = ir.VectorType(FLOAT, TILE)
NUM_SUMS = 20
"""Sums kept in registers at a time, beside what they are made of."""


def heads_at_once(num_kv: int, group: int) -> int:
    """KV heads whose query heads fit side by side into a row of scores."""
    return max(count for count in range(1, num_kv + 1) if num_kv % count == 0 and (count == 1 or count * group <= TILE))


def fits(num_kv: int, group: int, head_dim: int, block_size: int) -> bool:
    """Whether there is a kernel for these shapes."""
    return group <= TILE and head_dim % STEP == 0 and block_size % TILE == 0


def scratch_floats(num_kv: int, group: int, head_dim: int) -> int:
    """float32 elements that one thread needs: configuration, queries, scores, weights, sums."""
    num_steps = heads_at_once(num_kv, group) * head_dim // STEP
    return CONFIG_BYTES // 4 + num_steps * TILE * TILE + PARTITION * TILE * 3 // 2 + 2 * TILE + TILE * head_dim


@intrinsic(prefer_literal=True)
def load_queries(typing_context: Any, queries: Any, num_steps: Any) -> Any:
    """Loads the first tiles of queries from an address."""
    count = num_steps.literal_value

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        for step in range(min(count, LAST_TILE + 1 - QUERIES)):
            call(builder, "tileloadd64", QUERIES + step, at(builder, arguments[0], 1024 * step), LONG(64))
        return context.get_dummy_value()

    return types.void(types.int64, num_steps), generate


@intrinsic(prefer_literal=True)
def score_keys(typing_context: Any, keys: Any, stride: Any, queries: Any, scores: Any, num_steps: Any) -> Any:
    """Scores [16, 16] of 16 keys at an address, `stride` bytes apart, and the queries that `load_queries` took."""
    count, room = num_steps.literal_value, LAST_TILE + 1 - QUERIES

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        keys, stride, queries, scores = arguments[:4]
        call(builder, "tilezero", SCORES)
        for step in range(count):
            tile = QUERIES + min(step, room - 1)
            if count > room and step >= room - 1:
                call(builder, "tileloadd64", tile, at(builder, queries, 1024 * step), LONG(64))
            call(builder, "tileloadd64", KEYS, at(builder, keys, 64 * step), stride)
            call(builder, "tdpbf16ps", SCORES, KEYS, tile)
        call(builder, "tilestored64", SCORES, at(builder, scores), LONG(64))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4, num_steps), generate


def _row_at(builder: Any, rows: Any, index: Any) -> Any:
    """The vector at row `index` of [n, 16] words at a pointer."""
    place = builder.gep(rows, [builder.mul(index, INDEX(TILE))])
    return builder.bitcast(place, ir.VectorType(rows.type.pointee, TILE).as_pointer())


@intrinsic
def highest_of_rows(typing_context: Any, scores: Any, begin: Any, end: Any, highest: Any) -> Any:
    """The highest of each column [16] of rows begin to end - 1, of which there is at least one."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        scores, begin, end, highest = arguments
        found = cgutils.alloca_once(builder, ROW)
        builder.store(builder.load(_row_at(builder, scores, begin), align=4), found)
        with cgutils.for_range_slice(builder, begin, end, INDEX(1)) as (index, _):
            row, before = builder.load(_row_at(builder, scores, index), align=4), builder.load(found)
            builder.store(builder.select(builder.fcmp_ordered(">", row, before), row, before), found)
        builder.store(builder.load(found), _row_at(builder, highest, INDEX(0)), align=4)
        return context.get_dummy_value()

    return types.void(scores, types.int64, types.int64, highest), generate


def _constant(value: float) -> Any:
    return ir.Constant(ROW, [float(np.float32(value))] * TILE)


def _exponential(builder: Any, x: Any) -> Any:
    """As `simd.exponential`, of 16 numbers that are not above 0."""

    def fused(left: Any, right: Any, more: Any) -> Any:
        return builder.fadd(builder.fmul(left, right, flags=FUSED), more, flags=FUSED)

    lowest = _constant(-87.0)
    x = builder.select(builder.fcmp_ordered("<", x, lowest), lowest, x)
    rounder = _constant(12582912.0)
    shifted = fused(x, _constant(1.4426950408889634), rounder)
    whole = builder.fsub(shifted, rounder)
    rest = fused(whole, _constant(2.12194440e-4), fused(whole, _constant(-0.693359375), x))
    series = _constant(1.9875691500e-4)
    for factor in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        series = fused(series, rest, _constant(factor))
    series = builder.fadd(fused(builder.fmul(series, rest, flags=FUSED), rest, rest), _constant(1.0))
    words = ir.VectorType(WORD, TILE)
    exponent = builder.add(builder.bitcast(shifted, words), ir.Constant(words, [127] * TILE))
    power = builder.shl(exponent, ir.Constant(words, [23] * TILE))
    return builder.fmul(series, builder.bitcast(power, ROW))


@intrinsic
def weigh_pairs(
    typing_context: Any, scores: Any, begin: Any, end: Any, highest: Any, scale: Any, weights: Any, totals: Any
) -> Any:
    """Exponentials of scaled distances to the highest, of rows begin to end - 1, as bfloat16 pairs of rows 2 i and
    2 i + 1: [n, 16] words at `weights`. Rows beside them weigh nothing. Their sums go to `totals` [16]."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        scores, begin, end, highest, scale, weights, totals = arguments
        words, shorts = ir.VectorType(WORD, TILE), ir.VectorType(SHORT, TILE)
        top = builder.load(_row_at(builder, highest, INDEX(0)), align=4)
        lanes = ir.Constant(ir.VectorType(WORD, TILE), [0] * TILE)
        first = builder.insert_element(ir.Constant(ROW, ir.Undefined), scale, WORD(0))
        factor = builder.shuffle_vector(first, first, lanes)
        total = cgutils.alloca_once(builder, ROW)
        builder.store(_constant(0.0), total)
        convert = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(shorts, [ROW]), "llvm.x86.avx512bf16.cvtneps2bf16.512"
        )

        def weight(index: Any) -> Any:
            row = builder.load(_row_at(builder, scores, index), align=4)
            value = _exponential(builder, builder.fmul(builder.fsub(row, top), factor))
            is_inside = builder.and_(builder.icmp_signed(">=", index, begin), builder.icmp_signed("<", index, end))
            value = builder.select(is_inside, value, _constant(0.0))
            builder.store(builder.fadd(builder.load(total), value), total)
            return builder.zext(builder.call(convert, [value]), words)

        two = INDEX(2)
        num_pairs = builder.sdiv(builder.add(end, INDEX(1)), two)
        with cgutils.for_range_slice(builder, builder.sdiv(begin, two), num_pairs, INDEX(1)) as (pair, _):
            index = builder.mul(pair, two)
            low, high = weight(index), weight(builder.add(index, INDEX(1)))
            both = builder.or_(low, builder.shl(high, ir.Constant(words, [16] * TILE)))
            builder.store(both, _row_at(builder, weights, pair), align=4)
        builder.store(builder.load(total), _row_at(builder, totals, INDEX(0)), align=4)
        return context.get_dummy_value()

    return types.void(scores, types.int64, types.int64, highest, types.float32, weights, totals), generate


@intrinsic(prefer_literal=True)
def add_pairs(
    typing_context: Any, sums: Any, weights: Any, values: Any, stride: Any, count: Any, head_dim: Any, group: Any
) -> Any:
    """sums [group, head_dim] += pairs of weights times `count` values [count, head_dim], `stride` elements apart.

    Pairs lie [count / 2, 16], those of the group first. Values beyond `count` are not read.
    """
    size, num_heads = head_dim.literal_value, group.literal_value
    heads_together = min(num_heads, NUM_SUMS // 2)
    chunks_together = max(1, NUM_SUMS // (2 * heads_together))  # of 32 elements, two sums each

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        sums, weights, values, stride, count = arguments[:5]
        pair_type, words = ir.VectorType(SHORT, 2 * TILE), ir.VectorType(WORD, TILE)
        product = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(ROW, [ROW, words, words]), "llvm.x86.avx512bf16.dpbf16ps.512"
        )
        masks = [
            ir.Constant(ir.VectorType(WORD, 2 * TILE), [lane + offset for lane in range(TILE) for offset in (0, 32)]),
            ir.Constant(
                ir.VectorType(WORD, 2 * TILE), [lane + offset for lane in range(TILE, 32) for offset in (0, 32)]
            ),
        ]
        nothing = ir.Constant(pair_type, [0] * 2 * TILE)

        def add(heads: range, chunks: range) -> None:
            places = [(head, chunk + half) for head in heads for chunk in chunks for half in (0, TILE)]
            stored = [
                builder.bitcast(builder.gep(sums, [INDEX(head * size + first)]), ROW.as_pointer())
                for head, first in places
            ]
            held = [cgutils.alloca_once(builder, ROW) for _ in places]
            for local, to in zip(held, stored, strict=True):
                builder.store(builder.load(to, align=4), local)

            def part(row: Any, chunk: int) -> Any:
                place = builder.gep(values, [builder.add(builder.mul(stride, row), INDEX(chunk))])
                return builder.load(builder.bitcast(place, pair_type.as_pointer()), align=2)

            def add_two(pair: Any, has_second: bool) -> None:
                row = builder.mul(pair, INDEX(2))
                mixed = {}
                for chunk in chunks:
                    upper = part(builder.add(row, INDEX(1)), chunk) if has_second else nothing
                    lower = part(row, chunk)
                    for half, mask in zip((0, TILE), masks, strict=True):
                        mixed[chunk + half] = builder.bitcast(builder.shuffle_vector(lower, upper, mask), words)
                for head in heads:
                    place = builder.gep(weights, [builder.add(builder.mul(pair, INDEX(TILE)), INDEX(head))])
                    first = builder.insert_element(ir.Constant(words, ir.Undefined), builder.load(place), WORD(0))
                    weight = builder.shuffle_vector(first, first, ir.Constant(words, [0] * TILE))
                    for local, (own, dim) in zip(held, places, strict=True):
                        if own == head:
                            builder.store(builder.call(product, [builder.load(local), mixed[dim], weight]), local)

            num_pairs = builder.sdiv(count, INDEX(2))
            with cgutils.for_range(builder, num_pairs) as loop:
                add_two(loop.index, True)
            with builder.if_then(builder.icmp_signed("<", builder.mul(num_pairs, INDEX(2)), count)):
                add_two(num_pairs, False)
            for local, to in zip(held, stored, strict=True):
                builder.store(builder.load(local), to, align=4)

        for head in range(0, num_heads, heads_together):
            for chunk in range(0, size, 2 * TILE * chunks_together):
                chunks = range(chunk, min(size, chunk + 2 * TILE * chunks_together), 2 * TILE)
                add(range(head, min(num_heads, head + heads_together)), chunks)
        return context.get_dummy_value()

    return types.void(sums, weights, values, types.int64, types.int64, head_dim, group), generate


@njit(error_model="numpy")
def mend_scores(
    scores: Any,
    totals: Any,
    positions: Any,
    query: Any,
    keys: Any,
    table: Any,
    block_size: Any,
    width: Any,
    head_dim: Any,
    group: Any,
    num_heads: Any,
) -> Any:
    """Computes scores that are no numbers again, each from its own head's key alone; answers whether one is a number.

    `positions` are the first of the scores, and the first and end of those that count. Heads whose total is a number
    have none to mend.
    """
    first, begin, end = positions
    is_mended = False
    for head in range(num_heads):
        if totals[head] == totals[head]:
            continue
        own_query, own_keys = moved(query, head * head_dim), moved(keys, head // group * head_dim)
        for p in range(begin, end):
            place = (p - first) * TILE + head
            if scores[place] == scores[place]:
                continue
            key = moved(own_keys, (table[p // block_size] * block_size + p % block_size) * width)
            score = np.float32(0)
            for i in range(head_dim):
                score += widen(own_query[i]) * widen(key[i])
            scores[place] = score
            is_mended |= score == score
    return is_mended


def make_tiled_attend(element: Any, head_dim: int, group: int, num_kv: int, revision: int) -> Kernel:
    """The kernel for `group` query heads of each of `num_kv` KV heads. Arguments: as for `attention.make_attend`."""
    kv_at_once = heads_at_once(num_kv, group)
    num_passes, num_steps, steps_a_head = num_kv // kv_at_once, kv_at_once * head_dim // STEP, head_dim // STEP
    share = 4 * scratch_floats(num_kv, group, head_dim)
    num_heads, width = num_kv * group, num_kv * head_dim

    def tiled_attend(a: Any) -> None:
        assert revision
        keys, values = pointer(a[1], U16), pointer(a[2], U16)
        query_stride, output = a[3], pointer(a[4], U16)
        block_size, tables, tables_stride = a[6], pointer(a[7], I32), a[8]
        items, num_items, scale, window = pointer(a[9], I32), a[10], float_of_bits(np.int32(a[11])), a[12]
        partials = pointer(a[13], F32)
        scratch = a[14] + thread_index() * share
        queries_at = scratch + CONFIG_BYTES
        scores_at = queries_at + num_steps * 1024
        queries, scores = pointer(queries_at, U32), pointer(scores_at, F32)
        weights = pointer(scores_at + 4 * PARTITION * TILE, U32)
        highest = pointer(scores_at + 6 * PARTITION * TILE, F32)
        totals, sums = moved(highest, TILE), moved(highest, 2 * TILE)
        configure(scratch, 2 * TILE)
        for i in range(num_steps * 256):
            queries[i] = np.uint32(0)
        first_item, end_item = own_items(items, num_items)
        for index in range(first_item, end_item):
            item = moved(items, index * ITEM_WORDS)
            table = moved(tables, item[0] * tables_stride)
            first_row, num_rows, position = np.int64(item[1]), np.int64(item[2]), np.int64(item[3])
            first, last, partial = np.int64(item[4]), np.int64(item[5]), np.int64(item[6])
            for r in range(num_rows):
                begin, end = max(first, position + r + 1 - window), min(last, position + r + 1)
                if begin >= end:  # a part before the row's window
                    for head in range(num_heads):
                        found = moved(partials, ((partial + r) * num_heads + head) * (head_dim + 2))
                        for i in range(head_dim):
                            found[i] = np.float32(0)
                        found[head_dim] = LOWEST
                        found[head_dim + 1] = np.float32(0)
                    continue
                for part in range(num_passes):
                    first_head = part * kv_at_once * group
                    row_at = a[0] + 2 * ((first_row + r) * query_stride + first_head * head_dim)
                    row = pointer(row_at, U32)
                    for head in range(kv_at_once * group):
                        for step in range(steps_a_head):
                            for i in range(TILE):
                                to = ((head // group * steps_a_head + step) * TILE + i) * TILE + head
                                queries[to] = row[(head * head_dim + step * STEP) // 2 + i]
                    load_queries(queries_at, num_steps)
                    along = part * kv_at_once * head_dim
                    for p in range(begin // TILE * TILE, end, TILE):
                        place = (table[p // block_size] * block_size + p % block_size) * width + along
                        ahead = min(p + TILE, end - 1)
                        beyond = (table[ahead // block_size] * block_size + ahead % block_size) * width + along
                        for i in range(TILE):
                            for n in range(0, kv_at_once * head_dim, STEP):
                                fetch_ahead(moved(keys, beyond + i * width + n))
                        score_keys(a[1] + 2 * place, 2 * width, queries_at, scores_at + 64 * (p - first), num_steps)
                    is_mended = True
                    while is_mended:
                        highest_of_rows(scores, begin - first, end - first, highest)
                        weigh_pairs(scores, begin - first, end - first, highest, scale, weights, totals)
                        is_mended = mend_scores(
                            scores,
                            totals,
                            (first, begin, end),
                            pointer(row_at, U16),
                            moved(keys, along),
                            table,
                            block_size,
                            width,
                            head_dim,
                            group,
                            kv_at_once * group,
                        )
                    for i in range(kv_at_once * group * head_dim):
                        sums[i] = np.float32(0)
                    for p in range(begin // block_size * block_size, end, block_size):
                        place = table[p // block_size] * block_size * width + along
                        beyond = table[min(p + block_size, end - 1) // block_size] * block_size * width + along
                        skipped = max(p, begin // 2 * 2) - p
                        for kv in range(kv_at_once):
                            for i in range(block_size):
                                for n in range(0, head_dim, STEP):
                                    fetch_ahead(moved(values, beyond + i * width + kv * head_dim + n))
                            add_pairs(
                                moved(sums, kv * group * head_dim),
                                moved(weights, (p + skipped - first) // 2 * TILE + kv * group),
                                moved(values, place + skipped * width + kv * head_dim),
                                width,
                                min(end - p, block_size) - skipped,
                                head_dim,
                                group,
                            )
                    if partial < 0:
                        to = moved(output, ((first_row + r) * num_heads + first_head) * head_dim)
                        for head in range(kv_at_once * group):
                            for i in range(head * head_dim, (head + 1) * head_dim):
                                to[i] = narrow(sums[i] / totals[head], U16)
                    else:
                        for head in range(kv_at_once * group):
                            found = moved(partials, ((partial + r) * num_heads + first_head + head) * (head_dim + 2))
                            for i in range(head_dim):
                                found[i] = sums[head * head_dim + i]
                            found[head_dim] = highest[head] * scale
                            found[head_dim + 1] = totals[head]
        release_tiles()

    return Kernel(tiled_attend, set(FUSED))
