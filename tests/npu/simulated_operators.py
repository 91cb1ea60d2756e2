"""A library of NPU operators that runs on the CPU: the real schemas, numbers as the documents say, contracts checked.

The dispatcher holds callers to names, order and types of arguments; `contracts.py` to what it cannot see. Owns the
registration (namespaces `npu` and `atb`, for the whole process), counts calls, and can be told to refuse an operator as
a device does that lacks a kernel for a shape. What Baton does not use of an operator is not simulated and refused.
Numbers are computed in float32 and rounded once, by loops over sequences.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from contracts import (
    FUSED_HEAD_DIMS,
    HALF_TYPES,
    MAX_TOP_K,
    ContractViolation,
    Placement,
    require,
    require_compressed_mask,
    require_contexts,
    require_contiguous,
    require_heads,
    require_host_lengths,
    require_query_ends,
    require_scale,
    require_shape,
    require_slots,
    require_table,
    require_type,
)
from operator_schemas import ATB, NPU, name_of
from torch import Tensor

FRACTAL_NZ, ND = 29, 2
DROPPED = {torch.bfloat16: -10000.0, torch.float16: -float("inf")}
"""What hides a position in a mask that is added, by its dtype."""


class SimulatedOperators:
    """The operators of both namespaces."""

    def __init__(self) -> None:
        self.placement = Placement()
        """What tests say of where tensors lie."""
        self.num_calls: Counter[str] = Counter()
        """Calls, by operator."""
        self.refused: dict[str, Callable[[Tensor], bool]] = {}
        """Operators that fail for such a first argument, as on a device that has no kernel for it."""
        self._libraries: list[torch.library.Library] = []

    def register(self) -> None:
        """Makes them callable as `torch.ops.npu.*` and `torch.ops.atb.*`, as long as this object lives."""
        for namespace, schemas in (("npu", NPU), ("atb", ATB)):
            library = torch.library.Library(namespace, "DEF")
            for schema in schemas:
                name = name_of(schema)
                library.define(schema)
                library.impl(name, self._counted(name, getattr(self, name)), "CPU")
            self._libraries.append(library)

    def _counted(self, name: str, operator: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            self.num_calls[name] += 1
            tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
            require(all(tensor.numel() for tensor in tensors), f"{name}: an empty tensor")
            if name in self.refused and self.refused[name](args[0]):
                raise RuntimeError(f"{name}: not supported by this device")
            return operator(*args, **kwargs)

        return run

    # Attention.

    def npu_fused_infer_attention_score(self, query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Any:
        """Layout TND over paged KV [num_blocks, block_size, num_kv_heads * head_dim]."""
        num_rows, num_heads, head_dim = query.shape
        block_size, table = given.get("block_size", 0), given.get("block_table")
        num_kv_heads = given.get("num_key_value_heads", 0)
        known = {"atten_mask", "actual_seq_lengths", "actual_seq_lengths_kv", "block_table", "num_heads", "scale"}
        known |= {"input_layout", "num_key_value_heads", "sparse_mode", "block_size"}
        require(given.keys() <= known, f"not simulated: {sorted(given.keys() - known)}")
        require(given.get("input_layout", "BSH") == "TND", f"not simulated: layout {given.get('input_layout')}")
        require(given.get("sparse_mode", 0) == 3, "sparse_mode must be 3: new tokens are the last of their context")
        require_compressed_mask(given.get("atten_mask"))
        require_type("query", query, HALF_TYPES)
        require(query.dtype == key.dtype == value.dtype, "query, key and value must have one dtype")
        require_contiguous(query=query, key=key, value=value)
        require_heads(query, given.get("num_heads", 1), num_kv_heads, head_dim)
        require(num_heads <= 256 and num_heads <= 64 * num_kv_heads, "at most 256 heads, 64 for each KV head")
        require(head_dim in FUSED_HEAD_DIMS, f"layout TND: head_dim must be one of {FUSED_HEAD_DIMS}, is {head_dim}")
        require_scale(given.get("scale", 1.0), head_dim)
        require(block_size % 128 == 0 and 0 < block_size <= 512, f"block_size: 128, 256, 384 or 512, is {block_size}")
        require_shape("key", key, None, block_size, num_kv_heads * head_dim)
        require_shape("value", value, *key.shape)
        require(num_kv_heads * head_dim <= 65535, "num_kv_heads * head_dim: at most 65535")
        query_lens = require_query_ends(given.get("actual_seq_lengths"), num_rows)
        contexts = require_contexts("actual_seq_lengths_kv", given.get("actual_seq_lengths_kv"), query_lens)
        table = require_table(table, contexts, key.shape[0], block_size)
        shape = (key.shape[0], block_size, num_kv_heads, head_dim)
        out = attend(query, key.view(shape), value.view(shape), table, query_lens, contexts)
        return out, torch.zeros(1, dtype=torch.float32)  # the second is no softmax sum unless asked for

    def _npu_paged_attention(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        num_kv_heads: int,
        num_heads: int,
        scale_value: float,
        block_table: Tensor,
        context_lens: Tensor,
        out: Tensor,
        workspace: Tensor | None = None,
    ) -> None:
        """One row each; the mask is the context's end."""
        query_lens = [1] * query.shape[0]
        self._require_atb_caches(query, key_cache, value_cache, num_kv_heads, num_heads, scale_value, out)
        require_host_lengths(self.placement, context_lens=context_lens)
        contexts = require_contexts("context_lens", context_lens.tolist(), query_lens)
        table = require_table(block_table, contexts, *key_cache.shape[:2])
        out.copy_(attend(query, key_cache, value_cache, table, query_lens, contexts))

    def _npu_paged_attention_splitfuse(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        block_table: Tensor,
        context_lens: Tensor,
        mask: Tensor,
        seq_len: Tensor,
        num_kv_heads: int,
        num_heads: int,
        scale_value: float,
        out: Tensor,
    ) -> None:
        """Rows of several lengths; the mask is added to the scores, a row for each query row."""
        self._require_atb_caches(query, key_cache, value_cache, num_kv_heads, num_heads, scale_value, out)
        require_host_lengths(self.placement, context_lens=context_lens, seq_len=seq_len)
        query_lens = seq_len.tolist()
        require(sum(query_lens) == query.shape[0], f"seq_len: the sum must be {query.shape[0]}, is {sum(query_lens)}")
        contexts = require_contexts("context_lens", context_lens.tolist(), query_lens)
        table = require_table(block_table, contexts, *key_cache.shape[:2])
        require_type("mask", mask, (query.dtype,))
        require_shape("mask", mask, query.shape[0], max(contexts))
        require_contiguous(mask=mask)
        last_seen = [
            context - rows + row for rows, context in zip(query_lens, contexts, strict=True) for row in range(rows)
        ]
        hidden = torch.arange(mask.shape[1]) > torch.tensor(last_seen)[:, None]  # [T, longest]
        expected = torch.zeros(mask.shape).masked_fill_(hidden, DROPPED[mask.dtype]).to(mask.dtype)
        require(torch.equal(mask, expected), f"mask must be 0 where keys are seen and {DROPPED[mask.dtype]} elsewhere")
        out.copy_(attend(query, key_cache, value_cache, table, query_lens, contexts))

    @staticmethod
    def _require_atb_caches(
        query: Tensor, keys: Tensor, values: Tensor, num_kv_heads: int, num_heads: int, scale: float, out: Tensor
    ) -> None:
        _, block_size, _, head_dim = keys.shape
        require_type("query", query, HALF_TYPES)
        require(query.dtype == keys.dtype == values.dtype == out.dtype, "all tensors must have one dtype")
        require_contiguous(query=query, key_cache=keys, value_cache=values, out=out)
        require_heads(query, num_heads, num_kv_heads, head_dim)
        require_shape("key_cache", keys, None, None, num_kv_heads, None)
        require_shape("value_cache", values, *keys.shape)
        require_shape("out", out, *query.shape)
        require(head_dim <= 256 and head_dim % 16 == 0, f"head_dim: at most 256, in sixteens, is {head_dim}")
        require(block_size % 16 == 0 and block_size <= 128, f"block_size: at most 128, in sixteens, is {block_size}")
        require_scale(scale, head_dim)

    # The cache and what is computed row by row.

    def npu_scatter_pa_kv_cache(
        self,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,
        cache_mode: str | None = "PA_NZ",
        **given: Any,
    ) -> None:
        require(not given, f"not simulated: {sorted(given)}")
        require(cache_mode in (None, "Norm"), f"cache_mode must be 'Norm' for caches in C order, is {cache_mode!r}")
        require(key.dtype == value.dtype == key_cache.dtype == value_cache.dtype, "all tensors must have one dtype")
        require_contiguous(key=key, value=value, key_cache=key_cache, value_cache=value_cache)
        require_shape("key", key, None, *key_cache.shape[2:])
        require_shape("value", value, *key.shape)
        require_shape("key_cache", key_cache, None, None, None, None)
        require_shape("value_cache", value_cache, *key_cache.shape)
        num_blocks, block_size = key_cache.shape[:2]
        require_slots(slot_mapping, key.shape[0], num_blocks * block_size)
        for row, slot in enumerate(slot_mapping.tolist()):
            key_cache[slot // block_size, slot % block_size] = key[row]
            value_cache[slot // block_size, slot % block_size] = value[row]

    def npu_rms_norm(self, x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
        require_contiguous(input=x, gamma=gamma)
        require_shape("gamma", gamma, x.shape[-1])
        require(gamma.dtype in (x.dtype, torch.float32), f"gamma: dtype {gamma.dtype} for input {x.dtype}")
        inverse = (x.float().pow(2).mean(-1, keepdim=True) + epsilon).sqrt().reciprocal()  # [..., 1]
        return (x.float() * inverse * gamma.float()).to(x.dtype), inverse

    def npu_add_rms_norm(
        self, x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6
    ) -> tuple[Tensor, Tensor, Tensor]:
        require(x1.dtype == x2.dtype == gamma.dtype, "x1, x2 and gamma must have one dtype")
        require_contiguous(x1=x1, x2=x2)
        require_shape("x2", x2, *x1.shape)
        total = x1 + x2
        normed, inverse = self.npu_rms_norm(total, gamma, epsilon)
        return normed, inverse, total

    def npu_swiglu(self, x: Tensor, dim: int = -1) -> Tensor:
        require(dim == -1, f"not simulated: dim {dim}")
        require_contiguous(input=x)
        half = x.shape[-1] // 2
        require(x.shape[-1] == 2 * half, f"input: the last size must be even, is {x.shape[-1]}")
        gate, up = x[..., :half].float(), x[..., half:].float()
        return (gate / (1 + (-gate).exp()) * up).to(x.dtype)

    def npu_rotary_mul(
        self, x: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None
    ) -> Tensor:
        require(rotary_mode == "half" and rotate is None, f"not simulated: {rotary_mode}, rotate")
        require_contiguous(input=x, r1=r1, r2=r2)
        require_shape("input", x, None, None, None, None)
        head_dim = x.shape[-1]
        require(head_dim % 2 == 0 and head_dim < 896, f"head_dim must be even and below 896, is {head_dim}")
        for name, factors in (("r1", r1), ("r2", r2)):
            require_shape(name, factors, x.shape[0], x.shape[1], 1, head_dim)
            require_type(name, factors, (x.dtype,))
        wide, half = x.float(), head_dim // 2
        turned = torch.cat((-wide[..., half:], wide[..., :half]), dim=-1)
        return (wide * r1.float() + turned * r2.float()).to(x.dtype)

    # Linear layers and sampling.

    def npu_format_cast(self, x: Tensor, acl_format: int, **given: Any) -> Tensor:
        require(not given, f"not simulated: {sorted(given)}")
        require(acl_format in (ND, FRACTAL_NZ), f"not simulated: format {acl_format}")
        require(acl_format == ND or x.dtype in (*HALF_TYPES, torch.int8), f"no fractal format of {x.dtype}")
        require_contiguous(input=x)
        return x.clone()

    def npu_dynamic_quant(self, x: Tensor, **given: Any) -> tuple[Tensor, Tensor]:
        require(not given, f"not simulated: {sorted(given)}")
        require_type("input", x, HALF_TYPES)
        require_contiguous(input=x)
        require(x.dim() >= 2, "input: at least 2 dimensions")
        scales = x.float().abs().amax(-1) / 127  # [...]
        rounded = (x.float() / scales.clamp_min(1e-30)[..., None]).round().clamp(-127, 127)
        return rounded.to(torch.int8), scales

    def npu_quant_matmul(
        self,
        x1: Tensor,
        x2: Tensor,
        scale: Tensor,
        pertoken_scale: Tensor | None = None,
        output_dtype: int | None = None,
        **given: Any,
    ) -> Tensor:
        require(not given, f"not simulated: {sorted(given)}")
        types = {number: dtype for dtype, number in OUTPUT_TYPES.items()}
        require(output_dtype in types, f"output_dtype must be given, else the result is int8; is {output_dtype}")
        require_type("x1", x1, (torch.int8,))
        require_type("x2", x2, (torch.int8,))
        require_contiguous(x1=x1, x2=x2, scale=scale)
        require_shape("x2", x2, x1.shape[-1], None)
        require(max(x1.shape[-1], x2.shape[-1]) <= 65535, f"the last sizes may be 65535, are {x1.shape}, {x2.shape}")
        require_shape("scale", scale, x2.shape[1])
        require_type("scale", scale, (torch.float32,))
        if pertoken_scale is None:
            raise ContractViolation("not simulated: no pertoken_scale")
        require_shape("pertoken_scale", pertoken_scale, x1.shape[0])
        require_type("pertoken_scale", pertoken_scale, (torch.float32,))
        product = (x1.double() @ x2.double()).float()  # [m, n], of whole numbers
        return (product * scale * pertoken_scale[:, None]).to(types[output_dtype])

    def npu_top_k_top_p(self, logits: Tensor, p: Tensor | None = None, k: Tensor | None = None) -> Tensor:
        num_rows, vocab_size = logits.shape
        require_contiguous(logits=logits)
        kept = logits.clone()
        if k is not None:
            require_type("k", k, (torch.int32,))
            require_shape("k", k, num_rows)
            most = min(MAX_TOP_K, vocab_size)
            require(bool(((k >= 1) & (k <= most)).all()), f"k must be from 1 to {most}, is {k.tolist()}")
            for row, count in enumerate(k.tolist()):
                kept[row, logits[row] < logits[row].sort(descending=True).values[count - 1]] = -torch.inf
        if p is not None:
            require_type("p", p, (logits.dtype,))
            require_shape("p", p, num_rows)
            require(bool(((p >= 0) & (p <= 1)).all()), f"p must be from 0 to 1, is {p.tolist()}")
            for row, share in enumerate(p.tolist()):
                ascending = kept[row].sort()
                tail = ascending.values.softmax(-1).cumsum(-1) <= 1 - share
                tail[-1] = False
                kept[row, ascending.indices[tail]] = -torch.inf
        return kept


OUTPUT_TYPES = {torch.float16: 5, torch.bfloat16: 15}
"""Numbers of dtypes where a schema says int."""


def attend(
    query: Tensor, keys: Tensor, values: Tensor, table: Tensor, query_lens: Sequence[int], contexts: Sequence[int]
) -> Tensor:
    """Causal attention: query [T, Hq, D], caches [num_blocks, block_size, Hkv, D], table [B, M]."""
    out = torch.empty_like(query)
    block_size, scale = keys.shape[1], query.shape[2] ** -0.5
    group = query.shape[1] // keys.shape[2]
    row = 0
    for index, (num_rows, context) in enumerate(zip(query_lens, contexts, strict=True)):
        blocks = table[index, : -(-context // block_size)].long()
        key = keys[blocks].flatten(0, 1)[:context].float().repeat_interleave(group, dim=1)  # [L, Hq, D]
        value = values[blocks].flatten(0, 1)[:context].float().repeat_interleave(group, dim=1)  # [L, Hq, D]
        rows = query[row : row + num_rows].float()  # [n, Hq, D]
        scores = torch.einsum("nhd,lhd->hnl", rows, key) * scale  # [Hq, n, L]
        hidden = torch.arange(context) > torch.arange(context - num_rows, context)[:, None]  # [n, L]
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        out[row : row + num_rows] = torch.einsum("hnl,lhd->nhd", weights, value).to(query.dtype)
        row += num_rows
    return out
