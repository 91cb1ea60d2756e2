"""Products of 8-bit keys and values, for `int8_attention.py`: its vector routines.

Queries and weights are whole numbers of 15 and 16 bits in two parts, one byte each, so all sums are exact. Source: as
for `tiles.py`, and chapter 14 of the same manual for products of bytes.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from kernels import SCALE_BYTES
from kernels.cpu.score_rows import (
    ROW,
    WORD,
    WORDS,
    constant,
    early_lines,
    exponential_of_row,
    fetch_lines,
    later_lines,
    row_at,
)
from kernels.cpu.simd import FLOAT, FUSED, INDEX
from kernels.cpu.tiles import LONG, TILE, at, call

UPPER, LOWER, KEYS, QUERIES = 0, 1, 2, 3
"""Numbers of tiles: scores by the upper and by the lower parts of queries; keys; queries from the last on."""
LAST_TILE = 7
STEP = 64
"""Elements of a key that one product takes."""
QUAD = 4
"""Positions whose values one product takes."""
WEIGHT_STEPS = 65535.0
NUM_SUMS = 24
"""Sums kept in registers at a time, beside what they are made of."""


@intrinsic(prefer_literal=True)
def multiply_keys(
    typing_context: Any, keys: Any, stride: Any, queries: Any, products: Any, num_kv: Any, head_dim: Any
) -> Any:
    """Products of 16 keys at an address, `stride` bytes apart, and of the tiles at `queries`, upper and lower in turn.

    Those of the upper parts, int32 [16, 16], go to `products`, those of the lower behind them.
    """
    size, room = head_dim.literal_value, LAST_TILE + 1 - QUERIES
    offsets = [kv * (size + SCALE_BYTES) + step for kv in range(num_kv.literal_value) for step in range(0, size, STEP)]

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        keys, stride, queries, products = arguments[:4]
        call(builder, "tilezero", UPPER)
        call(builder, "tilezero", LOWER)
        for step, offset in enumerate(offsets):
            call(builder, "tileloadd64", KEYS, at(builder, keys, offset), stride)
            for part, sums in enumerate((UPPER, LOWER)):
                tile = QUERIES + (2 * step + part) % room
                call(builder, "tileloadd64", tile, at(builder, queries, 1024 * (2 * step + part)), LONG(64))
                call(builder, "tdpbssd", sums, KEYS, tile)
        call(builder, "tilestored64", UPPER, at(builder, products), LONG(64))
        call(builder, "tilestored64", LOWER, at(builder, products, 1024), LONG(64))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4, num_kv, head_dim), generate


def _scales(builder: Any, address: Any, pitch: int, num_kv: int, group: int) -> Any:
    """A vector of the scales of KV heads, `pitch` bytes apart from an address on, each as often as it has queries."""
    spread = None
    for head in range(num_kv):
        scale = builder.load(builder.bitcast(at(builder, address, head * pitch), FLOAT.as_pointer()), align=4)
        first = builder.insert_element(ir.Constant(ROW, ir.Undefined), scale, WORD(0))
        own = builder.shuffle_vector(first, first, ir.Constant(WORDS, [0] * TILE))
        lanes = [lane + (TILE if lane // group == head else 0) for lane in range(TILE)]
        spread = own if spread is None else builder.shuffle_vector(spread, own, ir.Constant(WORDS, lanes))
    return spread


@intrinsic(prefer_literal=True)
def scale_products(
    typing_context: Any,
    products: Any,
    scales: Any,
    stride: Any,
    factors: Any,
    scores: Any,
    fetched: Any,
    pitch: Any,
    num_kv: Any,
    group: Any,
) -> Any:
    """Scores float32 [16, 16] of products, by the scales of keys, the first at an address, and by factors [16].

    On the way the first half of 16 like rows at the address `fetched` is fetched into the cache."""
    shape = (pitch.literal_value, num_kv.literal_value, group.literal_value)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        products, scales, stride, factors, scores, fetched = arguments[:6]
        factor = builder.load(row_at(builder, factors, INDEX(0)), align=4)
        for row in range(TILE):
            next_row = builder.add(fetched, builder.mul(stride, INDEX(row)))
            fetch_lines(builder, next_row, early_lines(shape[0] * shape[1]))
            upper = builder.load(row_at(builder, products, INDEX(row)), align=4)
            lower = builder.load(row_at(builder, products, INDEX(TILE + row)), align=4)
            whole = builder.add(builder.shl(upper, ir.Constant(WORDS, [7] * TILE)), lower)
            scale = _scales(builder, builder.add(scales, builder.mul(stride, INDEX(row))), *shape)
            score = builder.fmul(builder.fmul(builder.sitofp(whole, ROW), factor), scale)
            builder.store(score, row_at(builder, scores, INDEX(row)), align=4)
        return context.get_dummy_value()

    return types.void(products, types.int64, types.int64, factors, scores, types.int64, pitch, num_kv, group), generate


@intrinsic(prefer_literal=True)
def weigh_rows(
    typing_context: Any,
    scores: Any,
    begin: Any,
    end: Any,
    highest: Any,
    scales: Any,
    stride: Any,
    found: Any,
    fetched: Any,
    pitch: Any,
    num_kv: Any,
    group: Any,
) -> Any:
    """Scores [16, 16] become exponentials of their distances to the highest, times the scales of values; rows other
    than begin to end - 1 become 0. `found` holds, and has added to it, three rows [16]: sums of the exponentials, the
    largest of what they became, and what is not a number where one of these is none. On the way
    the second half of 16 like rows at the address `fetched` is fetched into the cache."""
    shape = (pitch.literal_value, num_kv.literal_value, group.literal_value)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        scores, begin, end, highest, scales, stride, found, fetched = arguments[:8]
        top = builder.load(row_at(builder, highest, INDEX(0)), align=4)
        places = [row_at(builder, found, INDEX(row)) for row in range(3)]
        held = [cgutils.alloca_once(builder, ROW) for _ in places]
        for local, place in zip(held, places, strict=True):
            builder.store(builder.load(place, align=4), local)
        total, largest, unlike = held
        nothing = constant(0.0)
        with cgutils.for_range(builder, INDEX(TILE)) as loop:
            index = loop.index
            along = builder.add(fetched, builder.mul(stride, index))
            fetch_lines(builder, along, later_lines(shape[0] * shape[1]))
            weight = exponential_of_row(
                builder, builder.fsub(builder.load(row_at(builder, scores, index), align=4), top)
            )
            scale = _scales(builder, builder.add(scales, builder.mul(stride, index)), *shape)
            is_inside = builder.and_(builder.icmp_signed(">=", index, begin), builder.icmp_signed("<", index, end))
            scaled = builder.select(is_inside, builder.fmul(weight, scale), nothing)
            weight = builder.select(is_inside, weight, nothing)
            builder.store(builder.fadd(builder.load(total), weight), total)
            before = builder.load(largest)
            builder.store(builder.select(builder.fcmp_ordered(">", scaled, before), scaled, before), largest)
            builder.store(builder.fadd(builder.load(unlike), builder.fsub(scaled, scaled)), unlike)
            builder.store(scaled, row_at(builder, scores, index), align=4)
        for local, place in zip(held, places, strict=True):
            builder.store(builder.load(local), place, align=4)
        return context.get_dummy_value()

    numbers = (types.int64, types.int64)
    return types.void(scores, *numbers, highest, *numbers, found, types.int64, pitch, num_kv, group), generate


@intrinsic
def round_weights(typing_context: Any, scores: Any, begin: Any, end: Any, largest: Any, weights: Any) -> Any:
    """Weights of quads of rows begin to end - 1 in 16 bits, the largest as 65535.

    The upper bytes of a quad's rows, a word a head, go to row 2 q of `weights` [n, 16], the lower bytes to row 2 q + 1.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        scores, begin, end, largest, weights = arguments
        factor = builder.fdiv(constant(WEIGHT_STEPS), builder.load(row_at(builder, largest, INDEX(0)), align=4))
        half, byte, low = constant(0.5), ir.Constant(WORDS, [8] * TILE), ir.Constant(WORDS, [255] * TILE)
        with cgutils.for_range_slice(builder, begin, end, INDEX(1)) as (quad, _):
            upper = lower = ir.Constant(WORDS, [0] * TILE)
            first = builder.mul(quad, INDEX(QUAD))
            for position in range(QUAD):
                row = builder.load(row_at(builder, scores, builder.add(first, INDEX(position))), align=4)
                steps = builder.fptosi(builder.fadd(builder.fmul(row, factor, flags=FUSED), half, flags=FUSED), WORDS)
                shift = ir.Constant(WORDS, [8 * position] * TILE)
                upper = builder.or_(upper, builder.shl(builder.lshr(steps, byte), shift))
                lower = builder.or_(lower, builder.shl(builder.and_(steps, low), shift))
            to = builder.mul(quad, INDEX(2))
            builder.store(upper, row_at(builder, weights, to), align=4)
            builder.store(lower, row_at(builder, weights, builder.add(to, INDEX(1))), align=4)
        return context.get_dummy_value()

    return types.void(scores, types.int64, types.int64, largest, weights), generate


