"""Attention over paged KV by the NPU's own operators, and the choice between them.

The fused operator (`npu_fused_infer_attention_score`) takes any mix of prefill chunks and decode rows in one call; the
older ones of NNAL are there for shapes that it refuses. Which shapes those are depends on the version of CANN, so each
is tried at load against the reference on a small batch of every phase: a device that refuses a call, or takes a mask
the other way round, costs speed and never a token. Owns no KV.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from kernels import AttentionMetadata, reference

LOG = logging.getLogger(__name__)
MASK_SIZE = 2048
"""Rows and columns of the compressed mask, whatever the lengths."""
FUSED_HEAD_DIMS = (64, 128, 192)
"""That the fused operator takes in packed layout."""
RIGHT_DOWN_CAUSAL = 3
"""Sparse mode in which the query rows are the last positions of their context."""
HALF_TYPES = (torch.bfloat16, torch.float16)
HIDING = {torch.bfloat16: -10000.0, torch.float16: -torch.inf}
"""What NNAL's operators want added to the scores of hidden positions."""
TRIAL_TOLERANCE = 0.05
"""To the reference, for numbers about 1 in bfloat16. A wrong mask or length is off by far more."""


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What an operator may refuse."""

    num_heads: int
    """Query heads."""
    num_kv_heads: int
    """Key/value heads."""
    head_dim: int
    """D."""
    block_size: int
    """Token positions a block."""
    dtype: torch.dtype
    """Of query and caches."""


class Attention(ABC):
    """One way to attend. `plan` is made once a step."""

    name: str
    """For the log."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        """Where queries and caches are."""

    @abstractmethod
    def refuses(self, shape: AttentionShape) -> str | None:
        """Why the operator's documents exclude this shape; None: they do not."""

    @abstractmethod
    def plan(self, metadata: AttentionMetadata, dtype: torch.dtype) -> object:
        """What all layers of a step share."""

    @abstractmethod
    def attend(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        metadata: AttentionMetadata,
        plan: object,
        scale: float,
    ) -> Tensor:
        """As `Ops.paged_attention`, without windows."""


@dataclass(frozen=True, slots=True)
class FusedPlan:
    """Lists that the host passes to the operator."""

    query_ends: list[int]  # [B]
    """Cumulative; the last is T."""
    context_lens: list[int]  # [B]
    """Each sequence's own, since KV is paged."""


class FusedAttention(Attention):
    """One call for all phases. The length lists are arguments by name, so that a graph's replay can exchange them."""

    name = "npu_fused_infer_attention_score"

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        ones = torch.ones(MASK_SIZE, MASK_SIZE, dtype=torch.int8)
        self._mask = ones.triu(1).to(device)  # [2048, 2048], 1 hides

    def refuses(self, shape: AttentionShape) -> str | None:
        if shape.dtype not in HALF_TYPES:
            return f"dtype must be bfloat16 or float16, is {shape.dtype}"
        if shape.head_dim not in FUSED_HEAD_DIMS:
            return f"head_dim must be one of {FUSED_HEAD_DIMS}, is {shape.head_dim}"
        if shape.block_size % 128 or shape.block_size > 512:
            return f"block_size must be 128, 256, 384 or 512, is {shape.block_size}"
        if shape.num_heads > 256 or shape.num_heads > 64 * shape.num_kv_heads:
            return f"at most 256 heads and 64 a KV head, are {shape.num_heads} and {shape.num_kv_heads}"
        return None

    def plan(self, metadata: AttentionMetadata, dtype: torch.dtype) -> object:
        return FusedPlan(list(accumulate(metadata.query_lens_list)), list(metadata.context_lens_list))

    def attend(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        metadata: AttentionMetadata,
        plan: object,
        scale: float,
    ) -> Tensor:
        assert isinstance(plan, FusedPlan)
        num_blocks, block_size, num_kv_heads, head_dim = key_cache.shape
        attended, _ = torch.ops.npu.npu_fused_infer_attention_score(
            query.contiguous(),
            key_cache.view(num_blocks, block_size, num_kv_heads * head_dim),
            value_cache.view(num_blocks, block_size, num_kv_heads * head_dim),
            atten_mask=self._mask,
            actual_seq_lengths=plan.query_ends,
            actual_seq_lengths_kv=plan.context_lens,
            block_table=metadata.block_tables,
            num_heads=query.shape[1],
            scale=scale,
            input_layout="TND",
            num_key_value_heads=num_kv_heads,
            sparse_mode=RIGHT_DOWN_CAUSAL,
            block_size=block_size,
        )
        return attended  # type: ignore[no-any-return]  # [T, Hq, D]


@dataclass(frozen=True, slots=True)
class PagedPlan:
    """What NNAL's operators take beside the caches; None where all sequences have one row."""

    context_lens: Tensor  # [B] int32, in host memory
    """KV positions."""
    query_lens: Tensor | None  # [B] int32, in host memory
    """Query rows."""
    mask: Tensor | None  # [T, longest context]
    """Added to the scores of each query row."""


