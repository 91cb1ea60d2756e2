"""Norms, activation, and rotation with the writing of KV: one pass each over the rows, which threads share.

Owns the kernels and the layout of their arguments. Invariants: a row's result follows from that row alone; sums are
float32; the sum of an addition is rounded to the tensors' type before it is normalised, as where it is kept.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels.cpu.simd import FUSED, REORDERED, exponential, float_of_bits, narrow, pointer, widen
from kernels.cpu.threads import Kernel, num_threads, thread_index

F32, I64 = np.float32(0), np.int64(0)


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


def make_rope(element: Any, revision: int) -> Kernel:
    """Arguments: query, key, value, their row strides; cosine, sine, slots; caches; rows, heads, KV heads, half size.

    The query is turned in place; keys are turned on their way into the cache.
    """

    def rope(a: Any) -> None:
        assert revision
        query, key, value = pointer(a[0], element), pointer(a[1], element), pointer(a[2], element)
        query_stride, key_stride, value_stride = a[3], a[4], a[5]
        cosine, sine, slots = pointer(a[6], F32), pointer(a[7], F32), pointer(a[8], I64)
        key_cache, value_cache = pointer(a[9], element), pointer(a[10], element)
        num_rows, num_heads, num_kv_heads, half = a[11], a[12], a[13], a[14]
        width = 2 * half * num_kv_heads
        for row in range(np.int64(thread_index()), num_rows, np.int64(num_threads())):
            angle, to = row * half, slots[row] * width
            for head in range(num_heads):
                at = row * query_stride + head * 2 * half
                for i in range(half):
                    first, second = widen(query[at + i]), widen(query[at + half + i])
                    c, s = cosine[angle + i], sine[angle + i]
                    query[at + i] = narrow(first * c - second * s, element)
                    query[at + half + i] = narrow(second * c + first * s, element)
            for head in range(num_kv_heads):
                at, into = row * key_stride + head * 2 * half, to + head * 2 * half
                for i in range(half):
                    first, second = widen(key[at + i]), widen(key[at + half + i])
                    c, s = cosine[angle + i], sine[angle + i]
                    key_cache[into + i] = narrow(first * c - second * s, element)
                    key_cache[into + half + i] = narrow(second * c + first * s, element)
            for i in range(width):
                value_cache[to + i] = value[row * value_stride + i]

    return Kernel(rope, set(FUSED))
