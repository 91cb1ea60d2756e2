"""Linear layers of the CPU in every form they may take: against float64, against the reference, and in memory."""

from __future__ import annotations

import ctypes
import gc
import math
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from model_driver import Driver, load_runner
from tiny_models import family_config, random_weights, write_folder

from kernels import Quantization, load_ops, reference
from kernels.cpu import linear
from kernels.cpu.few_rows import (
    FEW_ROWS_FLOAT,
    FEW_ROWS_INT8,
    FEW_ROWS_INT8_BEFORE_TILES,
    TILED_ROWS_FLOAT,
    load_few_rows,
)
from kernels.cpu.linear import LinearLayers

DTYPES = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
"""Tolerance of a product, relative to the largest of its row."""
SIZES = [(1, 1), (7, 5), (33, 17), (64, 64), (96, 100), (577, 576), (65, 1536)]
"""(N, K)."""
SWITCHES = (FEW_ROWS_FLOAT, FEW_ROWS_INT8, FEW_ROWS_INT8_BEFORE_TILES, TILED_ROWS_FLOAT)
NUM_ROWS = sorted({0, 1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 47, 130, *SWITCHES, *(number + 1 for number in SWITCHES)})
PROMPT = [5, 17, 300, 2, 9, 64, 64, 101]
M_MMAP_THRESHOLD = -3
"""Of mallopt: larger pieces of memory are mapped one by one."""
needs_packed_bfloat16 = pytest.mark.skipif(
    not (linear.can_pack(torch.bfloat16) and linear.can_pack_int8()),
    reason="this CPU has no products of bfloat16 or 8-bit numbers, whose weights are left in order",
)


@pytest.fixture(params=["compiled", "torch"])
def layers(request: pytest.FixtureRequest) -> LinearLayers:
    """With the compiled kernels, where they can be had, and without."""
    return LinearLayers(load_few_rows() if request.param == "compiled" else None)


