"""Qwen2 and Qwen2.5, dense: biases on query, key and value, and an optional sliding window in the upper layers."""

from __future__ import annotations

from engine.decoder import Decoder
from engine.decoder_spec import ConfigReader, DecoderSpec, read_decoder_spec, read_windows


class Model(Decoder):
    """The biases are fixed: no key in the configuration switches them."""

    @staticmethod
    def read_spec(config: ConfigReader) -> DecoderSpec:
        return read_decoder_spec(config, qkv_bias=True, windows=read_windows(config))
