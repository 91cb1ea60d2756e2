"""The packaged model against `transformers`, in float32: by itself, and through the whole service.

The service answers all prompts, the model alone, whose logits can be seen, some of them. Where both say the same the
oracle's one pass over the answer judges both.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from asked import Asked, ask_together
from judging import NUM_NEW_TOKENS, Answered, Oracle, answer, judge
from served import Served

from router.tokenizer import load_tokenizer
from runtime.checkpoint import open_checkpoint

LENGTHS = [5, 15, 16, 17, 31, 48, 64, 65, 100, 128, 150, 200, 255, 256, 300, 400, 512, 513, 700, 1025]
"""On and beside the edges of blocks and chunks."""
ALONE = slice(None, None, 4)
"""Prompts that the model is asked without the service."""


@pytest.mark.timeout(1500)  # two minutes of computing, and whatever else computes goes first
def test_model_and_service_answer_as_the_oracle(
    oracle: Oracle, tmp_path: Path, measured: Callable[[str], None]
) -> None:
    """20 prompts, 64 new tokens each, greedy; to the service they come all at once, and its tokens from decode."""
    text = load_tokenizer(open_checkpoint("smollm2")).encode(chronicle(200), False)
    starts = random.Random(5).sample(range(len(text) - max(LENGTHS)), len(LENGTHS))
    prompts = [text[start : start + length] for start, length in zip(starts, LENGTHS, strict=True)]
    requests = [Asked(tuple(prompt), max_tokens=NUM_NEW_TOKENS) for prompt in prompts]
    service = Served(tmp_path, "--dtype=float32")
    try:
        answers = ask_together(service.address, requests)
    finally:
        service.close()
    served = [Answered(prompt, list(said.token_ids)) for prompt, said in zip(prompts, answers, strict=True)]
    model = open_checkpoint("smollm2").path
    alone = answer(model, prompts[ALONE], chunk_size=512)
    own = {tuple(mine.sequence) for mine in alone}
    others = [by_service for by_service in served if tuple(by_service.sequence) not in own]
    num_ties = judge(oracle, model, [*alone, *others], num_generated=1)
    num_parted = len(alone) + len(others) - len(served)
    measured(
        f"oracle: {num_ties} choices differ at near-ties, of {(len(alone) + len(others)) * NUM_NEW_TOKENS}; "
        f"{num_parted} of {len(alone)} answers of the service are not the model's own"
    )


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
