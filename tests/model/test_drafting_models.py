"""Drafters that are models: what they draft comes true as often as it should, whatever happened to a sequence before;
answers stay the same; and what keeps such drafters from being had."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from model_driver import BLOCK_SIZE, load_runner
from speculating import GREEDY, SAMPLED, Pool, request, tokens, with_length
from tiny_models import family_config, random_weights, write_folder

from engine import drafters
from engine.batch import Batch
from engine.config import WorkerConfig
from engine.drafters import UNKNOWN, Drafter, Target, draft_model, open_drafter
from engine.drafters import self as self_drafter
from engine.drafting import DraftingRunner
from engine.model_runner import ModelRunner
from engine.planning import build_batch
from engine.request import Sample, SamplingParams
from engine.scheduling import Limits
from engine.sequence import Sequence, State

PROMPTS = [[(7 * index + 3 * place * place) % 320 for place in range(5 + 9 * index)] for index in range(4)]
LONG_PROMPT = [(5 * place + place * place) % 320 for place in range(600)]
NUM_BLOCKS = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = family_config("llama-gqa-tied") | {"max_position_embeddings": 1024}
    return write_folder(tmp_path_factory.mktemp("drafting") / "model", config, random_weights(config))


@pytest.fixture(scope="module")
def runner(folder: Path) -> ModelRunner:
    return load_runner(folder, num_tokens=NUM_BLOCKS * BLOCK_SIZE, dtype="float32")


def drafter_of(folder: Path, runner: ModelRunner, name: str, **options: Any) -> Drafter:
    config = WorkerConfig(model=str(folder), dtype="float32", max_num_seqs=8, speculation=name, **options)
    drafter = open_drafter(Target(config, runner.cache.layout, runner))
    assert drafter is not None
    return drafter


def plainly(runner: ModelRunner, sampling: SamplingParams) -> list[list[Sample]]:
    pool = Pool(runner, None)
    for index, prompt in enumerate(PROMPTS):
        pool.add(request(index, prompt, sampling))
    pool.run()
    return [pool.samples[index.to_bytes(16, "big")] for index in range(len(PROMPTS))]


def rate(sequences: list[Sequence]) -> float:
    return sum(each.num_accepted_drafts for each in sequences) / sum(each.num_drafts for each in sequences)


SETTINGS = {
    "plain": {},
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.4},
    "logprobs": {"logprobs": True},
}


@pytest.mark.parametrize("changes", SETTINGS.values(), ids=list(SETTINGS))
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_model_that_drafts_for_its_equal_is_always_right(
    folder: Path, runner: ModelRunner, sampling: SamplingParams, changes: dict[str, Any]
) -> None:
    """Any draft that was computed on wrong KV, at a wrong place or with another history would be wrong."""
    sampling = with_length(sampling, **changes)
    plain = plainly(runner, sampling)
    pool = Pool(runner, drafter_of(folder, runner, "draft_model", draft_model_path=str(folder)), draft_length=6)
    sequences = [pool.add(request(index, prompt, sampling)) for index, prompt in enumerate(PROMPTS)]
    pool.run()
    assert [tokens(pool.samples[index.to_bytes(16, "big")]) for index in range(len(PROMPTS))] == [
        tokens(said) for said in plain
    ]
    assert rate(sequences) == 1.0 and sum(each.num_drafts for each in sequences) > 80


def test_it_is_still_right_after_pauses_moves_idle_steps_and_prefix_hits(folder: Path, runner: ModelRunner) -> None:
    sampling = with_length(SAMPLED)
    plain = [tokens(said) for said in plainly(runner, sampling)]

    def make() -> Drafter:
        return drafter_of(folder, runner, "draft_model", draft_model_path=str(folder))

    pool = Pool(runner, make(), draft_length=3, max_batch_size=2)
    sequences = [pool.add(request(index, prompt, sampling)) for index, prompt in enumerate(PROMPTS)]
    for step in range(9):
        # Now and then nobody drafts.
        pool.scheduler.speculation._limits = pool.limits if step % 3 else _without_drafts(pool)  # type: ignore[union-attr]
        pool.step()
    assert State.PAUSED in {each.state for each in sequences}
    other, moved = Pool(runner, make(), draft_length=5), []
    for index, sequence in enumerate(sequences):
        pool.scheduler.end(sequence, State.EVICTED, "drains")
        outputs = tuple(sequence.token_ids[len(PROMPTS[index]) :])
        moved.append(other.add(request(index, PROMPTS[index], sampling, outputs)))
    other.run()
    again = other.add(request(9, PROMPTS[3], sampling))
    other.run()
    assert again.num_cached > 0, "a prefix was reused"
    assert [each.token_ids[len(prompt) :] for each, prompt in zip(moved, PROMPTS, strict=True)] == plain
    assert rate([each for each in sequences if each.num_drafts]) == rate(moved) == rate([again]) == 1.0


def _without_drafts(pool: Pool) -> Limits:
    return replace(pool.limits, draft_length=0)


def test_a_long_input_is_caught_up_with_in_chunks_before_anything_is_drafted(folder: Path, runner: ModelRunner) -> None:
    pool = Pool(runner, drafter_of(folder, runner, "draft_model", draft_model_path=str(folder)), draft_length=4)
    sequence = pool.add(request(1, LONG_PROMPT, with_length(GREEDY)))
    num_drafts = []
    while not sequence.is_over:
        before = sequence.num_drafts
        pool.step()
        num_drafts.append(sequence.num_drafts - before)
    first = next(index for index, count in enumerate(num_drafts) if count)
    # Three steps of prompt, and as many of the rest until no more than a few tokens are missing.
    assert num_drafts[:first] == [0] * 6 and rate([sequence]) == 1.0


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_model_in_8_bits_is_nearly_always_right(
    folder: Path, runner: ModelRunner, sampling: SamplingParams
) -> None:
    sampling = with_length(sampling)
    plain = [tokens(said) for said in plainly(runner, sampling)]
    pool = Pool(runner, drafter_of(folder, runner, "self"), draft_length=4)
    sequences = [pool.add(request(index, prompt, sampling)) for index, prompt in enumerate(PROMPTS)]
    pool.run()
    assert [each.token_ids[len(prompt) :] for each, prompt in zip(sequences, PROMPTS, strict=True)] == plain
    assert 0.7 < rate(sequences) < 1.0


def test_the_copy_shares_embedding_and_head(folder: Path, runner: ModelRunner) -> None:
    drafter = drafter_of(folder, runner, "self")
    assert isinstance(drafter, self_drafter.Drafter)
    assert drafter._copy.model._embedding is runner.model._embedding and drafter._copy.model._head is runner.model._head


class _Says:
    """A model that drafts as told, and remembers what it ran."""

    def __init__(self, token_ids: list[int]) -> None:
        self._token_ids = iter(token_ids)
        self.batches: list[Batch] = []

    def run(self, batch: Batch) -> list[Sample]:
        self.batches.append(batch)
        return [Sample(next(self._token_ids)) for _ in batch.sample_rows]


def test_drafts_stand_in_the_history_of_the_rows_after_them(folder: Path, runner: ModelRunner) -> None:
    pool = Pool(runner, drafter_of(folder, runner, "self"), draft_length=3)
    pool.add(request(1, PROMPTS[1], with_length(GREEDY, presence_penalty=0.5)))
    pool.step()
    plan = pool.scheduler.plan(0.0)
    batch = build_batch(plan, BLOCK_SIZE, ())
    assert batch.token_ids[1:] == [UNKNOWN] * 3
    drafting, checking = _Says([11, 12, 13]), _Says([0] * 4)
    DraftingRunner(checking, drafting, BLOCK_SIZE).run(batch)
    assert batch.drafting_s > 0
    first = batch.token_ids[0]
    assert batch.token_ids == [first, 11, 12, 13]
    assert [row.output_token_ids for row in batch.sample_rows] == [
        (first,), (first, 11), (first, 11, 12), (first, 11, 12, 13),
    ]  # fmt: skip
    assert [each.token_ids for each in drafting.batches] == [[first], [11], [12]]
    assert [each.sample_rows[0].output_token_ids for each in drafting.batches] == [
        (first,),
        (first, 11),
        (first, 11, 12),
    ]
    assert [each.context_lens for each in drafting.batches] == [[15], [16], [17]]
    assert [len(each.block_tables[0]) for each in drafting.batches] == [1, 1, 2]


def test_blocks_beyond_the_budget_are_not_drafted_from(
    folder: Path, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_model, "MIN_BLOCKS", 20)
    monkeypatch.setattr(drafters, "MIB", 1024)
    block_bytes = runner.cache.layout.block_bytes
    unverified, weights = 8 * 5 * block_bytes // BLOCK_SIZE, 4 * draft_model.num_weights(runner.model.spec)
    budget = -(-(unverified + weights + 20 * block_bytes) // 1024)
    drafter = drafter_of(folder, runner, "draft_model", draft_model_path=str(folder), spec_memory_budget_mb=budget)
    assert isinstance(drafter, draft_model.Drafter)
    assert drafter._memory.ceiling == 20
    plain = [tokens(said) for said in plainly(runner, with_length(GREEDY))]
    pool = Pool(runner, drafter, draft_length=4)
    taken = pool.holdings.pool.allocate(17)
    sequences = [pool.add(request(index, prompt, with_length(GREEDY))) for index, prompt in enumerate(PROMPTS)]
    while pool.scheduler.live():
        pool.step()
    pool.holdings.pool.release(taken)
    assert [each.token_ids[len(prompt) :] for each, prompt in zip(sequences, PROMPTS, strict=True)] == plain
    assert sequences[0].num_drafts > 0 and sequences[3].num_drafts == 0


REASONS = {
    "no model is named": ({}, "--draft-model-path: needed for --speculation draft_model, got none"),
    "no such file": ({"draft_model_path": "/no/such/folder"}, "/no/such/folder: no such folder or file"),
    "another vocabulary": ({"draft_model_path": "OTHER"}, "a vocabulary of 320 tokens is needed, as the model has; "),
    "no memory": ({"draft_model_path": "SAME", "spec_memory_budget_mb": 1}, "--spec-memory-budget-mb: "),
}


@pytest.mark.parametrize("options,reason", REASONS.values(), ids=list(REASONS))
def test_without_a_drafter_one_line_says_why(
    folder: Path, runner: ModelRunner, tmp_path: Path, caplog: pytest.LogCaptureFixture, options: Any, reason: str
) -> None:
    path = options.get("draft_model_path")
    if path == "OTHER":
        config = family_config("llama-gqa-tied") | {"vocab_size": 300}
        options = {**options, "draft_model_path": str(write_folder(tmp_path / "other", config, random_weights(config)))}
    elif path == "SAME":
        options = {**options, "draft_model_path": str(folder)}
    config = WorkerConfig(model=str(folder), dtype="float32", speculation="draft_model", **options)
    with caplog.at_level(logging.WARNING, logger="engine.drafters"):
        assert open_drafter(Target(config, runner.cache.layout, runner)) is None
    (record,) = caplog.records
    assert record.message.startswith("decoding without speculation: ") and reason in record.message


def test_a_model_of_other_tokens_does_not_draft(
    folder: Path, runner: ModelRunner, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As many tokens, of which two have changed places."""
    config = family_config("llama-gqa-tied")
    paths = [write_folder(tmp_path / name, config, random_weights(config)) for name in ("mine", "same", "other")]
    for path in paths:
        words = [f"w{token_id}" for token_id in range(320)]
        if path.name == "other":
            words[7], words[9] = words[9], words[7]
        table = {word: token_id for token_id, word in enumerate(words)}
        (path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": table}}))
    mine, same, other = map(str, paths)
    for path, is_had in ((same, True), (other, False)):
        config = WorkerConfig(model=mine, dtype="float32", speculation="draft_model", draft_model_path=path)
        with caplog.at_level(logging.WARNING, logger="engine.drafters"):
            drafter = open_drafter(Target(config, runner.cache.layout, runner))
        assert (drafter is not None) == is_had
    (record,) = caplog.records
    assert record.message.startswith("decoding without speculation: --draft-model-path: the model's vocabulary")
    assert record.message.endswith(f"in which 7 is 'w7'; in that of {other} it is 'w9'")


def test_8_bits_do_not_draft_for_8_bits(folder: Path, runner: ModelRunner, caplog: pytest.LogCaptureFixture) -> None:
    config = WorkerConfig(model=str(folder), speculation="self", quantization="int8")
    with caplog.at_level(logging.WARNING, logger="engine.drafters"):
        assert open_drafter(Target(config, runner.cache.layout, runner)) is None
        assert (
            open_drafter(Target(WorkerConfig(model="tracer", speculation="self"), runner.cache.layout, _Says([])))
            is None
        )
    assert ["--quantization int8" in record.message for record in caplog.records] == [True, False]
