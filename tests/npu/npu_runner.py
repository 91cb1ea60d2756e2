"""Tiny models that the fused operator takes, on a simulated NPU and on the reference, over device memory alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tiny_models import FAMILIES, family_config, random_weights, write_folder

from engine.model_runner import ModelRunner, load_model, model_spec
from kernels import load_ops
from kvstore.cache import KVCache
from kvstore.device_memory import DeviceMemory
from runtime.checkpoint import open_checkpoint

BLOCK_SIZE = 128
SHAPE = {"head_dim": 64, "max_position_embeddings": 1024}
"""What tiny models need so that the fused operator takes them."""


def write_tiny(folder: Path, family: str, **changes: Any) -> Path:
    """A checkpoint of that family in `folder`."""
    config = family_config(family) | SHAPE | changes
    assert family in FAMILIES and json.dumps(config)
    return write_folder(folder / family, config, random_weights(config))


def load_runner(
    model: str | Path,
    device: str,
    *,
    num_blocks: int = 24,
    dtype: str = "bfloat16",
    max_graph_rows: int = 0,
    quantization: Any = "none",
) -> ModelRunner:
    """A runner on "npu" or "reference"."""
    checkpoint, ops = open_checkpoint(str(model)), load_ops(device)
    spec = model_spec(checkpoint, dtype)
    layout = spec.kv_layout(BLOCK_SIZE)
    memory = DeviceMemory(layout, num_blocks, ops.device, layout.num_blocks(max_graph_rows))
    decoder = load_model(checkpoint, spec, ops, None, quantization)
    return ModelRunner(decoder, ops, KVCache(memory), max_graph_rows)
