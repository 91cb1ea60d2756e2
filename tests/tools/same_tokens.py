"""Whether speculation changes no token, on a real model and real prompts. Run from the repository root:

    python tests/tools/same_tokens.py [--dtype D] [--prompts 50] [--tokens 32] [--drafters ngram] [--kinds drawn]

First questions of conversations (ShareGPT, if its package is installed, else texts of the bench), greedy and drawn at
temperature 0.8, by each drafter: every length from 1 to 8 undisturbed, and paused, moved and handed over with another
length for each ten prompts. Prints one JSON object. In float32 it exits non-zero if an answer differs that is not at a
near-tie, by less than 1e-4; in bfloat16 differing answers are counted, with the margins at which they part, and how
many of all tokens have no greater ones. `draft_model` is the model without its last layers. tests/model has a short
form.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
sys.path.insert(0, str(Path(__file__).parents[1] / "model"))

from model_driver import BLOCK_SIZE, load_runner
from same_answers import NUM_AT_ONCE, WAYS, Setting, margin, margins_along, plainly
from tiny_models import write_folder

from baton.bench.asks import Asks
from baton.bench.texts import SETS
from engine.config import WorkerConfig
from engine.drafters import Drafter, Target, open_drafter
from engine.model_runner import ModelRunner, model_spec
from engine.request import SamplingParams
from engine.weights import open_weights
from kvstore.cache import DTYPES
from runtime.checkpoint import open_checkpoint
from runtime.errors import ConfigError

TIE_MARGIN = 1e-4
KEPT_LAYERS = 2 / 3
"""Of the target's layers, in the model that drafts."""


@dataclass
class Counts:
    """Answers in one way, by one drafter."""

    answers: int = 0
    equal: int = 0
    margins: list[float] = field(default_factory=list)
    """Of those that differ, at their first difference."""
    drafts: int = 0
    accepted: int = 0

    def report(self, margins: list[float]) -> dict[str, Any]:
        """`margins` are those of all tokens."""
        ties = sum(each < TIE_MARGIN for each in self.margins)
        shown = {"answers": self.answers, "equal": self.equal, "near_ties": ties, "other": len(self.margins) - ties}
        if self.margins:
            most = max(self.margins)
            share = sum(each <= most for each in margins) / len(margins)
            shown |= {"margin_median": statistics.median(self.margins), "margin_most": most, "tokens_within": share}
        return {**shown, "drafts": self.drafts, "accepted": self.accepted}


def prompts_of(num_prompts: int, longest: int, model: str) -> tuple[str, list[list[int]]]:
    """Where they are from, and their token ids."""
    asks = Asks(1, seed=8)
    try:
        found = asks.from_conversations(8 * num_prompts, model, None)
        short = [list(ask.prompt_token_ids) for ask in found if len(ask.prompt_token_ids) <= longest]
        return "ShareGPT", short[:num_prompts]
    except ConfigError:
        found = [ask for make in SETS.values() for ask in asks.from_texts(make, num_prompts, longest, 1, model)]
        return "texts of the bench", [list(ask.prompt_token_ids) for ask in found[::2]]


def shortened(model: str, dtype: str, folder: Path) -> Path:
    """The model without its last layers."""
    checkpoint = open_checkpoint(model)
    weights = open_weights(checkpoint, DTYPES[model_spec(checkpoint, dtype).dtype], lambda share: None)
    num_layers = int(KEPT_LAYERS * checkpoint.config["num_hidden_layers"])
    shapes = {
        name: shape
        for name, shape in weights._shapes.items()
        if not name.startswith("model.layers.") or int(name.split(".")[2]) < num_layers
    }
    config = {**checkpoint.config, "num_hidden_layers": num_layers}
    return write_folder(folder, config, {name: weights.read(name, shape) for name, shape in shapes.items()})


