"""Builds a `tokenizers` tokenizer from the metadata of a GGUF file.

Owns the two kinds that the served models use, byte-level BPE ("gpt2") and SentencePiece BPE ("llama"), and the ways
byte-level vocabularies split text, which a GGUF file only names. Everything is built as the same model's tokenizer.json
would have it, so that a model answers alike from either form.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any, TypeVar

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from runtime.errors import CheckpointError
from runtime.gguf import GGUFFile

T = TypeVar("T")


class TokenType(IntEnum):
    """What tokenizer.ggml.token_type says of a token."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"


def _isolate(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(pattern), behavior="isolated")


def _then_bytes(*splits: pre_tokenizers.PreTokenizer) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _words_and_digits(num_digits: str) -> pre_tokenizers.PreTokenizer:
    """The split of the Llama 3 and Qwen families, which differ in the digits that stay together."""
    return _then_bytes(
        _isolate(
            rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{num_digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
            r"|\s*[\r\n]+|\s+(?!\S)|\s+"
        )
    )


def _smollm() -> pre_tokenizers.PreTokenizer:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])


def _default() -> pre_tokenizers.PreTokenizer:
    """What files without a name for it are read with: punctuation, words, then digits by three."""
    return _then_bytes(
        _isolate(r"[\p{P}\$\+<=>\^~\|]+"), _isolate(_GPT2_SPLIT), _isolate(r"\p{N}+"), _isolate(r"[0-9][0-9][0-9]")
    )


_SPLITS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "default": _default,
    "gpt-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    "smollm": _smollm,
    "llama-bpe": lambda: _words_and_digits("{1,3}"),
    "qwen2": lambda: _words_and_digits(""),
}
_ALIASES = {"gpt2": "gpt-2", "llama3": "llama-bpe", "llama-v3": "llama-bpe", "starcoder": "smollm"}


def build_gguf_tokenizer(gguf: GGUFFile) -> tuple[Tokenizer, frozenset[int], tuple[int, ...], tuple[int, ...]]:
    """Answers the tokenizer, the ids of special tokens, and the ids put before and after plain text.

    Raises CheckpointError naming the file and the metadata key.
    """
    metadata = _Metadata(gguf)
    kind = metadata.get("model", str)
    tokens = metadata.strings("tokens")
    types = metadata.token_types(len(tokens))
    splitting = ""
    try:
        if kind == "gpt2":
            splitting = metadata.get("pre", str, "default")
            splitting = _ALIASES.get(splitting, splitting)
            tokenizer = _byte_level(metadata, tokens, splitting)
        elif kind == "llama":
            tokenizer = _sentencepiece(metadata, tokens, types)
        else:
            raise metadata.fail("model", f'tokenizer "{kind}" is not known; known are: gpt2, llama')
        special_ids = _add_tokens(tokenizer, tokens, types)
    except CheckpointError:
        raise
    except Exception as error:  # The library raises nothing more precise.
        raise CheckpointError(f"{gguf.path}: its tokenizer cannot be built: {error}") from error
    begins = metadata.get("add_bos_token", bool, kind == "llama" or splitting == "llama-bpe")
    ends = metadata.get("add_eos_token", bool, False)
    prefix = metadata.token_id("bos", len(tokens)) if begins else ()
    suffix = metadata.token_id("eos", len(tokens)) if ends else ()
    return tokenizer, special_ids, prefix, suffix


def _byte_level(metadata: _Metadata, tokens: list[str], splitting: str) -> Tokenizer:
    split = _SPLITS.get(splitting)
    if split is None:
        known = ", ".join(sorted([*_SPLITS, *_ALIASES]))
        raise metadata.fail("pre", f'"{splitting}" is not known; known are: {known}')
    merges = []
    for merge in metadata.strings("merges"):
        left, space, right = merge.partition(" ")
        if not (left and space and right):
            raise metadata.fail("merges", f"{merge!r} is not two tokens with a space between")
        merges.append((left, right))
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    # A vocabulary of this family has whole words that its own merges do not reach.
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=splitting == "llama-bpe"))
    if splitting == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = split()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(metadata: _Metadata, tokens: list[str], types: list[int]) -> Tokenizer:
    scores = metadata.scores(len(tokens))
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    unknown = next((tokens[i] for i, type_ in enumerate(types) if type_ == TokenType.UNKNOWN), None)
    merges = _merges_from_scores(tokens, types, scores)
    has_bytes = TokenType.BYTE in types
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=has_bytes))
    marks: list[Any] = [normalizers.Replace(" ", "▁")]
    strips: list[Any] = []
    if metadata.get("add_space_prefix", bool, True):
        marks.insert(0, normalizers.Prepend("▁"))
        strips.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(marks)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strips]
    )
    return tokenizer