@pytest.fixture
def restored_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def in_all_strides(num_rows: int, size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Rows that are dense, apart, transposed, and with gaps."""
    return [
        random(num_rows, size, dtype=dtype) + 0.3,
        random(num_rows, 2 * size, dtype=dtype)[:, size:],
        random(size, num_rows, dtype=dtype).T,
        random(num_rows, 2 * size, dtype=dtype)[:, ::2],
    ]


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("num_out", "num_in"), SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_equal_those_in_float64(
    layers: LinearLayers, dtype: torch.dtype, num_out: int, num_in: int, with_bias: bool
) -> None:
    check_products(layers, dtype, num_out, num_in, with_bias)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("num_out", "num_in"), [(1, 1), (33, 17), (96, 100)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_products_of_widened_weights_equal_those_in_float64(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, num_out: int, num_in: int, with_bias: bool
) -> None:
    """As on a CPU that has no such products, in parts of 30 outputs or fewer."""
    monkeypatch.setattr(linear, "has_products", lambda dtype: False)
    monkeypatch.setattr(linear, "WIDENED_BYTES", 4 * 30 * 100)
    layers = LinearLayers(None)
    assert isinstance(layers.prepare(random(2, 3, dtype=dtype), None, "none"), linear.WidenedWeights)
    check_products(layers, dtype, num_out, num_in, with_bias)


def check_products(layers: LinearLayers, dtype: torch.dtype, num_out: int, num_in: int, with_bias: bool) -> None:
    """Of dense and of strided rows, as many as take each way."""
    weight = random(num_out, num_in, dtype=dtype, seed=1)
    bias = random(num_out, dtype=dtype, seed=2) if with_bias else None
    prepared = layers.prepare(weight, bias, "none")
    for num_rows in NUM_ROWS:
        for x in in_all_strides(num_rows, num_in, dtype):
            product = layers.multiply(x, prepared)
            expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
            assert product.shape == (num_rows, num_out) and product.dtype == dtype
            largest = max(1.0, float(expected.abs().max())) if num_rows else 1.0
            torch.testing.assert_close(product.double(), expected, atol=DTYPES[dtype] * largest, rtol=0)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("num_out", "num_in"), SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_int8_products_equal_the_reference_bit_for_bit(
    layers: LinearLayers, dtype: torch.dtype, num_out: int, num_in: int, with_bias: bool
) -> None:
    exact = load_ops("reference")
    weight = random(num_out, num_in, dtype=dtype, seed=1)
    weight[0] = 0
    bias = random(num_out, dtype=dtype, seed=2) if with_bias else None
    prepared, expected = layers.prepare(weight, bias, "int8"), exact.prepare_linear(weight, bias, "int8")
    for num_rows in NUM_ROWS:
        for x in in_all_strides(num_rows, num_in, dtype):
            x[num_rows // 2 : num_rows // 2 + 1] = 0
            assert torch.equal(layers.multiply(x, prepared), exact.linear(x, expected))


def test_int8_error_is_at_most_half_a_step_of_each_factor() -> None:
    exact = load_ops("reference")
    weight, x = random(50, 300, dtype=torch.float32, seed=1), random(20, 300, dtype=torch.float32) + 0.5
    x[3, 7] = 100  # an outlier makes a row's steps wide
    product = exact.linear(x, exact.prepare_linear(weight, None, "int8")).double()
    x, weight = x.double(), weight.double()
    half_x = (x.amax(1).clamp_min(0) - x.amin(1).clamp_max(0))[:, None] / 253 / 2  # [T, 1]
    half_weight = weight.abs().amax(1) / 127 / 2  # [N]
    bound = half_x * weight.abs().sum(1) + half_weight * x.abs().sum(1)[:, None] + 300 * half_x * half_weight
    error = (product - x @ weight.T).abs()
    assert (error <= bound + 1e-4).all()
    assert (error > bound / 100).any(), "the bound would not notice a missing digit"


def test_int8_row_does_not_depend_on_its_neighbours(layers: LinearLayers) -> None:
    x = random(2 * FEW_ROWS_INT8, 576, dtype=torch.bfloat16)
    prepared = layers.prepare(random(200, 576, dtype=torch.bfloat16, seed=1), None, "int8")
    together = layers.multiply(x, prepared)
    for num_rows in (1, 2, FEW_ROWS_INT8, FEW_ROWS_INT8 + 1):
        assert torch.equal(layers.multiply(x[:num_rows], prepared), together[:num_rows])


@needs_packed_bfloat16
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_tiled_row_does_not_depend_on_its_neighbours(with_bias: bool) -> None:
    """Where a matrix unit takes all these rows; elsewhere few and many rows may differ in the last bits."""
    layers = LinearLayers(load_few_rows())
    bias = random(200, dtype=torch.bfloat16, seed=2) if with_bias else None
    prepared = layers.prepare(random(200, 576, dtype=torch.bfloat16, seed=1), bias, "none")
    assert isinstance(prepared, linear.PackedWeights)
    x = random(TILED_ROWS_FLOAT, 576, dtype=torch.bfloat16)
    together = layers.multiply(x, prepared)
    ways = [layers.multiply(x[:n], prepared) for n in range(1, len(x))]
    if prepared.max_rows == TILED_ROWS_FLOAT:
        assert all(torch.equal(way, together[: len(way)]) for way in ways)
    for way in ways:
        torch.testing.assert_close(way, together[: len(way)], atol=0.25, rtol=0.01)


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_more_rows_than_stay_in_a_cache(quantization: Quantization) -> None:
    """So wide that 32 of them are all."""
    layers = LinearLayers(load_few_rows())
    weight, x = random(70, 8192, dtype=torch.bfloat16, seed=1), random(105, 8192, dtype=torch.bfloat16)
    together = layers.multiply(x, layers.prepare(weight, None, quantization))
    plain = reference.Ops(torch.device("cpu"))
    expected = plain.linear(x, plain.prepare_linear(weight, None, quantization))
    if quantization == "int8":
        assert torch.equal(together, expected)
    torch.testing.assert_close(together.float(), expected.float(), atol=1.0, rtol=0.01)


@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("num_rows", [1, FEW_ROWS_INT8 + 1])
def test_few_rows_and_8_bits_do_not_depend_on_threads(
    layers: LinearLayers, num_rows: int, quantization: Quantization, restored_threads: None
) -> None:
    x = random(num_rows, 576, dtype=torch.bfloat16)
    prepared = layers.prepare(random(1000, 576, dtype=torch.bfloat16, seed=1), None, quantization)
    products = []
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        products.append(layers.multiply(x, prepared))
    if quantization == "int8":
        assert torch.equal(products[0], products[1]) and torch.equal(products[0], products[2])
    for product in products[1:]:
        torch.testing.assert_close(product, products[0], atol=0.25, rtol=0.01)


@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf])
@pytest.mark.parametrize("num_rows", [4, 40])
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_what_is_not_finite_stays_visible_and_in_its_row(
    layers: LinearLayers, quantization: Quantization, num_rows: int, bad: float
) -> None:
    x = random(num_rows, 64, dtype=torch.float32)
    prepared = layers.prepare(random(8, 64, dtype=torch.float32, seed=1), None, quantization)
    clean = layers.multiply(x, prepared)
    x[2, 5] = bad
    product = layers.multiply(x, prepared)
    assert not product[2].isfinite().any()
    assert torch.equal(product[[0, 1, 3]], clean[[0, 1, 3]])


def test_plain_torch_serves_where_nothing_else_can(layers: LinearLayers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: False)
    weight, x = random(9, 16, dtype=torch.float32), random(3, 16, dtype=torch.float32, seed=1)
    plain = layers.prepare(weight, None, "none")
    assert isinstance(plain, reference.LinearWeights)
    torch.testing.assert_close(layers.multiply(x, plain), x @ weight.T)
    assert isinstance(layers.prepare(weight, None, "int8"), reference.Int8Weights)


@needs_packed_bfloat16
def test_other_orders_of_packed_weights_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the compiled kernels would misread is left to oneDNN."""
    few_rows = load_few_rows()
    assert few_rows is not None, "Numba is missing, so nothing is tested"
    layers = LinearLayers(few_rows)
    weight, x = random(64, 64, dtype=torch.bfloat16), random(1, 64, dtype=torch.bfloat16, seed=1)
    other = random(64, 128, dtype=torch.bfloat16, seed=2)
    monkeypatch.setattr(linear, "address_of", lambda packed: other.data_ptr())
    for quantization in ("none", "int8"):
        prepared = layers.prepare(weight, None, quantization)
        assert isinstance(prepared, linear.PackedWeights | linear.PackedInt8Weights) and prepared.address == 0
        expected = LinearLayers(None)
        assert torch.equal(
            layers.multiply(x, prepared), expected.multiply(x, expected.prepare(weight, None, quantization))
        )


def resident_bytes() -> int:
    gc.collect()
    # What was freed counts as resident until the allocator gives it back, which it delays for what it may need again.
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def mapped_tensors() -> Iterator[None]:
    """Memory of each large tensor goes back to the system at once, and what others have freed before goes now: it would
    be used again otherwise."""
    libc = ctypes.CDLL(None)
    assert libc.mallopt(M_MMAP_THRESHOLD, 2**20)
    libc.malloc_trim(0)
    yield
    libc.mallopt(M_MMAP_THRESHOLD, 2**25)


@pytest.mark.usefixtures("mapped_tensors")
@pytest.mark.parametrize(
    ("dtype", "quantization", "most"),
    [(torch.float32, "none", 1.15), (torch.bfloat16, "none", 1.15), (torch.float32, "int8", 0.4)],
)
def test_plain_weights_are_not_kept(
    layers: LinearLayers, dtype: torch.dtype, quantization: Quantization, most: float
) -> None:
    size = 4096
    layers.prepare(torch.ones(64, 64, dtype=dtype), None, quantization)
    before = resident_bytes()
    prepared = layers.prepare(torch.ones(size, size, dtype=dtype), None, quantization)
    grown = resident_bytes() - before
    num_bytes = size * size * dtype.itemsize
    assert grown < most * num_bytes
    assert grown > 0.2 * num_bytes and prepared is not None


@pytest.mark.parametrize("family", ["llama-gqa-tied", "llama-biases-linear", "qwen3"])
def test_quantised_model_says_almost_the_same(family: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path, family_config(family), random_weights(family_config(family)))
    found = []
    for quantization in ("none", "int8"):
        runner = load_runner(folder, num_tokens=32, quantization=quantization)
        found.append(Driver(runner, [16]).logits(0, PROMPT, 16, range(len(PROMPT))))
    similarity = torch.nn.functional.cosine_similarity(*found)  # [tokens]
    assert (similarity > 0.995).all() and not torch.equal(*found)
