"""Qwen3, dense: every query and key head is normalised before it is turned, and a head's size stands on its own."""

from __future__ import annotations

from engine.decoder import Decoder
from engine.decoder_spec import ConfigReader, DecoderSpec, read_decoder_spec, read_windows

DEFAULT_HEAD_DIM = 128
"""Where the file is silent."""


class Model(Decoder):
    """head_dim does not follow from hidden_size and the number of heads."""

    @staticmethod
    def read_spec(config: ConfigReader) -> DecoderSpec:
        attention_bias = config.flag("attention_bias")
        return read_decoder_spec(
            config,
            qkv_bias=attention_bias,
            output_bias=attention_bias,
            head_norms=True,
            head_dim=DEFAULT_HEAD_DIM,
            windows=read_windows(config),
        )
