"""Writes small random checkpoints of every family, as Hugging Face folders and as GGUF files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file

from engine.weights.gguf import LAYER_NAMES, MODEL_NAMES

BASE = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "eos_token_id": 0,
    "bos_token_id": 1,
}
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama-gqa-tied": {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
    "llama-mha-untied-llama3": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
        "rope_scaling": LLAMA3_SCALING,
    },
    "llama-biases-linear": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": True,
        "mlp_bias": True,
        "head_dim": 24,
        "rope_scaling": {"type": "linear", "factor": 4.0},
    },
    "qwen2": {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": False},
    "qwen2-window": {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "use_sliding_window": True,
        "sliding_window": 20,
        "max_window_layers": 1,
    },
    "qwen3": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 32},
    "mistral-window": {
        "model_type": "mistral",
        "architectures": ["MistralForCausalLM"],
        "sliding_window": 24,
        "tie_word_embeddings": False,
    },
    "mistral": {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": None},
}
"""Name: what differs from BASE."""


def family_config(name: str) -> dict[str, Any]:
    """The config.json of a family."""
    return BASE | FAMILIES[name]


def random_weights(config: Mapping[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    """Weights by Hugging Face names; large enough that attention is far from uniform."""
    generator = torch.Generator().manual_seed(seed)
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    num_query, num_kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    qkv_bias = config["model_type"] == "qwen2" or config.get("attention_bias", False)
    weights: dict[str, torch.Tensor] = {}

    def linear(name: str, num_out: int, num_in: int, bias: bool) -> None:
        weights[f"{name}.weight"] = torch.randn(num_out, num_in, generator=generator) * (1.5 / num_in**0.5)
        if bias:
            weights[f"{name}.bias"] = torch.randn(num_out, generator=generator) * 0.5

    def norm(name: str, size: int) -> None:
        weights[f"{name}.weight"] = 1 + 0.3 * torch.randn(size, generator=generator)

    weights["model.embed_tokens.weight"] = torch.randn(vocab, hidden, generator=generator)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        norm(f"{prefix}.input_layernorm", hidden)
        norm(f"{prefix}.post_attention_layernorm", hidden)
        linear(f"{prefix}.self_attn.q_proj", num_query, hidden, qkv_bias)
        linear(f"{prefix}.self_attn.k_proj", num_kv, hidden, qkv_bias)
        linear(f"{prefix}.self_attn.v_proj", num_kv, hidden, qkv_bias)
        linear(f"{prefix}.self_attn.o_proj", hidden, num_query, config.get("attention_bias", False))
        linear(f"{prefix}.mlp.gate_proj", inner, hidden, config.get("mlp_bias", False))
        linear(f"{prefix}.mlp.up_proj", inner, hidden, config.get("mlp_bias", False))
        linear(f"{prefix}.mlp.down_proj", hidden, inner, config.get("mlp_bias", False))
        if config["model_type"] == "qwen3":
            norm(f"{prefix}.self_attn.q_norm", head_dim)
            norm(f"{prefix}.self_attn.k_norm", head_dim)
    norm("model.norm", hidden)
    if not config["tie_word_embeddings"]:
        linear("lm_head", vocab, hidden, False)
    return weights


def write_folder(
    folder: Path, config: Mapping[str, Any], weights: Mapping[str, torch.Tensor], num_shards: int = 1
) -> Path:
    """A Hugging Face folder; with several shards, tensors are dealt in turn and an index is written."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if num_shards == 1:
        save_file(dict(weights), folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    names = [f"model-{shard + 1:05}-of-{num_shards:05}.safetensors" for shard in range(num_shards)]
    weight_map = {name: names[index % num_shards] for index, name in enumerate(weights)}
    for shard in names:
        held = {name: weights[name] for name in weights if weight_map[name] == shard}
        save_file(held, folder / shard, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def write_gguf(
    path: Path,
    config: Mapping[str, Any],
    weights: Mapping[str, torch.Tensor],
    kinds: Mapping[str, gguf.GGMLQuantizationType] | None = None,
    rope_factors: torch.Tensor | None = None,
) -> Path:
    """A GGUF file, tensors in F32 unless `kinds` (by GGUF name) says otherwise; llama rows turned as they are there."""
    architecture = config["model_type"]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
    for name, tensor in weights.items():
        gguf_name = to_gguf_name(name)
        if architecture == "llama" and ".attn_q." in gguf_name:
            tensor = turn_rows(tensor, config["num_attention_heads"])
        if architecture == "llama" and ".attn_k." in gguf_name:
            tensor = turn_rows(tensor, config["num_key_value_heads"])
        kind = (kinds or {}).get(gguf_name, gguf.GGMLQuantizationType.F32)
        data = gguf.quants.quantize(tensor.numpy(), kind)
        writer.add_tensor(gguf_name, data, raw_dtype=kind)
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", rope_factors.numpy().astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def to_gguf_name(name: str) -> str:
    """The GGUF name of a Hugging Face name."""
    stem, _, kind = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{ {new: old for old, new in LAYER_NAMES.items()}[part] }.{kind}"
    return f"{ {new: old for old, new in MODEL_NAMES.items()}[stem] }.{kind}"


def turn_rows(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """What the converter of llama models does to query and key rows: element i and i + D / 2 become neighbours."""
    rows = tensor.shape[0]
    halves = tensor.reshape(num_heads, 2, rows // num_heads // 2, -1)
    return halves.swapaxes(1, 2).reshape(tensor.shape).contiguous()