class PagedAttention(Attention):
    """`_npu_paged_attention` for steps of single rows, `_npu_paged_attention_splitfuse` for all others."""

    name = "_npu_paged_attention"

    def refuses(self, shape: AttentionShape) -> str | None:
        if shape.dtype not in HALF_TYPES:
            return f"dtype must be bfloat16 or float16, is {shape.dtype}"
        if shape.head_dim > 256 or shape.head_dim % 16:
            return f"head_dim must be at most 256, in sixteens, is {shape.head_dim}"
        if shape.block_size > 128 or shape.block_size % 16:
            return f"block_size must be at most 128, in sixteens, is {shape.block_size}"
        return None

    def plan(self, metadata: AttentionMetadata, dtype: torch.dtype) -> object:
        context_lens = torch.tensor(metadata.context_lens_list, dtype=torch.int32)  # [B], stays on the host
        if max(metadata.query_lens_list) == 1:
            return PagedPlan(context_lens, None, None)
        query_lens = torch.tensor(metadata.query_lens_list, dtype=torch.int32)  # [B], stays on the host
        places = torch.arange(max(metadata.context_lens_list), device=self.device)  # [longest]
        hidden = places > metadata.positions[:, None]  # [T, longest]
        mask = torch.zeros(hidden.shape, dtype=dtype, device=self.device).masked_fill_(hidden, HIDING[dtype])
        return PagedPlan(context_lens, query_lens, mask)

    def attend(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        metadata: AttentionMetadata,
        plan: object,
        scale: float,
    ) -> Tensor:
        assert isinstance(plan, PagedPlan)
        query = query.contiguous()
        out = torch.empty_like(query)  # [T, Hq, D]
        heads = {"num_kv_heads": key_cache.shape[2], "num_heads": query.shape[1], "scale_value": scale}
        lengths = {"block_table": metadata.block_tables, "context_lens": plan.context_lens}
        if plan.query_lens is None:
            torch.ops.atb._npu_paged_attention(query, key_cache, value_cache, **heads, **lengths, out=out)
            return out
        torch.ops.atb._npu_paged_attention_splitfuse(
            query, key_cache, value_cache, **lengths, mask=plan.mask, seq_len=plan.query_lens, **heads, out=out
        )
        return out


class PlainAttention(Attention):
    """The reference's: correct, and far slower, since it copies the KV it reads."""

    name = "the reference"

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._ops = reference.Ops(device)

    def refuses(self, shape: AttentionShape) -> str | None:
        return None

    def plan(self, metadata: AttentionMetadata, dtype: torch.dtype) -> object:
        return self._ops.plan_attention(metadata)

    def attend(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        metadata: AttentionMetadata,
        plan: object,
        scale: float,
        window: int | None = None,
    ) -> Tensor:
        return self._ops.paged_attention(query, key_cache, value_cache, replace(metadata, plan=plan), scale, window)


def choose_attention(device: torch.device, shape: AttentionShape) -> Attention:
    """The best that takes `shape` and gives the reference's numbers on this device."""
    for attention in (FusedAttention(device), PagedAttention(device)):
        reason = attention.refuses(shape) or try_attention(attention, shape)
        if reason is None:
            LOG.info("attention runs by %s", attention.name)
            return attention
        LOG.warning("attention does not run by %s: %s", attention.name, reason)
    LOG.warning("attention runs by the reference, which is slow")
    return PlainAttention(device)


def try_attention(attention: Attention, shape: AttentionShape) -> str | None:
    """Runs decode rows, chunks with and without a past, and both in one step; what is wrong, or None."""
    size = shape.block_size
    steps = ([(1, 1), (1, size + 3)], [(3, 3), (5, size + 9)], [(1, size), (7, 2 * size), (1, 5)])
    for step in steps:
        try:
            difference = _difference(attention, shape, step)
        except AttributeError as error:  # torch knows no such operator: NNAL's are loaded apart
            return f"NNAL is missing, or its nnal/atb/set_env.sh was not sourced: {error}"
        except RuntimeError as error:
            return str(error)
        if not difference <= TRIAL_TOLERANCE:  # also if it is NaN
            return f"its results differ from the reference by {difference}"
    return None


def _difference(attention: Attention, shape: AttentionShape, sequences: list[tuple[int, int]]) -> float:
    """Largest difference to the reference over random KV, for sequences of (query rows, context)."""
    device, generator = attention.device, torch.Generator().manual_seed(1)
    counts = [-(-context // shape.block_size) for _, context in sequences]
    num_rows = sum(rows for rows, _ in sequences)
    cache_shape = (sum(counts), shape.block_size, shape.num_kv_heads, shape.head_dim)
    query_shape = (num_rows, shape.num_heads, shape.head_dim)
    query, keys, values = (
        torch.randn(size, generator=generator).to(shape.dtype).to(device)
        for size in (query_shape, cache_shape, cache_shape)
    )  # [T, Hq, D], [num_blocks, block_size, Hkv, D] twice
    ends = list(accumulate(counts))
    tables = [[*range(end - count, end), *[0] * (max(counts) - count)] for count, end in zip(counts, ends, strict=True)]
    places = [position for rows, context in sequences for position in range(context - rows, context)]
    metadata = AttentionMetadata(
        query_starts=torch.tensor([0, *accumulate(rows for rows, _ in sequences)], dtype=torch.int32, device=device),
        context_lens=torch.tensor([context for _, context in sequences], dtype=torch.int32, device=device),
        block_tables=torch.tensor(tables, dtype=torch.int32, device=device),
        slots=torch.zeros(num_rows, dtype=torch.int64, device=device),  # nothing is written
        positions=torch.tensor(places, device=device),
        query_lens_list=tuple(rows for rows, _ in sequences),
        context_lens_list=tuple(context for _, context in sequences),
        block_size=shape.block_size,
    )
    results = []
    for way in (attention, PlainAttention(device)):
        plan = way.plan(metadata, shape.dtype)
        results.append(way.attend(query, keys, values, metadata, plan, shape.head_dim**-0.5).float())
    return float((results[0] - results[1]).abs().max())
