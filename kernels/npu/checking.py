"""Does an NPU do what its operators' documents say? Each operation against the reference on this machine's CPU.

`python -m kernels.npu [INDEX]` prints a line for each check. It is for the first hour with a device, a new version of
CANN or a new chip: what a simulation takes on trust is looked at here, with sizes of real models and positions far out.
Owns the cases and how far results may be off; serving does not come here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

import kernels
from kernels import AttentionMetadata, Counted, DeviceUnavailable, DeviceUse, reference
from kernels.npu.attention import AttentionShape, FusedAttention, PagedAttention, try_attention

BLOCK_SIZE = 128
FAR_POSITIONS = (0, 1, 127, 4_095, 32_767, 131_071)
"""Where cosines are of large angles."""
HALF_TOLERANCE = 0.02
"""Of the largest magnitude in a result: a few roundings to bfloat16."""
INT8_TOLERANCE = 0.05
"""The same, for 8-bit products against exact ones."""
HEADS = ((32, 8, 128), (28, 4, 128), (14, 2, 64), (9, 3, 64), (8, 8, 64))
"""Query heads, KV heads and head size of some models."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one check."""

    name: str
    """What was looked at."""
    fault: str | None
    """What is wrong; None: nothing."""
    difference: float | None = None
    """To the reference, as a part of the largest magnitude; None where it was not measured."""


