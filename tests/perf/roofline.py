"""How near decode steps come to what the machine can do: `python tests/perf/roofline.py --dtype bfloat16 --threads 2`.

Measures the peaks on the same threads, then whole steps as workers run them, then the same steps operation by
operation, which `baton profile` cannot. What is counted, and how peaks are measured, is `engine.work` and
`engine.measures`, as there. Wall-clock medians: nothing else should run. Operations called singly take somewhat longer
than in the program that does all layers in one call, whose bits are the same. Not a test.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from model_steps import BLOCK_SIZE, make_batch
from torch import Tensor

import kernels.cpu
from engine.measures import Peaks, measure_peaks
from engine.model_runner import DTYPES, ModelRunner, load_model, model_spec
from engine.work import Work, attention_work, linear_work, step_work
from kernels import AttentionMetadata, Quantization
from kvstore.cache import KVCache
from kvstore.layout import DTYPE_BYTES
from kvstore.memory import PoolMemory
from runtime import huge_pages
from runtime.checkpoint import open_checkpoint
from runtime.host import OPENMP_SETTING

T = TypeVar("T")
ROUNDS = 31
NO_WORK = Work()


@dataclass(slots=True)
class Done:
    """What calls of one operation did in a step."""

    seconds: float = 0.0
    """That they took."""
    num_calls: int = 0
    """How many."""
    work: Work = NO_WORK
    """What they had to do."""


class TimedOps(kernels.cpu.Ops):
    """The operations of a CPU, called singly, each call noted under a name."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.done: dict[str, Done] = defaultdict(Done)
        """By operation, since it was last cleared."""
        self._sizes: dict[int, tuple[int, int, int]] = {}  # id of a prepared weight: outputs, inputs, bytes of one

    def fuse_layers(self, *_: object) -> None:
        """Never: then each operation is a call."""

    def prepare_linear(self, weight: Tensor, bias: Tensor | None, quantization: Quantization = "none") -> object:
        """Notes the weight's size too."""
        num_out, num_in = weight.shape
        prepared = super().prepare_linear(weight, bias, quantization)
        self._sizes[id(prepared)] = num_out, num_in, 1 if quantization == "int8" else weight.element_size()
        return prepared

    def linear(self, x: Tensor, prepared: object) -> Tensor:
        """By the weight's shape."""
        num_out, num_in, weight_bytes = self._sizes[id(prepared)]
        call, work = super().linear, linear_work(x.shape[0], num_out, num_in, weight_bytes)
        return self._timed(f"linear {num_in} to {num_out}", lambda: call(x, prepared), work)

    def paged_attention(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        metadata: AttentionMetadata,
        scale: float,
        window: int | None,
    ) -> Tensor:
        """By the positions read."""
        _, num_heads, head_dim = query.shape
        lengths = (metadata.query_lens_list, metadata.context_lens_list)
        sizes = (num_heads, key_cache.shape[2], head_dim, key_cache.element_size())
        call, work = super().paged_attention, attention_work(*lengths, *sizes, window)
        return self._timed("attention", lambda: call(query, key_cache, value_cache, metadata, scale, window), work)

    def rms_norm(self, *arguments: object) -> Tensor:
        """Noted without bytes: rows stay in the CPU's caches."""
        call = super().rms_norm
        return self._timed("norms", lambda: call(*arguments))  # type: ignore[arg-type]

    def add_rms_norm(self, *arguments: object) -> tuple[Tensor, Tensor]:
        """As `rms_norm`."""
        call = super().add_rms_norm
        return self._timed("norms", lambda: call(*arguments))  # type: ignore[arg-type]

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """As `rms_norm`."""
        call = super().silu_mul
        return self._timed("silu_mul", lambda: call(gate_up))

    def rope_and_write_kv(self, *arguments: object) -> Tensor:
        """As `rms_norm`."""
        call = super().rope_and_write_kv
        return self._timed("rope and write KV", lambda: call(*arguments))  # type: ignore[arg-type]

    def _timed(self, name: str, call: Callable[[], T], work: Work = NO_WORK) -> T:
        done, started_s = self.done[name], time.perf_counter()
        result = call()
        done.seconds += time.perf_counter() - started_s
        done.num_calls += 1
        done.work += work
        return result


