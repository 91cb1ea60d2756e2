"""What decisions on drafts are worth over virtual costs: `python tests/perf/speculation_texts.py record|replay`.

`record` has a model go on with texts of `baton bench speculation` and keeps what it said, by which prompt lookup is
right or not wherever it is asked. `replay` decodes that without a model, with steps that take what
tests/engine/virtual_costs.py says, give or take: so that a change of the decisions shows where machines are noisy. It
prints tokens a millisecond by those without drafts, adaptive and for each fixed length, and adaptive by the best fixed.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

from virtual_costs import COSTS, RECORDED, Chancy, Text, counted, measure, recorded

from baton.bench.texts import SETS
from engine.drafters import ngram

PROMPT_TOKENS, ANSWER_TOKENS, NUM_TEXTS = 128, 160, 8


def record(file: Path, model: str, num_texts: int) -> None:
    """Greedy answers to texts of each set."""
    from speculation_cost import Model, Pool  # brings torch

    from engine.request import SamplingParams

    loaded = Model(model, "auto")
    runner = loaded.runner(num_texts * (PROMPT_TOKENS + ANSWER_TOKENS + 32))
    found = {}
    for name, make in SETS.items():
        chance = random.Random(1)
        prompts = [loaded.tokenizer.encode(make(chance), False)[:PROMPT_TOKENS] for _ in range(num_texts)]
        sampling = SamplingParams(max_tokens=ANSWER_TOKENS, ignore_eos=True)
        *_, generated = Pool(runner, None, num_texts).generate(prompts, sampling)
        found[name] = [list(pair) for pair in zip(prompts, generated.answers, strict=True)]
    lines = [f'"{name}": [\n' + ",\n".join(map(json.dumps, texts)) + "\n]" for name, texts in found.items()]
    file.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def replay(
    lengths: list[int], batches: list[int], num_seeds: int, noise: float, drift: float, only: str, per_place: int
) -> None:
    """Prints the table."""
    models = {"model .9": 0.9, "model .6": 0.6, "never": 0.0}
    sets = {name: recorded(name) for name in SETS} | dict.fromkeys(models, counted(8, ANSWER_TOKENS))
    print(f"{'cost':<16}{'set':<10}{'batch':>5}{'adaptive':>9}{'by best':>8}{'worst':>7}  fixed {lengths}")
    for cost_name, cost in COSTS.items():
        for name, texts in sets.items():
            if only and only not in (name, cost_name):
                continue
            for batch_size in batches:
                queue: list[Text] = [texts[index % len(texts)] for index in range(max(8, per_place * batch_size))]

                def drafter(seed: int, name: str = name) -> ngram.Drafter | Chancy:
                    if name not in models:
                        return ngram.Drafter()
                    return Chancy(lambda *_: models[name], is_model=name.startswith("model"), seed=seed)

                plain = measure(queue, batch_size, cost, None).rate
                fixed = [
                    measure(queue, batch_size, cost, drafter(0), is_fixed=True, draft_length=length).rate / plain
                    for length in lengths
                ]
                options = {"draft_length": max(lengths), "noise": noise, "drift": drift}
                adaptive = [
                    measure(queue, batch_size, cost, drafter(seed), seed=seed, **options).rate / plain
                    for seed in range(num_seeds)
                ]
                best, middle = max(1.0, *fixed), statistics.median(adaptive)
                shown = " ".join(f"{each:.2f}" for each in fixed)
                print(
                    f"{cost_name:<16}{name:<10}{batch_size:>5}{middle:>9.3f}{middle / best:>8.3f}"
                    f"{min(adaptive) / best:>7.3f}  {shown}",
                    flush=True,
                )


def main() -> None:
    """Does what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("record", "replay"))
    parser.add_argument("--file", type=Path, default=RECORDED, help="record: where the texts go")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--num-texts", type=int, default=NUM_TEXTS)
    parser.add_argument("--batches", default="1,4,16,32")
    parser.add_argument("--lengths", default="1,2,3,5,8")
    parser.add_argument("--noise", type=float, default=0.03)
    parser.add_argument("--drift", type=float, default=0.1)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--per-place", type=int, default=2, help="replay: answers one after the other in each place")
    parser.add_argument("--only", default="", help="replay: one cost or set")
    given = parser.parse_args()
    if given.kind == "record":
        record(given.file, given.model, given.num_texts)
    else:
        numbers = [[int(text) for text in each.split(",")] for each in (given.lengths, given.batches)]
        replay(*numbers, given.seeds, given.noise, given.drift, given.only, given.per_place)


if __name__ == "__main__":
    main()
