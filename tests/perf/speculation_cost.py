"""What speculation gives and costs without a service: `python tests/perf/speculation_cost.py [--model M] [--dtype D]`.

CPU milliseconds a token of a decode pool that is driven step by step, scheduler included: without speculation, with a
fixed number of drafts, and adaptive, in turns; for stories and for code and records, at several batch sizes. Times of
steps, from which the pool learns, are CPU times too. Not a test: machines differ.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

from drafting import take_no_time

from baton.bench.texts import SETS
from decode_svc.scheduler import DecodeScheduler
from engine.drafters import Drafter, ngram
from engine.holdings import Holdings
from engine.model_runner import ModelRunner, load_model, model_spec
from engine.planning import build_batch
from engine.request import Request, SamplingParams
from engine.scheduling import Limits
from engine.sequence import DECODE_MOVES, Sequence, State
from engine.step_time import load_of
from kernels import load_ops
from kvstore.blocks import BlockPool
from kvstore.cache import KVCache
from kvstore.hashing import PrefixHasher
from kvstore.memory import PoolMemory
from router.tokenizer import load_tokenizer
from runtime.checkpoint import open_checkpoint

BLOCK_SIZE = 16
PROMPT_TOKENS = 128


class Generation:
    """A batch that is generated to its end, a step at a time."""

    def __init__(
        self,
        runner: ModelRunner,
        drafter: Drafter | None,
        prompts: list[list[int]],
        sampling: SamplingParams,
        is_fixed: bool,
        **limits: Any,
    ) -> None:
        num_blocks = runner.cache.keys[0].shape[0]
        holdings = Holdings(BlockPool(num_blocks), PrefixHasher("model", "layout", BLOCK_SIZE), BLOCK_SIZE)
        most = Limits(max_model_len=4096, max_num_seqs=len(prompts), max_num_tokens=1024, chunk_size=512, **limits)
        self.scheduler = DecodeScheduler(holdings, most, 0, drafter=drafter)
        self._runner = runner
        self.cpu_s, self.num_tokens, self.num_steps = 0.0, 0, 0
        for index, prompt in enumerate(prompts):
            request = Request(index.to_bytes(16, "big"), "r", tuple(prompt), (), sampling)
            self.scheduler.add(Sequence(request, DECODE_MOVES, 0.0), None)
        while any(each.state is not State.DECODING for each in self.scheduler.live()):
            self.step()
        if is_fixed:
            take_no_time(self.scheduler)
        self.cpu_s, self.num_tokens, self.num_steps = 0.0, 0, 0
        self.outputs: list[Sequence] = self.scheduler.live()

    def step(self) -> None:
        begun_s = time.process_time()
        plan = self.scheduler.plan(0.0)
        batch = build_batch(plan, BLOCK_SIZE, ())
        ran_s = time.process_time()
        samples = self._runner.run(batch)
        if self.scheduler.step_times is not None:
            self.scheduler.step_times.observe(load_of(batch), 1000 * (time.process_time() - ran_s))
        new_tokens = self.scheduler.commit(plan, samples, 0.0)
        self.cpu_s += time.process_time() - begun_s
        self.num_tokens += len(new_tokens)
        self.num_steps += 1

    def run(self) -> None:
        while self.scheduler.live():
            self.step()


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--batches", default="1,4,16,32")
    parser.add_argument("--lengths", default="1,2,4,8")
    parser.add_argument("--longest", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--set", default=None)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    checkpoint = open_checkpoint(arguments.model)
    spec, ops = model_spec(checkpoint, arguments.dtype), load_ops("cpu")
    batches = [int(text) for text in arguments.batches.split(",")]
    num_blocks = max(batches) * (-(-(PROMPT_TOKENS + arguments.tokens + 16) // BLOCK_SIZE) + 1)
    memory = PoolMemory(spec.kv_layout(BLOCK_SIZE), num_blocks)
    memory.commit(num_blocks)
    model = load_model(checkpoint, spec, ops, None, arguments.quantization)
    runner, tokenizer = ModelRunner(model, ops, KVCache(memory)), load_tokenizer(checkpoint)
    sampling = SamplingParams(arguments.temperature, seed=5, max_tokens=arguments.tokens, ignore_eos=True)
    fixed = [int(text) for text in arguments.lengths.split(",") if text]
    ways: list[tuple[str, int, bool]] = [("off", 0, False), ("adaptive", arguments.longest, False)]
    ways += [(f"fixed {length}", length, True) for length in fixed]
    print(
        f"{'set':<8}{'batch':>6} {'way':<10}{'ms/token':>9}{'speedup':>8}{'tok/step':>9}{'drafts':>8}{'right':>7} equal"
    )
    for name, make in SETS.items():
        if arguments.set not in (None, name):
            continue
        for batch_size in batches:
            chance = random.Random(batch_size)
            prompts = [tokenizer.encode(make(chance), False)[:PROMPT_TOKENS] for _ in range(batch_size)]
            runs: dict[str, list[Generation]] = {}
            for _ in range(arguments.rounds):
                for way, length, is_fixed in ways:
                    drafter = ngram.Drafter() if length else None
                    limits = {"draft_length": length} if length else {}
                    generation = Generation(runner, drafter, prompts, sampling, is_fixed, **limits)
                    generation.run()
                    runs.setdefault(way, []).append(generation)
            plain = runs["off"][0]
            for way, each in runs.items():
                cost = statistics.median(1000 * one.cpu_s / one.num_tokens for one in each)
                base = statistics.median(1000 * one.cpu_s / one.num_tokens for one in runs["off"])
                last, speculation = each[-1], each[-1].scheduler.speculation
                drafts, right = (speculation.num_drafts, speculation.num_accepted) if speculation else (0, 0)
                equal = sum(a.token_ids == b.token_ids for a, b in zip(plain.outputs, last.outputs, strict=True))
                print(
                    f"{name:<8}{batch_size:>6} {way:<10}{cost:>9.2f}{base / cost:>8.2f}"
                    f"{last.num_tokens / last.num_steps:>9.2f}{drafts:>8}{right:>7} {equal}/{batch_size}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
