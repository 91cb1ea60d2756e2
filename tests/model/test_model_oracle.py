"""Baton's models against `transformers`, in float32.

Tokens: at every position of Baton's greedy output the oracle, given the same tokens before it, chooses the same one,
or its two best are closer than TIE_MARGIN (counted and printed). By induction that is equality of greedy sequences up
to near-ties, and it costs the oracle one pass instead of one per token; its own generation loop is compared as well
where that is cheap. Logits: within LOGIT_TOLERANCE.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_driver import Driver, load_runner
from tiny_models import FAMILIES, family_config, random_weights, write_folder, write_gguf

from engine.batch import Batch
from router.tokenizer import load_tokenizer
from runtime.checkpoint import open_checkpoint

ROOT = Path(__file__).resolve().parents[2]
ORACLE_PYTHON = ROOT / ".venv-oracle" / "bin" / "python"
TIE_MARGIN = 1e-4
LOGIT_TOLERANCE = 1e-3
NUM_NEW_TOKENS = 64


class Oracle:
    """The process of tests/model/oracle.py; it cannot see the repository."""

    def __init__(self, folder: Path) -> None:
        assert ORACLE_PYTHON.exists(), (
            f"{ORACLE_PYTHON} is missing: python3 -m venv .venv-oracle && "
            ".venv-oracle/bin/pip install -r tests/model/oracle-requirements.txt"
        )
        self._folder = folder
        self._log = folder / "stderr.txt"
        self._process = subprocess.Popen(
            [str(ORACLE_PYTHON), "-I", str(Path(__file__).with_name("oracle.py"))],
            cwd=folder,
            env={"HF_HUB_OFFLINE": "1", "HOME": str(folder), "PATH": os.environ["PATH"]},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log.open("w"),
            text=True,
        )

    def ask(self, job: dict[str, Any]) -> Any:
        """The answers to a job, by name."""
        job_path, output = self._folder / "job.json", self._folder / "answers.npz"
        job_path.write_text(json.dumps(job | {"output": str(output)}))
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{job_path}\n")
        self._process.stdin.flush()
        reply = self._process.stdout.readline().strip()
        assert reply == "done", json.loads(reply) if reply else self._log.read_text()[-4000:]
        return np.load(output)

    def close(self) -> None:
        self._process.communicate(timeout=30)


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Oracle]:
    oracle = Oracle(tmp_path_factory.mktemp("oracle"))
    yield oracle
    oracle.close()


def compare(answers: Any, index: int, output: Sequence[int], mine: np.ndarray) -> int:
    """Checks one judged sequence; answers the number of near-ties at which the choices differ."""
    difference = np.abs(answers[f"logits_{index}"] - mine).max()
    assert difference < LOGIT_TOLERANCE, f"prompt {index}: logits differ by {difference}"
    choices, margins = answers[f"choices_{index}"], answers[f"margins_{index}"]
    near_ties = 0
    for position, token_id in enumerate(output):
        if choices[position] != token_id:
            assert margins[position] < TIE_MARGIN, (
                f"prompt {index}, output {position}: {token_id} instead of {choices[position]}, "
                f"which leads by {margins[position]}"
            )
            near_ties += 1
    return near_ties


def check(
    oracle: Oracle,
    model: Path,
    prompts: list[list[int]],
    *,
    num_generated: int,
    chunk_size: int,
    baton_model: Path | None = None,
) -> None:
    """Generates with Baton, then has the oracle judge all of it and generate `num_generated` prompts itself."""
    capacities = [len(prompt) + NUM_NEW_TOKENS for prompt in prompts]
    runner = load_runner(baton_model or model, num_tokens=sum(capacities), num_sequences=len(prompts), dtype="float32")
    driver = Driver(runner, capacities)
    positions = [sorted({0, len(prompt) // 3, len(prompt) - 1}) for prompt in prompts]
    mine = [driver.logits(i, prompt, chunk_size, positions[i]) for i, prompt in enumerate(prompts)]
    outputs = [[int(logits[-1].argmax())] for logits in mine]
    driver.decode(prompts, outputs, NUM_NEW_TOKENS)
    judged = []
    for index, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        sequence = prompt + output[:-1]
        judged.append({"sequence": sequence, "greedy_from": len(prompt), "logits_at": positions[index]})
        # The last token once more, this time for its logits: they read all KV that decoding wrote.
        last = Batch()
        driver.add(last, index, sequence[-1:], len(sequence) - 1)
        driver.ask(last)
        positions[index].append(len(sequence) - 1)
        with torch.inference_mode():
            mine[index] = torch.cat((mine[index], runner.logits(last)))
    generated = [{"prompt": prompt, "num_tokens": NUM_NEW_TOKENS} for prompt in prompts[:num_generated]]
    answers = oracle.ask({"model": str(model), "judged": judged, "generated": generated})
    near_ties = [compare(answers, index, output, mine[index].numpy()) for index, output in enumerate(outputs)]
    print(f"{model.name}: {len(prompts)} prompts, {sum(near_ties)} choices differ at near-ties")
    for index in range(num_generated):
        if not near_ties[index]:
            assert answers[f"generated_{index}"].tolist() == outputs[index]


def random_prompts(vocab_size: int, lengths: Sequence[int], seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize("family", FAMILIES)
def test_tiny_model_equals_oracle(oracle: Oracle, family: str, tmp_path: Path) -> None:
    config = family_config(family)
    model = write_folder(tmp_path / family, config, random_weights(config), num_shards=2)
    prompts = random_prompts(config["vocab_size"], [1, 5, 16, 33, 100, 190], seed=3)
    check(oracle, model, prompts, num_generated=len(prompts), chunk_size=48)


@pytest.mark.parametrize("family", ["llama-gqa-tied", "qwen2", "qwen3"])
def test_tiny_gguf_equals_oracle(oracle: Oracle, family: str, tmp_path: Path) -> None:
    """The oracle reads the folder, Baton the file: names, order of rows and metadata must mean the same."""
    config = family_config(family)
    weights = random_weights(config)
    folder = write_folder(tmp_path / family, config, weights)
    file = write_gguf(tmp_path / f"{family}.gguf", config, weights)
    prompts = random_prompts(config["vocab_size"], [5, 33], seed=4)
    check(oracle, folder, prompts, num_generated=0, chunk_size=48, baton_model=file)


def test_real_model_equals_oracle(oracle: Oracle) -> None:
    """20 prompts of 5 to 1,500 tokens, at lengths on and beside the edges of blocks and chunks."""
    text = load_tokenizer(open_checkpoint("smollm2")).encode(chronicle(200), False)
    lengths = [5, 15, 16, 17, 31, 48, 64, 65, 100, 128, 150, 200, 255, 256, 300, 400, 512, 513, 1000, 1500]
    starts = random.Random(5).sample(range(len(text) - max(lengths)), len(lengths))
    prompts = [text[start : start + length] for start, length in zip(starts, lengths, strict=True)]
    check(oracle, open_checkpoint("smollm2").path, prompts, num_generated=2, chunk_size=512)


def chronicle(num_sentences: int) -> str:
    """Text of the same words every time, natural enough that the model is sure of some tokens and unsure of others."""
    rng = random.Random(11)
    towns, goods = ["Aldport", "Brenmoor", "Castle Hill", "Dunvale"], ["grain", "wool", "iron", "salt", "books"]
    deeds = ["opened a school", "lost its bridge to the river", "sold more {} than ever", "ran out of {}", "taxed {}"]
    return " ".join(
        f"In {rng.randrange(1400, 1950)} the town of {rng.choice(towns)}, home to {rng.randrange(900, 90000)} people, "
        f"{rng.choice(deeds).format(rng.choice(goods))}."
        for _ in range(num_sentences)
    )
