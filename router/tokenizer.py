"""Text to token ids, and token ids to bytes.

Owns building a tokenizer from tokenizer.json or from the metadata of a GGUF file, and the exact bytes of each token.
Splitting and merging is the `tokenizers` library's work, so that encoding is what Hugging Face does. Decoding is not:
the library decodes whole sequences, while a stream needs each token's bytes (`router.detokenizer` joins them).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tokenizers

from router.gguf_tokenizer import build_gguf_tokenizer
from runtime.checkpoint import Checkpoint, read_json_object
from runtime.errors import CheckpointError

NORMALISED_SHRINKAGE = 4
"""Unicode composition makes UTF-8 at most 3 times shorter; 4 leaves room for other normalisers."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPECIAL_TOKEN_KEYS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class Tokenizer:
    """A model's tokenizer. Immutable; `encode` may be called from any thread."""

    def __init__(
        self,
        library: tokenizers.Tokenizer,
        special_ids: Iterable[int],
        prefix: Iterable[int],
        suffix: Iterable[int],
        source: Path,
    ) -> None:
        """`prefix` and `suffix` are the ids that plain text is framed with. Raises CheckpointError naming `source`."""
        self._library = library
        self._special_ids = frozenset(special_ids)
        self._prefix = tuple(prefix)
        self._suffix = tuple(suffix)
        description = json.loads(library.to_str())
        self._token_bytes = _all_token_bytes(library, description, source)
        self._max_token_bytes = max((len(token) for token in self._token_bytes), default=0)
        if _shortens_text(description):
            self._max_token_bytes *= NORMALISED_SHRINKAGE

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """The ids of `text`, in which the names of special tokens are recognised.

        `add_special_tokens` frames it as the model wants plain text to be: most often with a begin-of-text id. The
        output of a chat template already has its frame. The interpreter's lock is released for the length of the work.
        """
        # Of the library's calls only the batch ones release the lock.
        ids = self._library.encode_batch([text], add_special_tokens=False)[0].ids
        return [*self._prefix, *ids, *self._suffix] if add_special_tokens else list(ids)

    @property
    def vocab_size(self) -> int:
        """One more than the highest id that has a token; a model may have more rows."""
        return len(self._token_bytes)

    def token_bytes(self, token_id: int) -> bytes:
        """What the token writes: often not whole characters. Empty for ids that have no token.

        The space with which SentencePiece marks the start of a word is part of the token.
        """
        return self._token_bytes[token_id] if 0 <= token_id < len(self._token_bytes) else b""

    def is_special(self, token_id: int) -> bool:
        """Whether the token steers the model and is no part of the text."""
        return token_id in self._special_ids

    def max_text_bytes(self, num_tokens: int) -> int:
        """Text longer than this, in UTF-8, has more than `num_tokens` tokens.

        Exact from the longest token where text is tokenised as it is. Where it is normalised first, the bound is
        NORMALISED_SHRINKAGE times that. (Tokens that swallow white space around them may break the bound.)
        """
        return self._max_token_bytes * num_tokens


def load_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """Builds the tokenizer of a model. Raises CheckpointError naming the file."""
    if checkpoint.gguf is not None:
        library, special_ids, prefix, suffix = build_gguf_tokenizer(checkpoint.gguf)
        return Tokenizer(library, special_ids, prefix, suffix, checkpoint.path)
    return _load_folder(checkpoint)


def special_token_texts(settings: Mapping[str, Any]) -> dict[str, str]:
    """The named special tokens of a tokenizer_config.json or special_tokens_map.json: {"bos_token": "<s>", ...}."""
    texts = {}
    for key in _SPECIAL_TOKEN_KEYS:
        value = settings.get(key)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            texts[key] = value
    return texts


def _load_folder(checkpoint: Checkpoint) -> Tokenizer:
    path = checkpoint.path / "tokenizer.json"
    read_json_object(path)  # For its errors: the library's do not name the file.
    try:
        library = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # The library raises nothing more precise.
        raise CheckpointError(f"{path}: not a tokenizer that can be used: {error}") from error
    library.no_truncation()
    library.no_padding()
    settings: dict[str, Any] = {}
    settings_path = checkpoint.path / "tokenizer_config.json"
    if settings_path.exists():
        settings = read_json_object(settings_path)
        _add_missing_tokens(library, settings, settings_path)
    special_ids = {i for i, token in library.get_added_tokens_decoder().items() if token.special}
    named = {key: library.token_to_id(text) for key, text in special_token_texts(settings).items()}
    special_ids.update(token_id for token_id in named.values() if token_id is not None)
    prefix, suffix = _frame(library)
    prefix = _override(prefix, settings.get("add_bos_token"), named.get("bos_token", checkpoint.bos_token_id))
    suffix = _override(suffix, settings.get("add_eos_token"), named.get("eos_token"))
    return Tokenizer(library, special_ids, prefix, suffix, path)