def median_s(call: Callable[[], object]) -> float:
    """Wall-clock seconds of a call, of several."""
    call()
    times = []
    for _ in range(ROUNDS):
        started_s = time.perf_counter()
        call()
        times.append(time.perf_counter() - started_s)
    return statistics.median(times)


def report(name: str, done: Done, peaks: Peaks) -> None:
    """Prints a row."""
    least_s = done.work.least_s(peaks.flops_per_s, peaks.bytes_per_s)
    times = f"{1e3 * done.seconds:>9.2f}{1e3 * least_s:>10.2f}"
    rates = f"{done.work.num_bytes / done.seconds / 1e9:>8.1f}{done.work.num_flops / done.seconds / 1e9:>9.0f}"
    print(f"{name:<26}{done.num_calls:>6}{times}{rates}{least_s / done.seconds:>8.0%}")


def measure(arguments: argparse.Namespace, num_seqs: int, context: int) -> None:
    """Prints the table of one step."""
    checkpoint = open_checkpoint(arguments.model)
    spec = model_spec(checkpoint, arguments.dtype)
    layout = spec.kv_layout(BLOCK_SIZE)
    num_blocks = num_seqs * layout.num_blocks(context)
    memory = PoolMemory.create(layout, 2 * num_blocks + 4096, num_blocks, epoch=0)
    try:
        cache = KVCache(memory)
        for plane in (*cache.keys, *cache.values):
            plane[:num_blocks] = torch.randn(spec.decoder.head_dim).to(plane.dtype)
        batch = make_batch([(1, context)] * num_seqs)
        whole, single = kernels.cpu.Ops(torch.device("cpu")), TimedOps(torch.device("cpu"))
        models = [load_model(checkpoint, spec, ops, None, arguments.quantization) for ops in (whole, single)]
        huge_pages.collapse_private_memory()
        steps = [ModelRunner(model, ops, cache) for model, ops in zip(models, (whole, single), strict=True)]
        peaks = measure_peaks(whole, DTYPES[spec.dtype], arguments.quantization)
        step_s = median_s(lambda: steps[0].run(batch))
        print(f"\ndecode {num_seqs} x {context}, {spec.dtype}, {arguments.threads} threads")
        print(f"peaks: {peaks.bytes_per_s / 1e9:.1f} GB/s, {peaks.flops_per_s / 1e9:.0f} GFLOP/s")
        print(f"{'':<26}{'calls':>6}{'ms':>9}{'roofline':>10}{'GB/s':>8}{'GFLOP/s':>9}{'share':>8}")
        rows = profile(steps[1], single, batch)
        element_bytes = DTYPE_BYTES[spec.dtype]
        layer_bytes = 1 if arguments.quantization == "int8" else element_bytes
        report("step", Done(step_s, 1, step_work(spec.decoder, batch, element_bytes, layer_bytes)), peaks)
        for name, done in rows.items():
            report(f"  {name}", done, peaks)
    finally:
        memory.close()


def profile(runner: ModelRunner, ops: TimedOps, batch: object) -> dict[str, Done]:
    """The median of each operation's time in a step, longest first, and what is left of the step."""
    seen: dict[str, list[Done]] = defaultdict(list)

    def run() -> None:
        ops.done = defaultdict(Done)
        started_s = time.perf_counter()
        runner.run(batch)  # type: ignore[arg-type]
        taken_s = time.perf_counter() - started_s
        ops.done["embedding, sampling, rest"] = Done(taken_s - sum(done.seconds for done in ops.done.values()), 1)
        for name, done in ops.done.items():
            seen[name].append(done)

    median_s(run)
    for all_done in seen.values():
        all_done[-1].seconds = statistics.median(done.seconds for done in all_done)
    return {name: each[-1] for name, each in sorted(seen.items(), key=lambda item: -item[1][-1].seconds)}


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", default="none", choices=["none", "int8"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", default="1x128,16x512,32x512", help="sequences x context, by commas")
    arguments = parser.parse_args()
    settings = dict([huge_pages.MALLOC_SETTING, OPENMP_SETTING])
    if not settings.items() <= os.environ.items():  # as the supervisor starts workers
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **settings})
    torch.set_num_threads(arguments.threads)
    with torch.inference_mode():
        for step in arguments.steps.split(","):
            num_seqs, context = map(int, step.split("x"))
            measure(arguments, num_seqs, context)


if __name__ == "__main__":
    main()