class Checker:
    """Runs the checks on the operations of one device."""

    def __init__(self, ops: kernels.Ops) -> None:
        self._ops, self._exact = ops, reference.Ops(torch.device("cpu"))
        self._generator = torch.Generator().manual_seed(1)

    def run(self) -> Iterator[Outcome]:
        """One outcome after the other; no fault ends the others."""
        for dtype in (torch.bfloat16, torch.float16):
            for name, compare, tolerance in (
                ("rms_norm", self._rms_norm, HALF_TOLERANCE),
                ("add_rms_norm", self._add_rms_norm, HALF_TOLERANCE),
                ("silu_mul", self._silu_mul, HALF_TOLERANCE),
                ("rotation and KV write", self._rope_and_write, HALF_TOLERANCE),
                ("embedding", self._embedding, 0.0),
                ("linear", self._linear, HALF_TOLERANCE),
                ("linear, 8 bits", self._linear_int8, INT8_TOLERANCE),
            ):
                yield self._compared(f"{name}, {_name(dtype)}", compare, dtype, tolerance)
        for num_heads, num_kv_heads, head_dim in HEADS:
            shape = AttentionShape(num_heads, num_kv_heads, head_dim, BLOCK_SIZE, torch.bfloat16)
            for kind in (FusedAttention, PagedAttention):
                attention = kind(self._ops.device)
                fault = attention.refuses(shape) or try_attention(attention, shape)
                yield Outcome(f"{attention.name}, {num_heads}/{num_kv_heads} heads of {head_dim}", fault)
        yield self._compared("recorded step", self._recorded_step, torch.bfloat16, 0.0)
        yield self._counted("units", lambda use: use.cube_s)
        yield self._counted("memory", lambda use: use.read_bytes)

    def _compared(
        self, name: str, compare: Callable[[torch.dtype], list[tuple[Tensor, Tensor]]], dtype: torch.dtype, most: float
    ) -> Outcome:
        try:
            pairs = compare(dtype)
            difference = max(_difference(result, expected) for result, expected in pairs)
        except (RuntimeError, AttributeError) as error:
            return Outcome(name, str(error).partition("\n")[0])
        if not difference <= most:  # also if it is NaN
            return Outcome(name, f"differs from the reference by {difference:.2%} of the largest", difference)
        return Outcome(name, None, difference)

    def _counted(self, counted: Counted, seen: Callable[[DeviceUse], float]) -> Outcome:
        """Whether the device counts a product of matrices."""
        name, counter = f"counting of {counted}", self._ops.new_counter(counted)
        assert counter is not None
        weight = self._ops.prepare_linear(self._there(self._random(torch.bfloat16, 1024, 1024)), None)
        rows = self._there(self._random(torch.bfloat16, 256, 1024))
        try:
            counter.start()
            self._ops.linear(rows, weight).cpu()
            counter.stop()
            use = counter.read()
        except (DeviceUnavailable, RuntimeError, AttributeError, TypeError) as error:
            return Outcome(name, str(error).partition("\n")[0])
        finally:
            counter.close()
        return Outcome(name, None if seen(use) else "a product of matrices left no trace in the profiler's table")

    def _random(self, dtype: torch.dtype, *shape: int) -> Tensor:
        """In host memory."""
        return torch.randn(*shape, generator=self._generator).to(dtype)

    def _there(self, tensor: Tensor) -> Tensor:
        """On the device."""
        return tensor.to(self._ops.device, copy=True)

    def _here(self, tensor: Tensor) -> Tensor:
        return tensor

    def _rms_norm(self, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
        ops, exact = self._ops, self._exact
        x, weight = self._random(dtype, 5, 4096) * 3, self._random(dtype, 4096)
        fused, small = self._random(dtype, 5, 12, 128), self._random(dtype, 128)
        rows = ops.rms_norm(self._there(x), self._there(weight), 1e-6)
        heads = ops.rms_norm(self._there(fused)[:, 2:6], self._there(small), 1e-6)  # strided, as of a projection
        return [
            (rows, exact.rms_norm(x, weight, 1e-6)),
            (heads, exact.rms_norm(fused[:, 2:6], small, 1e-6)),
        ]

    def _add_rms_norm(self, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
        x, residual, weight = self._random(dtype, 5, 4096), self._random(dtype, 5, 4096), self._random(dtype, 4096)
        results = self._ops.add_rms_norm(self._there(x), self._there(residual), self._there(weight), 1e-6)
        return list(zip(results, self._exact.add_rms_norm(x, residual, weight, 1e-6), strict=True))

    def _silu_mul(self, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
        gate_up = self._random(dtype, 5, 2 * 1536) * 3
        return [(self._ops.silu_mul(self._there(gate_up)), self._exact.silu_mul(gate_up))]

    def _rope_and_write(self, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
        positions = torch.tensor(FAR_POSITIONS)
        slots = torch.tensor([3, 383, 0, 128, 127, 200])
        frequencies = 1e6 ** (-torch.arange(0, 128, 2) / 128)  # [64]
        fused = self._random(dtype, len(positions), 12, 128)
        results: list[tuple[Tensor, Tensor, Tensor]] = []
        for ops, put in ((self._ops, self._there), (self._exact, self._here)):
            keys, values = (put(torch.zeros(3, BLOCK_SIZE, 2, 128, dtype=dtype)) for _ in range(2))
            query, key, value = put(fused).split((8, 2, 2), dim=1)
            cosine, sine = ops.rope_rows(put(positions), put(frequencies))
            turned = ops.rope_and_write_kv(query, key, value, cosine, sine, put(slots), keys, values)
            results.append((turned, keys, values))
        mine, exact = results
        return list(zip(mine, exact, strict=True))

    def _embedding(self, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
        table, ids = self._random(dtype, 500, 256), torch.tensor([499, 0, 7, 7])
        return [(self._ops.embedding(self._there(ids), self._there(table)), self._exact.embedding(ids, table))]

    def _linear(self, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
        weight, bias = self._random(dtype, 1000, 896), self._random(dtype, 1000)
        pairs = []
        for num_rows, is_biased in ((1, True), (1, False), (70, True)):
            x = self._random(dtype, num_rows, 896)
            prepared = self._ops.prepare_linear(self._there(weight), self._there(bias) if is_biased else None)
            exact = self._exact.prepare_linear(weight.float(), bias.float() if is_biased else None)
            pairs.append((self._ops.linear(self._there(x), prepared), self._exact.linear(x.float(), exact)))
        return pairs

    def _linear_int8(self, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
        weight, bias, x = self._random(dtype, 1024, 896), self._random(dtype, 1024), self._random(dtype, 70, 896)
        prepared = self._ops.prepare_linear(self._there(weight), self._there(bias), "int8")
        exact = self._exact.prepare_linear(weight.float(), bias.float())
        return [(self._ops.linear(self._there(x), prepared), self._exact.linear(x.float(), exact))]

    def _recorded_step(self, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
        """Rows of which one half attends to short contexts; recorded with those of one token."""
        ops, contexts, device = self._ops, (1, 130, 256, 300), self._ops.device
        ops.prepare(8, 2, 128, BLOCK_SIZE, dtype)
        query = self._there(self._random(dtype, 4, 8, 128))
        keys, values = (self._there(self._random(dtype, 12, BLOCK_SIZE, 2, 128)) for _ in range(2))
        weight = ops.prepare_linear(self._there(self._random(dtype, 64, 1024)), None)
        tables = torch.arange(12, dtype=torch.int32).view(4, 3).to(device)
        recorded = AttentionMetadata(
            query_starts=torch.tensor([0, *accumulate([1] * 4)], dtype=torch.int32, device=device),
            context_lens=torch.tensor(contexts, dtype=torch.int32, device=device),
            block_tables=tables,
            slots=torch.zeros(4, dtype=torch.int64, device=device),
            positions=torch.tensor([context - 1 for context in contexts], device=device),
            query_lens_list=(1,) * 4,
            context_lens_list=(1,) * 4,
            block_size=BLOCK_SIZE,
        )

        def compute(metadata: AttentionMetadata) -> Tensor:
            planned = replace(metadata, plan=ops.plan_attention(metadata))
            attended = ops.paged_attention(query, keys, values, planned, 128**-0.5, None)
            return ops.linear(attended.view(4, 1024), weight)

        asked = replace(recorded, context_lens_list=contexts)
        expected = compute(asked).clone()
        graph = ops.new_graph()
        if graph is None:
            raise RuntimeError("nothing can be recorded, since attention is not the fused operator's")
        result = graph.capture(lambda: compute(recorded))
        graph.replay(asked)
        return [(result, expected)]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _difference(result: Tensor, expected: Tensor) -> float:
    """Largest difference, as a part of the largest magnitude."""
    mine, exact = result.float().cpu(), expected.float().cpu()
    return float((mine - exact).abs().max() / exact.abs().max())
