"""CPU operations: compiled kernels where Numba runs, torch's and the reference's where it does not.

Owns the choice, which it makes once and reports. Linear layers choose for themselves, layer by layer.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernels import AttentionMetadata, DecoderLayer, DecoderShape, KVDtype, LayerStack, Quantization, reference
from kernels.cpu.few_rows import load_few_rows
from kernels.cpu.linear import LinearLayers

if TYPE_CHECKING:
    from kernels.cpu.compiled import CompiledOps

LOG = logging.getLogger(__name__)


def load_compiled() -> CompiledOps | None:
    """The compiled operations; None, with the reason in the log, where they cannot be had."""
    try:
        from kernels.cpu.compiled import CompiledOps
    except (ImportError, AttributeError) as error:  # the latter: a torch without an operator they use
        LOG.warning("CPU kernels are the slow reference, since they cannot be loaded: %s", error)
        return None
    return CompiledOps()


class Ops(reference.Ops):
    """What runs on `torch.device("cpu")`."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._compiled = load_compiled()
        self._few_rows = load_few_rows()
        self._linear = LinearLayers(self._few_rows)

    # Attention and elementwise operations.

    def prepare(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        dtype: torch.dtype,
        kv_dtype: KVDtype = "auto",
    ) -> None:
        if self._compiled is not None:
            kept = torch.int8 if kv_dtype == "int8" else dtype
            self._compiled.prepare(num_heads, num_kv_heads, head_dim, block_size, dtype, kept)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if self._compiled is None:
            return super().rms_norm(x, weight, eps)
        return self._compiled.rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        if self._compiled is None:
            return super().add_rms_norm(x, residual, weight, eps)
        return self._compiled.add_rms_norm(x, residual, weight, eps)

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
        if self._compiled is None:
            return super().rope_and_write_kv(query, key, value, cosine, sine, slots, key_cache, value_cache)
        return self._compiled.rope_and_write_kv(query, key, value, cosine, sine, slots, key_cache, value_cache)

    def plan_attention(self, metadata: AttentionMetadata) -> object:
        if self._compiled is None:
            return super().plan_attention(metadata)
        return self._compiled.plan_attention(metadata)

    def paged_attention(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        metadata: AttentionMetadata,
        scale: float,
        window: int | None,
    ) -> Tensor:
        if self._compiled is None:
            return super().paged_attention(query, key_cache, value_cache, metadata, scale, window)
        return self._compiled.paged_attention(query, key_cache, value_cache, metadata, scale, window)

    def fuse_layers(self, layers: Sequence[DecoderLayer], final_norm: Tensor, shape: DecoderShape) -> LayerStack | None:
        if self._compiled is None or self._few_rows is None:
            return None
        from kernels.cpu.layers import fuse

        stack = fuse(self._compiled, self._few_rows, layers, final_norm, shape, self.between_layers)
        LOG.info("layers of few rows run %s", "one by one" if stack is None else "in one call")
        return stack

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        if self._compiled is None:
            return super().silu_mul(gate_up)
        return self._compiled.silu_mul(gate_up)

    # Linear layers.

    def prepare_linear(self, weight: Tensor, bias: Tensor | None, quantization: Quantization = "none") -> object:
        return self._linear.prepare(weight, bias, quantization)

    def linear(self, x: Tensor, prepared: object) -> Tensor:
        return self._linear.multiply(x, prepared)
