"""Llama 1, 2 and 3.x, and the many models that share their form (SmolLM2 among them)."""

from __future__ import annotations

from engine.decoder import Decoder
from engine.decoder_spec import ConfigReader, DecoderSpec, read_decoder_spec


class Model(Decoder):
    """Biases are optional: one key for all four attention projections, one for the MLP."""

    @staticmethod
    def read_spec(config: ConfigReader) -> DecoderSpec:
        attention_bias = config.flag("attention_bias")
        return read_decoder_spec(
            config, qkv_bias=attention_bias, output_bias=attention_bias, mlp_bias=config.flag("mlp_bias")
        )
