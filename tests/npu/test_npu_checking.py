"""`python -m kernels.npu`: a device that does as documented passes, and each operation that does not is named."""

from __future__ import annotations

import pytest
import torch
from simulated_host import Npu

from kernels import load_ops, reference
from kernels.npu import linear, opening
from kernels.npu.__main__ import main
from kernels.npu.checking import Checker, Outcome


def outcomes() -> dict[str, Outcome]:
    with torch.inference_mode():
        return {outcome.name: outcome for outcome in Checker(load_ops("npu")).run()}


def faults() -> set[str]:
    """Names of what is wrong, without dtypes and shapes."""
    return {name.partition(",")[0] for name, outcome in outcomes().items() if outcome.fault is not None}


def test_a_device_as_documented(npu: Npu, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 * 7 + 2 * 5 + 1 + 2 + 1 and lines[-1] == "all as documented"
    assert all(line.startswith("ok    ") for line in lines[:-1])
    used = {name for name, count in npu.operators.num_calls.items() if count}
    assert used >= {"npu_rotary_mul", "npu_scatter_pa_kv_cache", "npu_quant_matmul", "_npu_paged_attention_splitfuse"}


@pytest.mark.parametrize(
    ("operator", "answer", "named"),
    [
        ("npu_rms_norm", lambda x, gamma, epsilon: (x * gamma, x), "rms_norm"),
        ("npu_add_rms_norm", lambda x, y, gamma, epsilon: (x + y, x, y), "add_rms_norm"),
        ("npu_swiglu", lambda x: x[..., : x.shape[-1] // 2], "silu_mul"),
        ("npu_rotary_mul", lambda x, cosine, sine: x * cosine - sine * x.flip(-1), "rotation and KV write"),
        ("npu_scatter_pa_kv_cache", lambda *tensors, cache_mode: None, "rotation and KV write"),
        ("npu_quant_matmul", lambda x, y, scale, **given: (x.float() @ y.float()).bfloat16(), "linear"),
    ],
)
def test_an_operator_that_answers_otherwise(
    npu: Npu, operator: str, answer: object, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.ops.npu, operator, answer)
    assert faults() == {named}


def test_far_positions_are_looked_at(npu: Npu, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device whose cosines are right up to some angle."""
    exact = reference.Ops.rope_rows

    def rope_rows(self: reference.Ops, positions: torch.Tensor, frequencies: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return exact(self, positions if type(self) is reference.Ops else positions.clamp_max(50_000), frequencies)

    monkeypatch.setattr(reference.Ops, "rope_rows", rope_rows)
    assert faults() == {"rotation and KV write"}


def test_refused_operators_are_named_with_their_reason(npu: Npu, capsys: pytest.CaptureFixture[str]) -> None:
    npu.operators.refused["npu_fused_infer_attention_score"] = lambda query: query.shape[2] == 64
    assert main(["0"]) == 1
    out = capsys.readouterr().out
    wrong = [line for line in out.splitlines() if line.startswith("WRONG")]
    assert len(wrong) == 3 and all("heads of 64" in line and "not supported by this device" in line for line in wrong)
    assert out.splitlines()[-1] == "3 wrong"


def test_weights_that_are_laid_out_otherwise(npu: Npu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "to_fractal", lambda weight: weight.flip(0))
    assert faults() == {"linear"}


def test_a_profiler_that_does_not_count(npu: Npu) -> None:
    npu.profiler.kernels = []
    assert faults() == {"counting of units", "counting of memory"}


def test_without_a_device(npu: Npu, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    npu.device.num_devices = 0
    assert main([]) == 2
    assert "kernels.npu: no NPU is visible" in capsys.readouterr().err
    assert opening.SEE == "see docs/npu.md"
