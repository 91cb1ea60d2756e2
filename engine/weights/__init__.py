"""Weights on disk, read tensor by tensor into the dtype that the model computes in.

`source.py` is what all formats offer; `safetensors.py` reads a file, or several, of a Hugging Face folder; `gguf.py`
reads a GGUF file, whose quantised blocks `blocks.py` turns back into numbers.
"""

from __future__ import annotations

import torch

from engine.weights.gguf import GGUFWeights
from engine.weights.safetensors import SafetensorsWeights
from engine.weights.source import Progress, WeightSource
from runtime.checkpoint import Checkpoint

__all__ = ["Progress", "WeightSource", "open_weights"]


def open_weights(checkpoint: Checkpoint, dtype: torch.dtype, progress: Progress) -> WeightSource:
    """Opens the weights of `checkpoint`. Raises CheckpointError naming the file."""
    if checkpoint.gguf is not None:
        return GGUFWeights(checkpoint.gguf, dtype, progress)
    return SafetensorsWeights(checkpoint.path, checkpoint.weight_files, dtype, progress)
