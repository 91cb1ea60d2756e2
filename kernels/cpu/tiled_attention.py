"""Attention to bfloat16 KV by the matrix unit of x86 CPUs (AMX), with the items and arguments of `attention.py`.

Owns one kernel. Scores are products of tiles: 16 keys, as they lie in a block, times the queries of up to 16 heads, in
pairs of elements as the instruction wants them, with zeros where a head does not read a key's head. A row of scores so
has all heads side by side: maxima and exponentials need no sums across lanes. Values are added up two positions at a
time, by the product of bfloat16 pairs, with weights rounded to bfloat16. All sums are float32. Query rows of an item
are taken one by one, so a row's result is the same whatever rows there are beside it. A key that is not a number makes
all heads of that row so. Source: as for `tiles.py`; sums by parts as in FlashAttention-2 (Dao, 2023).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kernels.cpu.attention import F32, I32, ITEM_WORDS, PARTITION, own_items
from kernels.cpu.score_rows import (
    ROW,
    WORD,
    constant,
    early_lines,
    exponential_of_row,
    fetch_lines,
    find_nothing,
    heads_at_once,
    highest_of_rows,
    later_lines,
    row_at,
    tile_at,
)
from kernels.cpu.simd import FUSED, INDEX, float_of_bits, moved, narrow, pointer
from kernels.cpu.threads import Kernel, thread_index
from kernels.cpu.tiles import CONFIG_BYTES, LONG, TILE, at, call, configure, release_tiles

SCORES, KEYS, QUERIES = 0, 1, 2
"""Numbers of tiles; queries have all from the last on, and reload what does not fit."""
LAST_TILE = 7
STEP = 32
"""Elements of a key that one product takes."""
U16, U32 = np.uint16(0), np.uint32(0)
SHORT = ir.IntType(16)
NUM_SUMS = 20
"""Sums kept in registers at a time, beside what they are made of."""


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
def score_keys(
    typing_context: Any, keys: Any, stride: Any, queries: Any, scores: Any, fetched: Any, num_steps: Any
) -> Any:
    """Scores [16, 16] of 16 keys at an address, `stride` bytes apart, and the queries that `load_queries` took.

    On the way the first half of 16 like rows at the address `fetched` is fetched into the cache.
    """
    count, room = num_steps.literal_value, LAST_TILE + 1 - QUERIES

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        keys, stride, queries, scores, fetched = arguments[:5]
        call(builder, "tilezero", SCORES)
        for step in range(count):
            tile = QUERIES + min(step, room - 1)
            if count > room and step >= room - 1:
                call(builder, "tileloadd64", tile, at(builder, queries, 1024 * step), LONG(64))
            call(builder, "tileloadd64", KEYS, at(builder, keys, 64 * step), stride)
            call(builder, "tdpbf16ps", SCORES, KEYS, tile)
            for row in range(step * TILE // count, (step + 1) * TILE // count):
                next_row = builder.add(fetched, builder.mul(stride, INDEX(row)))
                fetch_lines(builder, next_row, early_lines(64 * count))
        call(builder, "tilestored64", SCORES, at(builder, scores), LONG(64))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5, num_steps), generate


@intrinsic(prefer_literal=True)
def weigh_pairs(
    typing_context: Any,
    scores: Any,
    begin: Any,
    end: Any,
    highest: Any,
    scale: Any,
    weights: Any,
    totals: Any,
    fetched: Any,
    stride: Any,
    row_bytes: Any,
) -> Any:
    """Exponentials of scaled distances to the highest, of 16 rows, as bfloat16 pairs of rows 2 i and 2 i + 1: [8, 16]
    words at `weights`. Rows other than begin to end - 1 weigh nothing. Their sums are added to `totals` [16].

    On the way 16 rows of so many bytes at the address `fetched`, `stride` bytes apart, are fetched into the cache."""
    num_row_bytes = row_bytes.literal_value

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        scores, begin, end, highest, scale, weights, totals, fetched, stride = arguments[:9]
        words, shorts = ir.VectorType(WORD, TILE), ir.VectorType(SHORT, TILE)
        top = builder.load(row_at(builder, highest, INDEX(0)), align=4)
        lanes = ir.Constant(ir.VectorType(WORD, TILE), [0] * TILE)
        first = builder.insert_element(ir.Constant(ROW, ir.Undefined), scale, WORD(0))
        factor = builder.shuffle_vector(first, first, lanes)
        total = cgutils.alloca_once(builder, ROW)
        builder.store(builder.load(row_at(builder, totals, INDEX(0)), align=4), total)
        convert = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(shorts, [ROW]), "llvm.x86.avx512bf16.cvtneps2bf16.512"
        )

        def weight(index: Any) -> Any:
            row = builder.load(row_at(builder, scores, index), align=4)
            value = exponential_of_row(builder, builder.fmul(builder.fsub(row, top), factor))
            is_inside = builder.and_(builder.icmp_signed(">=", index, begin), builder.icmp_signed("<", index, end))
            value = builder.select(is_inside, value, constant(0.0))
            builder.store(builder.fadd(builder.load(total), value), total)
            return builder.zext(builder.call(convert, [value]), words)

        with cgutils.for_range(builder, INDEX(TILE // 2)) as loop:
            pair = loop.index
            index = builder.mul(pair, INDEX(2))
            for row in (index, builder.add(index, INDEX(1))):
                fetch_lines(builder, builder.add(fetched, builder.mul(row, stride)), later_lines(num_row_bytes))
            low, high = weight(index), weight(builder.add(index, INDEX(1)))
            both = builder.or_(low, builder.shl(high, ir.Constant(words, [16] * TILE)))
            builder.store(both, row_at(builder, weights, pair), align=4)
        builder.store(builder.load(total), row_at(builder, totals, INDEX(0)), align=4)
        return context.get_dummy_value()

    numbers = (types.int64, types.int64)
    return types.void(scores, *numbers, highest, types.float32, weights, totals, *numbers, row_bytes), generate


@intrinsic(prefer_literal=True)
def add_pairs(
    typing_context: Any,
    sums: Any,
    weights: Any,
    values: Any,
    stride: Any,
    count: Any,
    fetched: Any,
    head_dim: Any,
    group: Any,
) -> Any:
    """sums [group, head_dim] += pairs of weights times `count` values [count, head_dim], `stride` elements apart.

    Pairs lie [count / 2, 16], those of the group first. Values beyond `count` are not read. On the way as many rows of
    the same pattern at the address `fetched` are fetched into the cache.
    """
    size, num_heads = head_dim.literal_value, group.literal_value
    heads_together = min(num_heads, NUM_SUMS // 2)
    chunks_together = max(1, NUM_SUMS // (2 * heads_together))  # of 32 elements, two sums each

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        sums, weights, values, stride, count, fetched = arguments[:6]
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
                if not heads[0] and not chunks[0]:
                    for next_row in (row, builder.add(row, INDEX(1))):
                        offset = builder.mul(next_row, builder.mul(stride, INDEX(2)))
                        fetch_lines(builder, builder.add(fetched, offset), range(0, 2 * size, 64))
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

    return types.void(sums, weights, values, *[types.int64] * 3, head_dim, group), generate


def make_tiled_attend(element: Any, head_dim: int, group: int, num_kv: int, revision: int) -> Kernel:
    """The kernel for `group` query heads of each of `num_kv` KV heads. Arguments: as for `attention.make_attend`."""
    kv_at_once = heads_at_once(num_kv, group)
    num_passes, num_steps, steps_a_head = num_kv // kv_at_once, kv_at_once * head_dim // STEP, head_dim // STEP
    share = 4 * scratch_floats(num_kv, group, head_dim)
    num_heads, width, row_bytes = num_kv * group, num_kv * head_dim, 2 * kv_at_once * head_dim

    def tiled_attend(a: Any) -> None:
        assert revision
        values = pointer(a[2], U16)
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
            # What the next item reads is fetched while this one is computed: spread over it, since the CPU waits once
            # it has asked for more lines than it can wait for. An item's values are fetched before its keys.
            following = moved(items, min(index + 1, num_items - 1) * ITEM_WORDS)
            next_table = moved(tables, following[0] * tables_stride)
            next_first, next_last = np.int64(following[4]), np.int64(following[5])
            for r in range(num_rows):
                begin, end = max(first, position + r + 1 - window), min(last, position + r + 1)
                if begin >= end:
                    find_nothing(partials, partial + r, num_heads, head_dim)
                    continue
                for part in range(num_passes):
                    first_head = part * kv_at_once * group
                    row = pointer(a[0] + 2 * ((first_row + r) * query_stride + first_head * head_dim), U32)
                    for head in range(kv_at_once * group):
                        for step in range(steps_a_head):
                            for i in range(TILE):
                                to = ((head // group * steps_a_head + step) * TILE + i) * TILE + head
                                queries[to] = row[(head * head_dim + step * STEP) // 2 + i]
                    load_queries(queries_at, num_steps)
                    along = part * kv_at_once * head_dim
                    for p in range(begin // TILE * TILE, end, TILE):
                        place = (table[p // block_size] * block_size + p % block_size) * width + along
                        ahead = tile_at(next_table, p - first + next_first, next_last, block_size)
                        score_keys(
                            a[1] + 2 * place,
                            2 * width,
                            queries_at,
                            scores_at + 64 * (p - first),
                            a[2] + 2 * (ahead * width + along),
                            num_steps,
                        )
                    highest_of_rows(scores, begin - first, end - first, highest)
                    for i in range(TILE):
                        totals[i] = np.float32(0)
                    for p in range(begin // TILE * TILE, end, TILE):
                        ahead = tile_at(next_table, p - first + next_first, next_last, block_size)
                        weigh_pairs(
                            moved(scores, TILE * (p - first)),
                            begin - p,
                            end - p,
                            highest,
                            scale,
                            moved(weights, (p - first) // 2 * TILE),
                            totals,
                            a[2] + 2 * (ahead * width + along),
                            2 * width,
                            row_bytes,
                        )
                    for i in range(kv_at_once * group * head_dim):
                        sums[i] = np.float32(0)
                    for p in range(begin // block_size * block_size, end, block_size):
                        place = table[p // block_size] * block_size * width + along
                        ahead = tile_at(next_table, p - first + next_first, next_last, block_size)
                        skipped = max(p, begin // 2 * 2) - p
                        for kv in range(kv_at_once):
                            add_pairs(
                                moved(sums, kv * group * head_dim),
                                moved(weights, (p + skipped - first) // 2 * TILE + kv * group),
                                moved(values, place + skipped * width + kv * head_dim),
                                width,
                                min(end - p, block_size) - skipped,
                                a[1] + 2 * (ahead * width + along + kv * head_dim),
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
