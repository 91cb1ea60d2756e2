"""The operations in plain torch: the specification that other devices are tested against, on any torch device.

Written to be read and to be exact: accumulation and softmax in float32 for every dtype. Attention copies the KV it
reads out of the blocks; an optimised device reads it in place. Invariant: what a row's attention sums over, and in
which order, follows from its own sequence alone, never from what else is in the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import kernels
from kernels import SCALE_BYTES, AttentionMetadata, Quantization

SMALLEST_SPREAD = 1e-30
"""A row of zeros is scaled as if its numbers went so far apart."""


@dataclass(frozen=True, slots=True)
class LinearWeights:
    """A weight as `linear` uses it."""

    weight: Tensor  # [N, K]
    """Transposed as checkpoints store it."""
    bias: Tensor | None  # [N]
    """None where the layer has none."""


@dataclass(frozen=True, slots=True)
class Int8Weights:
    """A weight rounded to 8 bits."""

    values: Tensor  # [N, K] int8
    """-127 to 127."""
    scales: Tensor  # [N] float32
    """What the values of an output are multiplied with."""
    sums: Tensor  # [N] float32
    """Of each output's values."""
    bias: Tensor | None  # [N]
    """None where the layer has none."""


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Sequences with one query row each whose padded contexts have the same length."""

    rows: Tensor  # [R] int64, into the packed tokens
    """Where their queries stand."""
    blocks: Tensor  # [R * m] int64
    """Their block tables, cut or padded to m blocks."""
    context_lens: Tensor  # [R] int64
    """Their contexts."""
    shortest: int
    """The least of them."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """One sequence with several query rows."""

    first_row: int
    """Into the packed tokens."""
    num_rows: int
    """Query rows."""
    context_len: int
    """KV positions, the query rows' own included."""
    blocks: Tensor  # [m] int64
    """Exactly the blocks of its context."""


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """How one step's attention is split."""

    groups: tuple[DecodeGroup, ...]
    """Single rows, batched."""
    chunks: tuple[Chunk, ...]
    """All others, one by one."""


