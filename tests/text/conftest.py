"""Tokenizers that are slow to build, once for the folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from model_files import byte_level_metadata, sentencepiece_metadata, write_gguf

from router.tokenizer import Tokenizer, load_tokenizer
from runtime.checkpoint import open_checkpoint


@pytest.fixture(scope="session")
def smollm2() -> Tokenizer:
    return load_tokenizer(open_checkpoint("smollm2"))


@pytest.fixture(scope="session")
def byte_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Ids 0 to 255 are the bytes; 256 "ab", 257 the control token "<|end|>", 258 the plain added token "<think>"."""
    path: Path = tmp_path_factory.mktemp("bytes") / "bytes.gguf"
    return load_tokenizer(open_checkpoint(str(write_gguf(path, byte_level_metadata()))))


@pytest.fixture(scope="session")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path: Path = tmp_path_factory.mktemp("sentencepiece") / "sentencepiece.gguf"
    return load_tokenizer(open_checkpoint(str(write_gguf(path, sentencepiece_metadata()))))
