"""Small models of each family against `transformers`, in float32; how is said in `judging.py`."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from judging import Oracle, answer, judge
from tiny_models import FAMILIES, family_config, random_weights, write_folder, write_gguf


def random_prompts(vocab_size: int, lengths: Sequence[int], seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize("family", FAMILIES)
def test_tiny_model_equals_oracle(oracle: Oracle, family: str, tmp_path: Path) -> None:
    config = family_config(family)
    model = write_folder(tmp_path / family, config, random_weights(config), num_shards=2)
    prompts = random_prompts(config["vocab_size"], [1, 5, 16, 33, 100, 190], seed=3)
    judge(oracle, model, answer(model, prompts, chunk_size=48), num_generated=len(prompts))


@pytest.mark.parametrize("family", ["llama-gqa-tied", "qwen2", "qwen3"])
def test_tiny_gguf_equals_oracle(oracle: Oracle, family: str, tmp_path: Path) -> None:
    """The oracle reads the folder, Baton the file: names, order of rows and metadata must mean the same."""
    config = family_config(family)
    weights = random_weights(config)
    folder = write_folder(tmp_path / family, config, weights)
    file = write_gguf(tmp_path / f"{family}.gguf", config, weights)
    prompts = random_prompts(config["vocab_size"], [5, 33], seed=4)
    judge(oracle, folder, answer(file, prompts, chunk_size=48), num_generated=0)
