"""The compiled CPU operations against the reference, over the shapes that models and schedulers bring."""

from __future__ import annotations

import hashlib
import logging
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from attention_cases import BLOCK_SIZE, MIXED, SHAPES, TOLERANCES, make_case

import kernels.cpu
from kernels import Ops, load_ops
from kernels.cpu import compiled, threads
from kernels.cpu.compiled import CHUNK_ROWS, CompiledOps


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


@pytest.mark.parametrize("window", [None, 1, 20, 300])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim", "dtype"), SHAPES)
def test_attention_equals_reference(
    ops: Ops, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, window: int | None
) -> None:
    case = make_case(MIXED, num_heads, num_kv_heads, head_dim)
    expected = case.attend(load_ops("reference"), window)
    result = case.to(dtype).attend(ops, window)
    assert result.dtype == dtype and result.is_contiguous()
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(result.float(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("num_rows", [1, 7, CHUNK_ROWS, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_long_contexts_equal_reference(ops: Ops, num_rows: int, dtype: torch.dtype) -> None:
    case = make_case([(num_rows, 8191)])
    result = case.to(dtype).attend(ops)
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(result.float(), case.attend(load_ops("reference")), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_size", [1, 12, 48, 128])
def test_attention_over_blocks_of_other_sizes(ops: Ops, block_size: int, dtype: torch.dtype) -> None:
    case = make_case(MIXED, block_size=block_size)
    for window in (None, 20):
        expected, result = case.attend(load_ops("reference"), window), case.to(dtype).attend(ops, window)
        torch.testing.assert_close(result.float(), expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


@pytest.mark.parametrize("window", [None, 20])
def test_bfloat16_without_a_matrix_unit(monkeypatch: pytest.MonkeyPatch, window: int | None) -> None:
    monkeypatch.setattr(compiled, "load_tiled_attention", lambda: None)
    case = make_case(MIXED)
    result = case.to(torch.bfloat16).attend(load_ops("cpu"), window)
    torch.testing.assert_close(result.float(), case.attend(load_ops("reference"), window), atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 100])
def test_rows_do_not_depend_on_their_neighbours(ops: Ops, dtype: torch.dtype, window: int | None) -> None:
    case = make_case(MIXED).to(dtype)
    together, row = case.attend(ops, window), 0
    for index, (num_rows, _, _) in enumerate(case.sequences):
        assert torch.equal(case.only(index).attend(ops, window), together[row : row + num_rows])
        row += num_rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_verified_row_equals_a_decoded_one(ops: Ops, dtype: torch.dtype) -> None:
    for num_rows, context in [(2, 17), (8, 300), (5, 257), (CHUNK_ROWS - 1, 600)]:
        case = make_case([(num_rows, context)]).to(dtype)
        assert torch.equal(case.attend(ops)[-1:], case.only(0, last_rows=1).attend(ops))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_threads_do_not_change_results(ops: Ops, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    case = make_case([(1, 2000), (3, 900), (1, 5000)]).to(dtype)
    shared = case.attend(ops)
    torch.set_num_threads(1)
    assert torch.equal(case.attend(ops), shared)
    torch.set_num_threads(2)
    monkeypatch.setattr(threads, "find_parallel", lambda: None)
    assert torch.equal(case.attend(load_ops("cpu")), shared)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])  # the matrix unit multiplies keys by zeros as well
@pytest.mark.parametrize("place", [0, 3])
@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_nan_within_the_context_is_seen(ops: Ops, dtype: torch.dtype, place: int, wrong: float) -> None:
    """By the heads that read it, and by no others: those say what they say without it."""
    case = make_case([(1, 40), (1, 300), (1, 300)]).to(dtype)
    case.values[case.sequences[1][2][2], 5, 2, 7] = math.nan
    without = case.attend(ops)
    case.keys[case.sequences[0][2][0], place, 0] = wrong
    case.keys[case.sequences[2][2][0], place, 1] = wrong
    result = case.attend(ops)
    assert result[0, :3].isnan().all() and result[2, 3:6].isnan().all()
    assert result[1, 6:, 7].isnan().all() and result.isnan().sum() == 2 * 3 * 64 + 3
    others = ~result.isnan()
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(result[others], without[others], atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", list(TOLERANCES))
@pytest.mark.parametrize(("num_rows", "size"), [(1, 1), (1, 576), (3, 7), (130, 576)])
def test_norms_and_activation_equal_reference(ops: Ops, dtype: torch.dtype, num_rows: int, size: int) -> None:
    generator, reference = torch.Generator().manual_seed(size), load_ops("reference")
    x, residual = (torch.randn(num_rows, size, generator=generator).mul(3).to(dtype) for _ in range(2))
    weight, gate_up = torch.randn(size, generator=generator).to(dtype), torch.cat((x, residual), dim=1)
    tolerance = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}[dtype]
    close = {"atol": tolerance, "rtol": tolerance}
    torch.testing.assert_close(ops.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), **close)
    torch.testing.assert_close(ops.silu_mul(gate_up), reference.silu_mul(gate_up), **close)
    expected, expected_total = reference.add_rms_norm(x, residual, weight, 1e-5)
    result, total = ops.add_rms_norm(x.clone(), residual.clone(), weight, 1e-5)
    assert torch.equal(total, expected_total)
    torch.testing.assert_close(result, expected, **close)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_are_rounded_as_torch_rounds(ops: Ops, dtype: torch.dtype) -> None:
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    other = every[torch.randperm(len(every), generator=torch.Generator().manual_seed(3))]
    _, total = ops.add_rms_norm(every[None].clone(), other[None].clone(), torch.ones(len(every), dtype=dtype), 1e-5)
    torch.testing.assert_close(total[0], every + other, atol=0, rtol=0, equal_nan=True)


def test_activation_of_extreme_numbers(ops: Ops) -> None:
    gate = torch.cat((torch.linspace(-90, 90, 999), torch.tensor([-1e30, -200.0, 1e30, math.inf, math.nan])))
    result = ops.silu_mul(torch.cat((gate, torch.ones(len(gate))))[None])[0]
    expected = gate.double() / (1 + (-gate.double()).exp())
    torch.testing.assert_close(result[:999].double(), expected[:999], atol=1e-30, rtol=4e-7)
    assert result[999:1001].abs().max() < 1e-7
    assert result[1001] == 1e30 and result[1002] == math.inf and result[1003].isnan()


@pytest.mark.parametrize("dtype", list(TOLERANCES))
def test_rope_equals_reference_on_separate_tensors(ops: Ops, dtype: torch.dtype) -> None:
    generator, reference = torch.Generator().manual_seed(5), load_ops("reference")
    num_rows = 70
    parts = [torch.randn(num_rows, heads, 80, generator=generator).to(dtype) for heads in (4, 2, 2)]
    slots = torch.randperm(96, generator=generator)[:num_rows]
    rows = ops.rope_rows(torch.randint(0, 9000, (num_rows,), generator=generator), torch.rand(40, generator=generator))
    found = []
    for each in (ops, reference):
        caches = [torch.zeros(6, 16, 2, 80, dtype=dtype) for _ in range(2)]
        turned = each.rope_and_write_kv(*(part.clone() for part in parts), *rows, slots, *caches)
        found.append((turned, *caches))
    for result, expected in zip(*found, strict=True):
        tolerance = {torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
        torch.testing.assert_close(result, expected, atol=tolerance, rtol=tolerance)


def test_without_the_compiler_the_reference_runs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "kernels.cpu.compiled", None)
    with caplog.at_level(logging.WARNING):
        ops = load_ops("cpu")
    assert "slow reference" in caplog.text
    ops.prepare(9, 3, 64, BLOCK_SIZE, torch.float32)
    case = make_case(MIXED)
    assert torch.equal(case.attend(ops), case.attend(load_ops("reference")))
    x = torch.randn(2, 8)
    assert torch.equal(ops.silu_mul(x), load_ops("reference").silu_mul(x))


def test_without_a_place_for_machine_code_kernels_are_compiled_anew(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compile_ = threads.cfunc

    def refuse_to_keep(*arguments: object, cache: bool = False, **options: object) -> object:
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return compile_(*arguments, **options)

    monkeypatch.setattr(threads, "cfunc", refuse_to_keep)
    x = torch.randn(3, 10)
    with caplog.at_level(logging.INFO):
        result = CompiledOps().silu_mul(x)
    assert "nowhere to keep them: cannot cache function" in caplog.text
    torch.testing.assert_close(result, load_ops("reference").silu_mul(x))


def test_any_change_of_a_source_makes_another_revision(tmp_path: Path) -> None:
    folder = tmp_path / "cpu"
    shutil.copytree(Path(kernels.cpu.__file__).parent, folder, ignore=shutil.ignore_patterns("__pycache__"))
    assert threads.revision(folder) == threads.revision()
    for source in folder.glob("*.py"):
        before = threads.revision(folder)
        source.write_text(source.read_text() + "\n")
        assert threads.revision(folder) != before, source.name


RACER = """
import torch, hashlib
from kernels import load_ops
x = torch.arange(64.0).view(2, 32)
print(hashlib.sha256(load_ops("cpu").silu_mul(x).numpy().tobytes()).hexdigest())
"""


def test_two_processes_may_compile_at_once(ops: Ops, tmp_path: Path) -> None:
    root = Path(kernels.cpu.__file__).parents[2]
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(root)}
    expected = hashlib.sha256(ops.silu_mul(torch.arange(64.0).view(2, 32)).numpy().tobytes()).hexdigest()
    for _ in range(2):  # first with nothing there, then with what the race left
        running = [
            subprocess.Popen([sys.executable, "-c", RACER], env=environment, stdout=subprocess.PIPE, text=True)
            for _ in range(2)
        ]
        answers = [process.communicate(timeout=120)[0].strip() for process in running]
        assert answers == [expected, expected]
    assert list(tmp_path.rglob("*.nbi")), "nothing was kept"
