"""What NPU operators demand of their arguments and neither schema nor dispatcher checks, as functions that raise.

Written from the operators' documents. `ContractViolation` is no RuntimeError: what the backend does about operators
that a device refuses (it tries others) must not hide a wrong call.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

HALF_TYPES = (torch.bfloat16, torch.float16)
MASK_SIZE = 2048
FUSED_HEAD_DIMS = (64, 128, 192)
MAX_TOP_K = 1024


class ContractViolation(Exception):
    """A call that a device would refuse, or worse, answer wrongly."""


class Placement:
    """Which tensors stand for device memory, where all are host memory in truth: those that a test has said."""

    def __init__(self) -> None:
        self._on_device = WeakTensorKeyDictionary()

    def put_on_device(self, tensor: Tensor) -> Tensor:
        """Answers the tensor."""
        self._on_device[tensor] = True
        return tensor

    def require_host(self, name: str, tensor: Tensor) -> None:
        """For lists that the host reads."""
        require(tensor not in self._on_device, f"{name} must lie in host memory, not on the device")


def require(holds: bool, message: str) -> None:
    """Raises ContractViolation unless it holds."""
    if not holds:
        raise ContractViolation(message)


def require_type(name: str, tensor: Tensor, types: Sequence[torch.dtype]) -> None:
    """One of these dtypes."""
    require(tensor.dtype in types, f"{name}: dtype must be one of {list(types)}, is {tensor.dtype}")


def require_contiguous(**tensors: Tensor) -> None:
    """In C order, as a device reads them."""
    for name, tensor in tensors.items():
        require(tensor.is_contiguous(), f"{name} must be contiguous, has strides {tensor.stride()}")


def require_shape(name: str, tensor: Tensor, *shape: int | None) -> None:
    """These sizes; None leaves one open."""
    fits = tensor.dim() == len(shape) and all(
        wanted is None or size == wanted for size, wanted in zip(tensor.shape, shape, strict=False)
    )
    require(fits, f"{name}: shape must be {list(shape)}, is {list(tensor.shape)}")


def require_heads(query: Tensor, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    """Query [T, num_heads, head_dim] that share KV heads evenly."""
    require_shape("query", query, None, num_heads, head_dim)
    require(num_kv_heads > 0 and num_heads % num_kv_heads == 0, f"{num_kv_heads} KV heads for {num_heads} query heads")


def require_scale(scale: float, head_dim: int) -> None:
    """1 / sqrt(d): the operators' own default is right for nobody."""
    require(math.isclose(scale, head_dim**-0.5, rel_tol=1e-6), f"scale must be {head_dim**-0.5}, is {scale}")


def require_compressed_mask(mask: Tensor | None) -> None:
    """The one mask of sparse mode 3: 1 means hidden, which is everything above the diagonal."""
    if mask is None:
        raise ContractViolation("atten_mask is needed with sparse_mode 3")
    require_type("atten_mask", mask, (torch.int8, torch.uint8, torch.bool))
    require_shape("atten_mask", mask, MASK_SIZE, MASK_SIZE)
    require_contiguous(atten_mask=mask)
    wrong = "atten_mask must be 1 above the diagonal, where keys are hidden, and 0 elsewhere"
    require(torch.equal(mask, _compressed_mask(mask.dtype)), wrong)


@functools.cache
def _compressed_mask(dtype: torch.dtype) -> Tensor:
    return torch.ones(MASK_SIZE, MASK_SIZE, dtype=dtype).triu(1)


def require_query_ends(ends: Sequence[int] | None, num_rows: int) -> list[int]:
    """Cumulative lengths of queries; answers the lengths."""
    if ends is None:
        raise ContractViolation("actual_seq_lengths is needed with layout TND")
    require(0 < len(ends) <= 4096, f"actual_seq_lengths: 1 to 4096 sequences, got {len(ends)}")
    lengths = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    require(min(lengths) > 0, f"actual_seq_lengths must be cumulative and grow, is {list(ends)}")
    require(ends[-1] == num_rows, f"actual_seq_lengths: the last must be T, which is {num_rows}, is {ends[-1]}")
    return lengths


def require_contexts(name: str, contexts: Sequence[int] | None, query_lens: Sequence[int]) -> list[int]:
    """One length a sequence, its new tokens included."""
    if contexts is None:
        raise ContractViolation(f"{name} is needed")
    require(len(contexts) == len(query_lens), f"{name}: {len(query_lens)} sequences, got {len(contexts)} lengths")
    for context, query_len in zip(contexts, query_lens, strict=True):
        require(context >= query_len, f"{name}: a context of {context} for {query_len} new tokens")
    return list(contexts)


def require_table(table: Tensor | None, contexts: Sequence[int], num_blocks: int, block_size: int) -> Tensor:
    """Block ids of every sequence, enough of them, all inside the pool. Devices check none of it."""
    if table is None:
        raise ContractViolation("block_table is needed")
    require_type("block_table", table, (torch.int32,))
    require_shape("block_table", table, len(contexts), None)
    require_contiguous(block_table=table)
    longest = max(contexts)
    require(longest <= table.shape[1] * block_size, f"block_table: {table.shape[1]} blocks for {longest} positions")
    inside = bool(((table >= 0) & (table < num_blocks)).all())
    require(inside, f"block_table: ids must be from 0 to {num_blocks - 1}, are {table.min()} to {table.max()}")
    return table


def require_slots(slots: Tensor, num_rows: int, num_slots: int) -> None:
    """One place for each row, no two the same."""
    require_type("slot_mapping", slots, (torch.int32, torch.int64))
    require_shape("slot_mapping", slots, num_rows)
    require_contiguous(slot_mapping=slots)
    if num_rows:
        low, high = int(slots.min()), int(slots.max())
        require(low >= 0 and high < num_slots, f"slot_mapping: 0 to {num_slots - 1}, is {low} to {high}")
    require(slots.unique().numel() == num_rows, "slot_mapping: two rows have one slot")


def require_host_lengths(placement: Placement, **tensors: Tensor) -> None:
    """int32 vectors that the host reads."""
    for name, tensor in tensors.items():
        require_type(name, tensor, (torch.int32,))
        require_shape(name, tensor, None)
        placement.require_host(name, tensor)
