"""What `transformers` says about token sequences: the independent judge of Baton's models.

Run by .venv-oracle's interpreter in a process of its own, never imported and never with the repository on its path:
`transformers` probes for a package named `kernels`. Reads paths
of JSON jobs (see `answer`) from standard input and writes the answers as .npz.
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM


def load(job: dict) -> torch.nn.Module:
    """The job's model in float32 with torch's attention."""
    model_path = Path(job["model"])
    options = {"dtype": torch.float32, "attn_implementation": "sdpa", "local_files_only": True}
    if model_path.is_dir():
        model = AutoModelForCausalLM.from_pretrained(model_path, **options)
    else:
        model = AutoModelForCausalLM.from_pretrained(model_path.parent, gguf_file=model_path.name, **options)
    return model.eval()


def judge(model: torch.nn.Module, sequence: list[int], positions: list[int]) -> np.ndarray:
    """Logits [len(positions), V] float32 after the tokens at `positions`, from one pass without a KV cache."""
    keep = torch.tensor(positions)
    output = model(input_ids=torch.tensor([sequence]), use_cache=False, logits_to_keep=keep)
    return output.logits[0].float().numpy()


def generate(model: torch.nn.Module, prompt: list[int], num_tokens: int) -> list[int]:
    """Greedy continuation by the library's own loop and KV cache."""
    tokens = model.generate(
        input_ids=torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        do_sample=False,
        min_new_tokens=num_tokens,
        max_new_tokens=num_tokens,
        eos_token_id=None,
        pad_token_id=0,
    )
    return tokens[0, len(prompt) :].tolist()


def answer(job_path: Path) -> None:
    """Job: `model` (folder or .gguf), `output` (where the .npz goes), and
    `judged`: [{"sequence": ids, "greedy_from": position, "logits_at": positions}] answered by
        choices_i, margins_i (argmax and top-two margin after each token from greedy_from - 1 on) and logits_i;
    `generated`: [{"prompt": ids, "num_tokens": count}] answered by generated_i.
    """
    job = json.loads(job_path.read_text())
    model = load(job)
    answers: dict[str, np.ndarray] = {}
    for index, item in enumerate(job["judged"]):
        sequence, logits_at = item["sequence"], item["logits_at"]
        choosing = list(range(item["greedy_from"] - 1, len(sequence)))
        logits = judge(model, sequence, logits_at + choosing)
        top = torch.from_numpy(logits[len(logits_at) :]).topk(2)
        answers[f"choices_{index}"] = top.indices[:, 0].numpy()
        answers[f"margins_{index}"] = (top.values[:, 0] - top.values[:, 1]).numpy()
        answers[f"logits_{index}"] = logits[: len(logits_at)]
    for index, item in enumerate(job["generated"]):
        answers[f"generated_{index}"] = np.array(generate(model, item["prompt"], item["num_tokens"]))
    np.savez(job["output"], **answers)


def main() -> None:
    """Answers one job a line of standard input, until it ends; writes "done" or the error, one line a job."""
    # Libraries write progress to standard output as they please; the lines must not mix with it.
    replies, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        try:
            with torch.inference_mode():
                answer(Path(line.strip()))
            reply = "done"
        except Exception:
            reply = json.dumps(traceback.format_exc())
        print(reply, file=replies, flush=True)


if __name__ == "__main__":
    main()
