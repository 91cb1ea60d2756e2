"""What speculation gives and costs without a service: `python tests/perf/speculation_cost.py [--model M] [--dtype D]`.

CPU milliseconds a token of a decode pool that is driven step by step, scheduler included: without speculation, with a
fixed number of drafts, and adaptive, in turns; for stories and for code and records, at several batch sizes. Each pool
is used for all rounds, as a service is, and the first one does not count. Times of steps, from which pools learn, are
CPU times too. `fixed 0` has a drafter that is never asked; `--drafter wrong` is never right.
`--steps` prints instead what steps take by their sequences and drafts. Not a test: machines differ.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable
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
from engine.planning import build_batch, take_drafts
from engine.request import Request, SamplingParams
from engine.scheduling import Limits
from engine.sequence import DECODE_MOVES, Sequence, State
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
    """A batch that was generated to its end."""

    cpu_s: float
    num_tokens: int
    num_steps: int
    num_drafts: int
    num_right: int
    answers: list[list[int]]

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
        self._scheduler = DecodeScheduler(holdings, most, 0, drafter=drafter)
        if is_fixed:
            take_no_time(self._scheduler)
        self._runner = runner if drafter is None else drafter.runner(runner)

    def generate(self, prompts: list[list[int]], sampling: SamplingParams) -> Generated:
        """Answers to all prompts at once; what is measured begins when all have begun."""
        sequences = []
        for index, prompt in enumerate(prompts):
            request = Request(index.to_bytes(16, "big"), "r", tuple(prompt), (), sampling)
            sequences.append(Sequence(request, DECODE_MOVES, 0.0))
            self._scheduler.add(sequences[-1], None)
        while any(each.state is not State.DECODING for each in sequences):
            self._step()
        drafts, right, cpu_s, num_tokens, num_steps = *self._counts(), 0.0, 0, 0
        while self._scheduler.live():
            begun_s = time.process_time()
            num_tokens += self._step()
            cpu_s += time.process_time() - begun_s
            num_steps += 1
        more_drafts, more_right = self._counts()
        answers = [each.token_ids[len(prompt) :] for each, prompt in zip(sequences, prompts, strict=True)]
        return Generated(cpu_s, num_tokens, num_steps, more_drafts - drafts, more_right - right, answers)

    def _step(self) -> int:
        plan = self._scheduler.plan(0.0)
        batch = build_batch(plan, BLOCK_SIZE, ())
        begun_s = time.process_time()
        samples = self._runner.run(batch)
        if self._scheduler.step_times is not None:
            self._scheduler.step_times.observe(load_of(batch), 1000 * (time.process_time() - begun_s))
        take_drafts(plan, batch, 0.0)
        return len(self._scheduler.commit(plan, samples, 0.0))

    def _counts(self) -> tuple[int, int]:
        speculation = self._scheduler.speculation
        return (0, 0) if speculation is None else (speculation.num_drafts, speculation.num_accepted)


def load(model: str, dtype: str, num_tokens: int, quantization: Any = "none") -> tuple[ModelRunner, Tokenizer]:
    """A model with room for so many tokens."""
    checkpoint, ops = open_checkpoint(model), load_ops("cpu")
    spec = model_spec(checkpoint, dtype)
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    memory = PoolMemory(spec.kv_layout(BLOCK_SIZE), num_blocks)
    memory.commit(num_blocks)
    runner = ModelRunner(load_model(checkpoint, spec, ops, None, quantization), ops, KVCache(memory))
    return runner, load_tokenizer(checkpoint)


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


def compare(
    ways: dict[str, Callable[[], Pool]], prompts: list[list[int]], sampling: SamplingParams, rounds: int, label: str
) -> None:
    """Generates in all ways in turn and prints a line for each."""
    pools = {way: make() for way, make in ways.items()}
    found: dict[str, list[Generated]] = {way: [] for way in ways}
    for number in range(rounds + 1):
        for way, pool in pools.items():
            generated = pool.generate(prompts, sampling)
            if number:
                found[way].append(generated)
    plain = found["off"]
    base_ms = statistics.median(each.cost_ms for each in plain)
    for way, each in found.items():
        cost_ms, last = statistics.median(one.cost_ms for one in each), each[-1]
        ratios = [one.cost_ms / other.cost_ms for one, other in zip(plain, each, strict=True)]
        equal = sum(mine == other for mine, other in zip(plain[-1].answers, last.answers, strict=True))
        print(
            f"{label} {way:<10}{cost_ms:>9.2f}{base_ms / cost_ms:>8.3f}{statistics.median(ratios):>8.3f}"
            f"{last.num_tokens / last.num_steps:>9.2f}{last.num_drafts:>8}{last.num_right:>7} {equal}/{len(prompts)}",
            flush=True,
        )


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
    parser.add_argument("--lengths", default="0,1,2,4,8")
    parser.add_argument("--longest", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--sets", default="story,records")
    parser.add_argument("--steps", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    batches, lengths = ([int(text) for text in each.split(",") if text] for each in (given.batches, given.lengths))
    num_tokens = max(batches) * (PROMPT_TOKENS + given.tokens + 48)
    runner, tokenizer = load(given.model, given.dtype, num_tokens, given.quantization)
    if given.steps:
        return print_steps(runner, batches, given.rounds)
    sampling = SamplingParams(given.temperature, seed=5, max_tokens=given.tokens, ignore_eos=True)
    config = WorkerConfig(
        model=given.model, dtype=given.dtype, speculation=given.drafter, draft_model_path=given.draft_model_path
    )
    target = Target(config, runner.cache.layout, runner)

    def pool(size: int, name: str, is_fixed: bool = False, **limits: Any) -> Callable[[], Pool]:
        def make() -> Pool:
            drafter = Wrong() if name == "wrong" else None if name == NONE else open_drafter(target)
            return Pool(runner, drafter, size, is_fixed, **limits)

        return make

    print(
        f"{'set':<8}{'batch':>6} {'way':<10}{'ms/token':>9}{'speedup':>8}{'paired':>8}{'tok/step':>9}{'drafts':>8}"
        f"{'right':>7} equal"
    )
    for name in given.sets.split(","):
        for size in batches:
            chance = random.Random(size)
            prompts = [tokenizer.encode(SETS[name](chance), False)[:PROMPT_TOKENS] for _ in range(size)]
            ways = {
                "off": pool(size, NONE),
                "adaptive": pool(size, given.drafter, draft_length=given.longest),
                **{f"fixed {n}": pool(size, given.drafter, is_fixed=True, draft_length=n) for n in lengths},
            }
            compare(ways, prompts, sampling, given.rounds, f"{name:<8}{size:>6}")


if __name__ == "__main__":
    main()
