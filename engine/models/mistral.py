"""Mistral: Llama without biases, with a sliding window in every layer unless `sliding_window` is null."""

from __future__ import annotations

from engine.decoder import Decoder
from engine.decoder_spec import ConfigReader, DecoderSpec, read_decoder_spec

DEFAULT_WINDOW = 4096
"""Where the key is absent, as in the first release's code; null is the way to say none."""


class Model(Decoder):
    """The window is applied in attention; KV before it is kept, so blocks are shared like any other model's."""

    @staticmethod
    def read_spec(config: ConfigReader) -> DecoderSpec:
        windowed = config.raw("sliding_window", DEFAULT_WINDOW) is not None
        window = config.count("sliding_window", DEFAULT_WINDOW) if windowed else None
        return read_decoder_spec(config, windows=(window,) * config.count("num_hidden_layers"))
