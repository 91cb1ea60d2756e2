"""The shape of a decoder-only transformer, read from a configuration before any weight is.

Owns `DecoderSpec` and the strict reading of the config.json keys that all supported families share; what differs
between families is an argument that their file in `engine.models` gives. Whatever would change the result and is not
understood is refused here, with the file, the key and the value.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.rope import inverse_frequencies
from runtime.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """Everything about a model but its weights."""

    vocab_size: int
    """Rows of the embedding and of the head."""
    hidden_size: int
    """Elements of a token's hidden state."""
    intermediate_size: int
    """Elements between the two halves of the MLP."""
    num_layers: int
    """Decoder layers."""
    num_heads: int
    """Query heads a layer."""
    num_kv_heads: int
    """Key/value heads a layer; divides num_heads."""
    head_dim: int
    """Elements a head; even."""
    rms_norm_eps: float
    """Added to the mean square."""
    inverse_frequencies: tuple[float, ...]
    """Radians a position, for each of head_dim / 2 pairs; exact float32 values."""
    max_context_len: int
    """Positions the model was made for."""
    tied_head: bool
    """The head is the embedding."""
    qkv_bias: bool
    """Query, key and value projections have biases."""
    output_bias: bool
    """The attention's output projection has one."""
    mlp_bias: bool
    """All three MLP projections have one."""
    head_norms: bool
    """Each query and key head is normalised before it is turned."""
    windows: tuple[int | None, ...]
    """Sliding window of each layer in positions; None sees all."""

    @property
    def num_weights(self) -> int:
        """Of embedding, linear layers and head; all others are few."""
        heads = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim
        layer = self.hidden_size * (heads + 3 * self.intermediate_size)
        return self.num_layers * layer + (1 if self.tied_head else 2) * self.vocab_size * self.hidden_size


class ConfigReader:
    """Typed access to `Checkpoint.config`; a null counts as absent. Errors name the file, the key and the value."""

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        self._config = config
        self.path = path
        """For messages."""

    def raw(self, key: str, default: Any = None) -> Any:
        """The value of `key` as it stands, null included; the default only if the key is absent."""
        return self._config.get(key, default)

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number of at least 1; required unless there is a default."""
        value = self._config.get(key)
        value = default if value is None else value
        if type(value) is not int or value < 1:
            raise CheckpointError(f"{self.path}: {key} must be a whole number of at least 1, got {value!r}")
        return value

    def positive(self, key: str, default: float) -> float:
        """A finite number above 0."""
        value = self._config.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not (0 < value < math.inf):
            raise CheckpointError(f"{self.path}: {key} must be a positive number, got {value!r}")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """True or false."""
        value = self._config.get(key)
        value = default if value is None else value
        if type(value) is not bool:
            raise CheckpointError(f"{self.path}: {key} must be true or false, got {value!r}")
        return value


def read_decoder_spec(
    config: ConfigReader,
    *,
    qkv_bias: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
    head_norms: bool = False,
    head_dim: int | None = None,
    windows: tuple[int | None, ...] | None = None,
) -> DecoderSpec:
    """Reads the shared keys; the arguments say what the family fixes. Raises CheckpointError.

    `head_dim` is the family's default where the file is silent; None means hidden_size / num_attention_heads.
    """
    refuse_unsupported(config)
    hidden_size, num_heads = config.count("hidden_size"), config.count("num_attention_heads")
    num_kv_heads = config.count("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"{config.path}: num_key_value_heads {num_kv_heads} does not divide num_attention_heads {num_heads}"
        )
    if head_dim is None and config.raw("head_dim") is None and hidden_size % num_heads:
        raise CheckpointError(
            f"{config.path}: num_attention_heads {num_heads} does not divide hidden_size {hidden_size}"
        )
    head_dim = config.count("head_dim", head_dim or max(1, hidden_size // num_heads))
    if head_dim % 2:
        raise CheckpointError(f"{config.path}: head_dim must be even for rotary positions, got {head_dim}")
    num_layers = config.count("num_hidden_layers")
    theta = config.positive("rope_theta", 10_000.0)
    frequencies = inverse_frequencies(head_dim, theta, config.raw("rope_scaling"), config.path)
    return DecoderSpec(
        vocab_size=config.count("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=config.count("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=config.positive("rms_norm_eps", 1e-6),
        inverse_frequencies=tuple(frequencies.tolist()),
        max_context_len=config.count("max_position_embeddings"),
        tied_head=config.flag("tie_word_embeddings"),
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        mlp_bias=mlp_bias,
        head_norms=head_norms,
        windows=windows or (None,) * num_layers,
    )


def refuse_unsupported(config: ConfigReader) -> None:
    """Raises CheckpointError for settings that would change the result and that no model here implements."""
    activation = config.raw("hidden_act")
    if activation not in (None, "silu", "swish"):
        raise CheckpointError(f"{config.path}: hidden_act {activation!r} is not supported; supported is: silu")
    scaling = config.raw("rope_scaling") or {}
    for partial in (config.raw("partial_rotary_factor"), scaling.get("partial_rotary_factor")):
        if partial not in (None, 1, 1.0):
            raise CheckpointError(f"{config.path}: partial_rotary_factor {partial!r} is not supported, only 1")
    if config.raw("rope_parameters") is not None:
        raise CheckpointError(f"{config.path}: rope_parameters that differ between layers are not supported")
    if config.raw("quantization_config") is not None:
        raise CheckpointError(
            f"{config.path}: quantization_config: quantised folders are not supported; use a float checkpoint or GGUF"
        )


def read_windows(config: ConfigReader) -> tuple[int | None, ...]:
    """The sliding window of each layer as the Qwen families say it: switched on by `use_sliding_window`, for layers
    from `max_window_layers` on unless `layer_types` names the kind of each layer."""
    num_layers = config.count("num_hidden_layers")
    if not config.flag("use_sliding_window") or config.raw("sliding_window") is None:
        return (None,) * num_layers
    window = config.count("sliding_window")
    kinds = config.raw("layer_types")
    if kinds is None:
        first_layer = config.count("max_window_layers", 28) if config.raw("max_window_layers") != 0 else 0
        return tuple(window if layer >= first_layer else None for layer in range(num_layers))
    known = {"sliding_attention": window, "full_attention": None}
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in known for kind in kinds):
        raise CheckpointError(
            f"{config.path}: layer_types must hold {num_layers} times one of {', '.join(known)}, got {kinds!r}"
        )
    return tuple(known[kind] for kind in kinds)
