"""What speculation gives and costs without a service: `python tests/perf/speculation_cost.py [--model M] [--dtype D]`.

CPU milliseconds a token of a decode pool that is driven step by step, scheduler included: without speculation, with a
fixed number of drafts, and adaptive; for stories and for code and records, at several batch sizes. Each place answers
`--per-place` texts, one after another, as in a service, and what counts is the time in which all places are taken. The
same again is a round, in the same pool; the first one does not count. Within a round always that way steps which has
the fewest tokens, so that what the machine does meanwhile weighs on all alike. `paired` and `by best` are medians over
the rounds: against `off`, and against the fixed number that is the best over all rounds, with the least and the most.
Times of steps, from which pools learn, are CPU times too. `--drafter wrong` is never right.
`--steps` prints instead what steps take by their sequences and drafts; `--idle` compares, step by step, pools without a
drafter and with one that may draft nothing, deciding and learning included. Not a test: machines differ.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

from drafting import take_no_time
from model_steps import make_batch

from baton.bench.texts import SETS
from decode_svc.scheduler import DecodeScheduler
from engine.config import WorkerConfig
from engine.drafters import NONE, Drafter, Target, ngram, open_drafter
from engine.holdings import Holdings
from engine.model_runner import ModelRunner, load_model, model_spec
from engine.planning import Plan, build_batch, take_drafts
from engine.request import Request, Sample, SamplingParams
from engine.scheduling import Limits
from engine.sequence import DECODE_MOVES, Sequence
from engine.step_time import load_of
from kernels import load_ops
from kvstore.blocks import BlockPool
from kvstore.cache import KVCache
from kvstore.hashing import PrefixHasher
from kvstore.memory import PoolMemory
from router.tokenizer import Tokenizer, load_tokenizer
from runtime.checkpoint import open_checkpoint

BLOCK_SIZE = 16
PROMPT_TOKENS = 128


@dataclass
class Generated:
    """What is generated while all places are taken, and for whom."""

    sequences: list[Sequence]
    cpu_s: float = 0.0
    num_tokens: int = 0
    num_steps: int = 0
    num_drafts: int = 0
    num_right: int = 0

    @property
    def answers(self) -> list[list[int]]:
        return [each.token_ids[len(each.request.prompt_token_ids) :] for each in self.sequences]

    @property
    def cost_ms(self) -> float:
        return 1000 * self.cpu_s / self.num_tokens


class Wrong(ngram.Drafter):
    """Has guesses where prompt lookup has, and none comes true."""

    def propose(self, sequence: Sequence, most: int) -> tuple[int, ...]:
        return tuple(token_id ^ 1 for token_id in super().propose(sequence, most))


class Pool:
    """One that generates batches, a step at a time."""

    def __init__(
        self, runner: ModelRunner, drafter: Drafter | None, num_seqs: int, is_fixed: bool = False, **limits: Any
    ) -> None:
        holdings = Holdings(
            BlockPool(runner.cache.keys[0].shape[0]), PrefixHasher("model", "layout", BLOCK_SIZE), BLOCK_SIZE
        )
        most = Limits(max_model_len=4096, max_num_seqs=num_seqs, max_num_tokens=1024, chunk_size=512, **limits)
        self._scheduler = DecodeScheduler(holdings, most, 1 << 30, drafter=drafter)
        if is_fixed:
            take_no_time(self._scheduler)
        self._runner = runner if drafter is None else drafter.runner(runner)

    def generate(self, prompts: list[list[int]], sampling: SamplingParams) -> Iterator[Generated]:
        """Answers to all prompts, as many at once as there are places: what there is after each step, for as long as
        all places are taken; always the same one. What prompts take does not count: another worker has computed them.
        """
        sequences = []
        for index, prompt in enumerate(prompts):
            request = Request(index.to_bytes(16, "big"), "r", tuple(prompt), (), sampling)
            sequences.append(Sequence(request, DECODE_MOVES, 0.0))
            self._scheduler.add(sequences[-1], "another worker")
        generated, counts = Generated(sequences), self._counts()
        while self._scheduler.live():
            cpu_s, plan, num_tokens = self._step()
            if len(plan.slices) == self._scheduler.limits.max_num_seqs:
                generated.cpu_s += cpu_s
                generated.num_tokens += num_tokens
                generated.num_steps += 1
                generated.num_drafts, generated.num_right = map(int.__sub__, self._counts(), counts)
                yield generated

    def _step(self) -> tuple[float, Plan, int]:
        """CPU seconds, what was planned, and how many tokens came of it."""
        begun_s = time.process_time()
        plan = self._scheduler.plan(0.0)
        planned_s = time.process_time()
        for sequence in self._scheduler.take_fetches():
            self._scheduler.received(sequence)
            self._scheduler.fetched(sequence, self._prefill(sequence), 0.0)
        if not plan.slices:
            return 0.0, plan, 0
        fetched_s = time.process_time()
        batch = build_batch(plan, BLOCK_SIZE, ())
        before_s = time.process_time()
        samples = self._runner.run(batch)
        if self._scheduler.step_times is not None:
            self._scheduler.step_times.observe(load_of(batch), 1000 * (time.process_time() - before_s))
        take_drafts(plan, batch, 0.0)
        num_tokens = len(self._scheduler.commit(plan, samples, 0.0))
        return time.process_time() - fetched_s + planned_s - begun_s, plan, num_tokens

    def _prefill(self, sequence: Sequence) -> Sample:
        """Computes a prompt, of which all may be cached but its last token, and answers the first token."""
        sequence.num_computed = min(sequence.num_computed, sequence.num_tokens - 1)
        plan = Plan()
        plan.add(sequence, sequence.num_pending)
        (sample,) = self._runner.run(build_batch(plan, BLOCK_SIZE, ()))
        self._scheduler.holdings.unpin(sequence)
        return sample

    def _counts(self) -> tuple[int, int]:
        speculation = self._scheduler.speculation
        return (0, 0) if speculation is None else (speculation.num_drafts, speculation.num_accepted)


class Model:
    """A model, and its tokenizer."""

    def __init__(self, model: str, dtype: str, quantization: Any = "none") -> None:
        checkpoint = open_checkpoint(model)
        self._spec, self._ops = model_spec(checkpoint, dtype), load_ops("cpu")
        self._decoder = load_model(checkpoint, self._spec, self._ops, None, quantization)
        self.tokenizer: Tokenizer = load_tokenizer(checkpoint)

    def runner(self, num_tokens: int) -> ModelRunner:
        """One with room for so many tokens, which is its own."""
        num_blocks = -(-num_tokens // BLOCK_SIZE)
        memory = PoolMemory(self._spec.kv_layout(BLOCK_SIZE), num_blocks)
        memory.commit(num_blocks)
        return ModelRunner(self._decoder, self._ops, KVCache(memory))


def print_steps(runner: ModelRunner, batches: list[int], rounds: int) -> None:
    """CPU milliseconds of steps by sequences and drafts, in turns; the least of some rounds, and the middle."""
    cases = [
        (size, drafts)
        for size in batches
        for drafts in (0, 1, 2, 4, 8, 16, 31, 32, 33, 48, 64, 96)
        if drafts <= 8 * size
    ]
    found: dict[tuple[int, int], list[float]] = {case: [] for case in cases}
    for _ in range(rounds):
        for size, drafts in cases:
            lengths = [1 + drafts // size + (index < drafts % size) for index in range(size)]
            batch = make_batch([(length, 200) for length in lengths])
            begun_s = time.process_time()
            runner.run(batch)
            found[size, drafts].append(1000 * (time.process_time() - begun_s))
    for (size, drafts), times in found.items():
        print(f"{size:>4} sequences {drafts:>4} drafts {min(times):>8.2f} {statistics.median(times):>8.2f}")


def generate_in_step(
    pools: dict[str, Pool], prompts: list[list[int]], sampling: SamplingParams
) -> dict[str, Generated]:
    """All pools at once; always that one steps which has the fewest tokens."""
    runs = {way: pool.generate(prompts, sampling) for way, pool in pools.items()}
    found = {way: next(run) for way, run in runs.items()}
    while runs:
        way = min(runs, key=lambda each: found[each].num_tokens)
        if next(runs[way], None) is None:
            del runs[way]
    return found


def compare(
    ways: dict[str, Callable[[], Pool]], prompts: list[list[int]], sampling: SamplingParams, rounds: int, label: str
) -> None:
    """Generates in all ways and prints a line for each."""
    pools = {way: make() for way, make in ways.items()}
    generate_in_step(pools, prompts, sampling)
    found = [generate_in_step(pools, prompts, sampling) for _ in range(rounds)]

    def ratios(base: str, way: str) -> list[float]:
        return [each[base].cost_ms / each[way].cost_ms for each in found]

    fixed = [way for way in ways if way.startswith("fixed")]
    best = max(fixed, key=lambda way: statistics.median(ratios("off", way)), default="off")
    for way in ways:
        last, by_best = found[-1][way], ratios(best, way)
        equal = sum(mine == other for mine, other in zip(found[-1]["off"].answers, last.answers, strict=True))
        print(
            f"{label} {way:<10}{statistics.median(each[way].cost_ms for each in found):>9.2f}"
            f"{statistics.median(ratios('off', way)):>8.3f}{statistics.median(by_best):>9.3f}"
            f" ({min(by_best):.3f} to {max(by_best):.3f}){last.num_tokens / last.num_steps:>9.2f}{last.num_drafts:>8}"
            f"{last.num_right:>7} {equal}/{len(prompts)}",
            flush=True,
        )


def compare_steps(plain: Pool, idle: Pool, prompts: list[list[int]], sampling: SamplingParams, rounds: int) -> str:
    """Two ways that take the same steps, each the first of a pair of steps in turn: the median of the ratios of CPU
    times, each of two pairs, with its 95 % interval, by ranks."""
    times: dict[Pool, list[float]] = {plain: [], idle: []}
    for number in range(rounds + 1):
        runs = {pool: pool.generate(prompts, sampling) for pool in times}
        spent_s, first, second = dict.fromkeys(times, 0.0), plain, idle
        while runs:
            for pool in (first, second):
                if (generated := next(runs[pool], None)) is None:
                    del runs[pool]
                elif number:
                    times[pool].append(generated.cpu_s - spent_s[pool])
                    spent_s[pool] = generated.cpu_s
            first, second = second, first
    with_s, without_s = (list(map(float.__add__, times[pool][::2], times[pool][1::2])) for pool in (idle, plain))
    found = sorted(map(float.__truediv__, with_s, without_s))
    middle, margin = (len(found) - 1) / 2, 0.98 * math.sqrt(len(found))
    low, high = found[max(0, round(middle - margin))], found[min(len(found) - 1, round(middle + margin))]
    return f"{statistics.median(found):.4f} ({low:.4f} to {high:.4f}), {len(found)} times two pairs"


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--drafter", default="ngram")
    parser.add_argument("--draft-model-path", default=None)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--batches", default="1,4,16,32")
    parser.add_argument("--lengths", default="1,2,3,5,8")
    parser.add_argument("--longest", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--per-place", type=int, default=3)
    parser.add_argument("--sets", default="story,records")
    parser.add_argument("--steps", action="store_true")
    parser.add_argument("--idle", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    batches, lengths = ([int(text) for text in each.split(",") if text] for each in (given.batches, given.lengths))
    model, seq_tokens = Model(given.model, given.dtype, given.quantization), PROMPT_TOKENS + given.tokens + 48
    if given.steps:
        return print_steps(model.runner(max(batches) * seq_tokens), batches, given.rounds)
    sampling = SamplingParams(given.temperature, seed=5, max_tokens=given.tokens, ignore_eos=True)
    config = WorkerConfig(
        model=given.model, dtype=given.dtype, speculation=given.drafter, draft_model_path=given.draft_model_path
    )

    def pool(size: int, name: str, is_fixed: bool = False, **limits: Any) -> Callable[[], Pool]:
        def make() -> Pool:
            runner = model.runner(size * seq_tokens)
            target = Target(config, runner.cache.layout, runner)
            drafter = Wrong() if name == "wrong" else None if name == NONE else open_drafter(target)
            return Pool(runner, drafter, size, is_fixed, **limits)

        return make

    if not given.idle:
        print(
            f"{'set':<8}{'batch':>6} {'way':<10}{'ms/token':>9}{'paired':>8}{'by best':>9}{'':<17}{'tok/step':>9}"
            f"{'drafts':>8}{'right':>7} equal"
        )
    for name, size in itertools.product(given.sets.split(","), batches):
        chance, label = random.Random(size), f"{name:<8}{size:>6}"
        texts = [SETS[name](chance) for _ in range(size * given.per_place)]
        prompts = [model.tokenizer.encode(text, False)[:PROMPT_TOKENS] for text in texts]
        if given.idle:
            pools = pool(size, NONE)(), pool(size, given.drafter, draft_length=0)()
            print(f"{label} {compare_steps(*pools, prompts, sampling, given.rounds)}", flush=True)
            continue
        ways = {
            "off": pool(size, NONE),
            "adaptive": pool(size, given.drafter, draft_length=given.longest),
            **{f"fixed {n}": pool(size, given.drafter, is_fixed=True, draft_length=n) for n in lengths},
        }
        compare(ways, prompts, sampling, given.rounds, label)


if __name__ == "__main__":
    main()
