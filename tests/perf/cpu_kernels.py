"""What each CPU operation costs beside the reference and the machine: `python tests/perf/cpu_kernels.py --help`.

Prints, for one layer of a model's shape: CPU milliseconds of a call, the reference's, GFLOP/s and GB/s, and the larger
of the call's shares of two measured peaks, that of multiplying matrices and that of reading memory. Layers are visited
in turn over large caches, as a step does. CPU time of this process is taken, in alternation, and the least of several
rounds: what else runs on the machine matters less so. Not a test.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import AttentionMetadata, Ops, load_ops

BLOCK_SIZE = 16
ROUNDS = 7
CACHE_BYTES = 400 << 20
Call = Callable[[int], object]


@dataclass(frozen=True, slots=True)
class Shape:
    """A model, as far as these operations see it."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden: int
    inner: int


@dataclass(frozen=True, slots=True)
class Work:
    """What a call does at least."""

    num_flops: float
    num_bytes: float


def cpu_s(call: Call, num_calls: int) -> float:
    """CPU seconds of one of `num_calls` calls, which get their number."""
    started_s = time.process_time()
    for index in range(num_calls):
        call(index)
    return (time.process_time() - started_s) / num_calls


def least_cpu_s(calls: list[Call], num_calls: int) -> list[float]:
    """The least CPU seconds of each call over rounds in which they take turns."""
    rounds = [[cpu_s(call, num_calls) for call in calls] for _ in range(ROUNDS)]
    return [min(times) for times in zip(*rounds, strict=True)]


