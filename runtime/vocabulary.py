"""Which token each id of a model stands for, as its files say, to see whether two models speak of the same ones.

Owns reading the list from tokenizer.json and from the metadata of a GGUF file, in which the same token is written the
same way. How text becomes tokens is `router.tokenizer`'s business; a file that it would refuse counts here as one that
says nothing, because who only compares need not judge.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from runtime.checkpoint import Checkpoint, read_json_object

UNUSED = 5
"""The type, in a GGUF file, of tokens that only fill the list up."""


def differing_token(one: Checkpoint, other: Checkpoint) -> tuple[int, str, str] | None:
    """The first id that stands for different tokens in two models, and these; None where there is none among the ids
    that both name. Raises CheckpointError where a file cannot be read."""
    mine, theirs = dict(_tokens(one)), dict(_tokens(other))
    common = mine.keys() & theirs.keys()
    token_id = min((each for each in common if mine[each] != theirs[each]), default=None)
    return None if token_id is None else (token_id, mine[token_id], theirs[token_id])


def _tokens(checkpoint: Checkpoint) -> Iterator[tuple[int, str]]:
    if checkpoint.gguf is not None:
        metadata = checkpoint.gguf.metadata
        tokens = metadata.get("tokenizer.ggml.tokens") or []
        types = metadata.get("tokenizer.ggml.token_type") or [None] * len(tokens)
        for token_id, (token, kind) in enumerate(zip(tokens, types, strict=False)):
            if kind != UNUSED:
                yield token_id, token
        return
    path = checkpoint.path / "tokenizer.json"
    if path.exists():
        yield from _tokens_of(read_json_object(path))


def _tokens_of(description: dict[str, Any]) -> Iterator[tuple[int, str]]:
    """Of a tokenizer.json: a table by token, or a list of (token, score); added tokens stand over them."""
    match description.get("model"):
        case {"vocab": dict(table)}:
            yield from ((token_id, token) for token, token_id in table.items() if isinstance(token_id, int))
        case {"vocab": list(entries)}:
            yield from ((token_id, str(entry[0])) for token_id, entry in enumerate(entries) if entry)
    for added in description.get("added_tokens") or []:
        match added:
            case {"id": int(token_id), "content": str(token)}:
                yield token_id, token
