"""Attention of many rows by the matrix unit: against the reference, and the same however prompts are cut and shared."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention_cases import TOLERANCES, make_case

from kernels import load_ops
from kernels.cpu.compiled import CompiledOps
from kernels.cpu.few_rows import load_tiles

pytestmark = pytest.mark.skipif(load_tiles() is None, reason="this CPU has no matrix unit")
CHUNKS = [(32, 32), (33, 33), (64, 64), (65, 127), (47, 128), (96, 129), (31 + 128, 300), (300, 300), (40, 1000)]
"""Rows and context, around the sizes that are computed at once."""
TOLERANCE = TOLERANCES[torch.bfloat16]


@pytest.mark.parametrize("window", [None, 1, 20, 128, 300])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(9, 3, 64), (4, 4, 32), (8, 1, 96), (4, 2, 128)])
@pytest.mark.parametrize("block_size", [16, 128])
def test_chunks_equal_the_reference(
    num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, window: int | None
) -> None:
    case = make_case(CHUNKS, num_heads, num_kv_heads, head_dim, block_size)
    result, expected = (
        case.to(torch.bfloat16).attend(load_ops("cpu"), window),
        case.attend(load_ops("reference"), window),
    )
    torch.testing.assert_close(result.float(), expected, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("window", [None, 20, 300])
def test_chunks_of_rounded_kv_equal_the_reference(window: int | None) -> None:
    case = make_case(CHUNKS).rounded()
    expected = case.attend(load_ops("reference"), window)
    result = replace(case, query=case.query.bfloat16()).attend(load_ops("cpu"), window)
    torch.testing.assert_close(result.float(), expected, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("window", [None, 100, 300])
def test_rows_are_the_same_however_a_prompt_is_cut(window: int | None) -> None:
    ops = load_ops("cpu")
    case = make_case([(700, 777)]).to(torch.bfloat16)
    ((num_rows, context, table),) = case.sequences
    whole = case.attend(ops, window)
    for length in (32, 129, 256, 500):
        first = [(length, context - num_rows + length, table)]
        part = replace(case, query=case.query[:length], sequences=first)
        assert torch.equal(part.attend(ops, window), whole[:length])
        rest = replace(case, query=case.query[length:], sequences=[(num_rows - length, context, table)])
        assert torch.equal(rest.attend(ops, window), whole[length:])


def test_threads_and_neighbours_do_not_change_rows() -> None:
    ops = load_ops("cpu")
    case, before = make_case(CHUNKS).to(torch.bfloat16), torch.get_num_threads()
    try:
        results = []
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            results.append(case.attend(ops))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(result, results[0]) for result in results)
    row = 0
    for index, (num_rows, _) in enumerate(CHUNKS):
        assert torch.equal(case.only(index).attend(ops), results[0][row : row + num_rows])
        row += num_rows


def test_the_unit_is_what_attends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else nothing above says anything of it."""
    called = []
    attend = CompiledOps._attend_tiled
    monkeypatch.setattr(CompiledOps, "_attend_tiled", lambda *given: called.append(attend(*given)))
    make_case(CHUNKS).to(torch.bfloat16).attend(load_ops("cpu"))
    assert len(called) == len(CHUNKS)
