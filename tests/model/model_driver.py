"""Runs prompts on a ModelRunner without a scheduler: prefill in chunks, then decode all together.

Block ids are dealt in shuffled order, so that no test passes on contiguous tables by luck.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import torch

from engine.batch import Batch, SampleRow
from engine.model_runner import ModelRunner, load_model, model_spec
from engine.request import Sample, SamplingParams
from kernels import KVDtype, Quantization, load_ops
from kvstore.cache import KVCache
from kvstore.memory import PoolMemory
from runtime.checkpoint import open_checkpoint

BLOCK_SIZE = 16
GREEDY = SamplingParams()


def load_runner(
    model: str | Path,
    *,
    num_tokens: int,
    num_sequences: int = 1,
    dtype: str = "auto",
    quantization: Quantization = "none",
    kv_dtype: KVDtype = "auto",
) -> ModelRunner:
    """A runner with room for `num_sequences` of altogether `num_tokens`."""
    checkpoint = open_checkpoint(str(model))
    spec = model_spec(checkpoint, dtype)
    ops = load_ops("cpu")
    num_blocks = -(-num_tokens // BLOCK_SIZE) + num_sequences
    memory = PoolMemory(spec.kv_layout(BLOCK_SIZE, kv_dtype), num_blocks)
    memory.commit(num_blocks)
    return ModelRunner(load_model(checkpoint, spec, ops, None, quantization), ops, KVCache(memory))


class Driver:
    """Sequences of one runner, each with blocks for `capacities[i]` tokens."""

    def __init__(self, runner: ModelRunner, capacities: Sequence[int]) -> None:
        self.runner = runner
        self.block_size = block_size = runner.cache.layout.block_size
        ids = list(range(runner.cache.scratch_slots.start // block_size))
        random.Random(7).shuffle(ids)
        self.tables: list[list[int]] = []
        for capacity in capacities:
            num_blocks = -(-capacity // block_size)
            assert len(ids) >= num_blocks, "the pool is too small for this test"
            self.tables.append([ids.pop() for _ in range(num_blocks)])

    def add(self, batch: Batch, sequence: int, tokens: Sequence[int], start: int) -> None:
        """Packs `tokens` of a sequence, the first at position `start`."""
        table, end, block_size = self.tables[sequence], start + len(tokens), self.block_size
        batch.token_ids += tokens
        batch.positions += range(start, end)
        batch.slots += [table[p // block_size] * block_size + p % block_size for p in range(start, end)]
        batch.query_starts.append(batch.num_tokens)
        batch.context_lens.append(end)
        batch.block_tables.append(table[: -(-end // block_size)])

    def ask(self, batch: Batch, sampling: SamplingParams = GREEDY) -> None:
        """Samples after the token packed last."""
        batch.sample_rows.append(SampleRow(batch.num_tokens - 1, batch.positions[-1] + 1, sampling))

    def prefill(
        self, sequence: int, prompt: Sequence[int], chunk_size: int, sampling: SamplingParams = GREEDY
    ) -> Sample:
        """Computes a prompt chunk by chunk; answers the token after it."""
        samples: list[Sample] = []
        for start in range(0, len(prompt), chunk_size):
            batch = Batch()
            self.add(batch, sequence, prompt[start : start + chunk_size], start)
            if start + chunk_size >= len(prompt):
                self.ask(batch, sampling)
            samples = self.runner.run(batch)
        return samples[0]

    def logits(self, sequence: int, tokens: Sequence[int], chunk_size: int, positions: Sequence[int]) -> torch.Tensor:
        """Prefills `tokens` and answers the logits [len(positions), V] after those at `positions`, which ascend."""
        found: list[torch.Tensor] = []
        for start in range(0, len(tokens), chunk_size):
            batch = Batch()
            self.add(batch, sequence, tokens[start : start + chunk_size], start)
            inside = [p - start for p in positions if 0 <= p - start < chunk_size]
            batch.sample_rows = [SampleRow(row, start + row + 1, GREEDY) for row in inside]
            with torch.inference_mode():
                found.append(self.runner.logits(batch))
        return torch.cat(found)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        num_tokens: int,
        *,
        chunk_size: int = 512,
        sampling: SamplingParams = GREEDY,
    ) -> list[list[int]]:
        """`num_tokens` for each prompt: prefilled one by one, decoded in one batch."""
        outputs = [[self.prefill(i, prompt, chunk_size, sampling).token_id] for i, prompt in enumerate(prompts)]
        self.decode(prompts, outputs, num_tokens, sampling)
        return outputs

    def decode(
        self,
        prompts: Sequence[Sequence[int]],
        outputs: list[list[int]],
        num_tokens: int,
        sampling: SamplingParams = GREEDY,
    ) -> None:
        """Lengthens all `outputs`, which hold one token each, to `num_tokens`."""
        for step in range(1, num_tokens):
            batch = Batch()
            for sequence, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
                self.add(batch, sequence, output[-1:], len(prompt) + step - 1)
                self.ask(batch, sampling)
            for output, answer in zip(outputs, self.runner.run(batch), strict=True):
                output.append(answer.token_id)
