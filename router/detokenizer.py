"""Output token ids to text as they come: whole characters only, nothing lost.

Works on the bytes of tokens. All deltas together equal decoding all bytes at once, with U+FFFD where the bytes are
truly not UTF-8. A prompt may end inside a character: then the output's first bytes complete it, and the first delta
begins with that character; if they do not complete it, the prompt's bytes give nothing. The space with which
SentencePiece begins a word is text like any other and stays, also at the start of an answer.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from router.tokenizer import Tokenizer

_NUM_PARTIAL_BYTES = 3
"""A character has at most four bytes, so at most three are an incomplete one."""


class Detokenizer:
    """The text of one output."""

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool = True, prompt_token_ids: Sequence[int] = ()
    ) -> None:
        """Of the prompt only an incomplete last character matters: its last few tokens are enough."""
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._prompt_bytes = _incomplete_end(tokenizer, prompt_token_ids)

    def push(self, token_ids: Iterable[int]) -> str:
        """The characters that are whole now and were not before."""
        return self._decode(b"".join(map(self._bytes, token_ids)))

    def flush(self) -> str:
        """What is left at the end: U+FFFD if the output ends inside a character, else nothing."""
        return self._decoder.decode(b"", final=True)

    def _bytes(self, token_id: int) -> bytes:
        if self._skip_special_tokens and self._tokenizer.is_special(token_id):
            return b""
        return self._tokenizer.token_bytes(token_id)

    def _decode(self, data: bytes) -> str:
        if self._prompt_bytes and data:
            if _continues(self._prompt_bytes, data[0]):
                data = self._prompt_bytes + data
            self._prompt_bytes = b""
        return self._decoder.decode(data)


def _incomplete_end(tokenizer: Tokenizer, token_ids: Sequence[int]) -> bytes:
    """The bytes of the character that a text breaks off in; empty if it ends with a whole one."""
    end = b""
    for token_id in reversed(token_ids):
        end = tokenizer.token_bytes(token_id) + end
        if len(end) >= _NUM_PARTIAL_BYTES:
            break
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    decoder.decode(end[-_NUM_PARTIAL_BYTES:])
    return decoder.getstate()[0]


def _continues(start: bytes, byte: int) -> bool:
    """Whether `byte` can follow the incomplete character `start`."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="strict")
    try:
        decoder.decode(start + bytes([byte]))
    except UnicodeDecodeError:
        return False
    return True