def _merges_from_scores(tokens: list[str], types: list[int], scores: list[float]) -> list[tuple[str, str]]:
    """SentencePiece merges whichever neighbours make the best-scored token: every way to split a token is a merge,
    ranked by the token's score."""
    mergeable = (TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.UNUSED)
    ids = {token: i for i, token in enumerate(tokens) if types[i] in mergeable}
    ranked: list[tuple[float, int, int, tuple[str, str]]] = []
    for token, token_id in ids.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                ranked.append((-scores[token_id], ids[left], ids[right], (left, right)))
    ranked.sort()
    return [pair for *_, pair in ranked]


def _add_tokens(tokenizer: Tokenizer, tokens: list[str], types: list[int]) -> frozenset[int]:
    """Makes the tokenizer recognise control and user-defined tokens in text; answers the ids of the special ones."""
    special_ids = frozenset(i for i, type_ in enumerate(types) if type_ in (TokenType.CONTROL, TokenType.UNKNOWN))
    tokenizer.add_special_tokens([AddedToken(tokens[i], normalized=False) for i in sorted(special_ids) if tokens[i]])
    plain = [i for i, type_ in enumerate(types) if type_ == TokenType.USER_DEFINED]
    tokenizer.add_tokens([AddedToken(tokens[i], normalized=False) for i in plain if tokens[i]])
    return special_ids


class _Metadata:
    """Typed access to the keys under tokenizer.ggml."""

    def __init__(self, gguf: GGUFFile) -> None:
        self.gguf = gguf

    def fail(self, key: str, problem: str) -> CheckpointError:
        return CheckpointError(f'{self.gguf.path}: metadata key "tokenizer.ggml.{key}": {problem}')

    def get(self, key: str, kind: type[T], default: T | None = None) -> T:
        value = self.gguf.metadata.get(f"tokenizer.ggml.{key}", default)
        if value is None:
            raise self.fail(key, "is missing")
        if type(value) is not kind:
            raise self.fail(key, f"must be of type {kind.__name__}, got {type(value).__name__}")
        return value

    def strings(self, key: str) -> list[str]:
        values: list[Any] = self.get(key, list)
        if not all(type(value) is str for value in values):
            raise self.fail(key, "must be a list of strings")
        return values

    def token_types(self, num_tokens: int) -> list[int]:
        if "tokenizer.ggml.token_type" not in self.gguf.metadata:
            return [TokenType.NORMAL] * num_tokens
        types: list[Any] = self.get("token_type", list)
        if len(types) != num_tokens or not all(type(value) is int for value in types):
            raise self.fail("token_type", f"must be {num_tokens} integers, one a token, got {len(types)} values")
        return types

    def scores(self, num_tokens: int) -> list[float]:
        scores: list[Any] = self.get("scores", list)
        if len(scores) != num_tokens or not all(type(value) is float for value in scores):
            raise self.fail("scores", f"must be {num_tokens} floats, one a token, got {len(scores)} values")
        return scores

    def token_id(self, name: str, num_tokens: int) -> tuple[int, ...]:
        """The id of a named token, as a tuple of one; empty when it is not set."""
        key = f"{name}_token_id"
        if f"tokenizer.ggml.{key}" not in self.gguf.metadata:
            return ()
        token_id = self.get(key, int)
        if not 0 <= token_id < num_tokens:
            raise self.fail(key, f"must be below the {num_tokens} tokens, got {token_id}")
        return (token_id,)
