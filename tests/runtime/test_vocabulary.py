"""Two models' lists of tokens: the same in either form, and the first id that stands for something else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from runtime.checkpoint import Checkpoint
from runtime.errors import CheckpointError
from runtime.gguf import GGUFFile
from runtime.vocabulary import differing_token

WORDS = ["a", "b", "Ġc", "<|end|>"]


def folder(path: Path, description: dict[str, Any] | None) -> Checkpoint:
    path.mkdir()
    if description is not None:
        (path / "tokenizer.json").write_text(json.dumps(description))
    return Checkpoint(path, "safetensors", path.name, {}, (), None, "", ())


def of_words(words: list[str]) -> dict[str, Any]:
    """A tokenizer.json whose last token is an added one."""
    table = {word: token_id for token_id, word in enumerate(words[:-1])}
    return {"model": {"vocab": table}, "added_tokens": [{"id": len(words) - 1, "content": words[-1]}]}


def gguf(words: list[str], types: list[int] | None = None) -> Checkpoint:
    metadata = {"tokenizer.ggml.tokens": words, **({} if types is None else {"tokenizer.ggml.token_type": types})}
    file = GGUFFile(Path("model.gguf"), metadata, {}, 0)
    return Checkpoint(file.path, "gguf", "model", {}, (), None, "", (), file)


def test_the_same_tokens_in_every_form(tmp_path):
    table = folder(tmp_path / "table", of_words(WORDS))
    listed = folder(tmp_path / "list", {"model": {"vocab": [[word, -1.0] for word in WORDS]}})
    for one in (table, listed, gguf(WORDS)):
        for other in (table, listed, gguf(WORDS)):
            assert differing_token(one, other) is None


def test_the_first_id_that_differs_is_named(tmp_path):
    mine = folder(tmp_path / "mine", of_words(WORDS))
    assert differing_token(mine, gguf(["a", "x", "y", "<|end|>"])) == (1, "b", "x")
    assert differing_token(mine, gguf([*WORDS[:-1], "</s>"])) == (3, "<|end|>", "</s>"), "an added token"
    swapped = folder(tmp_path / "swapped", of_words(["b", "a", "Ġc", "<|end|>"]))
    assert differing_token(swapped, mine) == (0, "b", "a")


def test_ids_that_only_one_names_say_nothing(tmp_path):
    mine = folder(tmp_path / "mine", of_words(WORDS))
    assert differing_token(mine, gguf([*WORDS, "more"])) is None
    assert differing_token(mine, gguf(["a", "b", "[PAD2]", "<|end|>"], [1, 1, 5, 3])) is None
    assert differing_token(mine, gguf(["a", "b", "[PAD2]", "<|end|>"], [1, 1, 1, 3])) == (2, "Ġc", "[PAD2]")
    assert differing_token(mine, folder(tmp_path / "none", None)) is None
    assert differing_token(mine, folder(tmp_path / "odd", {"model": 5, "added_tokens": [{"id": "x"}]})) is None


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    broken = folder(tmp_path / "broken", {})
    (tmp_path / "broken" / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not valid JSON"):
        differing_token(gguf(WORDS), broken)
