"""`kernels.npu.Ops` over the simulated operators against the reference, and how it chooses among operators."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace
from itertools import accumulate

import pytest
import torch
from simulated_host import Npu

import kernels.npu
from kernels import AttentionMetadata, load_ops, reference
from kernels.npu import attention as attention_module
from kernels.npu.attention import FusedAttention, PagedAttention, PlainAttention

BLOCK_SIZE = 128
FUSED, PAGED, SPLITFUSE = "npu_fused_infer_attention_score", "_npu_paged_attention", "_npu_paged_attention_splitfuse"
DECODING = [(1, 1), (1, 128), (1, 129), (1, 300)]
CHUNKS = [(5, 5), (3, 131), (130, 130), (2, 257)]
MIXED = [(1, 1), (5, 5), (1, 129), (3, 200), (1, 40), (128, 128)]
"""Sequences of (query rows, context)."""


@dataclass(frozen=True)
class Case:
    """A packed batch over a cache whose other places are numbers that nobody may read."""

    query: torch.Tensor  # [T, Hq, D]
    keys: torch.Tensor  # [num_blocks, BLOCK_SIZE, Hkv, D]
    values: torch.Tensor  # [num_blocks, BLOCK_SIZE, Hkv, D]
    metadata: AttentionMetadata

    def attend(self, ops: kernels.Ops, window: int | None = None) -> torch.Tensor:
        metadata = replace(self.metadata, plan=ops.plan_attention(self.metadata))
        scale = self.query.shape[2] ** -0.5
        return ops.paged_attention(self.query, self.keys, self.values, metadata, scale, window)


def make_case(sequences: list[tuple[int, int]], num_heads: int = 4, num_kv_heads: int = 2, head_dim: int = 64) -> Case:
    generator = torch.Generator().manual_seed(len(sequences))
    counts = [-(-context // BLOCK_SIZE) for _, context in sequences]
    ids = torch.randperm(sum(counts) + 2, generator=generator).tolist()
    tables = [[ids.pop() for _ in range(count)] for count in counts]
    shape = (sum(counts) + 2, BLOCK_SIZE, num_kv_heads, head_dim)
    keys, values = torch.full(shape, 1e4), torch.full(shape, 1e4)
    for (_, context), table in zip(sequences, tables, strict=True):
        for cache in (keys, values):
            content = torch.randn(context, num_kv_heads, head_dim, generator=generator)
            for position in range(context):
                cache[table[position // BLOCK_SIZE], position % BLOCK_SIZE] = content[position]
    positions = [position for rows, context in sequences for position in range(context - rows, context)]
    metadata = AttentionMetadata(
        query_starts=torch.tensor([0, *accumulate(rows for rows, _ in sequences)], dtype=torch.int32),
        context_lens=torch.tensor([context for _, context in sequences], dtype=torch.int32),
        block_tables=torch.tensor([t + [0] * (max(counts) - len(t)) for t in tables], dtype=torch.int32),
        slots=torch.arange(len(positions)),
        positions=torch.tensor(positions),
        query_lens_list=tuple(rows for rows, _ in sequences),
        context_lens_list=tuple(context for _, context in sequences),
        block_size=BLOCK_SIZE,
    )
    query = torch.randn(len(positions), num_heads, head_dim, generator=generator)
    return Case(query.bfloat16(), keys.bfloat16(), values.bfloat16(), metadata)


def prepared(case: Case) -> kernels.npu.Ops:
    ops = load_ops("npu")
    assert isinstance(ops, kernels.npu.Ops)
    _, num_heads, head_dim = case.query.shape
    ops.prepare(num_heads, case.keys.shape[2], head_dim, BLOCK_SIZE, case.query.dtype)
    return ops


def assert_like_reference(result: torch.Tensor, case: Case, window: int | None = None) -> None:
    expected = case.attend(load_ops("reference"), window)
    assert result.dtype == case.query.dtype and result.is_contiguous()
    torch.testing.assert_close(result, expected, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("sequences", [DECODING, CHUNKS, MIXED])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(4, 2, 64), (4, 4, 64), (8, 1, 128), (2, 2, 192)])
def test_every_phase_is_one_call_of_the_fused_operator(
    npu: Npu, sequences: list[tuple[int, int]], num_heads: int, num_kv_heads: int, head_dim: int
) -> None:
    case = make_case(sequences, num_heads, num_kv_heads, head_dim)
    ops = prepared(case)
    npu.operators.num_calls.clear()
    assert_like_reference(case.attend(ops), case)
    assert npu.operators.num_calls == {FUSED: 1}


@pytest.mark.parametrize(("sequences", "operator"), [(DECODING, PAGED), (CHUNKS, SPLITFUSE), (MIXED, SPLITFUSE)])
@pytest.mark.parametrize("head_dim", [32, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_head_sizes_run_by_the_older_operators(
    npu: Npu, sequences: list[tuple[int, int]], operator: str, head_dim: int, dtype: torch.dtype
) -> None:
    case = make_case(sequences, head_dim=head_dim)
    case = replace(case, query=case.query.to(dtype), keys=case.keys.to(dtype), values=case.values.to(dtype))
    ops = prepared(case)
    assert not npu.operators.num_calls[FUSED], "the documents exclude it: it is not even tried"
    npu.operators.num_calls.clear()
    assert_like_reference(case.attend(ops), case)
    assert npu.operators.num_calls == {operator: 1}


def test_lengths_of_the_older_operators_stay_on_the_host(npu: Npu) -> None:
    case = make_case(MIXED, head_dim=32)
    for tensor in (case.metadata.context_lens, case.metadata.query_starts, case.metadata.block_tables):
        npu.operators.placement.put_on_device(tensor)
    assert_like_reference(case.attend(prepared(case)), case)


def test_a_head_size_that_no_operator_takes_runs_by_the_reference(npu: Npu) -> None:
    case = make_case(MIXED, head_dim=24)
    result = case.attend(prepared(case))
    assert torch.equal(result, case.attend(load_ops("reference"))) and not npu.operators.num_calls


def test_what_the_device_refuses_is_found_at_load(npu: Npu, caplog: pytest.LogCaptureFixture) -> None:
    """Grouped heads of 64, which some versions of CANN lack."""
    npu.operators.refused[FUSED] = lambda query: query.shape[2] == 64
    case = make_case(MIXED)
    with caplog.at_level(logging.INFO):
        ops = prepared(case)
    assert_like_reference(case.attend(ops), case)
    assert f"attention does not run by {FUSED}: {FUSED}: not supported by this device" in caplog.text
    assert f"attention runs by {PAGED}" in caplog.text
    npu.operators.refused[SPLITFUSE] = lambda query: True
    assert torch.equal(case.attend(prepared(case)), case.attend(load_ops("reference")))


def test_a_missing_nnal_is_named(npu: Npu, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    class NoOperators:
        def __getattr__(self, name: str) -> object:
            raise AttributeError(f"'_OpNamespace' 'atb' object has no attribute '{name}'")

    case = make_case(MIXED, head_dim=32)
    monkeypatch.setattr(torch.ops, "atb", NoOperators())
    result = case.attend(prepared(case))
    assert f"attention does not run by {PAGED}: NNAL is missing, or its nnal/atb/set_env.sh" in caplog.text
    assert torch.equal(result, case.attend(load_ops("reference")))


@pytest.mark.parametrize("fault", ["mask", "lengths", "numbers"])
def test_an_operator_that_answers_otherwise_is_not_used(
    npu: Npu, fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever a version of an operator may mean by its arguments, wrong results are seen before the first request."""
    true = FusedAttention.attend

    def attend(self, query, keys, values, metadata, plan, scale):  # type: ignore[no-untyped-def]
        if fault == "numbers":
            return query * math.nan
        step = metadata.query_lens_list
        hidden = {"lengths": (1,) * len(step), "mask": step}[fault]
        shown = tuple(context - (rows > 1) for rows, context in zip(hidden, metadata.context_lens_list, strict=True))
        contexts = shown if fault == "mask" else tuple(max(1, context - 1) for context in metadata.context_lens_list)
        contexts = tuple(max(rows, context) for rows, context in zip(step, contexts, strict=True))
        changed = replace(metadata, context_lens_list=contexts)
        return true(self, query, keys, values, changed, self.plan(changed, query.dtype), scale)

    monkeypatch.setattr(FusedAttention, "attend", attend)
    case = make_case(MIXED)
    ops = prepared(case)
    assert f"attention does not run by {FUSED}: its results differ from the reference by" in caplog.text
    npu.operators.num_calls.clear()
    assert_like_reference(case.attend(ops), case)
    assert npu.operators.num_calls == {SPLITFUSE: 1}


