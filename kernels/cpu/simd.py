"""What Numba lacks for kernels over a KV pool: typed pointers, narrow floats and two vector routines, in LLVM's terms.

Owns no kernel. `scores_of_keys` and `add_weighted_values` are the inner loops of attention, generated for one head size
and element type; everything around them is plain Python that Numba compiles. bfloat16 is seen as uint16 and float16 as
int16, so that an element's type says how it is widened. Invariant: all arithmetic is float32, and the order of a sum
follows from constants alone, never from how many rows or sequences there are.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

FLOAT = ir.FloatType()
INDEX = ir.IntType(64)
FUSED = ("contract", "nsz")
"""A product may be fused with the sum it goes into; nothing else is reordered."""
REORDERED = {"reassoc", "contract", "nsz"}
"""For loops whose sums may be split into lanes."""


def widest_vector() -> int:
    """float32 elements of a vector, as many as suit this CPU."""
    return 16 if binding.get_host_cpu_features().get("avx512f", False) else 8


@intrinsic
def pointer(typing_context: Any, address: Any, element: Any) -> Any:
    """`address` as a pointer to elements of the type of `element`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(element)(types.int64, element), generate


@intrinsic
def moved(typing_context: Any, address: Any, count: Any) -> Any:
    """A pointer `count` elements further."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.gep(arguments[0], [arguments[1]])

    return address(address, types.int64), generate


def fetch_line(builder: Any, address: Any) -> None:
    """Tells the CPU that the cache line at a pointer will be read soon."""
    word, byte = ir.IntType(32), ir.IntType(8).as_pointer()
    function = builder.module.declare_intrinsic(
        "llvm.prefetch", [byte], ir.FunctionType(ir.VoidType(), [byte, word, word, word])
    )
    builder.call(function, [builder.bitcast(address, byte), word(0), word(2), word(1)])


@intrinsic
def fetch_ahead(typing_context: Any, address: Any) -> Any:
    """Tells the CPU that the cache line at a pointer will be read soon."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        fetch_line(builder, arguments[0])
        return context.get_dummy_value()

    return types.void(address), generate


@intrinsic
def float_of_bits(typing_context: Any, bits: Any) -> Any:
    """The float32 that an int32 is the bits of."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], FLOAT)

    return types.float32(types.int32), generate


@intrinsic
def bits_of_float(typing_context: Any, value: Any) -> Any:
    """The bits of a float32 as int32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.int32(types.float32), generate


@intrinsic
def widen(typing_context: Any, element: Any) -> Any:
    """The float32 equal to an element of a tensor; of 8 bits, to the whole number."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if element == types.float32:
            return arguments[0]
        if element == types.int8:
            return builder.sitofp(arguments[0], FLOAT)
        if element == types.uint16:
            bits = builder.zext(arguments[0], ir.IntType(32))
            return builder.bitcast(builder.shl(bits, ir.IntType(32)(16)), FLOAT)
        return builder.fpext(builder.bitcast(arguments[0], ir.HalfType()), FLOAT)

    return types.float32(element), generate


@intrinsic
def narrow(typing_context: Any, value: Any, like: Any) -> Any:
    """The element nearest to a float32, of the type of `like`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word, short = ir.IntType(32), ir.IntType(16)
        if like == types.float32:
            return arguments[0]
        if like == types.int16:
            return builder.bitcast(builder.fptrunc(arguments[0], ir.HalfType()), short)
        bits = builder.bitcast(arguments[0], word)
        is_odd = builder.and_(builder.lshr(bits, word(16)), word(1))
        rounded = builder.lshr(builder.add(builder.add(bits, word(0x7FFF)), is_odd), word(16))
        # Rounding could carry a NaN over into an infinity or a zero.
        is_nan = builder.fcmp_unordered("uno", arguments[0], arguments[0])
        return builder.select(is_nan, short(0x7FC0), builder.trunc(rounded, short))

    return like(types.float32, like), generate


