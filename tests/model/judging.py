"""Greedy answers of Baton's models, and `transformers` as their judge.

Tokens: at every position of an answer the oracle, given the same tokens before it, chooses the same one, or its two
best are closer than TIE_MARGIN. By induction that is equality of greedy sequences up to near-ties, and it costs the
oracle one pass instead of one per token; its own generation loop is compared as well where that is cheap. Logits:
within LOGIT_TOLERANCE. Owns the oracle's process, which cannot see the repository.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from model_driver import Driver, load_runner

from engine.batch import Batch
from runtime.huge_pages import MALLOC_SETTING

ROOT = Path(__file__).resolve().parents[2]
ORACLE_PYTHON = ROOT / ".venv-oracle" / "bin" / "python"
TIE_MARGIN = 1e-4
LOGIT_TOLERANCE = 1e-3
NUM_NEW_TOKENS = 64


class Oracle:
    """The process of tests/model/oracle.py."""

    def __init__(self, folder: Path) -> None:
        assert ORACLE_PYTHON.exists(), f"{ORACLE_PYTHON} is missing; `make oracle` installs it"
        self._folder = folder
        self._log = folder / "stderr.txt"
        self._process = subprocess.Popen(
            [str(ORACLE_PYTHON), "-I", str(Path(__file__).with_name("oracle.py"))],
            cwd=folder,
            env={
                "HF_HUB_OFFLINE": "1",
                "HOME": str(folder),
                "PATH": os.environ["PATH"],
                # Threads that spin while they wait would halve its speed on a machine that does something else as well.
                "OMP_WAIT_POLICY": "passive",
                **dict([MALLOC_SETTING]),
            },
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
        """Ends the process."""
        self._process.communicate(timeout=30)


@dataclass(frozen=True, slots=True)
class Answered:
    """A prompt, and what was said to it."""

    prompt: list[int]
    """Token ids."""
    output: list[int]
    """NUM_NEW_TOKENS ids."""
    logits: np.ndarray | None = None
    """After the tokens at `positions`, [4, V] float32; None: not known."""

    @property
    def sequence(self) -> list[int]:
        """All tokens that others follow."""
        return self.prompt + self.output[:-1]

    @property
    def positions(self) -> list[int]:
        """Where logits are compared; the last ones read all KV that decoding wrote."""
        if self.logits is None:
            return []
        return [*positions_within(self.prompt), len(self.sequence) - 1]


def positions_within(prompt: Sequence[int]) -> list[int]:
    """Positions of a prompt after which logits are compared."""
    return sorted({0, len(prompt) // 3, len(prompt) - 1})


def answer(model: Path, prompts: list[list[int]], chunk_size: int) -> list[Answered]:
    """What Baton's model says: each prompt prefilled by itself, all decoded together."""
    capacities = [len(prompt) + NUM_NEW_TOKENS for prompt in prompts]
    runner = load_runner(model, num_tokens=sum(capacities), num_sequences=len(prompts), dtype="float32")
    driver = Driver(runner, capacities)
    logits = [driver.logits(i, prompt, chunk_size, positions_within(prompt)) for i, prompt in enumerate(prompts)]
    outputs = [[int(rows[-1].argmax())] for rows in logits]
    driver.decode(prompts, outputs, NUM_NEW_TOKENS)
    answers = []
    for index, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        # The last token but one once more, this time for its logits.
        last, sequence = Batch(), prompt + output[:-1]
        driver.add(last, index, sequence[-1:], len(sequence) - 1)
        driver.ask(last)
        with torch.inference_mode():
            rows = torch.cat((logits[index], runner.logits(last)))
        answers.append(Answered(prompt, output, rows.numpy()))
    return answers


def judge(oracle: Oracle, model: Path, answers: Sequence[Answered], num_generated: int) -> int:
    """Has all answers judged, and the first `num_generated` prompts answered by the oracle itself; counts the choices
    that differ, all of them at near-ties."""
    judged = [
        {"sequence": each.sequence, "greedy_from": len(each.prompt), "logits_at": each.positions} for each in answers
    ]
    generated = [{"prompt": each.prompt, "num_tokens": NUM_NEW_TOKENS} for each in answers[:num_generated]]
    said = oracle.ask({"model": str(model), "judged": judged, "generated": generated})
    differences = [
        np.abs(said[f"logits_{index}"] - each.logits).max(axis=1)
        for index, each in enumerate(answers)
        if each.logits is not None
    ]
    assert all((rows < LOGIT_TOLERANCE).all() for rows in differences), (
        f"logits differ, by answer and position, by {[rows.tolist() for rows in differences]}"
    )
    near_ties = [_compare(said, index, each) for index, each in enumerate(answers)]
    for index in range(num_generated):
        if not near_ties[index]:
            assert said[f"generated_{index}"].tolist() == answers[index].output
    return sum(near_ties)


def _compare(said: Any, index: int, mine: Answered) -> int:
    """Checks one judged answer; the number of near-ties at which the choices differ."""
    choices, margins = said[f"choices_{index}"], said[f"margins_{index}"]
    assert len(choices) == len(mine.output) == NUM_NEW_TOKENS
    differing = np.flatnonzero(choices != np.array(mine.output))
    assert (margins[differing] < TIE_MARGIN).all(), (
        f"prompt {index} of {len(mine.prompt)} tokens: at outputs {differing} the oracle chooses {choices[differing]}, "
        f"which lead by {margins[differing]}"
    )
    return len(differing)
