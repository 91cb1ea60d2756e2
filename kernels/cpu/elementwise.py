"""Norms, activation, and rotation with the writing of KV: one pass each over the rows, which threads share.

Owns the kernels and the layout of their arguments. Invariants: a row's result follows from that row alone; sums are
float32; the sum of an addition is rounded to the tensors' type before it is normalised, as where it is kept.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from kernels import SCALE_BYTES
from kernels.cpu.simd import (
    FUSED,
    REORDERED,
    exponential,
    float_of_bits,
    largest_magnitude,
    moved,
    narrow,
    pointer,
    widen,
)
from kernels.cpu.threads import Kernel, num_threads, thread_index

F32, I64, I8 = np.float32(0), np.int64(0), np.int8(0)


def make_norm(element: Any, revision: int) -> Kernel:
    """Arguments: x, output, weight, rows, row stride, heads, head stride, size, eps."""

    def norm(a: Any) -> None:
        assert revision
        x, output, weight = pointer(a[0], element), pointer(a[1], element), pointer(a[2], element)
        num_rows, row_stride, num_heads, head_stride, size = a[3], a[4], a[5], a[6], a[7]
        eps = float_of_bits(np.int32(a[8]))
        for row in range(np.int64(thread_index()), num_rows, np.int64(num_threads())):
            for head in range(num_heads):
                at, to = row * row_stride + head * head_stride, (row * num_heads + head) * size
                squares = np.float32(0)
                for i in range(size):
                    value = widen(x[at + i])
                    squares += value * value
                factor = np.float32(1) / np.sqrt(squares / np.float32(size) + eps)
                for i in range(size):
                    output[to + i] = narrow(widen(x[at + i]) * factor * widen(weight[i]), element)

    return Kernel(norm, REORDERED)


def make_add_norm(element: Any, revision: int) -> Kernel:
    """Arguments: x, residual, weight, rows, size, eps. x becomes the norm of the sum, residual the sum."""

    def add_norm(a: Any) -> None:
        assert revision
        x, residual, weight = pointer(a[0], element), pointer(a[1], element), pointer(a[2], element)
        num_rows, size, eps = a[3], a[4], float_of_bits(np.int32(a[5]))
        for row in range(np.int64(thread_index()), num_rows, np.int64(num_threads())):
            at = row * size
            squares = np.float32(0)
            for i in range(size):
                total = narrow(widen(x[at + i]) + widen(residual[at + i]), element)
                residual[at + i] = total
                squares += widen(total) * widen(total)
            factor = np.float32(1) / np.sqrt(squares / np.float32(size) + eps)
            for i in range(size):
                x[at + i] = narrow(widen(residual[at + i]) * factor * widen(weight[i]), element)

    return Kernel(add_norm, REORDERED)


def make_silu_mul(element: Any, revision: int) -> Kernel:
    """Arguments: gate and up, output, rows, size."""

    def silu_mul(a: Any) -> None:
        assert revision
        gate_up, output, num_rows, size = pointer(a[0], element), pointer(a[1], element), a[2], a[3]
        for row in range(np.int64(thread_index()), num_rows, np.int64(num_threads())):
            for i in range(size):
                gate, up = widen(gate_up[2 * row * size + i]), widen(gate_up[(2 * row + 1) * size + i])
                output[row * size + i] = narrow(gate / (np.float32(1) + exponential(-gate)) * up, element)

    return Kernel(silu_mul, set(FUSED))


@njit(fastmath=set(FUSED), error_model="numpy", forceinline=True)
def round_head(x: Any, at: Any, size: Any, address: Any) -> None:
    """A head at x[at] in 8 bits, and its scale, to an address: `reference.round_kv`."""
    largest = largest_magnitude(moved(x, at), size)
    factor, values = np.float32(127) / largest, pointer(address, I8)
    for i in range(size):
        values[i] = np.int8(np.rint(widen(x[at + i]) * factor))
    pointer(address + size, F32)[0] = largest / np.float32(127)


def make_rope(element: Any, kept: Any, revision: int) -> Kernel:
    """Arguments: query, key, value, their row strides; cosine, sine, slots; caches; rows, heads, KV heads, half size.

    The query is turned in place. Keys are turned on their way into the cache; before they are rounded, in place too.
    They are, as values are, where `kept` is of 8 bits.
    """
    is_rounded = isinstance(kept, np.int8)

    def rope(a: Any) -> None:
        assert revision
        query, key, value = pointer(a[0], element), pointer(a[1], element), pointer(a[2], element)
        query_stride, key_stride, value_stride = a[3], a[4], a[5]
        cosine, sine, slots = pointer(a[6], F32), pointer(a[7], F32), pointer(a[8], I64)
        key_cache, value_cache = pointer(a[9], element), pointer(a[10], element)
        num_rows, num_heads, num_kv_heads, half = a[11], a[12], a[13], a[14]
        size = 2 * half
        width = size * num_kv_heads
        for row in range(np.int64(thread_index()), num_rows, np.int64(num_threads())):
            angle, to = row * half, slots[row] * width
            for head in range(num_heads):
                at = row * query_stride + head * size
                for i in range(half):
                    first, second = widen(query[at + i]), widen(query[at + half + i])
                    c, s = cosine[angle + i], sine[angle + i]
                    query[at + i] = narrow(first * c - second * s, element)
                    query[at + half + i] = narrow(second * c + first * s, element)
            if is_rounded:
                for head in range(num_kv_heads):
                    at = row * key_stride + head * size
                    place = (slots[row] * num_kv_heads + head) * (size + SCALE_BYTES)
                    for i in range(half):
                        first, second = widen(key[at + i]), widen(key[at + half + i])
                        c, s = cosine[angle + i], sine[angle + i]
                        key[at + i] = narrow(first * c - second * s, element)
                        key[at + half + i] = narrow(second * c + first * s, element)
                    round_head(key, at, size, a[9] + place)
                    round_head(value, row * value_stride + head * size, size, a[10] + place)
                continue
            for head in range(num_kv_heads):
                at, into = row * key_stride + head * size, to + head * size
                for i in range(half):
                    first, second = widen(key[at + i]), widen(key[at + half + i])
                    c, s = cosine[angle + i], sine[angle + i]
                    key_cache[into + i] = narrow(first * c - second * s, element)
                    key_cache[into + half + i] = narrow(second * c + first * s, element)
            for i in range(width):
                value_cache[to + i] = value[row * value_stride + i]

    return Kernel(rope, set(FUSED))


def make_widen(element: Any, revision: int) -> Kernel:
    """Copies KV in 8 bits out of its blocks, as `reference.widen_kv` says.

    Arguments: cache, blocks, output, positions, block size, KV heads, head size.
    """

    def widen_context(a: Any) -> None:
        assert revision
        blocks, output = pointer(a[1], I64), pointer(a[2], element)
        num_positions, block_size, num_kv_heads, size = a[3], a[4], a[5], a[6]
        for position in range(np.int64(thread_index()), num_positions, np.int64(num_threads())):
            slot = blocks[position // block_size] * block_size + position % block_size
            for head in range(num_kv_heads):
                place = a[0] + (slot * num_kv_heads + head) * (size + SCALE_BYTES)
                values, scale = pointer(place, I8), pointer(place + size, F32)[0]
                to = moved(output, (position * num_kv_heads + head) * size)
                for i in range(size):
                    to[i] = narrow(np.float32(values[i]) * scale, element)

    return Kernel(widen_context, set(FUSED))
