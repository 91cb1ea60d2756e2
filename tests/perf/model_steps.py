"""What a step of a whole model costs beside the reference: `python tests/perf/model_steps.py [--model M] [--dtype D]`.

Prints CPU milliseconds a step, sampling included, for decoding at several batch sizes and contexts and for chunks of
prompts, with both implementations in turn; KV is random, since only its size matters. With --profile, where the time of
a step at batch 1 goes, by function. Not a test: machines differ.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats

import torch
from cpu_kernels import least_cpu_s

from engine.batch import Batch, SampleRow
from engine.model_runner import ModelRunner, load_model, model_spec
from engine.request import SamplingParams
from kernels import load_ops
from kvstore.cache import KVCache
from kvstore.memory import PoolMemory
from runtime.checkpoint import open_checkpoint

BLOCK_SIZE = 16


def make_batch(sequences: list[tuple[int, int]]) -> Batch:
    """A batch of `sequences` (rows, context), each sampling after its last row; blocks one after the other."""
    batch, next_block = Batch(), 0
    for rows, context in sequences:
        num_blocks = -(-context // BLOCK_SIZE)
        table = list(range(next_block, next_block + num_blocks))
        next_block += num_blocks
        own = range(context - rows, context)
        batch.token_ids += [7 + position % 1000 for position in own]
        batch.positions += own
        batch.slots += [table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in own]
        batch.query_starts.append(batch.num_tokens)
        batch.context_lens.append(context)
        batch.block_tables.append(table)
        batch.sample_rows.append(SampleRow(batch.num_tokens - 1, context, SamplingParams()))
    return batch


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    checkpoint = open_checkpoint(arguments.model)
    spec = model_spec(checkpoint, arguments.dtype)
    memory = PoolMemory(spec.kv_layout(BLOCK_SIZE), 32 * 2048 // BLOCK_SIZE)
    memory.commit(32 * 2048 // BLOCK_SIZE)
    cache = KVCache(memory)
    for plane in (*cache.keys, *cache.values):
        plane.copy_(torch.randn(BLOCK_SIZE * spec.decoder.head_dim)[: spec.decoder.head_dim].expand(plane.shape))
    runners = [
        ModelRunner(load_model(checkpoint, spec, ops), ops, cache) for ops in map(load_ops, ("cpu", "reference"))
    ]
    if arguments.profile:
        batch = make_batch([(1, 128)])
        runners[0].run(batch)
        with cProfile.Profile() as profile:
            for _ in range(20):
                runners[0].run(batch)
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)
        return
    print(f"{spec.dtype}, {arguments.threads} threads\n{'step':<24}{'ms':>10}{'reference':>11}")
    steps = [(f"decode {n} x {c}", [(1, c)] * n) for c in (128, 512, 2048) for n in (1, 16, 32)]
    steps += [(f"chunk {rows} x {c}", [(rows, c)]) for rows, c in ((512, 512), (512, 2048))]
    for name, sequences in steps:
        batch = make_batch(sequences)
        calls = [lambda _, runner=runner, batch=batch: runner.run(batch) for runner in runners]
        for call in calls:
            call(0)
        ours_s, reference_s = least_cpu_s(calls, 2)
        print(f"{name:<24}{1e3 * ours_s:>10.1f}{1e3 * reference_s:>11.1f}{reference_s / ours_s:>7.2f}x", flush=True)


if __name__ == "__main__":
    main()
