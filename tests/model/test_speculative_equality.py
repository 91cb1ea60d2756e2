"""Speculative decoding on real models, in float32: the same tokens as without, whatever is drafted and interrupted.

A decode pool of scheduler and runner, driven step by step. Two drafters: prompt lookup, and one that knows the answer
and is wrong by a script, so that runs of right drafts of every length are followed by wrong ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from drafting import Scripted
from model_driver import BLOCK_SIZE, load_runner
from speculating import GREEDY, SAMPLED, Pool, request, tokens, with_length
from tiny_models import family_config, random_weights, write_folder

from engine.drafters import Drafter, ngram
from engine.model_runner import ModelRunner
from engine.request import Priority, Sample, SamplingParams
from engine.sequence import Sequence, State
from router.tokenizer import load_tokenizer
from runtime.checkpoint import open_checkpoint

SCRIPT = (3, 0, 8, 1, 2, 5, 0, 0)
"""Right drafts, in turn by the sequence's length."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelRunner, list[list[int]]]:
    config = family_config("llama-gqa-tied")
    folder = write_folder(tmp_path_factory.mktemp("tiny") / "model", config, random_weights(config))
    prompts = [[(7 * index + 3 * place * place) % 320 for place in range(5 + 9 * index)] for index in range(4)]
    return load_runner(folder, num_tokens=64 * BLOCK_SIZE, dtype="float32"), prompts


@pytest.fixture(scope="module")
def small() -> tuple[ModelRunner, list[list[int]]]:
    texts = (
        '[{"name": "Ada", "age": 36, "city": "London"}, {"name": "Alan", "age": 41, "city": "London"}, {"name":',
        "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n\ndef mul(a, b):\n",
        "The tide came in before the bell was rung, and",
    )
    tokenizer = load_tokenizer(open_checkpoint("smollm2"))
    prompts = [tokenizer.encode(text, False) for text in texts]
    return load_runner("smollm2", num_tokens=64 * BLOCK_SIZE, dtype="float32"), prompts


Model = tuple[ModelRunner, list[list[int]]]
Answers = dict[tuple[int, ...], list[int]]


def plainly(model: Model, sampling: SamplingParams) -> list[list[Sample]]:
    """The answers without speculation."""
    runner, prompts = model
    pool = Pool(runner, None)
    for index, prompt in enumerate(prompts):
        pool.add(request(index, prompt, sampling))
    pool.run()
    return [pool.samples[index.to_bytes(16, "big")] for index in range(len(prompts))]


def knowing(model: Model, plain: list[list[Sample]]) -> Drafter:
    """Guesses by the answers, as right as the script says."""
    answers: Answers = {
        tuple(prompt): [sample.token_id for sample in said] for prompt, said in zip(model[1], plain, strict=True)
    }

    def true_token(sequence: Sequence, position: int) -> int:
        prompt = sequence.request.prompt_token_ids
        answer = answers[prompt]
        return answer[min(position - len(prompt), len(answer) - 1)]

    return Scripted(true_token, SCRIPT)


def drafters(model: Model, plain: list[list[Sample]]) -> dict[str, Callable[[], Drafter]]:
    return {"ngram": ngram.Drafter, "knowing": lambda: knowing(model, plain)}


def check(model: Model, sampling: SamplingParams, lengths: range | tuple[int, ...]) -> None:
    runner, prompts = model
    plain = plainly(model, sampling)
    for name, make in drafters(model, plain).items():
        for length in lengths:
            pool = Pool(runner, make(), draft_length=length)
            for index, prompt in enumerate(prompts):
                pool.add(request(index, prompt, sampling))
            pool.run()
            speculation = pool.scheduler.speculation
            assert speculation is not None
            for index in range(len(prompts)):
                said = pool.samples[index.to_bytes(16, "big")]
                assert tokens(said) == tokens(plain[index]), f"{name}, {length} drafts, prompt {index}"
                for mine, other in zip(said, plain[index], strict=True):
                    assert (mine.logprob is None) == (other.logprob is None)
                    if mine.logprob is not None and other.logprob is not None:
                        assert mine.logprob == pytest.approx(other.logprob, abs=1e-3)
            if name == "knowing":
                assert 0 < speculation.num_accepted < speculation.num_drafts, "right and wrong ones are needed"


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_tiny_model_says_the_same_with_drafts_of_any_length(tiny: Model, sampling: SamplingParams) -> None:
    check(tiny, with_length(sampling), range(1, 9))