def drafter_of(name: str, runner: ModelRunner, model: str, dtype: str, folder: Path) -> Drafter:
    path = str(shortened(model, dtype, folder / "draft")) if name == "draft_model" else None
    config = WorkerConfig(
        model=model, dtype=dtype, max_num_seqs=NUM_AT_ONCE, draft_length=8, speculation=name, draft_model_path=path
    )
    drafter = open_drafter(Target(config, runner.cache.layout, runner))
    assert drafter is not None
    return drafter


def plays(num_groups: int) -> Iterator[tuple[str, int, int]]:
    """(way, group, draft length): undisturbed all of them, else one for each group."""
    for way in WAYS:
        for group in range(num_groups):
            lengths = range(1, 9) if way == "undisturbed" else [(1, 8, 4, 2, 6, 3, 7, 5)[group % 8]]
            yield from ((way, group, length) for length in lengths)


def main() -> None:
    """Plays everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--longest", type=int, default=192, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--drafters", default="ngram,self,draft_model")
    parser.add_argument("--kinds", default="greedy,drawn", help="how tokens are chosen")
    given = parser.parse_args()
    began_s = time.monotonic()
    num_tokens = NUM_AT_ONCE * (given.longest + given.tokens + 2 * BLOCK_SIZE)
    runner = load_runner(given.model, num_tokens=num_tokens, dtype=given.dtype)
    source, prompts = prompts_of(given.prompts, given.longest, given.model)
    groups = [prompts[first : first + NUM_AT_ONCE] for first in range(0, len(prompts), NUM_AT_ONCE)]
    length = SamplingParams(max_tokens=given.tokens, ignore_eos=True)
    kinds = {kind: replace(length, temperature={"greedy": 0.0, "drawn": 0.8}[kind]) for kind in given.kinds.split(",")}
    counts: dict[str, Counts] = {}
    margins: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        drafters = {
            name: drafter_of(name, runner, given.model, given.dtype, Path(folder)) for name in given.drafters.split(",")
        }
        for kind, params in kinds.items():
            sampling = [[replace(params, seed=index) for index, _ in enumerate(group)] for group in groups]
            plain = [plainly(runner, group, each) for group, each in zip(groups, sampling, strict=True)]
            margins[kind] = [
                each
                for group, params_of, answers in zip(groups, sampling, plain, strict=True)
                for one in zip(group, answers, params_of, strict=True)
                for each in margins_along(runner, *one)
            ]
            for name, drafter in drafters.items():
                for way, group, draft_length in plays(len(groups)):
                    count = counts.setdefault(f"{name}, {kind}, {way}", Counts())
                    played = WAYS[way](Setting(runner, drafter, draft_length), groups[group], sampling[group])
                    count.drafts += played.num_drafts
                    count.accepted += played.num_accepted
                    compare(count, runner, groups[group], sampling[group], plain[group], played.answers)
                print(f"{kind}, {name}: {time.monotonic() - began_s:.0f} s", file=sys.stderr, flush=True)
    report = {key: count.report(margins[key.split(", ")[1]]) for key, count in counts.items()}
    print(
        json.dumps(
            {
                "prompts": f"{len(prompts)} of {source}",
                "dtype": given.dtype,
                "tokens": given.tokens,
                "took_s": round(time.monotonic() - began_s),
                "by_way": report,
            },
            indent=2,
        )
    )
    sys.exit(given.dtype == "float32" and any(each["other"] for each in report.values()))


def compare(
    count: Counts,
    runner: ModelRunner,
    prompts: list[list[int]],
    sampling: list[SamplingParams],
    expected: list[list[int]],
    answers: list[list[int]],
) -> None:
    """Counts answers, and looks at those that differ."""
    for prompt, params, plain, answer in zip(prompts, sampling, expected, answers, strict=True):
        assert len(plain) == len(answer) == params.max_tokens, "an answer is cut off"
        count.answers += 1
        place = next((i for i, (one, other) in enumerate(zip(plain, answer, strict=True)) if one != other), None)
        if place is None:
            count.equal += 1
        else:
            prefix = [*prompt, *answer[:place]]
            count.margins.append(margin(runner, prefix, params, plain[place], answer[place]))


if __name__ == "__main__":
    main()
