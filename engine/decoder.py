"""The decoder-only transformer that all supported families share, written against `kernels.Ops`.

Owns prepared weights and the order of operations; families differ by their `DecoderSpec` (see `engine.models`). Does
not own KV storage: each layer's cache is an argument. Invariants: query, key and value are one projection, gate and up
are another, both joined at load; after the last attention only the rows that sample are computed further, unless the
device takes all layers at once. What attention and MLP add to a token is summed by `Ops.sum_parts`, so that the weights
may be a part of a layer's heads and inner elements, and the head a part of the vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.decoder_spec import ConfigReader, DecoderSpec
from engine.weights.source import Weights
from kernels import AttentionMetadata, DecoderLayer, DecoderShape, Ops, Quantization


class Decoder(ABC):
    """A loaded model. `forward` writes KV and answers logits; nothing else changes."""

    @staticmethod
    @abstractmethod
    def read_spec(config: ConfigReader) -> DecoderSpec:
        """What the family's configuration means. Raises CheckpointError for what is not supported."""

    def __init__(
        self,
        spec: DecoderSpec,
        ops: Ops,
        weights: Weights,
        quantization: Quantization = "none",
        shared: Decoder | None = None,
    ) -> None:
        """Embedding and head, which are not quantised, are those of `shared`, if it is given: the same model."""
        self.spec = spec
        """The model's shape."""
        self._ops = ops
        load = WeightLoader(spec, ops, weights, quantization)
        self._embedding: Tensor = load.embedding() if shared is None else shared._embedding  # [V, H]
        self._layers = [load.layer(index) for index in range(spec.num_layers)]
        self._final_norm = weights.read("model.norm.weight", (spec.hidden_size,)).to(ops.device)  # [H]
        # What follows each layer: the sum it ends with is normalised by the same operation.
        self._following_norms = [layer.input_norm for layer in self._layers[1:]] + [self._final_norm]  # [H] each
        self._head: object = load.head(self._embedding) if shared is None else shared._head
        shape = DecoderShape(
            spec.hidden_size,
            spec.intermediate_size,
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            spec.rms_norm_eps,
        )
        # The parts of a layer have to be summed in the middle of it.
        self._stack = None if ops.has_parts else ops.fuse_layers(self._layers, self._final_norm, shape)
        self._inverse_frequencies = load.inverse_frequencies()  # [D / 2] float32

    @property
    def dtype(self) -> torch.dtype:
        """What it computes in."""
        return self._final_norm.dtype

    def forward(
        self,
        token_ids: Tensor,
        metadata: AttentionMetadata,
        key_caches: Sequence[Tensor],
        value_caches: Sequence[Tensor],
        sample_rows: Tensor,
    ) -> Tensor:
        """Computes T packed tokens.

        token_ids [T] int64; metadata with its plan; per layer one key and one value cache, as
        `kernels.Ops.rope_and_write_kv` takes them, written at `metadata.slots`; sample_rows [S] int64 into the packed
        tokens.
        Returns logits [S, V] float32.
        """
        ops, eps = self._ops, self.spec.rms_norm_eps
        rope = ops.rope_rows(metadata.positions, self._inverse_frequencies)
        hidden = ops.embedding(token_ids, self._embedding)  # [T, H]
        if self._stack is not None and self._stack.fits(metadata):
            normed = self._stack.run(hidden, rope, metadata, key_caches, value_caches)
            return ops.linear(normed[sample_rows], self._head).float()  # [S, V]
        normed = ops.rms_norm(hidden, self._layers[0].input_norm, eps)
        caches = zip(key_caches, value_caches, strict=True)
        for layer, next_norm, (keys, values) in zip(self._layers, self._following_norms, caches, strict=True):
            attended = self._attend(layer, normed, rope, metadata, keys, values)  # [T, H]
            if layer is self._layers[-1]:
                if not sample_rows.numel():
                    return hidden.new_empty((0, self.spec.vocab_size), dtype=torch.float32)
                attended, hidden = attended[sample_rows], hidden[sample_rows]  # [S, H]
            normed, hidden = ops.add_rms_norm(attended, hidden, layer.post_attention_norm, eps)
            gated = ops.silu_mul(ops.linear(normed, layer.gate_up))  # [T, I]
            normed, hidden = ops.add_rms_norm(ops.sum_parts(ops.linear(gated, layer.down)), hidden, next_norm, eps)
            ops.between_layers()
        return ops.linear(normed, self._head).float()  # [S, V]

    def _attend(
        self,
        layer: DecoderLayer,
        normed: Tensor,
        rope: tuple[Tensor, Tensor],
        metadata: AttentionMetadata,
        key_cache: Tensor,
        value_cache: Tensor,
    ) -> Tensor:
        """Attention of one layer, projections included: [T, H] to [T, H]."""
        spec, ops = self.spec, self._ops
        heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        qkv = ops.linear(normed, layer.qkv).view(normed.shape[0], sum(heads), spec.head_dim)
        query, key, value = qkv.split_with_sizes(heads, 1)  # [T, Hq, D], [T, Hkv, D], [T, Hkv, D]
        if layer.query_norm is not None and layer.key_norm is not None:
            query = ops.rms_norm(query, layer.query_norm, spec.rms_norm_eps)
            key = ops.rms_norm(key, layer.key_norm, spec.rms_norm_eps)
        query = ops.rope_and_write_kv(query, key, value, *rope, metadata.slots, key_cache, value_cache)
        scale = spec.head_dim**-0.5
        attended = ops.paged_attention(query, key_cache, value_cache, metadata, scale, layer.window)  # [T, Hq, D]
        return ops.sum_parts(ops.linear(attended.view(normed.shape[0], -1), layer.output))


