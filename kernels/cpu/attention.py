"""Attention that reads KV where it lies, through the block table: any number of query rows of a sequence.

Owns the split of a step into items and the two kernels. A context is cut every `PARTITION` positions; an item is one
part of one context, read once for up to `MAX_ROWS` query rows and all heads. Where a row sees several parts, a second
kernel merges what they found. Invariant: cuts and the order of every sum follow from positions in the row's own
sequence, never from other rows, other sequences or the number of threads.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import njit

from kernels import SCALE_BYTES, AttentionMetadata
from kernels.cpu.simd import (
    FUSED,
    REORDERED,
    add_weighted_values,
    exponential,
    fetch_ahead,
    float_of_bits,
    moved,
    narrow,
    pointer,
    scores_of_keys,
    widen,
)
from kernels.cpu.threads import Kernel, num_threads, thread_index

PARTITION = 256
"""Positions of one item's part of a context."""
MAX_ROWS = 8
"""Query rows of one item; more of them share a load of K and V, but need more room near the CPU."""
ITEM_WORDS = 7
MERGE_WORDS = 4
F32, I32 = np.float32(0), np.int32(0)
LOWEST = np.float32(-np.inf)


@dataclass(frozen=True, slots=True)
class Items:
    """A step's attention as pieces of like cost, which threads share."""

    pieces: array[int]  # [num_pieces * ITEM_WORDS] int32
    """Sequence, first packed row, rows, position of the first, first and end position of the part, partial or -1."""
    merges: array[int]  # [num_merges * MERGE_WORDS] int32
    """Packed row, its partial of the first part, distance to that of the next part, parts."""
    num_partials: int
    """Results, of one row in one part, that are merged."""
    num_reads: int
    """KV positions read, all pieces together."""


