"""What linear layers cost, by rows, and a whole step of them: `python tests/perf/linear_cost.py [THREADS [ROWS,...]]`.

Shapes are those of SmolLM2-135M, each with its own weights in every layer, so that they come from where they come from
in a step. Prints for plain torch, reordered and 8-bit weights the milliseconds of all layers and GFLOP/s; the least of
many alternated runs, in CPU seconds on one thread and in wall time on several. Not a test: machines differ.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import Any

import torch

from kernels import Ops, Quantization, load_ops

NUM_LAYERS = 30
SHAPES = {
    "qkv": (960, 576, NUM_LAYERS),
    "output": (576, 576, NUM_LAYERS),
    "gate_up": (3072, 576, NUM_LAYERS),
    "down": (576, 1536, NUM_LAYERS),
    "head": (49152, 576, 1),
}
"""Outputs, inputs and how many there are."""
ROWS = (1, 4, 8, 16, 32, 64, 128, 512)


@dataclass(frozen=True, slots=True)
class Form:
    """One way to hold weights."""

    name: str
    """Column of the table."""
    dtype: torch.dtype
    """Of inputs and outputs."""
    quantization: Quantization
    """As told to `prepare_linear`; the head is never quantised."""
    ops: Ops
    """Whose operations."""

    def prepare(self, shape: str) -> list[Any]:
        """Random weights for all layers of a shape."""
        num_out, num_in, count = SHAPES[shape]
        quantization: Quantization = "none" if shape == "head" else self.quantization
        return [
            self.ops.prepare_linear(torch.randn(num_out, num_in).to(self.dtype), None, quantization)
            for _ in range(count)
        ]


def least_time(form: Form, layers: list[Any], x: torch.Tensor, best: float, clock: Any) -> float:
    """Seconds of a pass over `layers`, if less than `best`."""
    started = clock()
    for layer in layers:
        form.ops.linear(x, layer)
    return min(best, clock() - started)


def main(num_threads: str = "1", rows: str = ",".join(map(str, ROWS))) -> None:
    """Prints the tables."""
    torch.set_num_threads(int(num_threads))
    clock = time.process_time if num_threads == "1" else time.perf_counter
    plain, cpu = load_ops("reference"), load_ops("cpu")
    forms = [
        Form("f32 plain", torch.float32, "none", plain),
        Form("f32", torch.float32, "none", cpu),
        Form("bf16 plain", torch.bfloat16, "none", plain),
        Form("bf16", torch.bfloat16, "none", cpu),
        Form("f32 int8", torch.float32, "int8", cpu),
        Form("bf16 int8", torch.bfloat16, "int8", cpu),
    ]
    started = time.process_time()
    with torch.inference_mode():
        prepared = {(form.name, shape): form.prepare(shape) for form in forms for shape in SHAPES}
        print(f"{num_threads} threads; weights prepared in {time.process_time() - started:.1f} CPU seconds")
        print(f"{'rows':>5} {'layer':<8}" + "".join(f"{form.name:>20}" for form in forms))
        for num_rows in map(int, rows.split(",")):
            totals = dict.fromkeys((form.name for form in forms), 0.0)
            for shape, (num_out, num_in, count) in SHAPES.items():
                best = dict.fromkeys(totals, float("inf"))
                for _ in range(max(4, min(20, 100 // num_rows))):
                    for form in forms:
                        x = torch.randn(num_rows, num_in).to(form.dtype)
                        best[form.name] = least_time(form, prepared[form.name, shape], x, best[form.name], clock)
                flops = 2 * num_rows * num_out * num_in * count
                cells = (f"{1e3 * best[n]:9.2f}{flops / best[n] / 1e9:7.0f} GF" for n in totals)
                print(f"{num_rows:>5} {shape:<8}" + " ".join(cells), flush=True)
                totals = {name: total + best[name] for name, total in totals.items()}
            print(f"{num_rows:>5} {'step':<8}" + " ".join(f"{1e3 * total:9.2f} ms      " for total in totals.values()))


if __name__ == "__main__":
    main(*sys.argv[1:])