@njit(fastmath=set(FUSED), error_model="numpy", forceinline=True)
def exponential(x: Any) -> Any:
    """e to the power of x, from -87 to 88 within 2 units in the last place; beyond them as at them."""
    # Written so that a NaN stays one.
    x = np.float32(-87.0) if x < np.float32(-87.0) else x
    x = np.float32(88.0) if x > np.float32(88.0) else x
    # Adding this rounds to a whole number, since it leaves no bits below one.
    rounder = np.float32(12582912.0)
    shifted = x * np.float32(1.4426950408889634) + rounder
    whole = shifted - rounder
    # ln 2 in two parts, the first exact in few bits.
    rest = x - whole * np.float32(0.693359375) + whole * np.float32(2.12194440e-4)
    series = np.float32(1.9875691500e-4)
    series = series * rest + np.float32(1.3981999507e-3)
    series = series * rest + np.float32(8.3334519073e-3)
    series = series * rest + np.float32(4.1665795894e-2)
    series = series * rest + np.float32(1.6666665459e-1)
    series = series * rest + np.float32(5.0000001201e-1)
    series = series * rest * rest + rest + np.float32(1.0)
    return series * float_of_bits((bits_of_float(shifted) + np.int32(127)) << np.int32(23))


@njit(error_model="numpy", forceinline=True)
def largest_magnitude(x: Any, size: Any) -> Any:
    """The largest magnitude of `size` elements, and at least 1e-30; not a number if one of them is none."""
    largest = bits_of_float(np.float32(1e-30))  # bits of magnitudes are in the same order, those of NaN on top
    for i in range(size):
        largest = max(largest, bits_of_float(widen(x[i])) & np.int32(0x7FFFFFFF))
    return float_of_bits(largest)


def load(builder: Any, address: Any, element: Any, lanes: int) -> Any:
    """`lanes` elements from a pointer to `element`s, as float32."""
    bits = address.type.pointee
    vector = builder.bitcast(address, ir.VectorType(bits, lanes).as_pointer())
    loaded = builder.load(vector, align=bits_size(element))
    if element == types.float32:
        return loaded
    if element == types.int8:
        return builder.sitofp(builder.sext(loaded, ir.VectorType(ir.IntType(32), lanes)), ir.VectorType(FLOAT, lanes))
    if element == types.uint16:
        words = ir.VectorType(ir.IntType(32), lanes)
        shift = ir.Constant(words, [16] * lanes)
        return builder.bitcast(builder.shl(builder.zext(loaded, words), shift), ir.VectorType(FLOAT, lanes))
    halves = builder.bitcast(loaded, ir.VectorType(ir.HalfType(), lanes))
    return builder.fpext(halves, ir.VectorType(FLOAT, lanes))


def bits_size(element: Any) -> int:
    """Bytes of an element."""
    return int(element.bitwidth) // 8


def add_product(builder: Any, total: Any, left: Any, right: Any) -> Any:
    """total + left * right."""
    return builder.fadd(total, builder.fmul(left, right, flags=FUSED), flags=FUSED)


def splat(builder: Any, scalar: Any, lanes: int) -> Any:
    """A vector with `scalar` in every lane."""
    vector = ir.VectorType(FLOAT, lanes)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(ir.IntType(32), lanes), [0] * lanes))


def sum_lanes_of_each(builder: Any, vectors: list[Any], lanes: int) -> Any:
    """The vector whose lane i is the sum of the lanes of vectors[i]; there are as many vectors as lanes.

    A tree: each round adds halves of two neighbours, so that all lanes work in every addition.
    """
    segment = lanes
    while len(vectors) > 1:
        half = segment // 2
        starts = range(0, 2 * lanes, segment)
        low = [start + lane for start in starts for lane in range(half)]
        masks = [ir.Constant(ir.VectorType(ir.IntType(32), lanes), m) for m in (low, [lane + half for lane in low])]
        vectors = [
            builder.fadd(*(builder.shuffle_vector(a, b, mask) for mask in masks), flags=FUSED)
            for a, b in zip(vectors[::2], vectors[1::2], strict=True)
        ]
        segment = half
    return vectors[0]