class WeightLoader:
    """Reads weights by their Hugging Face names, checks every shape, joins what is computed together."""

    def __init__(self, spec: DecoderSpec, ops: Ops, weights: Weights, quantization: Quantization) -> None:
        self._spec = spec
        self._ops = ops
        self._weights = weights
        self._quantization = quantization

    def embedding(self) -> Tensor:
        """[V, H]."""
        spec = self._spec
        return self._read("model.embed_tokens.weight", (spec.vocab_size, spec.hidden_size))

    def head(self, embedding: Tensor) -> object:
        """H to V; the embedding itself where the two are tied. Never quantised: what it costs in accuracy is, for its
        size, more than elsewhere, since nothing comes after it."""
        if self._spec.tied_head:
            return self._ops.prepare_linear(embedding, None)
        shape = (self._spec.vocab_size, self._spec.hidden_size)
        return self._ops.prepare_linear(self._read("lm_head.weight", shape), None)

    def inverse_frequencies(self) -> Tensor:
        """[D / 2] float32. A GGUF file may carry the scaling of Llama 3 as a divisor for each frequency."""
        frequencies = torch.tensor(self._spec.inverse_frequencies, dtype=torch.float32)
        if self._weights.holds("rope_freqs.weight"):
            shape = (self._spec.head_dim // 2,)
            frequencies = frequencies / self._weights.read("rope_freqs.weight", shape, torch.float32)
        return frequencies.to(self._ops.device)

    def layer(self, index: int) -> DecoderLayer:
        """Everything under model.layers.<index>."""
        spec, prefix = self._spec, f"model.layers.{index}"
        hidden, inner = spec.hidden_size, spec.intermediate_size
        num_query, num_kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        qkv = [(f"{attention}.q_proj", num_query), (f"{attention}.k_proj", num_kv), (f"{attention}.v_proj", num_kv)]
        gate_up = [(f"{mlp}.gate_proj", inner), (f"{mlp}.up_proj", inner)]
        norms: list[Tensor | None] = [None, None]
        if spec.head_norms:
            names = (f"{attention}.q_norm.weight", f"{attention}.k_norm.weight")
            norms = [self._read(name, (spec.head_dim,)) for name in names]
        return DecoderLayer(
            input_norm=self._read(f"{prefix}.input_layernorm.weight", (hidden,)),
            qkv=self._joined(qkv, hidden, spec.qkv_bias),
            query_norm=norms[0],
            key_norm=norms[1],
            output=self._joined([(f"{attention}.o_proj", hidden)], num_query, spec.output_bias),
            post_attention_norm=self._read(f"{prefix}.post_attention_layernorm.weight", (hidden,)),
            gate_up=self._joined(gate_up, hidden, spec.mlp_bias),
            down=self._joined([(f"{mlp}.down_proj", hidden)], inner, spec.mlp_bias),
            window=spec.windows[index],
        )

    def _joined(self, parts: Sequence[tuple[str, int]], num_in: int, with_bias: bool) -> object:
        """One prepared linear of several projections (name, outputs) of the same input."""
        weights = [self._read(f"{name}.weight", (num_out, num_in)) for name, num_out in parts]
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)  # [sum of outputs, num_in]
        bias = None
        if with_bias:
            bias = torch.cat([self._read(f"{name}.bias", (num_out,)) for name, num_out in parts])
        return self._ops.prepare_linear(weight, bias, self._quantization)

    def _read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self._weights.read(name, shape).to(self._ops.device)
