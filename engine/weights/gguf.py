"""Weights of a GGUF file: memory-mapped, dequantised to the model's dtype, by their Hugging Face names.

Owns the map between the two worlds of names and the order of rows in which llama's query and key weights are stored.
The header was read, and every tensor's place in the file checked, by `runtime.gguf`; decoding is `blocks.py`'s work.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from engine.weights.blocks import DECODERS, decode_blocks
from engine.weights.source import Progress, WeightSource
from runtime.errors import CheckpointError
from runtime.gguf import GGUFFile

MODEL_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "rope_freqs": "rope_freqs",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TURNED_ROWS = {"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"}
"""In architecture "llama", where each head's rows are stored pair by pair: GGUF name and key of the number of heads."""

_LAYER_PATTERN = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


def hugging_face_name(gguf_name: str) -> str:
    """ "blk.3.attn_q.weight" to "model.layers.3.self_attn.q_proj.weight"; names that no model asks for stay."""
    if match := _LAYER_PATTERN.fullmatch(gguf_name):
        layer, part, kind = match.groups()
        return f"model.layers.{layer}.{LAYER_NAMES.get(part, part)}.{kind}"
    part, _, kind = gguf_name.rpartition(".")
    return f"{MODEL_NAMES.get(part, part)}.{kind}"


class GGUFWeights(WeightSource):
    """The tensors of one file."""

    def __init__(self, gguf: GGUFFile, dtype: torch.dtype, progress: Progress) -> None:
        self._gguf = gguf
        self._tensors = {hugging_face_name(name): tensor for name, tensor in gguf.tensors.items()}
        shapes = {name: tensor.shape for name, tensor in self._tensors.items()}
        try:
            # Copy on write only because torch wants writable memory; nothing is written.
            self._data = np.memmap(gguf.path, dtype=np.uint8, mode="c")
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{gguf.path}: cannot be mapped into memory: {error}") from error
        super().__init__(gguf.path, shapes, dtype, progress)

    def file_of(self, name: str) -> Path:
        return self._gguf.path

    def decode(self, name: str, dtype: torch.dtype) -> Tensor:
        tensor, path = self._tensors[name], self._gguf.path
        if tensor.type_name not in DECODERS or tensor.num_bytes is None:
            raise CheckpointError(
                f"{path}: tensor {tensor.name} has quantisation {tensor.type_name}, which is not supported; "
                f"supported are: {', '.join(sorted(DECODERS))}"
            )
        if tensor.offset + tensor.num_bytes > self._data.size:
            raise CheckpointError(
                f"{path}: tensor {tensor.name} ends at byte {tensor.offset + tensor.num_bytes}, "
                f"but the file has {self._data.size}: it is truncated"
            )
        stored = torch.from_numpy(self._data[tensor.offset : tensor.offset + tensor.num_bytes])
        decoded = decode_blocks(stored, tensor.type_name, dtype).view(tensor.shape)
        return self._in_hugging_face_order(decoded, tensor.name)

    def _in_hugging_face_order(self, tensor: Tensor, gguf_name: str) -> Tensor:
        """Element i of a head pairs with i + D / 2; llama files store the two side by side, as rows 2i and 2i + 1."""
        match = _LAYER_PATTERN.fullmatch(gguf_name)
        if self._gguf.metadata.get("general.architecture") != "llama" or not match or match[2] not in TURNED_ROWS:
            return tensor
        num_heads = self._num_heads(TURNED_ROWS[match[2]], int(match[1]))
        rows = tensor.shape[0]
        if num_heads < 1 or rows % (2 * num_heads):
            raise CheckpointError(
                f"{self._gguf.path}: tensor {gguf_name} has {rows} rows, which {num_heads} heads cannot share"
            )
        pairs = tensor.view(num_heads, rows // num_heads // 2, 2, -1)  # [heads, D / 2, 2, columns]
        return pairs.transpose(1, 2).reshape(tensor.shape)

    def _num_heads(self, suffix: str, layer: int) -> int:
        """Heads of a layer as the metadata say; a model without grouped heads may leave out the second count."""
        value = self._gguf.metadata.get(f"llama.{suffix}", self._gguf.metadata.get("llama.attention.head_count"))
        if isinstance(value, list):
            value = value[layer] if layer < len(value) else None
        return value if isinstance(value, int) else 0
