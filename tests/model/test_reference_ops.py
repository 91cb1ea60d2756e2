"""The reference operations against their definitions written as plain loops."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kernels
from kernels import AttentionMetadata, Ops, available_ops, load_ops
from kernels.reference import padded_num_blocks

BLOCK_SIZE = 4
HEAD_DIM = 8


@dataclass
class Case:
    """A packed batch over a random cache."""

    query: torch.Tensor  # [T, Hq, D]
    keys: torch.Tensor  # [num_blocks, BLOCK_SIZE, Hkv, D]
    values: torch.Tensor  # [num_blocks, BLOCK_SIZE, Hkv, D]
    metadata: AttentionMetadata
    sequences: list[tuple[int, int, list[int]]]  # (query rows, context, table)

    def attend(self, ops: Ops, window: int | None = None) -> torch.Tensor:
        return ops.paged_attention(self.query, self.keys, self.values, self.metadata, HEAD_DIM**-0.5, window)


def make_case(
    ops: Ops,
    sequences: list[tuple[int, int]],
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Case:
    """`sequences` holds (query rows, context length). Unused slots and blocks hold NaN."""
    generator = torch.Generator().manual_seed(seed)
    num_blocks = 3 + sum(-(-context // BLOCK_SIZE) for _, context in sequences)
    ids = torch.randperm(num_blocks, generator=generator).tolist()
    shape = (num_blocks, BLOCK_SIZE, num_kv_heads, HEAD_DIM)
    keys, values = torch.full(shape, math.nan, dtype=dtype), torch.full(shape, math.nan, dtype=dtype)
    described, starts, slots, positions = [], [0], [], []
    for num_rows, context in sequences:
        table = [ids.pop() for _ in range(-(-context // BLOCK_SIZE))]
        for position in range(context):
            block, offset = table[position // BLOCK_SIZE], position % BLOCK_SIZE
            keys[block, offset] = torch.randn(num_kv_heads, HEAD_DIM, generator=generator)
            values[block, offset] = torch.randn(num_kv_heads, HEAD_DIM, generator=generator)
        own = range(context - num_rows, context)
        slots += [table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in own]
        positions += own
        starts.append(starts[-1] + num_rows)
        described.append((num_rows, context, table))
    query = torch.randn(starts[-1], num_heads, HEAD_DIM, generator=generator).to(dtype)
    return Case(query, keys, values, make_metadata(ops, described, starts, slots, positions), described)


def make_metadata(
    ops: Ops, sequences: list[tuple[int, int, list[int]]], starts: list[int], slots: list[int], positions: list[int]
) -> AttentionMetadata:
    longest = max(len(table) for _, _, table in sequences)

    def build(plan: object) -> AttentionMetadata:
        return AttentionMetadata(
            query_starts=torch.tensor(starts, dtype=torch.int32),
            context_lens=torch.tensor([context for _, context, _ in sequences], dtype=torch.int32),
            block_tables=torch.tensor([t + [0] * (longest - len(t)) for _, _, t in sequences], dtype=torch.int32),
            slots=torch.tensor(slots),
            positions=torch.tensor(positions),
            query_lens_list=tuple(rows for rows, _, _ in sequences),
            context_lens_list=tuple(context for _, context, _ in sequences),
            block_size=BLOCK_SIZE,
            plan=plan,
        )

    return build(ops.plan_attention(build(None)))


def attention_by_loops(case: Case, window: int | None) -> torch.Tensor:
    """Every row, head and position one by one, in float64."""
    output = torch.empty(case.query.shape, dtype=torch.float64)
    group = case.query.shape[1] // case.keys.shape[2]
    row = 0
    for num_rows, context, table in case.sequences:
        for position in range(context - num_rows, context):
            first = 0 if window is None else max(0, position - window + 1)
            for head in range(case.query.shape[1]):
                places = [(table[p // BLOCK_SIZE], p % BLOCK_SIZE) for p in range(first, position + 1)]
                query = case.query[row, head].double()
                scores = [float(query @ case.keys[b, o, head // group].double()) / HEAD_DIM**0.5 for b, o in places]
                highest = max(scores)
                weights = [math.exp(score - highest) for score in scores]
                total = sum(
                    weight * case.values[b, o, head // group].double()
                    for weight, (b, o) in zip(weights, places, strict=True)
                )
                output[row, head] = total / sum(weights)
            row += 1
    return output


@pytest.fixture(params=[name for name in available_ops() if name in ("reference", "cpu")])
def ops(request: pytest.FixtureRequest) -> Ops:
    return load_ops(request.param)


MIXED = [(1, 1), (5, 5), (1, 17), (3, 21), (1, 9), (1, 40), (8, 8), (2, 4)]


@pytest.mark.parametrize("window", [None, 1, 6, 100])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
def test_paged_attention_equals_loops(
    ops: Ops, window: int | None, num_kv_heads: int, dtype: torch.dtype, tolerance: float
) -> None:
    case = make_case(ops, MIXED, num_kv_heads=num_kv_heads, dtype=dtype)
    result = case.attend(ops, window)
    assert result.dtype == dtype and result.is_contiguous()
    torch.testing.assert_close(result.double(), attention_by_loops(case, window), atol=tolerance, rtol=tolerance)


def test_attention_of_a_row_does_not_depend_on_its_neighbours(ops: Ops) -> None:
    case = make_case(ops, MIXED)
    together = case.attend(ops)
    row = 0
    for num_rows, context, table in case.sequences:
        rows = slice(row, row + num_rows)
        alone = Case(
            case.query[rows],
            case.keys,
            case.values,
            make_metadata(
                ops,
                [(num_rows, context, table)],
                [0, num_rows],
                case.metadata.slots[rows].tolist(),
                case.metadata.positions[rows].tolist(),
            ),
            [(num_rows, context, table)],
        )
        assert torch.equal(alone.attend(ops), together[rows])
        row += num_rows


@given(st.integers(1, 10_000))
def test_padding_is_monotonous_and_under_a_quarter(num_blocks: int) -> None:
    padded = padded_num_blocks(num_blocks)
    assert num_blocks <= padded < num_blocks * 1.25
    assert padded_num_blocks(padded) == padded
    assert padded_num_blocks(num_blocks + 1) >= padded


def test_rope_and_write_kv_equals_loops(ops: Ops) -> None:
    generator = torch.Generator().manual_seed(1)
    num_rows, num_heads, num_kv_heads = 5, 4, 2
    fused = torch.randn(num_rows, num_heads + 2 * num_kv_heads, HEAD_DIM, generator=generator)
    original = fused.clone()
    positions = torch.tensor([0, 1, 7, 300, 41])
    slots = torch.tensor([3, 0, 11, 6, 8])
    frequencies = torch.tensor([1.0, 0.3, 0.1, 0.01])
    keys, values = torch.full((3, 4, num_kv_heads, HEAD_DIM), -5.0), torch.full((3, 4, num_kv_heads, HEAD_DIM), -5.0)
    query, key, value = fused.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    turned = ops.rope_and_write_kv(query, key, value, *ops.rope_rows(positions, frequencies), slots, keys, values)

    def turn(vector: torch.Tensor, position: int) -> torch.Tensor:
        result = torch.empty(HEAD_DIM, dtype=torch.float64)
        for i, frequency in enumerate(frequencies.double().tolist()):
            j = i + HEAD_DIM // 2
            cosine, sine = math.cos(position * frequency), math.sin(position * frequency)
            result[i] = vector[i] * cosine - vector[j] * sine
            result[j] = vector[j] * cosine + vector[i] * sine
        return result

    for row, (position, slot) in enumerate(zip(positions.tolist(), slots.tolist(), strict=True)):
        for head in range(num_heads):
            expected = turn(original[row, head].double(), position)
            torch.testing.assert_close(turned[row, head].double(), expected, atol=2e-5, rtol=0)
        for head in range(num_kv_heads):
            expected = turn(original[row, num_heads + head].double(), position)
            torch.testing.assert_close(keys.flatten(0, 1)[slot, head].double(), expected, atol=2e-5, rtol=0)
            assert torch.equal(values.flatten(0, 1)[slot, head], original[row, num_heads + num_kv_heads + head])
    untouched = [slot for slot in range(12) if slot not in slots.tolist()]
    assert (keys.flatten(0, 1)[untouched] == -5).all() and (values.flatten(0, 1)[untouched] == -5).all()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 8e-3), (torch.float16, 1e-3)])
def test_norms_and_activation_equal_their_definitions(ops: Ops, dtype: torch.dtype, tolerance: float) -> None:
    generator = torch.Generator().manual_seed(2)
    x, residual = (torch.randn(3, 16, generator=generator).to(dtype) * 3 for _ in range(2))
    weight = torch.randn(16, generator=generator).to(dtype)

    def normed(wide: torch.Tensor) -> torch.Tensor:
        return wide / (wide.square().mean(dim=-1, keepdim=True) + 1e-5).sqrt() * weight.double()

    expected_total = (x + residual).double()
    close = {"atol": tolerance, "rtol": tolerance}
    torch.testing.assert_close(ops.rms_norm(x, weight, 1e-5).double(), normed(x.double()), **close)
    heads = x.view(3, 4, 4)[:, 1:3]  # strided, as a slice of a fused projection is
    by_head = ops.rms_norm(heads, weight[:4], 1e-5).double()
    for head in (0, 1):
        wide = heads[:, head].double()
        expected = wide / (wide.square().mean(dim=-1, keepdim=True) + 1e-5).sqrt() * weight[:4].double()
        torch.testing.assert_close(by_head[:, head], expected, **close)
    gate, up = x[:, :8].double(), x[:, 8:].double()
    expected = gate / (1 + (-gate).exp()) * up
    torch.testing.assert_close(ops.silu_mul(x).double(), expected, **close)
    result, total = ops.add_rms_norm(x.clone(), residual.clone(), weight, 1e-5)
    torch.testing.assert_close(total.double(), expected_total, **close)
    torch.testing.assert_close(result.double(), normed(total.double()), **close)


def test_linear_and_embedding(ops: Ops) -> None:
    x, weight, bias = torch.randn(3, 5), torch.randn(7, 5), torch.randn(7)
    torch.testing.assert_close(ops.linear(x, ops.prepare_linear(weight, None)), x @ weight.T)
    torch.testing.assert_close(ops.linear(x, ops.prepare_linear(weight, bias)), x @ weight.T + bias)
    assert ops.linear(x[:0], ops.prepare_linear(weight, bias)).shape == (0, 7)
    ids = torch.tensor([6, 0, 6])
    assert torch.equal(ops.embedding(ids, weight), weight[ids])


def test_each_file_of_kernels_defines_ops() -> None:
    import importlib

    assert {"reference", "cpu"} <= set(available_ops())
    for name in available_ops():
        module = importlib.import_module(f"kernels.{name}")
        assert issubclass(module.Ops, Ops), name
        assert not module.Ops.__abstractmethods__, name


def test_unknown_device_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'tpu' is not supported; supported are: .*cpu.*reference"):
        load_ops("tpu")
    with pytest.raises(ValueError, match="not supported"):
        load_ops("../kernels")
    assert kernels.load_ops("cpu").device == torch.device("cpu")
