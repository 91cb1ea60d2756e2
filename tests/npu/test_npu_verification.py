"""Rows that check drafts, on `kernels.npu.Ops`: ragged, up to 16 a sequence, one fused call a layer; tokens unchanged.

A decode pool of scheduler and runner, driven step by step, with a drafter that knows the answer and is wrong by a
script. Prompts end around the end of a block, so that drafts cross into the next one. In float16, whose sums depend
less than those of bfloat16 on how many rows a step has.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from drafting import Scripted
from npu_runner import load_runner, write_tiny
from rounding import assert_same_up_to_rounding
from simulated_host import Npu
from speculating import GREEDY, SAMPLED, Pool, request, tokens, with_length

from engine.batch import Batch, Runner
from engine.model_runner import ModelRunner
from engine.request import Sample, SamplingParams
from engine.sequence import Sequence
from router.tokenizer import load_tokenizer
from runtime.checkpoint import open_checkpoint

FUSED = "npu_fused_infer_attention_score"
SCRIPT = (3, 0, 15, 1, 2, 7, 0)
"""Right drafts, in turn by the sequence's length."""
MAX_DRAFTS = 15
NUM_TOKENS = 40
LENGTHS = (5, 121, 127, 140)


class Watching(Runner):
    """Notes the rows of each sequence of each step."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.num_rows: list[list[int]] = []

    def run(self, batch: Batch) -> list[Sample]:
        self.num_rows.append([end - begin for begin, end in pairwise(batch.query_starts)])
        return self._runner.run(batch)

    def verification(self) -> list[list[int]]:
        """Of the steps that check drafts."""
        return [rows for rows in self.num_rows if 1 < max(rows) <= 1 + MAX_DRAFTS]


class Knowing(Scripted):
    """Guesses by the answers, by prompt."""

    def __init__(self, answers: dict[tuple[int, ...], list[int]]) -> None:
        def true_token(sequence: Sequence, position: int) -> int:
            answer = answers[sequence.request.prompt_token_ids]
            return answer[min(position - sequence.request.num_input_tokens, len(answer) - 1)]

        super().__init__(true_token, SCRIPT)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Sums that do not depend on the machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def answers(
    runner: ModelRunner, prompts: list[list[int]], sampling: SamplingParams, known: list[list[int]] | None = None
) -> tuple[list[list[int]], Watching]:
    """What is said, and the steps; with drafts, where answers are known."""
    drafter = None
    if known is not None:
        drafter = Knowing({tuple(prompt): answer for prompt, answer in zip(prompts, known, strict=True)})
    pool = Pool(runner, drafter, num_blocks=20, draft_length=MAX_DRAFTS)
    pool.runner = watching = Watching(pool.runner)
    for index, prompt in enumerate(prompts):
        pool.add(request(index, prompt, sampling))
    pool.run()
    return [tokens(pool.samples[index.to_bytes(16, "big")]) for index in range(len(prompts))], watching


def check(npu: Npu, model: str | Path, prompts: list[list[int]], sampling: SamplingParams, graph_rows: int) -> None:
    expected, _ = answers(load_runner(model, "reference", dtype="float16"), prompts, sampling)
    runner = load_runner(model, "npu", dtype="float16", max_graph_rows=graph_rows)
    num_layers = runner.cache.layout.num_layers
    npu.operators.num_calls.clear()
    said, watching = answers(runner, prompts, sampling, expected)
    exact = partial(load_runner, model, "reference", dtype="float32")
    assert_same_up_to_rounding(said, expected, prompts, exact, sampling, torch.float16)
    verification = watching.verification()
    assert max(map(max, verification)) == 1 + MAX_DRAFTS and any(len(set(rows)) > 2 for rows in verification)
    assert "_npu_paged_attention" not in npu.operators.num_calls, "each step is one call a layer"
    if not graph_rows:
        assert npu.operators.num_calls[FUSED] == num_layers * len(watching.num_rows)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("family", ["llama-gqa-tied", "qwen3"])
@pytest.mark.parametrize("graph_rows", [0, 4])
def test_a_tiny_model_says_the_same_with_drafts(
    npu: Npu, tmp_path: Path, family: str, sampling: SamplingParams, graph_rows: int
) -> None:
    prompts = [[(7 * index + 3 * place * place) % 320 for place in range(LENGTHS[index])] for index in range(4)]
    check(npu, write_tiny(tmp_path, family), prompts, with_length(sampling, max_tokens=NUM_TOKENS), graph_rows)


@pytest.mark.parametrize("sampling", [SAMPLED], ids=["sampled"])
def test_smollm2_says_the_same_with_drafts(npu: Npu, sampling: SamplingParams) -> None:
    """After texts that repeat themselves: what follows is nearly certain, and no draw near to what rounding changes."""
    tokenizer = load_tokenizer(open_checkpoint("smollm2"))
    texts = ("one two three four " * 9, "The tide came in before the bell was rung. " * 15, "1, 2, 3, " * 21)
    prompts = [tokenizer.encode(text, False)[:length] for text, length in zip(texts, (25, *LENGTHS[1:]), strict=False)]
    assert [len(prompt) for prompt in prompts] == [25, *LENGTHS[1:3]]
    check(npu, "smollm2", prompts, with_length(sampling, max_tokens=NUM_TOKENS), 0)