SETTINGS = {
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4},
    "bias": {"logit_bias": ((5, 4.0), (9, 3.5), (11, -50.0))},
    "log-probabilities": {"logprobs": True, "top_logprobs": 3},
    "least tokens and endings": {"min_tokens": 9, "ignore_eos": False, "stop_token_ids": tuple(range(3, 120))},
    "filters": {"top_k": 20, "min_p": 0.02},
}


@pytest.mark.parametrize("changes", SETTINGS.values(), ids=list(SETTINGS))
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_tiny_model_says_the_same_whatever_is_asked_for(
    tiny: Model, sampling: SamplingParams, changes: dict[str, Any]
) -> None:
    check(tiny, with_length(sampling, **changes), (3, 8))


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_packaged_model_says_the_same(small: Model, sampling: SamplingParams) -> None:
    check(small, with_length(sampling, max_tokens=32), (8,))


@pytest.mark.parametrize("name", ["ngram", "knowing"])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_tiny_model_says_the_same_while_others_pause_and_evict_it(
    tiny: Model, sampling: SamplingParams, name: str
) -> None:
    """Two places in a step, blocks for less than all; who is evicted comes again, as a router sends it."""
    runner, prompts = tiny
    sampling = with_length(sampling)
    plain = plainly(tiny, sampling)
    pool = Pool(runner, drafters(tiny, plain)[name](), num_blocks=10, max_batch_size=2, draft_length=6)
    classes = (Priority.LOW, Priority.NORMAL, Priority.LOW, Priority.HIGH)
    waiting = [request(index, prompt, sampling, priority=classes[index]) for index, prompt in enumerate(prompts)]
    outputs: list[list[int]] = [[] for _ in prompts]
    live: dict[int, Sequence] = {}
    states: set[State] = set()
    for step in range(2000):
        if waiting and step % 4 == 0:
            asked = waiting.pop(0)
            live[prompts.index(list(asked.prompt_token_ids))] = pool.add(asked)
        if not live:
            break
        pool.step()
        for index, sequence in list(live.items()):
            states.add(sequence.state)
            outputs[index] = sequence.token_ids[len(prompts[index]) :]
            if sequence.state is State.EVICTED:
                pool.samples.pop(sequence.request.attempt_id, None)
                again = request(index, prompts[index], sampling, tuple(outputs[index]), priority=classes[index])
                live[index] = pool.add(again)
            elif sequence.is_over:
                assert sequence.state is State.FINISHED
                del live[index]
    assert not live and {State.PAUSED, State.EVICTED} <= states, "the test has become too easy"
    assert outputs == [tokens(said) for said in plain]
    assert pool.holdings.pool.num_used == 0


@pytest.mark.parametrize("name", ["ngram", "knowing"])
def test_as_many_drafts_come_true_after_a_move_to_another_worker(tiny: Model, name: str) -> None:
    runner, prompts = tiny
    sampling = with_length(SAMPLED)
    plain = plainly(tiny, sampling)
    make = drafters(tiny, plain)[name]
    for num_steps in (4, 9):
        pool = Pool(runner, make(), draft_length=4)
        sequences = [pool.add(request(index, prompt, sampling)) for index, prompt in enumerate(prompts)]
        for _ in range(num_steps):
            pool.step()
        other = Pool(runner, make(), draft_length=4)
        moved = []
        for index, sequence in enumerate(sequences):
            pool.scheduler.end(sequence, State.EVICTED, "drains")
            moved.append(
                other.add(request(index, prompts[index], sampling, tuple(sequence.token_ids[len(prompts[index]) :])))
            )
        assert pool.holdings.pool.num_used == 0
        fresh, kept = make(), make()
        for sequence in moved:
            kept.propose(sequence, 4)
        other.run()
        assert [sequence.token_ids[len(prompt) :] for sequence, prompt in zip(moved, prompts, strict=True)] == [
            tokens(said) for said in plain
        ]
        for sequence in moved:
            assert kept.propose(sequence, 4) == fresh.propose(sequence, 4), "what it drafts follows from the tokens"
