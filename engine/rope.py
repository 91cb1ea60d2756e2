"""Rotary position embedding: which frequencies a configuration asks for.

Owns the variants of `rope_scaling` that are known (none, linear, llama3) and refuses the others by name; turning heads
by the angles is `kernels`' work. Frequencies are computed in float32 step by step as training code does, because an
error of one unit in the last place is multiplied by the position.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runtime.errors import CheckpointError


def inverse_frequencies(head_dim: int, theta: float, scaling: Mapping[str, Any] | None, path: Path) -> Tensor:
    """Radians a position for each pair of a head's elements: [head_dim / 2] float32.

    `scaling` is `Checkpoint.config["rope_scaling"]`. Raises CheckpointError naming `path` for a variant that is not
    known, or one whose parameters are missing or wrong.
    """
    frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)  # [D / 2]
    if scaling is None:
        return frequencies
    kind = str(scaling.get("rope_type"))
    if kind not in SCALINGS:
        raise CheckpointError(
            f"{path}: rope_scaling of type {kind!r} is not supported; supported are: {', '.join(sorted(SCALINGS))}"
        )
    return SCALINGS[kind](frequencies, scaling, path)


def _unscaled(frequencies: Tensor, scaling: Mapping[str, Any], path: Path) -> Tensor:
    return frequencies


def _linear(frequencies: Tensor, scaling: Mapping[str, Any], path: Path) -> Tensor:
    """Positions pressed together by one factor."""
    return frequencies / _positive(scaling, "factor", path)


def _llama3(frequencies: Tensor, scaling: Mapping[str, Any], path: Path) -> Tensor:
    """Long wavelengths stretched by a factor, short ones kept, those between interpolated."""
    factor = _positive(scaling, "factor", path)
    low, high = _positive(scaling, "low_freq_factor", path), _positive(scaling, "high_freq_factor", path)
    original_len = _positive(scaling, "original_max_position_embeddings", path)
    if high <= low:
        raise CheckpointError(f"{path}: rope_scaling.high_freq_factor must exceed low_freq_factor {low}, got {high}")
    wavelengths = 2 * math.pi / frequencies  # [D / 2], positions a turn
    share_kept = (original_len / wavelengths - low) / (high - low)
    between = (1 - share_kept) * frequencies / factor + share_kept * frequencies
    stretched = torch.where(wavelengths > original_len / low, frequencies / factor, between)
    return torch.where(wavelengths < original_len / high, frequencies, stretched)


SCALINGS: Mapping[str, Callable[[Tensor, Mapping[str, Any], Path], Tensor]] = {
    "default": _unscaled,
    "linear": _linear,
    "llama3": _llama3,
}
"""Known values of rope_scaling.rope_type."""


def _positive(scaling: Mapping[str, Any], key: str, path: Path) -> float:
    value = scaling.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not (value > 0 and math.isfinite(value)):
        raise CheckpointError(f"{path}: rope_scaling.{key} must be a positive number, got {value!r}")
    return float(value)
