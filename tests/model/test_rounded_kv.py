"""KV in 8 bits: how it is rounded, and attention to it, against the reference."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from attention_cases import MIXED, TOLERANCES, make_case

from kernels import Ops, load_ops
from kernels.cpu.compiled import CHUNK_ROWS
from kernels.reference import rotate, round_kv, widen_kv

SHAPES = [(9, 3, 64, torch.float32), (9, 3, 64, torch.bfloat16), (2, 2, 80, torch.float16)]
SHAPES += [(32, 8, 64, torch.bfloat16), (6, 2, 128, torch.bfloat16)]


@pytest.fixture
def ops() -> Ops:
    return load_ops("cpu")


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    """Whatever number the process is given for everything else."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


# Of both kernels and of all types some; each shape is compiled.
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim", "dtype"), SHAPES)
def test_attention_to_rounded_kv_equals_reference(
    ops: Ops, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, window: int | None
) -> None:
    case = make_case(MIXED, num_heads, num_kv_heads, head_dim).rounded()
    expected = case.attend(load_ops("reference"), window)
    result = replace(case, query=case.query.to(dtype)).attend(ops, window)
    assert result.dtype == dtype and result.is_contiguous()
    few = torch.tensor([num_rows < CHUNK_ROWS for num_rows, _ in MIXED for _ in range(num_rows)])
    # Chunks round their weights to the query's type, the others do not.
    for rows, tolerance in ((few, TOLERANCES[dtype] * 0.4), (~few, TOLERANCES[dtype])):
        torch.testing.assert_close(result[rows].float(), expected[rows], atol=tolerance, rtol=2 * tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_size", [12, 48])
def test_rounded_kv_in_blocks_that_parts_of_a_context_cut(ops: Ops, block_size: int, dtype: torch.dtype) -> None:
    case = make_case(MIXED, block_size=block_size).rounded()
    for window in (None, 20):
        expected = case.attend(load_ops("reference"), window)
        result = replace(case, query=case.query.to(dtype)).attend(ops, window)
        torch.testing.assert_close(result.float(), expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


@pytest.mark.parametrize("num_rows", [1, 7, CHUNK_ROWS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_long_contexts_of_rounded_kv_equal_reference(ops: Ops, num_rows: int, dtype: torch.dtype) -> None:
    case = make_case([(num_rows, 8191)]).rounded()
    result = replace(case, query=case.query.to(dtype)).attend(ops)
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(result.float(), case.attend(load_ops("reference")), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("window", [None, 100])
def test_rows_over_rounded_kv_do_not_depend_on_neighbours_or_threads(ops: Ops, window: int | None) -> None:
    case = make_case(MIXED).rounded()
    case = replace(case, query=case.query.bfloat16())
    together, row = case.attend(ops, window), 0
    for index, (num_rows, _, _) in enumerate(case.sequences):
        assert torch.equal(case.only(index).attend(ops, window), together[row : row + num_rows])
        if num_rows < CHUNK_ROWS:  # as a verified row equals a decoded one
            last = case.only(index, last_rows=1).attend(ops, window)
            assert torch.equal(last, together[row + num_rows - 1 : row + num_rows])
        row += num_rows
    torch.set_num_threads(1)
    assert torch.equal(case.attend(ops, window), together)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_in_rounded_kv_is_seen(ops: Ops, dtype: torch.dtype) -> None:
    case = make_case([(1, 40), (1, 300)])
    case.keys[case.sequences[0][2][0], 3, 0, 5] = math.nan
    case.values[case.sequences[1][2][2], 5, 2, 7] = math.nan
    case = case.rounded()
    result = replace(case, query=case.query.to(dtype)).attend(ops)
    assert result[0, :3].isnan().all() and not result[0, 3:].isnan().any()
    assert result[1, 6:].isnan().all() and not result[1, :6].isnan().any()


def test_extreme_numbers_in_rounded_kv(ops: Ops) -> None:
    case = make_case([(1, 70)])
    case.query.mul_(30)  # one position takes nearly all of the weight
    case.keys[..., 1] *= 100
    case.values[:, ::3] *= 1e-20
    case.values[case.sequences[0][2][0], 0] = 0
    case = case.rounded()
    expected = case.attend(load_ops("reference"))
    for dtype, tolerance in ((torch.float32, 3e-6), (torch.bfloat16, 4e-2)):
        result = replace(case, query=case.query.to(dtype)).attend(ops).float()
        torch.testing.assert_close(result, expected, atol=tolerance, rtol=tolerance)


def test_rounding_of_kv() -> None:
    x = torch.tensor([[1.0, -2.0, 0.5, 2.0], [0.0, 0.0, 0.0, 0.0], [1e-3, math.nan, 0.0, 1.0]])
    cache = round_kv(x)
    assert cache.dtype == torch.int8 and cache.shape == (3, 8)
    assert cache[0, :4].tolist() == [64, -127, 32, 127]  # 63.5 and 31.75
    wide = widen_kv(cache, torch.float32)
    torch.testing.assert_close(wide[:2], x[:2], atol=2 / 254 + 1e-6, rtol=0)
    assert wide[1].tolist() == [0, 0, 0, 0] and wide[2].isnan().all()


@pytest.mark.parametrize("dtype", list(TOLERANCES))
@pytest.mark.parametrize(("num_kv_heads", "head_dim"), [(2, 80), (3, 64)])
def test_kv_is_rounded_as_the_reference_rounds(ops: Ops, dtype: torch.dtype, num_kv_heads: int, head_dim: int) -> None:
    generator, num_rows = torch.Generator().manual_seed(5), 70
    query, key, value = (
        torch.randn(num_rows, heads, head_dim, generator=generator).to(dtype)
        for heads in (2 * num_kv_heads, num_kv_heads, num_kv_heads)
    )
    value[0], value[1, 1] = 0, torch.linspace(-1, 1e4, head_dim).to(dtype)
    slots = torch.randperm(96, generator=generator)[:num_rows]
    positions = torch.randint(0, 9000, (num_rows,), generator=generator)
    rows = ops.rope_rows(positions, torch.rand(head_dim // 2, generator=generator))
    keys, values = (torch.zeros(6, 16, num_kv_heads, head_dim + 4, dtype=torch.int8) for _ in range(2))
    ops.rope_and_write_kv(query.clone(), key.clone(), value.clone(), *rows, slots, keys, values)
    written = values.flatten(0, 1)[slots]
    assert torch.equal(written, round_kv(value))
    turned = rotate(key, *rows)
    largest = turned.float().abs().amax(dim=-1, keepdim=True)
    # Products may be fused with sums or not: a step apart.
    far = (widen_kv(keys.flatten(0, 1)[slots], torch.float32) - turned.float()).abs() / largest
    assert far.max() <= (0.5 / 127 if dtype == torch.float32 else 1.6 / 127) + 1e-4
    untouched = torch.ones(96, dtype=torch.bool).index_fill_(0, slots, False)
    assert not keys.flatten(0, 1)[untouched].any()
