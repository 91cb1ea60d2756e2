"""No token changes by drafts, in all the ways of tests/tools/same_tokens.py: its short form, on a tiny model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from model_driver import BLOCK_SIZE, load_runner
from same_answers import WAYS, Played, Setting, margin, margins_along, plainly
from tiny_models import family_config, random_weights, write_folder

from engine.config import WorkerConfig
from engine.drafters import Drafter, Target, open_drafter
from engine.model_runner import ModelRunner
from engine.request import SamplingParams
from engine.sequence import State

NUM_PROMPTS, NUM_TOKENS = 8, 28
PROMPTS = [[(11 * index + 5 * place * place) % 300 for place in range(4 + 7 * index)] for index in range(NUM_PROMPTS)]
SAMPLED = SamplingParams(temperature=0.8, max_tokens=NUM_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = family_config("llama-gqa-tied")
    return write_folder(tmp_path_factory.mktemp("alike") / "model", config, random_weights(config))


@pytest.fixture(scope="module")
def runner(folder: Path) -> ModelRunner:
    return load_runner(folder, num_tokens=64 * BLOCK_SIZE, dtype="float32")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that is nearly the same: it guesses right and wrong."""
    config = family_config("llama-gqa-tied")
    weights = random_weights(config)
    for name, others in random_weights(config, seed=1).items():
        weights[name] = weights[name] + 0.03 * others
    return write_folder(tmp_path_factory.mktemp("nearly") / "model", config, weights)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["ngram", "self", "draft_model"])
def test_answers_are_those_without_drafts(folder: Path, other: Path, runner: ModelRunner, name: str, way: str) -> None:
    path = str(other) if name == "draft_model" else None
    config = WorkerConfig(
        model=str(folder), dtype="float32", max_num_seqs=8, draft_length=8, speculation=name, draft_model_path=path
    )
    drafter: Drafter | None = open_drafter(Target(config, runner.cache.layout, runner))
    assert drafter is not None
    sampling = [replace(SAMPLED, temperature=0.8 * (index % 2), seed=index) for index in range(NUM_PROMPTS)]
    plain = plainly(runner, PROMPTS, sampling)
    seen = Played([])
    for draft_length in (1, 8):
        played = WAYS[way](Setting(runner, drafter, draft_length), PROMPTS, sampling)
        assert played.answers == plain, f"{draft_length} drafts"
        seen.states |= played.states
        seen.num_drafts += played.num_drafts
        seen.num_accepted += played.num_accepted
    assert 0 < seen.num_accepted < seen.num_drafts, "right and wrong ones are needed"
    if way == "paused":
        assert {State.PAUSED, State.EVICTED} <= seen.states, "too easy"
    if way == "moved":
        assert State.EVICTED in seen.states


def test_margins_are_those_of_what_was_chosen(runner: ModelRunner) -> None:
    """The judge of answers that differ: what was chosen leads, and how much says how little another one lacks."""
    for params in (SAMPLED, replace(SAMPLED, temperature=0.0)):
        (answer,) = plainly(runner, PROMPTS[3:4], [params])
        prompt = PROMPTS[3]
        along = margins_along(runner, prompt, answer, params)
        assert len(along) == NUM_TOKENS and min(along) > 1e-4 and max(along) > 100 * min(along)
        for place in (0, 9, NUM_TOKENS - 1):
            prefix, chosen = [*prompt, *answer[:place]], answer[place]
            assert margin(runner, prefix, params, chosen, chosen) == 0.0
            lacking = [margin(runner, prefix, params, chosen, token) for token in range(320) if token != chosen]
            assert min(lacking) == pytest.approx(along[place], rel=1e-3)
