"""All layers in one call say what the same kernels say one by one, in every step that takes that way."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from model_driver import Driver, load_runner
from tiny_models import FAMILIES, family_config, random_weights, write_folder

from engine.batch import Batch
from engine.model_runner import ModelRunner
from kernels import KVDtype, Quantization
from kernels.cpu.few_rows import load_few_rows
from kernels.reference import round_kv
from kvstore.cache import KVCache
from kvstore.memory import PoolMemory

WIDE = {"intermediate_size": 128}
"""The matrix unit takes inputs by 64 bytes."""
LENGTHS = [5, 17, 300, 31, 2, 64, 270]


@pytest.fixture
def restored_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def has_matrix_unit() -> bool:
    few_rows = load_few_rows()
    return few_rows is not None and few_rows.has_tiles


def make_runner(
    folder: Path, family: str, quantization: Quantization, dtype: str = "bfloat16", kv_dtype: KVDtype = "auto"
) -> ModelRunner:
    config = family_config(family) | WIDE
    write_folder(folder, config, random_weights(config))
    num_tokens = sum(LENGTHS) + 64 * len(LENGTHS)
    runner = load_runner(
        folder,
        num_tokens=num_tokens,
        num_sequences=len(LENGTHS),
        dtype=dtype,
        quantization=quantization,
        kv_dtype=kv_dtype,
    )
    for cache in (*runner.cache.keys, *runner.cache.values):
        shape = (*cache.shape[:-1], runner.cache.layout.head_dim)
        content = torch.randn(shape, generator=torch.Generator().manual_seed(3))
        cache.copy_(round_kv(content) if kv_dtype == "int8" else content)
    return runner


def mixed_batch(driver: Driver, rows: list[int]) -> Batch:
    """So many rows at the end of each sequence, sampling after the last."""
    batch = Batch()
    for sequence, (length, num_rows) in enumerate(zip(LENGTHS, rows, strict=False)):
        if num_rows:
            tokens = [(7 * position + sequence) % 300 for position in range(length, length + num_rows)]
            driver.add(batch, sequence, tokens, length)
            driver.ask(batch)
    return batch


def both_ways(runner: ModelRunner, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and then all KV, in one call and one by one."""
    model, found = runner.model, []
    before = [cache.clone() for cache in (*runner.cache.keys, *runner.cache.values)]
    stack = model._stack
    for way in (stack, None):
        for cache, content in zip((*runner.cache.keys, *runner.cache.values), before, strict=True):
            cache.copy_(content)
        model._stack = way
        with torch.inference_mode():
            logits = runner.logits(batch).flatten()
        found.append(torch.cat([logits, *(c.flatten().float() for c in (*runner.cache.keys, *runner.cache.values))]))
    model._stack = stack
    return found[0], found[1]


@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_alike(family: str, quantization: Quantization, tmp_path: Path) -> None:
    runner = make_runner(tmp_path, family, quantization)
    driver = Driver(runner, [length + 64 for length in LENGTHS])
    # Attention's output of 96 inputs is no whole number of tiles of 8 bits.
    is_fused = has_matrix_unit() and not (quantization == "int8" and family == "llama-biases-linear")
    assert (runner.model._stack is not None) == is_fused
    for rows in ([1], [1] * 7, [0, 1, 0, 3], [1, 16, 1, 1], [17, 9, 0, 8, 5, 20, 5], [31, 0, 1]):
        fused, single = both_ways(runner, mixed_batch(driver, rows))
        assert torch.equal(fused, single), rows


@pytest.mark.parametrize("family", FAMILIES)
def test_rounded_kv_alike(family: str, tmp_path: Path) -> None:
    runner = make_runner(tmp_path, family, "none", kv_dtype="int8")
    driver = Driver(runner, [length + 64 for length in LENGTHS])
    assert (runner.model._stack is not None) == has_matrix_unit()
    for rows in ([1] * 7, [17, 9, 0, 8, 5, 20, 5]):
        fused, single = both_ways(runner, mixed_batch(driver, rows))
        assert torch.equal(fused, single), rows


def test_what_does_not_fit_goes_one_by_one(tmp_path: Path) -> None:
    runner = make_runner(tmp_path, "llama-gqa-tied", "none")
    driver = Driver(runner, [length + 64 for length in LENGTHS])
    for rows, fits in (([31, 31, 2], True), ([31, 31, 3], False), ([1, 32], False)):
        if runner.model._stack is not None:
            metadata = runner.metadata(mixed_batch(driver, rows))
            assert runner.model._stack.fits(metadata) == fits
        fused, single = both_ways(runner, mixed_batch(driver, rows))
        assert torch.equal(fused, single)


def test_float32_with_8_bits(tmp_path: Path) -> None:
    runner = make_runner(tmp_path, "llama-gqa-tied", "int8", dtype="float32")
    driver = Driver(runner, [length + 64 for length in LENGTHS])
    assert (runner.model._stack is not None) == has_matrix_unit()
    fused, single = both_ways(runner, mixed_batch(driver, [1, 1, 3]))
    assert torch.equal(fused, single)


def test_threads_and_caches_may_change_between_steps(tmp_path: Path, restored_threads: None) -> None:
    runner = make_runner(tmp_path, "qwen3", "none")
    driver = Driver(runner, [length + 64 for length in LENGTHS])
    batch = mixed_batch(driver, [1, 2, 1, 1])
    expected = both_ways(runner, batch)[1]
    for num_threads in (1, 3, 2):
        torch.set_num_threads(num_threads)
        assert torch.equal(both_ways(runner, batch)[0], expected)
    memory = PoolMemory(runner.cache.layout, runner.cache.keys[0].shape[0])
    memory.commit(memory.ceiling)
    other = KVCache(memory)
    for old, new in zip((*runner.cache.keys, *runner.cache.values), (*other.keys, *other.values), strict=True):
        new.copy_(old)
    runner.cache = other
    assert torch.equal(both_ways(runner, batch)[0], expected)


def test_threads_given_back_between_layers_change_nothing(tmp_path: Path, restored_threads: None) -> None:
    runner = make_runner(tmp_path, "llama-gqa-tied", "none")
    batch = mixed_batch(Driver(runner, [length + 64 for length in LENGTHS]), [1, 16, 1, 1, 9, 1, 1])
    torch.set_num_threads(1)
    expected = both_ways(runner, batch)
    counts: list[int] = []

    def give_back() -> None:
        counts.append(torch.get_num_threads())
        torch.set_num_threads(1)

    runner.call_between_layers(give_back)
    torch.set_num_threads(2)
    found = both_ways(runner, batch)
    assert counts[0] == 2 and set(counts[1:]) == {1}
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