def _interleave(builder: Any, low: Any, high: Any, size: int) -> list[Any]:
    """Elements of `size` bytes of two vectors of 64 bytes in turns, within each 16 bytes: lower and upper halves."""
    count, lane = 64 // size, 16 // size
    vector = ir.VectorType(ir.IntType(8 * size), count)
    low, high = builder.bitcast(low, vector), builder.bitcast(high, vector)
    results = []
    for half in (0, lane // 2):
        picked = [
            start + half + index + source
            for start in range(0, count, lane)
            for index in range(lane // 2)
            for source in (0, count)
        ]
        results.append(builder.shuffle_vector(low, high, ir.Constant(ir.VectorType(WORD, count), picked)))
    return results


@intrinsic(prefer_literal=True)
def add_quads(
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
    """Adds to int32 sums [group, 2, head_dim] weights, upper and lower bytes, times `count` quads of values.

    Weights lie as `round_weights` leaves them, those of the group first; values at an address, `stride` bytes apart.
    The order of sums within 64 elements is that of `place_of`. On the way as many bytes from `fetched` on are fetched
    into the cache.
    """
    size, num_heads = head_dim.literal_value, group.literal_value
    heads_together = min(num_heads, NUM_SUMS // 8)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        sums, weights, values, stride, count, fetched = arguments[:6]
        bytes_type = ir.VectorType(ir.IntType(8), 64)
        # LLVM 22 sees bytes in the last two, but takes and turns what earlier versions had.
        product = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(WORDS, [WORDS] * 3), "llvm.x86.avx512.vpdpbusd.512"
        )

        def add(heads: range, chunk: int) -> None:
            places = [(head, part, index) for head in heads for part in (0, 1) for index in range(4)]
            stored = [
                builder.bitcast(
                    builder.gep(sums, [INDEX((2 * head + part) * size + chunk + TILE * index)]), WORDS.as_pointer()
                )
                for head, part, index in places
            ]
            held = [cgutils.alloca_once(builder, WORDS) for _ in places]
            for local, to in zip(held, stored, strict=True):
                builder.store(builder.load(to, align=4), local)
            with cgutils.for_range(builder, count) as loop:
                first = builder.mul(loop.index, INDEX(QUAD))
                rows = []
                if not heads[0] and not chunk:
                    num_bytes = QUAD * (size + SCALE_BYTES)
                    along = builder.add(fetched, builder.mul(loop.index, INDEX(num_bytes)))
                    fetch_lines(builder, along, range(0, num_bytes, 64))
                for position in range(QUAD):
                    offset = builder.add(builder.mul(builder.add(first, INDEX(position)), stride), INDEX(chunk))
                    place = at(builder, builder.add(values, offset))
                    rows.append(builder.load(builder.bitcast(place, bytes_type.as_pointer()), align=1))
                pairs = zip(
                    _interleave(builder, rows[0], rows[1], 1), _interleave(builder, rows[2], rows[3], 1), strict=True
                )
                quads = [
                    builder.bitcast(quad, WORDS) for low, high in pairs for quad in _interleave(builder, low, high, 2)
                ]
                factors = {}
                for head in heads:
                    for part in (0, 1):
                        row = builder.add(builder.mul(loop.index, INDEX(2)), INDEX(part))
                        place = builder.gep(weights, [builder.add(builder.mul(row, INDEX(TILE)), INDEX(head))])
                        word = builder.insert_element(ir.Constant(WORDS, ir.Undefined), builder.load(place), WORD(0))
                        factors[head, part] = builder.shuffle_vector(word, word, ir.Constant(WORDS, [0] * TILE))
                for local, (head, part, index) in zip(held, places, strict=True):
                    builder.store(
                        builder.call(product, [builder.load(local), factors[head, part], quads[index]]), local
                    )
            for local, to in zip(held, stored, strict=True):
                builder.store(builder.load(local), to, align=4)

        for head in range(0, num_heads, heads_together):
            for chunk in range(0, size, STEP):
                add(range(head, min(num_heads, head + heads_together)), chunk)
        return context.get_dummy_value()

    return types.void(sums, weights, *[types.int64] * 4, head_dim, group), generate


@njit(error_model="numpy", forceinline=True)
def place_of(index: Any) -> Any:
    """Which element of a head a sum is of."""
    within = index % STEP
    return index - within + within // 4 % 4 * 16 + within // 16 * 4 + within % 4
