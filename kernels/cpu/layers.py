"""All layers of a step in one call, for steps of few rows, where calls from Python would cost as much as they compute.

Owns the program of a model: the kernels of all its layers in order, each with its arguments, and the buffers between
them, which serve every step. What changes from step to step is written into the arguments before it runs. Threads meet
at a barrier after each kernel. Does not own kernels. Invariant: results are those of the same kernels called singly.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from kernels import AttentionMetadata, DecoderLayer, DecoderShape, LayerStack
from kernels.cpu import attention, compiled, elementwise, few_rows
from kernels.cpu.compiled import AttentionPlan, CompiledOps
from kernels.cpu.few_rows import FewRows
from kernels.cpu.linear import PackedInt8Weights, PackedWeights
from kernels.cpu.simd import pointer
from kernels.cpu.threads import SHARE, Kernel, barrier

MAX_ROWS = few_rows.TILED_ROWS_FLOAT
"""Of a step that runs in one call."""
WORDS = 16
"""Room for one kernel's arguments."""
NUM_PARTS = 6
"""A program runs in so many parts, between which the number of threads may change; starting threads costs little."""
I64 = np.int64(0)


class Late(enum.Enum):
    """Arguments that are known when a step runs."""

    ROWS = enum.auto()
    COSINE = enum.auto()
    SINE = enum.auto()
    SLOTS = enum.auto()
    TABLES = enum.auto()
    TABLES_STRIDE = enum.auto()
    PIECES = enum.auto()
    NUM_PIECES = enum.auto()
    MERGES = enum.auto()
    NUM_MERGES = enum.auto()
    PARTIALS = enum.auto()


@intrinsic
def call_at(typing_context: Any, function: Any, arguments: Any) -> Any:
    """Calls the kernel at an address."""
    signature = ir.FunctionType(ir.VoidType(), [ir.IntType(64).as_pointer()])

    def generate(context: Any, builder: Any, _: Any, given: Any) -> Any:
        builder.call(
            builder.inttoptr(given[0], signature.as_pointer()),
            [builder.inttoptr(given[1], ir.IntType(64).as_pointer())],
        )
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


def make_run(element: Any, revision: int) -> Kernel:
    """Runs kernels one after the other. Arguments: addresses of kernels, their arguments, number."""

    def run(a: Any) -> None:
        assert revision
        functions = pointer(a[0], I64)
        for index in range(a[2]):
            call_at(functions[index], a[1] + index * 8 * WORDS)
            barrier()

    return Kernel(run, set())


def fuse(
    ops: CompiledOps,
    products: FewRows,
    layers: Sequence[DecoderLayer],
    final_norm: Tensor,
    shape: DecoderShape,
    between_layers: Callable[[], None],
) -> LayerProgram | None:
    """The program of a model; None if a linear layer is held in a form that no kernel here multiplies with."""
    for layer in layers:
        for weights in (layer.qkv, layer.output, layer.gate_up, layer.down):
            if not isinstance(weights, PackedWeights | PackedInt8Weights) or not products.is_tiled(weights):
                return None
    return LayerProgram(ops, products, layers, final_norm, shape, between_layers)


