"""Byte-level BPE by its definition, slow and obvious, to hold the real tokenizer against."""

from __future__ import annotations

import unicodedata
from itertools import pairwise

from router.tokenizer import byte_level_alphabet


def kind_of(char: str) -> str:
    category = unicodedata.category(char)[0]
    if category in "LN":
        return category
    return "space" if char.isspace() and char not in "\x1c\x1d\x1e\x1f" else "other"


def words_of(text: str) -> list[str]:
    """GPT-2's split, by hand: contractions; runs of letters, digits or others with one space before; white space, of
    which the last character is left to the next word."""
    words, at = [], 0
    while at < len(text):
        ending = next((e for e in ("'s", "'t", "'re", "'ve", "'m", "'ll", "'d") if text.startswith(e, at)), None)
        start = at + (text[at] == " " and at + 1 < len(text) and kind_of(text[at + 1]) != "space")
        if ending:
            end = at + len(ending)
        elif kind_of(text[start]) != "space":
            end = start
            while end < len(text) and kind_of(text[end]) == kind_of(text[start]):
                end += 1
        else:
            end = at
            while end < len(text) and kind_of(text[end]) == "space":
                end += 1
            end -= end < len(text) and end - at > 1
        words.append(text[at:end])
        at = end
    return words


class SlowSmolLM:
    """Byte-level BPE as it is defined: digits alone, GPT-2's words, then the best merge until there is none."""

    def __init__(self, metadata):
        tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
        self.ids = {token: token_id for token_id, token in enumerate(tokens)}
        self.ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(metadata["tokenizer.ggml.merges"])}
        self.special = [tokens[i] for i, kind in enumerate(types) if kind == 3]
        self.alphabet = byte_level_alphabet()

    def encode(self, text: str) -> list[int]:
        found = min(((text.find(s), -len(s), s) for s in self.special if s in text), default=None)
        if found is not None:
            at, _, special = found
            return [*self.encode(text[:at]), self.ids[special], *self.encode(text[at + len(special) :])]
        pieces, run = [], ""
        for char in text:
            if kind_of(char) == "N":
                pieces += [run, char]
                run = ""
            else:
                run += char
        return [i for piece in [*pieces, run] for word in words_of(piece) for i in self.merge(word)]

    def merge(self, word: str) -> list[int]:
        parts = [self.alphabet[byte] for byte in word.encode() if self.alphabet[byte] in self.ids]
        while True:
            pairs = [(self.ranks.get(pair, 10**9), i) for i, pair in enumerate(pairwise(parts))]
            rank, at = min(pairs, default=(10**9, 0))
            if rank == 10**9:
                return [self.ids[part] for part in parts]
            parts[at : at + 2] = ["".join(parts[at : at + 2])]