def padded_num_blocks(num_blocks: int) -> int:
    """The next of 1 2 3 4 5 6 7 8 10 12 14 16 20 24 ...: few sizes, less than a quarter of padding.

    Depends on the sequence's own length only, so that its sums do not change with its neighbours.
    """
    step = 1 << max(0, num_blocks.bit_length() - 3)
    return -(-num_blocks // step) * step


def round_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A weight [N, K] to int8 [N, K] and float32 scales [N]: an output's largest magnitude becomes 127."""
    wide = weight.float()
    scales = wide.abs().amax(dim=1).clamp_min(SMALLEST_SPREAD) / 127  # [N]
    return (wide / scales[:, None]).round().to(torch.int8), scales


def round_inputs(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x [T, K] to int8 values [T, K], float32 scales [T] and middles [T]: x is about (value + middle) * scale.

    A row's numbers, and zero, are spread over 253 steps, halves going to even. The middle is a whole number: outputs of
    norms have outliers on one side, so that a range about zero would be half empty.
    """
    wide = x.float()
    low, high = wide.amin(dim=1).clamp_max(0), wide.amax(dim=1).clamp_min(0)  # [T]
    spread = (high - low).clamp_min(SMALLEST_SPREAD)  # [T]
    steps = spread.reciprocal() * 253  # [T]
    middles = ((high + low) * 0.5 * steps).round()  # [T]
    values = (wide * steps[:, None]).round() - middles[:, None]  # [T, K]
    return values.to(torch.int8), spread / 253, middles


def round_kv(x: Tensor) -> Tensor:
    """Heads x [..., D] as int8 [..., D + SCALE_BYTES]: the largest magnitude of each becomes 127, halves go to even.

    The last bytes are the scale, a float32. What is not a number makes the scale, and so the whole head, not one.
    """
    wide = x.float()
    largest = wide.abs().amax(dim=-1, keepdim=True).clamp_min(SMALLEST_SPREAD)  # [..., 1]
    values = (wide * (wide.new_tensor(127) / largest)).round().to(torch.int8)  # [..., D]
    return torch.cat((values, (largest / 127).view(torch.int8)), dim=-1)


def widen_kv(cache: Tensor, dtype: torch.dtype) -> Tensor:
    """What blocks of a cache say, [..., D] of a type: they themselves, or what `round_kv` was given, about."""
    if cache.dtype != torch.int8:
        return cache
    values, scales = cache[..., :-SCALE_BYTES], cache[..., -SCALE_BYTES:].contiguous().view(torch.float32)
    return (values.float() * scales).to(dtype)


class Ops(kernels.Ops):
    """Every operation by its definition."""

    def prepare_linear(self, weight: Tensor, bias: Tensor | None, quantization: Quantization = "none") -> object:
        if quantization == "int8":
            values, scales = round_weight(weight)
            return Int8Weights(values, scales, values.sum(dim=1).float(), bias)
        return LinearWeights(weight, bias)

    def linear(self, x: Tensor, prepared: object) -> Tensor:
        if isinstance(prepared, Int8Weights):
            values, scales, middles = round_inputs(x)  # [T, K], [T], [T]
            products = (values.double() @ prepared.values.double().T).float()  # [T, N], of whole numbers
            product = (products + middles[:, None] * prepared.sums) * prepared.scales * scales[:, None]  # [T, N]
            return (product if prepared.bias is None else product + prepared.bias.float()).to(x.dtype)
        assert isinstance(prepared, LinearWeights)
        return F.linear(x, prepared.weight, prepared.bias)  # [T, N]

    def embedding(self, token_ids: Tensor, table: Tensor) -> Tensor:
        return F.embedding(token_ids, table)  # [T, H]

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)  # [..., 1]
        return (wide * scale * weight.float()).to(x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = x + residual
        return self.rms_norm(total, weight, eps), total

    def rope_rows(self, positions: Tensor, inverse_frequencies: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions.float()[:, None] * inverse_frequencies  # [T, D / 2]
        return angles.cos(), angles.sin()

    def rope_and_write_kv(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cosine: Tensor,
        sine: Tensor,
        slots: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
    ) -> Tensor:
        key = rotate(key, cosine, sine)
        if key_cache.dtype == torch.int8:
            key, value = round_kv(key), round_kv(value)
        key_cache.flatten(0, 1).index_copy_(0, slots, key)
        value_cache.flatten(0, 1).index_copy_(0, slots, value)
        return rotate(query, cosine, sine)  # [T, Hq, D]

    def plan_attention(self, metadata: AttentionMetadata) -> object:
        decoding: dict[int, list[int]] = {}  # padded number of blocks: sequences
        chunks: list[Chunk] = []
        first_rows: list[int] = []
        row = 0
        for sequence, (num_rows, context_len) in enumerate(
            zip(metadata.query_lens_list, metadata.context_lens_list, strict=True)
        ):
            first_rows.append(row)
            num_blocks = -(-context_len // metadata.block_size)
            if num_rows == 1:
                decoding.setdefault(padded_num_blocks(num_blocks), []).append(sequence)
            else:
                blocks = metadata.block_tables[sequence, :num_blocks].long()  # [m]
                chunks.append(Chunk(row, num_rows, context_len, blocks))
            row += num_rows
        groups = [
            plan_group(metadata, num_blocks, sequences, [first_rows[sequence] for sequence in sequences])
            for num_blocks, sequences in decoding.items()
        ]
        return AttentionPlan(tuple(groups), tuple(chunks))

    def paged_attention(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        metadata: AttentionMetadata,
        scale: float,
        window: int | None,
    ) -> Tensor:
        plan = metadata.plan
        assert isinstance(plan, AttentionPlan)
        output = query.new_empty(query.shape)  # [T, Hq, D]
        for group in plan.groups:
            output[group.rows] = attend_group(query[group.rows], key_cache, value_cache, group, scale, window)
        for chunk in plan.chunks:
            rows = slice(chunk.first_row, chunk.first_row + chunk.num_rows)
            output[rows] = attend_chunk(query[rows], key_cache, value_cache, chunk, scale, window)
        return output

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)  # [T, I] each
        return (F.silu(gate.float()) * up.float()).to(gate_up.dtype)


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """x [T, heads, D] turned by the angles of its row, [T, D / 2] each."""
    first, second = x.float().chunk(2, dim=-1)  # [T, heads, D / 2]
    cosine, sine = cosine[:, None], sine[:, None]  # [T, 1, D / 2]
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1).to(x.dtype)


def plan_group(
    metadata: AttentionMetadata, num_blocks: int, sequences: list[int], first_rows: list[int]
) -> DecodeGroup:
    """Single-row `sequences` whose contexts are padded to `num_blocks` blocks."""
    device = metadata.block_tables.device
    chosen = torch.tensor(sequences, device=device)  # [R]
    tables = metadata.block_tables[chosen, :num_blocks].long()  # [R, at most m]
    tables = F.pad(tables, (0, num_blocks - tables.shape[1]))  # [R, m]
    return DecodeGroup(
        rows=torch.tensor(first_rows, device=device),
        blocks=tables.flatten(),
        context_lens=metadata.context_lens[chosen].long(),
        shortest=min(metadata.context_lens_list[sequence] for sequence in sequences),
    )


def attend_group(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, group: DecodeGroup, scale: float, window: int | None
) -> Tensor:
    """One query row [R, Hq, D] for each sequence; the query heads that share a KV head stand as its query rows."""
    num_rows, num_heads, head_dim = query.shape
    num_kv_heads = key_cache.shape[2]
    key, value = (
        widen_kv(cache[group.blocks], torch.float32).view(num_rows, -1, num_kv_heads, head_dim)  # [R, L, Hkv, D]
        for cache in (key_cache, value_cache)
    )
    positions = torch.arange(key.shape[1], device=key.device)  # [L]
    visible = positions < group.context_lens[:, None]  # [R, L]
    # A hidden position weighs nothing, but nothing times NaN is NaN: what stands in other owners' slots must go.
    beyond = ~visible[:, group.shortest :, None, None]  # [R, L - shortest, 1, 1]
    key[:, group.shortest :].masked_fill_(beyond, 0)
    value[:, group.shortest :].masked_fill_(beyond, 0)
    if window is not None:
        visible &= positions >= group.context_lens[:, None] - window
    attended = F.scaled_dot_product_attention(
        query.float().view(num_rows, num_kv_heads, -1, head_dim),  # [R, Hkv, Hq / Hkv, D]
        key.float().transpose(1, 2),  # [R, Hkv, L, D]
        value.float().transpose(1, 2),
        attn_mask=visible[:, None, None],  # [R, 1, 1, L]
        scale=scale,
    )
    return attended.reshape(num_rows, num_heads, head_dim).to(query.dtype)


def attend_chunk(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, chunk: Chunk, scale: float, window: int | None
) -> Tensor:
    """The last n = `chunk.num_rows` positions of one sequence, query [n, Hq, D], to all of its context."""
    key, value = (
        widen_kv(cache[chunk.blocks], torch.float32).flatten(0, 1)[: chunk.context_len]  # [L, Hkv, D]
        for cache in (key_cache, value_cache)
    )
    key_positions = torch.arange(chunk.context_len, device=key.device)  # [L]
    query_positions = key_positions[-chunk.num_rows :, None]  # [n, 1]
    visible = key_positions <= query_positions  # [n, L]
    if window is not None:
        visible &= key_positions > query_positions - window
    attended = F.scaled_dot_product_attention(
        query.float().transpose(0, 1)[None],  # [1, Hq, n, D]
        key.float().transpose(0, 1)[None],  # [1, Hkv, L, D]
        value.float().transpose(0, 1)[None],
        attn_mask=visible,
        scale=scale,
        enable_gqa=True,
    )[0]  # [Hq, n, D]
    return attended.transpose(0, 1).to(query.dtype)
