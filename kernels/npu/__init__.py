"""Operations on Ascend NPUs (Atlas A2 and A3), by the fused operators of torch_npu.

Operators are called through `torch.ops.npu` and `torch.ops.atb`, where torch_npu registers them; nothing here imports
it before a device is opened. Computes in bfloat16 or float16 with KV blocks of 128 positions. Rotation is done in
float32, as the reference does it, since cosines in half precision lose what distinguishes far positions. Sliding
windows are the reference's work in steps whose contexts exceed them. What was checked, and how: docs/npu.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import kernels
from kernels import AttentionMetadata, Counted, KVDtype, MemoryBytes, Quantization, reference
from kernels.npu import linear, opening
from kernels.npu.attention import (
    HALF_TYPES,
    Attention,
    AttentionShape,
    FusedAttention,
    PlainAttention,
    choose_attention,
)
from kernels.npu.counting import NpuCounter
from kernels.npu.graphs import NpuGraph


@dataclass(slots=True)
class StepPlan:
    """One step's attention."""

    unlimited: object
    """For layers that see everything."""
    windowed: object = None
    """For layers whose window is exceeded; made when the first of them runs."""


class Ops(reference.Ops):
    """What runs on `torch.device("npu", index)`."""

    dtypes = HALF_TYPES
    kv_dtypes = ("auto",)

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._attention: Attention | None = None
        self._plain = PlainAttention(device)
        self._dtype = torch.bfloat16
        self._graph_pool: Any = None

    @staticmethod
    def open_device(index: int) -> torch.device:
        return opening.open_npu(index)

    def enter_thread(self) -> None:
        opening.import_npu().set_device(self.device.index or 0)

    def memory_bytes(self) -> MemoryBytes | None:
        return opening.memory_bytes(self.device.index or 0)

    def prepare(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        dtype: torch.dtype,
        kv_dtype: KVDtype = "auto",
    ) -> None:
        shape = AttentionShape(num_heads, num_kv_heads, head_dim, block_size, dtype)
        self._attention, self._dtype = choose_attention(self.device, shape), dtype

    def new_counter(self, counted: Counted) -> kernels.DeviceCounter | None:
        return NpuCounter(counted)

    def new_graph(self) -> kernels.Graph | None:
        """None where attention is not the operator whose lengths a replay can exchange."""
        if not isinstance(self._attention, FusedAttention):
            return None
        npu = opening.import_npu()
        if self._graph_pool is None:
            self._graph_pool = npu.graph_pool_handle()
        return NpuGraph(npu, self._graph_pool)

    # Linear layers.

    def prepare_linear(self, weight: Tensor, bias: Tensor | None, quantization: Quantization = "none") -> object:
        return linear.prepare_weight(weight, bias, quantization)

    def linear(self, x: Tensor, prepared: object) -> Tensor:
        assert isinstance(prepared, linear.HalfWeights | linear.Int8Weights)
        return linear.multiply(x, prepared)  # [T, N]

    # Elementwise operations. Operators read memory in C order; views of a fused projection are copied first.

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        normed: Tensor = torch.ops.npu.npu_rms_norm(x.contiguous(), weight, epsilon=eps)[0]
        return normed

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        normed, _, total = torch.ops.npu.npu_add_rms_norm(x.contiguous(), residual.contiguous(), weight, epsilon=eps)
        return normed, total  # [T, H] each

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gated: Tensor = torch.ops.npu.npu_swiglu(gate_up.contiguous())
        return gated

    def rope_rows(self, positions: Tensor, inverse_frequencies: Tensor) -> tuple[Tensor, Tensor]:
        """[1, T, 1, D] float32 each, both halves of D alike: the form that `npu_rotary_mul` takes."""
        cosine, sine = super().rope_rows(positions, inverse_frequencies)  # [T, D / 2]
        return torch.cat((cosine, cosine), dim=-1)[None, :, None], torch.cat((sine, sine), dim=-1)[None, :, None]

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
        query, key = turn(query, cosine, sine), turn(key, cosine, sine)  # [T, Hq, D], [T, Hkv, D]
        # "Norm" is the cache in C order; the operator's default is another.
        torch.ops.npu.npu_scatter_pa_kv_cache(key, value.contiguous(), key_cache, value_cache, slots, cache_mode="Norm")
        return query

    # Attention.

    def plan_attention(self, metadata: AttentionMetadata) -> object:
        assert self._attention is not None, "prepare comes first"
        return StepPlan(self._attention.plan(metadata, self._dtype))

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
        assert isinstance(plan, StepPlan) and self._attention is not None
        if window is None or max(metadata.context_lens_list) <= window:
            return self._attention.attend(query, key_cache, value_cache, metadata, plan.unlimited, scale)
        if plan.windowed is None:
            plan.windowed = self._plain.plan(metadata, self._dtype)
        return self._plain.attend(query, key_cache, value_cache, metadata, plan.windowed, scale, window)


def turn(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """heads [T, N, D] turned by [1, T, 1, D]; contiguous."""
    wide = heads.float().contiguous()[None]  # [1, T, N, D]
    turned: Tensor = torch.ops.npu.npu_rotary_mul(wide, cosine, sine)
    return turned[0].to(heads.dtype)
