"""The model as the router knows it: its tokenizer and chat template, no weights.

"tracer" is the model of exact tests: its tokens are bytes, and one more ends a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from router.chat_template import ChatTemplate, load_chat_template
from router.tokenizer import Tokenizer, byte_level_alphabet, load_tokenizer
from runtime.checkpoint import open_checkpoint

TRACER = "tracer"
TRACER_EOS = "<|end|>"


@dataclass(frozen=True, slots=True)
class TextModel:
    """Everything about a model that concerns text."""

    name: str
    """Its public name."""
    fingerprint: str
    """The checkpoint's; workers' fingerprints begin with it."""
    tokenizer: Tokenizer
    """Text to ids and back."""
    chat_template: ChatTemplate | None
    """None for a model without."""


def open_text_model(model: str, served_model_name: str | None) -> TextModel:
    """Reads tokenizer and template. Raises CheckpointError naming the file."""
    if model == TRACER:
        return TextModel(served_model_name or TRACER, TRACER, _tracer_tokenizer(), None)
    checkpoint = open_checkpoint(model)
    return TextModel(
        served_model_name or checkpoint.name,
        checkpoint.fingerprint,
        load_tokenizer(checkpoint),
        load_chat_template(checkpoint),
    )


def _tracer_tokenizer() -> Tokenizer:
    alphabet = byte_level_alphabet()
    library = tokenizers.Tokenizer(models.BPE(vocab={char: byte for byte, char in alphabet.items()}, merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([TRACER_EOS])
    end = library.token_to_id(TRACER_EOS)
    assert end == len(alphabet)
    return Tokenizer(library, {end}, (), (), Path(TRACER))