def split_into_items(metadata: AttentionMetadata, sequences: list[tuple[int, int]]) -> Items:
    """The pieces of `sequences`, given as (index in the batch, first packed row)."""
    pieces, merges = array("i"), array("i")
    num_partials = num_reads = 0
    for sequence, first_row in sequences:
        num_rows, context_len = metadata.query_lens_list[sequence], metadata.context_lens_list[sequence]
        if num_rows == 1 and context_len <= PARTITION:
            # What most steps of short contexts consist of.
            pieces.extend((sequence, first_row, 1, context_len - 1, 0, context_len, -1))
            num_reads += context_len
            continue
        for skipped in range(0, num_rows, MAX_ROWS):
            rows = min(MAX_ROWS, num_rows - skipped)
            position, row = context_len - num_rows + skipped, first_row + skipped
            seen = position + rows
            num_parts = -(-seen // PARTITION)
            for part in range(num_parts):
                partial = num_partials + part * rows if num_parts > 1 else -1
                end = min(seen, (part + 1) * PARTITION)
                pieces.extend((sequence, row, rows, position, part * PARTITION, end, partial))
            if num_parts > 1:
                for index in range(rows):
                    merges.extend((row + index, num_partials + index, rows, num_parts))
                num_partials += num_parts * rows
            num_reads += seen
    return Items(pieces, merges, num_partials, num_reads)


def scratch_floats(num_heads: int, head_dim: int) -> int:
    """float32 elements that one thread needs beside its item."""
    return MAX_ROWS * num_heads * (2 * head_dim + PARTITION)


@njit(fastmath=REORDERED, error_model="numpy", forceinline=True)
def weigh(scores: Any, first: Any, last: Any) -> Any:
    """Replaces scores by the exponentials of their distance to the highest; answers the highest and their sum."""
    highest = LOWEST
    for j in range(first, last):
        highest = max(highest, scores[j])
    total = np.float32(0)
    for j in range(first, last):
        weight = exponential(scores[j] - highest)
        scores[j] = weight
        total += weight
    return highest, total


@njit(error_model="numpy", forceinline=True)
def cost_of(item: Any) -> Any:
    """Of a piece, in halves of a position: reading one costs about as much as one row's products with it."""
    num_rows, num_reads = np.int64(item[2]), np.int64(item[5]) - np.int64(item[4])
    return num_reads * (1 + num_rows) + 32 * num_rows  # the last: to begin and end it


@njit(error_model="numpy", forceinline=True)
def scale_at(address: Any) -> Any:
    """The scale of a head in 8 bits."""
    return pointer(address, F32)[0]


@njit(error_model="numpy", forceinline=True)
def own_items(items: Any, num_items: Any) -> Any:
    """First and end index of this thread's pieces. They differ in size: it does those whose middle lies in its share of
    the cost."""
    cost = 0
    for index in range(num_items):
        cost += cost_of(moved(items, index * ITEM_WORDS))
    threads = np.int64(num_threads())
    begins, ends, cost = thread_index() * cost // threads, (thread_index() + 1) * cost // threads, 0
    first = end = 0
    for index in range(num_items):
        own = cost_of(moved(items, index * ITEM_WORDS))
        first += cost + own // 2 < begins
        end += cost + own // 2 < ends
        cost += own
    return first, end


def make_attend(element: Any, kept: Any, head_dim: int, group: int, lanes: int, revision: int) -> Kernel:
    """The first kernel, for `group` query heads a KV head and blocks that are a multiple of `lanes`.

    KV is of the query's type or, where `kept` is of 8 bits, rounded as `reference.round_kv` says.

    Arguments: query, caches, query row stride, output, KV heads, block size, block tables and their stride, pieces and
    their number, scale, window, partials, scratch.
    """
    line, is_rounded = 64 // np.dtype(type(kept)).itemsize, isinstance(kept, np.int8)
    pitch = head_dim + SCALE_BYTES if is_rounded else head_dim  # elements of a head

    def attend(a: Any) -> None:
        assert revision
        query, keys, values = pointer(a[0], element), pointer(a[1], kept), pointer(a[2], kept)
        query_stride, output = a[3], pointer(a[4], element)
        num_kv, block_size, tables, tables_stride = a[5], a[6], pointer(a[7], I32), a[8]
        items, num_items, scale, window = pointer(a[9], I32), a[10], float_of_bits(np.int32(a[11])), a[12]
        partials = pointer(a[13], F32)
        num_heads, width = num_kv * group, num_kv * pitch
        heads = num_heads * head_dim
        queries = moved(pointer(a[14], F32), thread_index() * MAX_ROWS * (2 * heads + num_heads * PARTITION))
        totals = moved(queries, MAX_ROWS * heads)
        scores = moved(totals, MAX_ROWS * heads)
        first_item, end_item = own_items(items, num_items)
        for index in range(first_item, end_item):
            item = moved(items, index * ITEM_WORDS)
            table = moved(tables, item[0] * tables_stride)
            first_row, num_rows, position = np.int64(item[1]), np.int64(item[2]), np.int64(item[3])
            first, last, partial = np.int64(item[4]), np.int64(item[5]), np.int64(item[6])
            for r in range(num_rows):
                for i in range(heads):
                    queries[r * heads + i] = widen(query[(first_row + r) * query_stride + i]) * scale
                    totals[r * heads + i] = np.float32(0)
            earliest = max(first, position + 1 - window)
            for p in range(earliest // lanes * lanes, last, lanes):
                place = (table[p // block_size] * block_size + p % block_size) * width
                ahead = min(p + lanes, last - 1)
                beyond = (table[ahead // block_size] * block_size + ahead % block_size) * width
                for kv in range(num_kv):
                    key = moved(keys, place + kv * pitch)
                    next_keys = moved(keys, beyond + kv * pitch)
                    for r in range(num_rows):
                        for g in range(group):
                            for i in range(g, lanes, group):
                                for n in range(0, head_dim, line):
                                    fetch_ahead(moved(next_keys, i * width + n))
                            h = r * num_heads + kv * group + g
                            to = moved(scores, h * PARTITION + p - first)
                            scores_of_keys(moved(queries, h * head_dim), key, width, to, head_dim, lanes)
                            if is_rounded:
                                for i in range(lanes):
                                    to[i] *= scale_at(a[1] + place + i * width + kv * pitch + head_dim)
            for r in range(num_rows):
                begin, end = max(first, position + r + 1 - window) - first, min(last, position + r + 1) - first
                for h in range(r * num_heads, (r + 1) * num_heads):
                    highest, total = weigh(moved(scores, h * PARTITION), begin, end)
                    if partial < 0:
                        # The values are summed with their final weights.
                        for j in range(begin, end):
                            scores[h * PARTITION + j] /= total
                    else:
                        found = moved(partials, (partial * num_heads + h) * (head_dim + 2))
                        found[head_dim] = highest
                        found[head_dim + 1] = total
            for p in range(earliest // block_size * block_size, last, block_size):
                place = np.int64(table[p // block_size]) * block_size * width
                beyond = np.int64(table[min(p + block_size, last - 1) // block_size]) * block_size * width
                for kv in range(num_kv):
                    next_values = moved(values, beyond + kv * pitch)
                    for i in range(block_size):
                        for n in range(0, head_dim, line):
                            fetch_ahead(moved(next_values, i * width + n))
                    for r in range(num_rows):
                        begin = max(first, p, position + r + 1 - window)
                        end = min(last, p + block_size, position + r + 1)
                        h = r * num_heads + kv * group
                        if is_rounded:
                            for g in range(group):
                                weights = moved(scores, (h + g) * PARTITION - first)
                                for j in range(begin, end):
                                    weights[j] *= scale_at(a[2] + place + (j - p) * width + kv * pitch + head_dim)
                        add_weighted_values(
                            moved(totals, h * head_dim),
                            moved(scores, h * PARTITION + begin - first),
                            PARTITION,
                            moved(values, place + (begin - p) * width + kv * pitch),
                            width,
                            end - begin,
                            head_dim,
                            lanes,
                            group,
                        )
            for r in range(num_rows):
                if partial < 0:
                    to = moved(output, (first_row + r) * heads)
                    for i in range(heads):
                        to[i] = narrow(totals[r * heads + i], element)
                else:
                    for h in range(num_heads):
                        found = moved(partials, ((partial + r) * num_heads + h) * (head_dim + 2))
                        for d in range(head_dim):
                            found[d] = totals[r * heads + h * head_dim + d]

    return Kernel(attend, set(FUSED))


def make_merge(element: Any, head_dim: int, revision: int) -> Kernel:
    """The second kernel. Arguments: merges, number of them, partials, output, heads."""

    def merge(a: Any) -> None:
        assert revision
        merges, num_merges, output, num_heads = pointer(a[0], I32), a[1], pointer(a[3], element), a[4]
        for index in range(np.int64(thread_index()), num_merges, np.int64(num_threads())):
            entry = moved(merges, index * MERGE_WORDS)
            for head in range(num_heads):
                step = entry[2] * num_heads * (head_dim + 2)
                found = moved(pointer(a[2], F32), (entry[1] * num_heads + head) * (head_dim + 2))
                highest, total = LOWEST, np.float32(0)
                for part in range(entry[3]):
                    highest = max(highest, found[part * step + head_dim])
                for part in range(entry[3]):
                    weight = exponential(found[part * step + head_dim] - highest)
                    found[part * step + head_dim] = weight
                    total += weight * found[part * step + head_dim + 1]
                for d in range(head_dim):
                    found[d] *= found[head_dim] / total
                for part in range(1, entry[3]):
                    weight = found[part * step + head_dim] / total
                    for d in range(head_dim):
                        found[d] += weight * found[part * step + d]
                to = moved(output, (entry[0] * num_heads + head) * head_dim)
                for d in range(head_dim):
                    to[d] = narrow(found[d], element)

    return Kernel(merge, set(FUSED))
