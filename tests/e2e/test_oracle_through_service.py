"""The whole service against `transformers`, float32: text goes in at the router, tokens come out of decode.

The judge is the script of tests/model, in a process of its own. As there, it is given Baton's tokens and says at each
place which it would have chosen, so that equality up to near-ties follows by induction; for some prompts it generates
by itself as well.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from asked import Asked, ask_together, prompts
from served import Served
from ties import TIE_MARGIN

from runtime.checkpoint import open_checkpoint

ROOT = Path(__file__).resolve().parents[2]
ORACLE_PYTHON = ROOT / ".venv-oracle" / "bin" / "python"
LENGTHS = [5, 6, 9, 12, 15, 16, 17, 24, 31, 33, 48, 64, 65, 90, 128, 150, 256, 400, 513, 1500]
NUM_NEW_TOKENS = 64
NUM_GENERATED = 2


def test_answers_equal_those_of_transformers(system: Served, tmp_path: Path, measured: Callable[[str], None]) -> None:
    """20 prompts of 5 to 1,500 tokens, 64 new tokens each, greedy."""
    requests = [Asked(prompt, max_tokens=NUM_NEW_TOKENS) for prompt in prompts(LENGTHS, seed=31)]
    answers = ask_together(system.address, requests)
    judged = [
        {
            "sequence": [*request.prompt_token_ids, *answer.token_ids[:-1]],
            "greedy_from": len(request.prompt_token_ids),
            "logits_at": [],
        }
        for request, answer in zip(requests, answers, strict=True)
    ]
    generated = [
        {"prompt": request.prompt_token_ids, "num_tokens": NUM_NEW_TOKENS} for request in requests[:NUM_GENERATED]
    ]
    said = ask_oracle(
        tmp_path, {"model": str(open_checkpoint("smollm2").path), "judged": judged, "generated": generated}
    )
    num_ties = 0
    for index, answer in enumerate(answers):
        choices, margins = said[f"choices_{index}"], said[f"margins_{index}"]
        assert len(choices) == len(answer.token_ids) == NUM_NEW_TOKENS
        differing = np.flatnonzero(choices != np.array(answer.token_ids))
        assert (margins[differing] < TIE_MARGIN).all(), (
            f"prompt of {LENGTHS[index]} tokens: at outputs {differing} the oracle chooses {choices[differing]} "
            f"with margins {margins[differing]}"
        )
        num_ties += len(differing)
        if index < NUM_GENERATED and not len(differing):
            assert said[f"generated_{index}"].tolist() == list(answer.token_ids)
    measured(f"oracle through the service: {num_ties} of {20 * NUM_NEW_TOKENS} choices differ at near-ties")


def ask_oracle(folder: Path, job: dict[str, Any]) -> Any:
    """The oracle's answers to one job, by name."""
    assert ORACLE_PYTHON.exists(), f"{ORACLE_PYTHON} is missing; `make test` installs it"
    job_path, output = folder / "job.json", folder / "answers.npz"
    job_path.write_text(json.dumps(job | {"output": str(output)}))
    finished = subprocess.run(
        [str(ORACLE_PYTHON), "-I", str(ROOT / "tests" / "model" / "oracle.py")],
        cwd=folder,
        # Threads that spin while they wait would halve its speed on a machine that does something else as well.
        env={"HF_HUB_OFFLINE": "1", "HOME": str(folder), "PATH": os.environ["PATH"], "OMP_WAIT_POLICY": "passive"},
        input=f"{job_path}\n",
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert finished.stdout.strip() == "done", finished.stdout + finished.stderr[-4000:]
    return np.load(output)