@pytest.mark.parametrize(("window", "operator"), [(1, 0), (100, 0), (199, 0), (200, 1), (10_000, 1)])
def test_windows_are_the_references_work_where_they_hide_something(npu: Npu, window: int, operator: int) -> None:
    case = make_case(MIXED)
    ops = prepared(case)
    npu.operators.num_calls.clear()
    assert_like_reference(case.attend(ops, window), case, window)
    assert npu.operators.num_calls[FUSED] == operator


def test_one_step_has_layers_with_and_without_a_window(npu: Npu) -> None:
    case = make_case(MIXED)
    ops = prepared(case)
    metadata = replace(case.metadata, plan=ops.plan_attention(case.metadata))
    results = [ops.paged_attention(case.query, case.keys, case.values, metadata, 0.125, w) for w in (50, None, 50)]
    assert torch.equal(results[0], results[2])
    assert_like_reference(results[0], case, 50)
    assert_like_reference(results[1], case)


def test_choices_by_documented_limits() -> None:
    shape = attention_module.AttentionShape(4, 2, 64, 128, torch.bfloat16)
    cpu = torch.device("cpu")
    fused, paged, plain = FusedAttention(cpu), PagedAttention(cpu), PlainAttention(cpu)
    assert (fused.refuses(shape), paged.refuses(shape), plain.refuses(shape)) == (None, None, None)
    for changes, message in [
        ({"dtype": torch.float32}, "dtype"),
        ({"head_dim": 80}, "head_dim"),
        ({"block_size": 64}, "block_size"),
        ({"block_size": 640}, "block_size"),
        ({"num_heads": 300, "num_kv_heads": 100}, "heads"),
        ({"num_heads": 65, "num_kv_heads": 1}, "heads"),
    ]:
        assert message in (fused.refuses(replace(shape, **changes)) or ""), changes
    for changes, message in [
        ({"dtype": torch.float32}, "dtype"),
        ({"head_dim": 24}, "head_dim"),
        ({"head_dim": 272}, "head_dim"),
        ({"block_size": 256}, "block_size"),
        ({"block_size": 24}, "block_size"),
    ]:
        assert message in (paged.refuses(replace(shape, **changes)) or ""), changes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rope_and_write_kv_equals_reference(npu: Npu, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(4)
    fused = torch.randn(5, 8, 64, generator=generator).to(dtype)
    positions, slots = torch.tensor([0, 1, 7, 30_000, 41]), torch.tensor([3, 0, 250, 129, 8])
    frequencies = 1 / 10_000 ** (torch.arange(0, 64, 2) / 64)
    written = []
    for ops in (load_ops("npu"), load_ops("reference")):
        keys, values = torch.full((2, 128, 2, 64), -5.0, dtype=dtype), torch.full((2, 128, 2, 64), -5.0, dtype=dtype)
        query, key, value = fused.clone().split((4, 2, 2), dim=1)
        rope = ops.rope_rows(positions, frequencies)
        written.append((ops.rope_and_write_kv(query, key, value, *rope, slots, keys, values), keys, values))
    for mine, expected in zip(*written, strict=True):
        torch.testing.assert_close(mine, expected, atol=0, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norms_and_activation_equal_reference(npu: Npu, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    x, residual = (torch.randn(3, 32, generator=generator).to(dtype) * 3 for _ in range(2))
    weight = torch.randn(32, generator=generator).to(dtype)
    mine, exact = load_ops("npu"), load_ops("reference")
    one_rounding = {"atol": 0.0, "rtol": 1e-2}
    torch.testing.assert_close(mine.rms_norm(x, weight, 1e-5), exact.rms_norm(x, weight, 1e-5), **one_rounding)
    heads = x.view(3, 4, 8)[:, 1:3]  # strided, as a slice of a fused projection is
    expected = exact.rms_norm(heads, weight[:8], 1e-5)
    torch.testing.assert_close(mine.rms_norm(heads, weight[:8], 1e-5), expected, **one_rounding)
    expected_pair = exact.add_rms_norm(x, residual, weight, 1e-5)
    for result, expected in zip(mine.add_rms_norm(x, residual, weight, 1e-5), expected_pair, strict=True):
        torch.testing.assert_close(result, expected, **one_rounding)
    torch.testing.assert_close(mine.silu_mul(x), exact.silu_mul(x), **one_rounding)
    assert not torch.equal(mine.rms_norm(x, weight, 1e-5), exact.rms_norm(x, weight, 1.0)), "epsilon arrives"


def test_linear_layers(npu: Npu) -> None:
    generator = torch.Generator().manual_seed(6)
    x, weight, bias = (torch.randn(*size, generator=generator).bfloat16() for size in ((3, 16), (32, 16), (32,)))
    mine, exact = load_ops("npu"), load_ops("reference")
    for given in (None, bias):
        result = mine.linear(x, mine.prepare_linear(weight, given))
        assert torch.equal(result, exact.linear(x, exact.prepare_linear(weight, given)))
    assert npu.operators.num_calls["npu_format_cast"] == 2
    table = weight.clone()
    mine.prepare_linear(weight, None)
    assert torch.equal(mine.embedding(torch.tensor([3]), weight), table[3:4]), "a tied embedding stays as it was"


def test_8_bit_layers(npu: Npu) -> None:
    """To the definition: symmetric, a scale for each row of inputs and each output; bias added afterwards."""
    generator = torch.Generator().manual_seed(7)
    x, weight, bias = (torch.randn(*size, generator=generator).bfloat16() for size in ((5, 64), (32, 64), (32,)))
    ops = load_ops("npu")
    rounded, scales = reference.round_weight(weight)
    spread = x.float().abs().amax(1, keepdim=True) / 127
    expected = ((x.float() / spread).round() * spread) @ (rounded.float() * scales[:, None]).T
    result = ops.linear(x, ops.prepare_linear(weight, None, "int8"))
    torch.testing.assert_close(result, expected.bfloat16(), atol=0.05, rtol=1e-2)
    with_bias = ops.linear(x, ops.prepare_linear(weight, bias, "int8"))
    torch.testing.assert_close(with_bias, (expected + bias.float()).bfloat16(), atol=0.05, rtol=1e-2)
    exact = x.float() @ weight.float().T
    assert (result.float() - exact).abs().mean() < 0.02 * exact.abs().mean()


def test_what_is_too_wide_for_8_bits_is_not_rounded(npu: Npu) -> None:
    ops = load_ops("npu")
    weight = torch.ones(65536, 16, dtype=torch.bfloat16)
    assert ops.linear(weight[:2], ops.prepare_linear(weight, None, "int8")).shape == (2, 65536)
    assert not npu.operators.num_calls["npu_quant_matmul"]