class LayerProgram(LayerStack):
    """Runs all layers of one model; used by one thread at a time."""

    def __init__(
        self,
        ops: CompiledOps,
        products: FewRows,
        layers: Sequence[DecoderLayer],
        final_norm: Tensor,
        shape: DecoderShape,
        between_layers: Callable[[], None],
    ) -> None:
        self._ops, self._products = ops, products
        self._layers, self._final_norm, self._shape = layers, final_norm, shape
        self._run = make_run(I64, ops.revision)
        self._between_layers = between_layers
        self._program: Program | None = None
        self._num_threads = 0
        self._cache_addresses: tuple[int, ...] = ()
        self._partials = torch.empty(0)
        self._buffers = Buffers(shape, MAX_ROWS, final_norm.dtype)

    def fits(self, metadata: AttentionMetadata) -> bool:
        """See `kernels.LayerStack`: few rows, and no sequence that is better left to torch."""
        plan = metadata.plan
        assert isinstance(plan, AttentionPlan)
        return not plan.chunks and metadata.slots.shape[0] <= MAX_ROWS

    def run(
        self,
        hidden: Tensor,
        rope: tuple[Tensor, Tensor],
        metadata: AttentionMetadata,
        key_caches: Sequence[Tensor],
        value_caches: Sequence[Tensor],
    ) -> Tensor:
        """See `kernels.LayerStack`."""
        num_threads = torch.get_num_threads()
        addresses = tuple(cache.data_ptr() for cache in (*key_caches, *value_caches))
        if num_threads > self._num_threads or addresses != self._cache_addresses:
            self._num_threads, self._cache_addresses = num_threads, addresses
            self._program = self._build(key_caches, value_caches)
        num_rows, plan, shape, program = hidden.shape[0], metadata.plan, self._shape, self._program
        assert program is not None and isinstance(plan, AttentionPlan) and metadata.block_tables.is_contiguous()
        items = plan.items
        num_floats = items.num_partials * shape.num_heads * (shape.head_dim + 2)
        if self._partials.numel() < num_floats:
            self._partials = torch.empty(num_floats)
        self._buffers.hidden[:num_rows] = hidden
        program.set(Late.ROWS, num_rows)
        program.set(Late.COSINE, rope[0].data_ptr())
        program.set(Late.SINE, rope[1].data_ptr())
        program.set(Late.SLOTS, metadata.slots.data_ptr())
        program.set(Late.TABLES, metadata.block_tables.data_ptr())
        program.set(Late.TABLES_STRIDE, metadata.block_tables.stride(0))
        program.set(Late.PIECES, items.pieces.buffer_info()[0])
        program.set(Late.NUM_PIECES, len(items.pieces) // attention.ITEM_WORDS)
        program.set(Late.MERGES, items.merges.buffer_info()[0])
        program.set(Late.NUM_MERGES, len(items.merges) // attention.MERGE_WORDS)
        program.set(Late.PARTIALS, self._partials.data_ptr())
        for index, part in enumerate(program.parts):
            if index:
                self._between_layers()
            self._run(part, torch.get_num_threads() * SHARE)
        return self._buffers.normed[:num_rows]

    def _build(self, key_caches: Sequence[Tensor], value_caches: Sequence[Tensor]) -> Program:
        shape, buffers, program = self._shape, self._buffers, Program()
        attend = self._ops.attend_kernel(
            shape.num_heads, shape.num_kv_heads, shape.head_dim, key_caches[0].shape[1],
            buffers.normed.dtype, key_caches[0].dtype,
        )  # fmt: skip
        self._tile_share = self._products.tile_share
        self._tile_scratch = torch.empty(self._num_threads * self._tile_share, dtype=torch.uint8)
        self._attend_scratch = torch.empty(
            self._num_threads * self._ops.scratch_floats(shape.num_heads, shape.num_kv_heads, shape.head_dim)
        )
        following = [layer.input_norm for layer in self._layers[1:]] + [self._final_norm]
        self._add_norm_of_heads(program, buffers.hidden, buffers.normed, self._layers[0].input_norm, 1)
        part_size = -(-len(self._layers) // NUM_PARTS)
        each = zip(self._layers, following, key_caches, value_caches, strict=True)
        for index, (layer, next_norm, keys, values) in enumerate(each):
            if index and index % part_size == 0:
                program.end_part()
            self._add_attention(program, layer, attend, keys, values)
            self._add_sum_and_norm(program, layer.post_attention_norm)
            self._add_product(program, buffers.normed, layer.gate_up, buffers.gate_up)
            program.add(
                self._ops.kernel(elementwise.make_silu_mul, buffers.normed.dtype), compiled.SILU_MUL,
                buffers.gate_up, buffers.gated, Late.ROWS, shape.intermediate_size,
            )  # fmt: skip
            self._add_product(program, buffers.gated, layer.down, buffers.normed)
            self._add_sum_and_norm(program, next_norm)
        program.finish()
        return program

    def _add_attention(
        self, program: Program, layer: DecoderLayer, attend: Kernel, keys: Tensor, values: Tensor
    ) -> None:
        shape, buffers, dtype = self._shape, self._buffers, self._buffers.normed.dtype
        block_size, num_heads, num_kv, head_dim = keys.shape[1], shape.num_heads, shape.num_kv_heads, shape.head_dim
        self._add_product(program, buffers.normed, layer.qkv, buffers.qkv)
        query, key, value = buffers.qkv.split((num_heads * head_dim, num_kv * head_dim, num_kv * head_dim), dim=1)
        if layer.query_norm is not None and layer.key_norm is not None:
            self._add_norm_of_heads(program, query, buffers.query, layer.query_norm, num_heads)
            self._add_norm_of_heads(program, key, buffers.key, layer.key_norm, num_kv)
            query, key = buffers.query, buffers.key
        program.add(
            self._ops.kernel(elementwise.make_rope, dtype, keys.dtype), compiled.ROPE,
            query, key, value, query.stride(0), key.stride(0), value.stride(0),
            Late.COSINE, Late.SINE, Late.SLOTS, keys, values, Late.ROWS, num_heads, num_kv, head_dim // 2,
        )  # fmt: skip
        program.add(
            attend, compiled.ATTEND,
            query, keys, values, query.stride(0), buffers.attended, num_kv, block_size,
            Late.TABLES, Late.TABLES_STRIDE, Late.PIECES, Late.NUM_PIECES, head_dim**-0.5,
            compiled.NO_WINDOW if layer.window is None else layer.window, Late.PARTIALS, self._attend_scratch,
        )  # fmt: skip
        program.add(
            self._ops.kernel(attention.make_merge, dtype, head_dim), compiled.MERGE,
            Late.MERGES, Late.NUM_MERGES, Late.PARTIALS, buffers.attended, num_heads,
        )  # fmt: skip
        self._add_product(program, buffers.attended, layer.output, buffers.normed)

    def _add_norm_of_heads(self, program: Program, x: Tensor, output: Tensor, weight: Tensor, num_heads: int) -> None:
        size = x.shape[1] // num_heads
        program.add(
            self._ops.kernel(elementwise.make_norm, x.dtype), compiled.NORM,
            x, output, weight, Late.ROWS, x.stride(0), num_heads, size, size, self._shape.eps,
        )  # fmt: skip

    def _add_sum_and_norm(self, program: Program, weight: Tensor) -> None:
        normed, hidden = self._buffers.normed, self._buffers.hidden
        program.add(
            self._ops.kernel(elementwise.make_add_norm, normed.dtype), compiled.ADD_NORM,
            normed, hidden, weight, Late.ROWS, normed.shape[1], self._shape.eps,
        )  # fmt: skip

    def _add_product(self, program: Program, x: Tensor, weights: object, output: Tensor) -> None:
        products, buffers, scratch = self._products, self._buffers, (self._tile_scratch, self._tile_share)
        if isinstance(weights, PackedWeights):
            program.add(
                products.tiled_kernel(False, x.dtype), few_rows.TILED_FLOAT,
                x, x.stride(0), Late.ROWS, weights.num_in, weights.address, weights.bias,
                output, weights.num_out, *scratch,
            )  # fmt: skip
            return
        assert isinstance(weights, PackedInt8Weights)
        rounded = (buffers.values, buffers.scales, buffers.middles)
        program.add(products.round_kernel(x.dtype), few_rows.ROUND, x, x.stride(0), *rounded, Late.ROWS, weights.num_in)
        program.add(
            products.tiled_kernel(True, x.dtype), few_rows.TILED_INT8,
            buffers.values, Late.ROWS, weights.num_in, buffers.scales, buffers.middles, weights.address,
            weights.sums, weights.scales, weights.bias, output, weights.scales.shape[0], *scratch,
        )  # fmt: skip


class Buffers:
    """What lies between the kernels of a step."""

    def __init__(self, shape: DecoderShape, max_rows: int, dtype: torch.dtype) -> None:
        def rows(size: int) -> Tensor:
            return torch.empty((max_rows, size), dtype=dtype)

        query, key = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.hidden, self.normed = rows(shape.hidden_size), rows(shape.hidden_size)
        self.qkv, self.query, self.key, self.attended = rows(query + 2 * key), rows(query), rows(key), rows(query)
        self.gate_up, self.gated = rows(2 * shape.intermediate_size), rows(shape.intermediate_size)
        widest = max(query, shape.hidden_size, shape.intermediate_size)
        self.values = torch.empty(max_rows * widest, dtype=torch.int8)
        """Rows rounded to 8 bits, each as long as a weight's inputs."""
        self.scales, self.middles = torch.empty(max_rows), torch.empty(max_rows)


class Program:
    """Kernels in order, with their arguments."""

    def __init__(self) -> None:
        self._functions: list[int] = []
        self._packed: list[bytes] = []
        self._late: dict[Late, list[int]] = {name: [] for name in Late}
        self._starts = [0]
        self.parts: tuple[int, ...] = ()
        """Addresses of what `make_run` wants, part by part, once finished."""

    def add(self, kernel: Kernel, layout: struct.Struct, *arguments: int | float | Tensor | Late | None) -> None:
        """A kernel and its arguments: numbers, tensors for their addresses (None: 0), and what comes late."""
        values: list[float] = []
        for index, argument in enumerate(arguments):
            if isinstance(argument, Late):
                self._late[argument].append(len(self._functions) * WORDS + index)
            if isinstance(argument, Tensor):
                values.append(argument.data_ptr())
            else:
                values.append(0 if argument is None or isinstance(argument, Late) else argument)
        self._functions.append(kernel.address)
        self._packed.append(layout.pack(*values).ljust(8 * WORDS, b"\0"))

    def end_part(self) -> None:
        """What is added from now on belongs to the next part."""
        self._starts.append(len(self._functions))

    def finish(self) -> None:
        """Nothing is added from now on."""
        self._words = np.frombuffer(bytearray(b"".join(self._packed)), dtype=np.int64)
        self._places = {name: np.array(places, dtype=np.int64) for name, places in self._late.items()}
        self._addresses = np.array(self._functions, dtype=np.int64)
        functions, words = self._addresses.ctypes.data, self._words.ctypes.data
        self._arguments = np.array(
            [
                (functions + 8 * start, words + 8 * WORDS * start, end - start)
                for start, end in pairwise([*self._starts, len(self._functions)])
            ],
            dtype=np.int64,
        )
        self.parts = tuple(row.ctypes.data for row in self._arguments)

    def set(self, name: Late, value: int) -> None:
        """Gives a late argument its value, wherever it stands."""
        self._words[self._places[name]] = value