def measure_peaks(dtype: torch.dtype) -> tuple[float, float]:
    """Floating point operations a second in a product of matrices, and bytes a second read from memory."""
    left, right = (torch.randn(1024, 1024).to(dtype) for _ in range(2))
    large = torch.randn(CACHE_BYTES // 4)
    multiply_s, read_s = least_cpu_s([lambda _: left @ right, lambda _: large.sum()], 3)
    return 2 * 1024**3 / multiply_s, CACHE_BYTES / read_s


class Layers:
    """KV caches of several layers, and a batch over them."""

    def __init__(self, shape: Shape, dtype: torch.dtype, sequences: list[tuple[int, int]]) -> None:
        """`sequences` holds (query rows, context)."""
        self.shape, self.dtype = shape, dtype
        row_bytes = shape.num_kv_heads * shape.head_dim * dtype.itemsize
        num_blocks = [-(-context // BLOCK_SIZE) for _, context in sequences]
        total = sum(num_blocks) + 1
        num_layers = max(2, min(64, CACHE_BYTES // (2 * total * BLOCK_SIZE * row_bytes)))
        size = (total, BLOCK_SIZE, shape.num_kv_heads, shape.head_dim)
        self.caches = [tuple(torch.randn(size).to(dtype) for _ in range(2)) for _ in range(num_layers)]
        ids = torch.randperm(total).tolist()
        tables = torch.zeros(len(sequences), max(num_blocks), dtype=torch.int32)
        for row, count in zip(tables, num_blocks, strict=True):
            row[:count] = torch.tensor([ids.pop() for _ in range(count)])
        starts = torch.tensor([0] + [rows for rows, _ in sequences]).cumsum(0)
        positions = torch.cat([torch.arange(context - rows, context) for rows, context in sequences])
        owners = torch.repeat_interleave(torch.tensor([rows for rows, _ in sequences]))
        self.num_rows = len(positions)
        self.num_positions = sum(context for _, context in sequences)
        self.num_pairs = sum(rows * context - rows * (rows - 1) // 2 for rows, context in sequences)
        self.metadata = AttentionMetadata(
            query_starts=starts.int(),
            context_lens=torch.tensor([context for _, context in sequences], dtype=torch.int32),
            block_tables=tables,
            slots=tables[owners, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE,
            positions=positions,
            query_lens_list=tuple(rows for rows, _ in sequences),
            context_lens_list=tuple(context for _, context in sequences),
            block_size=BLOCK_SIZE,
        )
        heads = shape.num_heads + 2 * shape.num_kv_heads
        self.fused = torch.randn(self.num_rows, heads, shape.head_dim).to(dtype)

    def attention(self, ops: Ops) -> Call:
        """A call of `paged_attention` on the layer of its number."""
        metadata = AttentionMetadata(
            **{name: getattr(self.metadata, name) for name in AttentionMetadata.__slots__ if name != "plan"},
            plan=ops.plan_attention(self.metadata),
        )
        query = self.fused[:, : self.shape.num_heads].contiguous()

        def call(index: int) -> Tensor:
            return ops.paged_attention(query, *self.caches[index % len(self.caches)], metadata, 0.125, None)

        return call

    def rope(self, ops: Ops) -> Call:
        """A call of `rope_and_write_kv`."""
        shape = self.shape
        rows = ops.rope_rows(self.metadata.positions, torch.rand(shape.head_dim // 2))
        parts = self.fused.split((shape.num_heads, shape.num_kv_heads, shape.num_kv_heads), dim=1)

        def call(index: int) -> Tensor:
            return ops.rope_and_write_kv(*parts, *rows, self.metadata.slots, *self.caches[index % len(self.caches)])

        return call

    def attention_work(self) -> Work:
        """Of one call."""
        shape = self.shape
        row_bytes = shape.num_kv_heads * shape.head_dim * self.dtype.itemsize
        flops = 4 * self.num_pairs * shape.num_heads * shape.head_dim
        return Work(flops, 2 * self.num_positions * row_bytes)


def elementwise_calls(ops: Ops, shape: Shape, dtype: torch.dtype, num_rows: int) -> dict[str, tuple[Call, Work]]:
    """Norm with residual, and activation."""
    x, residual = (torch.randn(num_rows, shape.hidden).to(dtype) for _ in range(2))
    weight, gate_up = torch.ones(shape.hidden, dtype=dtype), torch.randn(num_rows, 2 * shape.inner).to(dtype)
    return {
        "add_rms_norm": (
            lambda _: ops.add_rms_norm(x, residual, weight, 1e-5),
            Work(6 * x.numel(), 4 * x.numel() * dtype.itemsize),
        ),
        "silu_mul": (lambda _: ops.silu_mul(gate_up), Work(0, 1.5 * gate_up.numel() * dtype.itemsize)),
    }


def report(name: str, calls: list[Call], work: Work, num_calls: int, peaks: tuple[float, float]) -> None:
    """Measures and prints a row."""
    for call in calls:
        call(0)
    ours_s, reference_s = least_cpu_s(calls, num_calls)
    share = max(work.num_flops / ours_s / peaks[0], work.num_bytes / ours_s / peaks[1])
    print(
        f"{name:<34}{1e3 * ours_s:>10.3f}{1e3 * reference_s:>11.3f}{reference_s / ours_s:>7.1f}x"
        f"{work.num_flops / ours_s / 1e9:>9.1f}{work.num_bytes / ours_s / 1e9:>7.1f}{share:>8.0%}"
    )


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--heads", default="9,3,64", help="query heads, KV heads, elements a head")
    parser.add_argument("--sizes", default="576,1536", help="hidden size, inner size")
    parser.add_argument("--only", default="", help="rows whose name contains this")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    dtype = getattr(torch, arguments.dtype)
    shape = Shape(*(int(part) for part in f"{arguments.heads},{arguments.sizes}".split(",")))
    ours, reference = load_ops("cpu"), load_ops("reference")
    peaks = measure_peaks(dtype)
    print(f"{arguments.dtype}, {arguments.threads} threads")
    print(f"peaks: {peaks[0] / 1e9:.0f} GFLOP/s, {peaks[1] / 1e9:.1f} GB/s")
    print(f"{'operation':<34}{'ms':>10}{'reference':>11}{'':>8}{'GFLOP/s':>9}{'GB/s':>7}{'of peak':>8}")
    batches = [(f"decode {n} x {c}", [(1, c)] * n) for c in (128, 512, 2048) for n in (1, 16, 32)]
    batches += [(f"verify 8 x {rows} rows x 512", [(rows, 512)] * 8) for rows in (4, 8)]
    batches += [(f"chunk {rows} x {c}", [(rows, c)]) for rows, c in ((16, 2048), (64, 2048), (512, 512), (512, 2048))]
    with torch.inference_mode():
        for name, sequences in batches:
            if arguments.only not in f"attention {name}":
                continue
            layers = Layers(shape, dtype, sequences)
            calls = [layers.attention(ops) for ops in (ours, reference)]
            num_calls = max(2, min(100, 3_000_000 // layers.num_pairs))
            report(f"attention {name}", calls, layers.attention_work(), num_calls, peaks)
        for num_rows in (1, 32, 512):
            layers = Layers(shape, dtype, [(num_rows, num_rows)])
            work = Work(0, 2 * layers.fused.numel() * dtype.itemsize)
            if arguments.only in f"rope {num_rows}":
                report(
                    f"rope and write KV, {num_rows} rows", [layers.rope(o) for o in (ours, reference)], work, 50, peaks
                )
            named = [elementwise_calls(ops, shape, dtype, num_rows) for ops in (ours, reference)]
            for name in named[0]:
                if arguments.only in f"{name} {num_rows}":
                    calls = [each[name][0] for each in named]
                    report(f"{name}, {num_rows} rows", calls, named[0][name][1], 50, peaks)


if __name__ == "__main__":
    main()
