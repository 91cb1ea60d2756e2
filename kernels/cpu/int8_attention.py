"""Attention to KV in 8 bits by the matrix unit of x86 CPUs (AMX), with the items and arguments of `attention.py`.

Owns one kernel, laid out as that of `tiled_attention.py`, with half of its bytes to read. Keys are multiplied as they
lie in a block, with queries in whole numbers of 15 bits, of which the upper and the lower part are two tiles. Values
are added up four positions at a time, with weights, scales of values included, in whole numbers of 16 bits, likewise in
two parts. So all sums are exact; what is lost is a query's rounding to 2**-14 of its largest element, and a weight's to
2**-16 of the largest of its part of the context. Query rows of an item are taken one by one, so a row's result is the
same whatever rows there are beside it. What is not a number makes its head so. Source: as for `tiles.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels import SCALE_BYTES
from kernels.cpu.attention import F32, I32, ITEM_WORDS, PARTITION, own_items
from kernels.cpu.int8_products import (
    QUAD,
    STEP,
    WEIGHT_STEPS,
    add_quads,
    multiply_keys,
    place_of,
    round_weights,
    scale_products,
    weigh_rows,
)
from kernels.cpu.score_rows import find_nothing, heads_at_once, highest_of_rows, tile_at
from kernels.cpu.simd import (
    FUSED,
    float_of_bits,
    largest_magnitude,
    moved,
    narrow,
    pointer,
    widen,
)
from kernels.cpu.threads import Kernel, thread_index
from kernels.cpu.tiles import CONFIG_BYTES, TILE, configure, release_tiles

QUERY_STEPS = np.float32(127 * 128)
I8 = np.int8(0)


def fits(num_kv: int, group: int, head_dim: int, block_size: int) -> bool:
    """Whether there is a kernel for these shapes."""
    return group <= TILE and head_dim % STEP == 0 and block_size % TILE == 0


def scratch_floats(num_kv: int, group: int, head_dim: int) -> int:
    """Words of 32 bits that one thread needs: configuration, queries, products, scores, weights, rows, sums."""
    num_tiles = 2 * heads_at_once(num_kv, group) * head_dim // STEP + 2
    return CONFIG_BYTES // 4 + num_tiles * TILE * TILE + PARTITION * TILE * 3 // 2 + 5 * TILE + 2 * TILE * head_dim


def make_int8_attend(element: Any, head_dim: int, group: int, num_kv: int, revision: int) -> Kernel:
    """The kernel for `group` query heads of each of `num_kv` KV heads. Arguments: as for `attention.make_attend`."""
    kv_at_once = heads_at_once(num_kv, group)
    num_passes, steps_a_head = num_kv // kv_at_once, head_dim // STEP
    share = 4 * scratch_floats(num_kv, group, head_dim)
    pitch, num_heads, num_at_once = head_dim + SCALE_BYTES, num_kv * group, kv_at_once * group
    width = num_kv * pitch

    def int8_attend(a: Any) -> None:
        assert revision
        query = pointer(a[0], element)
        query_stride, output = a[3], pointer(a[4], element)
        block_size, tables, tables_stride = a[6], pointer(a[7], I32), a[8]
        items, num_items, scale, window = pointer(a[9], I32), a[10], float_of_bits(np.int32(a[11])), a[12]
        partials = pointer(a[13], F32)
        scratch = a[14] + thread_index() * share
        queries_at = scratch + CONFIG_BYTES
        products_at = queries_at + 2 * kv_at_once * steps_a_head * 1024
        queries, products = pointer(queries_at, I32), pointer(products_at, I32)
        rounded, quads = pointer(products_at, I8), pointer(products_at, I32)  # before there are products
        scores = pointer(products_at + 2048, F32)
        weights = pointer(products_at + 2048 + 4 * PARTITION * TILE, I32)
        factors = pointer(products_at + 2048 + 6 * PARTITION * TILE, F32)
        highest, found = moved(factors, TILE), moved(factors, 2 * TILE)
        largest, unlike = moved(found, TILE), moved(found, 2 * TILE)
        sums = pointer(products_at + 2048 + 6 * PARTITION * TILE + 4 * 5 * TILE, I32)
        configure(scratch, 2 * TILE)
        for i in range(2 * kv_at_once * steps_a_head * 256):
            queries[i] = np.int32(0)
        for i in range(TILE):
            factors[i] = np.float32(0)
        first_item, end_item = own_items(items, num_items)
        for index in range(first_item, end_item):
            item = moved(items, index * ITEM_WORDS)
            table = moved(tables, item[0] * tables_stride)
            first_row, num_rows, position = np.int64(item[1]), np.int64(item[2]), np.int64(item[3])
            first, last, partial = np.int64(item[4]), np.int64(item[5]), np.int64(item[6])
            # What the next item reads is fetched while this one is computed, as in `tiled_attention.py`.
            following = moved(items, min(index + 1, num_items - 1) * ITEM_WORDS)
            next_table = moved(tables, following[0] * tables_stride)
            next_first, next_last = np.int64(following[4]), np.int64(following[5])
            for r in range(num_rows):
                begin, end = max(first, position + r + 1 - window), min(last, position + r + 1)
                if begin >= end:
                    find_nothing(partials, partial + r, num_heads, head_dim)
                    continue
                for part in range(num_passes):
                    first_head = part * num_at_once
                    for head in range(num_at_once):
                        own = moved(query, (first_row + r) * query_stride + (first_head + head) * head_dim)
                        size = largest_magnitude(own, head_dim)
                        for i in range(head_dim):
                            steps = np.int32(np.rint(widen(own[i]) * (QUERY_STEPS / size)))
                            upper = (steps + np.int32(64)) >> np.int32(7)
                            rounded[i] = np.int8(upper)
                            rounded[head_dim + i] = np.int8(steps - (upper << np.int32(7)))
                        for i in range(head_dim // 4):
                            to = (2 * (head // group * steps_a_head * 16 + i // 16 * 16) + i % 16) * TILE + head
                            queries[to], queries[to + 256] = quads[i], quads[head_dim // 4 + i]
                        factors[head] = size / QUERY_STEPS * scale
                    along = part * kv_at_once * pitch
                    for p in range(begin // TILE * TILE, end, TILE):
                        place = (table[p // block_size] * block_size + p % block_size) * width + along
                        ahead = tile_at(next_table, p - first + next_first, next_last, block_size)
                        multiply_keys(a[1] + place, width, queries_at, products_at, kv_at_once, head_dim)
                        scale_products(
                            products,
                            a[1] + place + head_dim,
                            width,
                            factors,
                            moved(scores, TILE * (p - first)),
                            a[2] + ahead * width + along,
                            pitch,
                            kv_at_once,
                            group,
                        )
                    highest_of_rows(scores, begin - first, end - first, highest)
                    for i in range(3 * TILE):
                        found[i] = np.float32(0)
                    for p in range(begin // TILE * TILE, end, TILE):
                        place = (table[p // block_size] * block_size + p % block_size) * width + along
                        ahead = tile_at(next_table, p - first + next_first, next_last, block_size)
                        weigh_rows(
                            moved(scores, TILE * (p - first)),
                            begin - p,
                            end - p,
                            highest,
                            a[2] + place + head_dim,
                            width,
                            found,
                            a[2] + ahead * width + along,
                            pitch,
                            kv_at_once,
                            group,
                        )
                    first_quad, end_quad = (begin - first) // QUAD, (end - first + QUAD - 1) // QUAD
                    round_weights(scores, first_quad, end_quad, largest, weights)
                    for i in range(2 * num_at_once * head_dim):
                        sums[i] = np.int32(0)
                    for p in range(begin // block_size * block_size, end, block_size):
                        place = table[p // block_size] * block_size * width + along
                        ahead = tile_at(next_table, p - first + next_first, next_last, block_size)
                        skipped = max(p, begin // QUAD * QUAD) - p
                        num_quads = (min(end - p, block_size) - skipped + QUAD - 1) // QUAD
                        for kv in range(kv_at_once):
                            add_quads(
                                moved(sums, 2 * kv * group * head_dim),
                                moved(weights, (p + skipped - first) // QUAD * 2 * TILE + kv * group),
                                a[2] + place + skipped * width + kv * pitch,
                                width,
                                num_quads,
                                a[1] + ahead * width + kv * block_size * pitch,
                                head_dim,
                                group,
                            )
                    for head in range(num_at_once):
                        own = moved(sums, 2 * head * head_dim)
                        step = largest[head] / np.float32(WEIGHT_STEPS)
                        if partial < 0:
                            step /= found[head]
                            to = moved(output, ((first_row + r) * num_heads + first_head + head) * head_dim)
                            for i in range(head_dim):
                                high, low = np.float32(own[i]), np.float32(own[head_dim + i])
                                to[place_of(i)] = narrow((high * np.float32(256) + low) * step + unlike[head], element)
                        else:
                            to = moved(partials, ((partial + r) * num_heads + first_head + head) * (head_dim + 2))
                            for i in range(head_dim):
                                high, low = np.float32(own[i]), np.float32(own[head_dim + i])
                                to[place_of(i)] = (high * np.float32(256) + low) * step + unlike[head]
                            to[head_dim] = highest[head]
                            to[head_dim + 1] = found[head]
        release_tiles()

    return Kernel(int8_attend, set(FUSED))