def _add_missing_tokens(library: tokenizers.Tokenizer, settings: Mapping[str, Any], path: Path) -> None:
    """tokenizer_config.json may add tokens that tokenizer.json lacks."""
    entries = settings.get("added_tokens_decoder", {})
    if not isinstance(entries, dict):
        raise CheckpointError(f"{path}: added_tokens_decoder must be an object")
    for token_id, entry in sorted(entries.items(), key=lambda item: (len(item[0]), item[0])):
        if not isinstance(entry, dict) or not isinstance(entry.get("content"), str):
            raise CheckpointError(f"{path}: added_tokens_decoder: entry {token_id} has no content")
        if library.token_to_id(entry["content"]) is None:
            flags = {key: bool(entry.get(key)) for key in ("lstrip", "rstrip", "single_word", "normalized", "special")}
            library.add_tokens([tokenizers.AddedToken(entry["content"], **flags)])


def _frame(library: tokenizers.Tokenizer) -> tuple[list[int], list[int]]:
    """What the tokenizer's post-processor puts before and after a text."""
    encoding = library.encode("a", add_special_tokens=True)
    mask = encoding.special_tokens_mask
    num_before = mask.index(0) if 0 in mask else len(mask)
    num_after = mask[::-1].index(0) if 0 in mask else 0
    return list(encoding.ids[:num_before]), list(encoding.ids[len(mask) - num_after :])


def _override(frame: list[int], wanted: object, token_id: int | None) -> list[int]:
    """An explicit add_bos_token or add_eos_token goes before the post-processor."""
    if not isinstance(wanted, bool) or token_id is None:
        return frame
    if wanted:
        return frame if token_id in frame else [token_id]
    return [item for item in frame if item != token_id]


def _all_token_bytes(library: tokenizers.Tokenizer, description: Mapping[str, Any], source: Path) -> list[bytes]:
    """The bytes of every token, by id."""
    decoders = _flatten(description.get("decoder"), "decoders")
    kinds = {decoder.get("type") for decoder in decoders}
    vocabulary = library.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocabulary.values(), default=-1) + 1)
    if kinds == {"ByteLevel"}:
        # Each byte is written as one printable character below U+0144, so Latin-1 finishes the way back.
        printable_to_byte = {ord(char): byte for byte, char in byte_level_alphabet().items()}
        for token, token_id in vocabulary.items():
            try:
                table[token_id] = token.translate(printable_to_byte).encode("latin-1")
            except UnicodeEncodeError:
                table[token_id] = token.encode()
        # Added tokens are plain text, though some of their characters may look like written bytes.
        for token_id, added_token in library.get_added_tokens_decoder().items():
            table[token_id] = added_token.content.encode()
    elif kinds and kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        word_start = _word_start(decoders)
        for token, token_id in vocabulary.items():
            match = _BYTE_TOKEN.fullmatch(token) if "ByteFallback" in kinds else None
            table[token_id] = bytes([int(match[1], 16)]) if match else token.replace(word_start, " ").encode()
    else:
        raise CheckpointError(
            f"{source}: decoder {' + '.join(sorted(map(str, kinds))) or 'null'} is not known; known are ByteLevel, "
            "and SentencePiece's Replace, ByteFallback, Fuse, Strip, Metaspace"
        )
    return table


def _word_start(decoders: list[Mapping[str, Any]]) -> str:
    """The character that SentencePiece writes for a space."""
    for decoder in decoders:
        if decoder["type"] == "Metaspace":
            return str(decoder["replacement"])
        if decoder["type"] == "Replace" and decoder.get("content") == " ":
            return str(decoder["pattern"].get("String", "▁"))
    return "▁"


def _shortens_text(description: Mapping[str, Any]) -> bool:
    """Whether text may lose bytes before it is tokenised."""
    normalizers = _flatten(description.get("normalizer"), "normalizers")
    marks_spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    return any(normalizer.get("type") != "Prepend" and normalizer != marks_spaces for normalizer in normalizers)


def _flatten(step: Mapping[str, Any] | None, key: str) -> list[Mapping[str, Any]]:
    """The steps of a (nested) Sequence, in order."""
    if step is None:
        return []
    if step.get("type") == "Sequence":
        return [inner for item in step[key] for inner in _flatten(item, key)]
    return [step]


def byte_level_alphabet() -> dict[int, str]:
    """Byte to the character that stands for it in byte-level vocabularies: itself where it is printable in Latin-1,
    else the next free one from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) if byte in printable else chr(0x100 + others.index(byte)) for byte in range(256)}
