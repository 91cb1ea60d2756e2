"""Answers with drafts beside those without, on a model that is loaded: undisturbed, paused, moved and handed over.

Owns the ways in which requests are played over pools of scheduler and runner that draft as much as they may, and the
judgement of an answer that differs: how little, at its first difference, kept the other token from being chosen.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from model_driver import BLOCK_SIZE, Driver
from speculating import Pool, request

from engine import sampler
from engine.drafters import Drafter
from engine.model_runner import ModelRunner
from engine.request import Priority, SamplingParams
from engine.sequence import Sequence, State
from kvstore.cache import KVCache
from kvstore.memory import PoolMemory

NUM_AT_ONCE = 10
MAX_STEPS = 4000


@dataclass(frozen=True, slots=True)
class Setting:
    """Where answers are made."""

    runner: ModelRunner
    """The target."""
    drafter: Drafter | None
    """Who guesses; None: nobody."""
    draft_length: int = 1
    """Drafts of each sequence in each step, where there are guesses."""

    @property
    def num_blocks(self) -> int:
        return self.runner.cache.scratch_slots.start // BLOCK_SIZE

    def pool(self, num_blocks: int | None = None, **limits: int) -> Pool:
        limits = {"max_num_seqs": NUM_AT_ONCE, "draft_length": self.draft_length, **limits}
        return Pool(self.runner, self.drafter, num_blocks or self.num_blocks, **limits)


@dataclass
class Played:
    """What came of some requests."""

    answers: list[list[int]]
    states: set[State] = field(default_factory=set)
    """In which sequences were seen."""
    num_drafts: int = 0
    num_accepted: int = 0

    def count(self, sequence: Sequence) -> None:
        """Once, at its end."""
        self.num_drafts += sequence.num_drafts
        self.num_accepted += sequence.num_accepted_drafts


def undisturbed(setting: Setting, prompts: list[list[int]], sampling: list[SamplingParams]) -> Played:
    """All at once."""
    pool = setting.pool()
    sequences = [pool.add(request(index, *each)) for index, each in enumerate(zip(prompts, sampling, strict=True))]
    pool.run()
    return _played(sequences, prompts)


def paused(setting: Setting, prompts: list[list[int]], sampling: list[SamplingParams]) -> Played:
    """By threes, one more with every step, whose places those of a higher class take, and with blocks for a few: who is
    evicted comes again."""
    longest = max(len(prompt) + each.max_tokens for prompt, each in zip(prompts, sampling, strict=True))
    pool = setting.pool(min(setting.num_blocks, 2 * (longest // BLOCK_SIZE + 2)), max_batch_size=3)
    played, live = Played([[] for _ in prompts]), dict[int, Sequence]()
    waiting = list(range(len(prompts)))
    for _ in range(MAX_STEPS):
        if waiting:
            index = waiting.pop(0)
            asked = request(index, prompts[index], sampling[index], priority=Priority(1 + index % 3))
            live[index] = pool.add(asked)
        if not (live or waiting):
            break
        pool.step()
        for index, sequence in list(live.items()):
            played.states.add(sequence.state)
            if sequence.is_over:
                played.count(sequence)
                played.answers[index] = sequence.token_ids[len(prompts[index]) :]
                del live[index]
            if sequence.state is State.EVICTED:
                pool.samples.pop(sequence.request.attempt_id, None)
                outputs = tuple(played.answers[index])
                again = request(index, prompts[index], sampling[index], outputs, priority=Priority(1 + index % 3))
                live[index] = pool.add(again)
    assert not live, "they never end"
    return played


def moved(setting: Setting, prompts: list[list[int]], sampling: list[SamplingParams]) -> Played:
    """Evicted in the middle, and gone on with elsewhere, twice."""
    chance, outputs = random.Random(len(prompts)), [()] * len(prompts)
    played = Played([])
    for _ in range(2):
        pool = setting.pool()
        sequences = [
            pool.add(request(index, prompt, params, outputs[index]))
            for index, (prompt, params) in enumerate(zip(prompts, sampling, strict=True))
        ]
        for _ in range(chance.randint(3, 8)):
            pool.step()
        for index, sequence in enumerate(sequences):
            if not sequence.is_over:
                pool.scheduler.end(sequence, State.EVICTED, "drains")
            played.states.add(sequence.state)
            played.count(sequence)
            outputs[index] = tuple(sequence.token_ids[len(prompts[index]) :])
    pool = setting.pool()
    rest = [
        pool.add(request(index, prompt, params, outputs[index]))
        for index, (prompt, params) in enumerate(zip(prompts, sampling, strict=True))
    ]
    pool.run()
    for sequence, prompt in zip(rest, prompts, strict=True):
        played.answers.append(sequence.token_ids[len(prompt) :])
        played.count(sequence)
    return played


def handed_over(setting: Setting, prompts: list[list[int]], sampling: list[SamplingParams]) -> Played:
    """Prompts computed by another pool, whose KV is copied to other blocks."""
    runner = setting.runner
    memory = PoolMemory(runner.cache.layout, setting.num_blocks)
    memory.commit(setting.num_blocks)
    prefill = Pool(ModelRunner(runner.model, runner.ops, KVCache(memory)), None, setting.num_blocks)
    decode, arrived = setting.pool(), []
    for index, (prompt, params) in enumerate(zip(prompts, sampling, strict=True)):
        source = prefill.add(request(index, prompt, params))
        while not prefill.samples.get(source.request.attempt_id):
            prefill.step()
        sequence = decode.receive(request(index, prompt, params))
        num_cached = sequence.num_cached // BLOCK_SIZE
        for mine, theirs in list(zip(sequence.block_table, source.block_table, strict=False))[num_cached:]:
            for to, source_plane in _planes(runner.cache, prefill.runner.cache):
                to[mine] = source_plane[theirs]
        decode.arrived(sequence, prefill.samples[source.request.attempt_id][0])
        if not source.is_over:
            prefill.scheduler.end(source, State.CANCELLED)
        arrived.append(sequence)
    decode.run()
    return _played(arrived, prompts)


WAYS: dict[str, Callable[[Setting, list[list[int]], list[SamplingParams]], Played]] = {
    "undisturbed": undisturbed,
    "paused": paused,
    "moved": moved,
    "handed over": handed_over,
}


def _planes(mine: KVCache, theirs: KVCache) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [*zip(mine.keys, theirs.keys, strict=True), *zip(mine.values, theirs.values, strict=True)]


def _played(sequences: list[Sequence], prompts: list[list[int]]) -> Played:
    played = Played([each.token_ids[len(prompt) :] for each, prompt in zip(sequences, prompts, strict=True)])
    for sequence in sequences:
        played.count(sequence)
    return played


def plainly(runner: ModelRunner, prompts: list[list[int]], sampling: list[SamplingParams]) -> list[list[int]]:
    """The answers without drafts."""
    return undisturbed(Setting(runner, None), prompts, sampling).answers


def margin(runner: ModelRunner, prefix: list[int], params: SamplingParams, one: int, other: int) -> float:
    """By how much two tokens fail to be both what follows: of greedy ones the difference of their log-probabilities,
    of drawn ones how far the draw's number in [0, 1) is from what the farther of them is drawn by."""
    logits = _logits(runner, prefix, 1)[0]  # [V]
    if params.temperature == 0:
        return float(logits.max() - min(logits[one], logits[other]))
    ends, uniform = _ends(logits, params), sampler.uniform(params.seed, len(prefix))
    return max(
        max(0.0, (float(ends[token - 1]) if token else 0.0) - uniform, uniform - float(ends[token]))
        for token in (one, other)
    )


def margins_along(runner: ModelRunner, prompt: list[int], answer: list[int], params: SamplingParams) -> list[float]:
    """By how much each token of an answer was chosen before another one, as `margin` says."""
    rows = _logits(runner, [*prompt, *answer[:-1]], len(answer))  # [n, V]
    if params.temperature == 0:
        best = rows.topk(2).values  # [n, 2]
        return (best[:, 0] - best[:, 1]).tolist()
    found = []
    for place, logits in enumerate(rows):
        uniform = sampler.uniform(params.seed, len(prompt) + place)
        found.append(float((_ends(logits, params) - uniform).abs().min()))
    return found


def _logits(runner: ModelRunner, tokens: list[int], num_rows: int) -> torch.Tensor:
    """Logits [num_rows, V] after the last tokens."""
    driver, first = Driver(runner, [len(tokens)]), len(tokens) - num_rows
    return driver.logits(0, tokens, len(tokens), range(first, len(tokens)))


def _ends(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Where each token's part of [0, 1) ends: [V] float64."""
    weights = sampler.weigh(logits, params)  # [V]
    return weights.cumsum(0) / weights.sum()