@intrinsic(prefer_literal=True)
def scores_of_keys(
    typing_context: Any, query: Any, keys: Any, stride: Any, scores: Any, head_dim: Any, lanes: Any
) -> Any:
    """Writes to `scores` the products of `query` [head_dim] with `lanes` keys that lie `stride` elements apart."""
    if not isinstance(head_dim, types.IntegerLiteral) or not isinstance(lanes, types.IntegerLiteral):
        return None
    size, width, element = head_dim.literal_value, lanes.literal_value, keys.dtype

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        query, keys, stride, scores = arguments[:4]
        chunks = range(0, size, width)
        queries = [load(builder, builder.gep(query, [INDEX(at)]), types.float32, width) for at in chunks]
        totals = []
        for index in range(width):
            key = builder.gep(keys, [builder.mul(stride, INDEX(index))])
            total = ir.Constant(ir.VectorType(FLOAT, width), [0.0] * width)
            for at, part in zip(chunks, queries, strict=True):
                total = add_product(builder, total, part, load(builder, builder.gep(key, [INDEX(at)]), element, width))
            totals.append(total)
        to = builder.bitcast(scores, ir.VectorType(FLOAT, width).as_pointer())
        builder.store(sum_lanes_of_each(builder, totals, width), to, align=4)
        return context.get_dummy_value()

    return types.void(query, keys, stride, scores, head_dim, lanes), generate


@intrinsic(prefer_literal=True)
def add_weighted_values(
    typing_context: Any,
    totals: Any,
    weights: Any,
    weight_stride: Any,
    values: Any,
    stride: Any,
    count: Any,
    head_dim: Any,
    lanes: Any,
    group: Any,
) -> Any:
    """totals [group, head_dim] += weights [group, count] times values [count, head_dim].

    Rows of `weights` lie `weight_stride` apart, rows of `values` `stride`. Values beyond `count` are not read.
    """
    if not all(isinstance(number, types.IntegerLiteral) for number in (head_dim, lanes, group)):
        return None
    size, width, num_heads = head_dim.literal_value, lanes.literal_value, group.literal_value
    element = values.dtype
    # As many sums at a time as fit into vector registers beside what they are made of.
    num_sums = 24 if width == 16 else 10
    heads_at_once = min(num_heads, num_sums)
    chunks_at_once = max(1, num_sums // heads_at_once)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        totals, weights, weight_stride, values, stride, count = arguments[:6]
        chunks, heads = range(0, size, width), range(num_heads)
        vector = ir.VectorType(FLOAT, width)

        def add(some_heads: range, some_chunks: range) -> None:
            places = [(head, at) for head in some_heads for at in some_chunks]
            stored = [
                builder.bitcast(builder.gep(totals, [INDEX(head * size + at)]), vector.as_pointer())
                for head, at in places
            ]
            sums = [cgutils.alloca_once(builder, vector) for _ in places]
            for held, to in zip(sums, stored, strict=True):
                builder.store(builder.load(to, align=4), held)
            rows = {head: builder.gep(weights, [builder.mul(weight_stride, INDEX(head))]) for head in some_heads}
            with cgutils.for_range(builder, count) as loop:
                value = builder.gep(values, [builder.mul(stride, loop.index)])
                parts = {at: load(builder, builder.gep(value, [INDEX(at)]), element, width) for at in some_chunks}
                factors = {
                    head: splat(builder, builder.load(builder.gep(row, [loop.index])), width)
                    for head, row in rows.items()
                }
                for held, (head, at) in zip(sums, places, strict=True):
                    builder.store(add_product(builder, builder.load(held), factors[head], parts[at]), held)
            for held, to in zip(sums, stored, strict=True):
                builder.store(builder.load(held), to, align=4)

        for first_head in range(0, num_heads, heads_at_once):
            for first_chunk in range(0, len(chunks), chunks_at_once):
                add(
                    heads[first_head : first_head + heads_at_once],
                    chunks[first_chunk : first_chunk + chunks_at_once],
                )
        return context.get_dummy_value()

    signature = types.void(totals, weights, weight_stride, values, stride, count, head_dim, lanes, group)
    return signature, generate
