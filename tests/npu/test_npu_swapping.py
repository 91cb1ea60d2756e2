"""Whole workers on simulated NPUs whose pool is too small for their batch: KV goes to host memory and comes back."""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
from harness import FINISHED, attempt, cell
from model_driver import GREEDY, Driver
from npu_runner import load_runner, write_tiny
from own_memory import expect_little
from rounding import assert_same_up_to_rounding
from simulated_host import Npu

from engine.config import WorkerConfig
from engine.loading import open_model
from engine.pool_sizing import open_memory, open_swap_space
from runtime.errors import ConfigError

NUM_NEW = 24
LENGTHS = (120, 125, 110, 250)
OPTIONS = {"dtype": "auto", "device": "npu:0", "num_kv_blocks": 5, "kv_block_size": None, "max_num_seqs": 4}


def expected_and_prompts(folder: Path) -> tuple[list[list[int]], list[list[int]]]:
    """Each prompt's answer alone, on the reference."""
    prompts = [[(11 * index + 5 * place * place) % 320 for place in range(LENGTHS[index])] for index in range(4)]
    runner = load_runner(folder, "reference")
    answers = [Driver(runner, [len(prompt) + NUM_NEW]).generate([prompt], NUM_NEW, chunk_size=64) for prompt in prompts]
    return [answer for (answer,) in answers], prompts


@pytest.mark.parametrize("decode_graphs", [False, True])
async def test_answers_are_those_of_an_undisturbed_run(
    npu: Npu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, decode_graphs: bool
) -> None:
    swapped: Counter[str] = expect_little(monkeypatch)
    folder = write_tiny(tmp_path, "llama-gqa-tied", num_hidden_layers=2)
    expected, prompts = expected_and_prompts(folder)
    async with cell(mixed=True, model=str(folder), decode_graphs=decode_graphs, **OPTIONS) as c:
        fingerprint = c.decode.parts.identity.model.fingerprint
        requests = [attempt(prompt, max_tokens=NUM_NEW) for prompt in prompts]
        for request in requests:
            request.fingerprint = fingerprint
        answers = await asyncio.gather(*(c.router.generate(request) for request in requests))
        assert {answer.record.outcome for answer in answers} == {FINISHED}
        assert swapped["out"] >= swapped["in"] > 0
        assert not c.decode.role.scheduler.totals.evictions
        await c.balanced()
    exact = partial(load_runner, folder, "reference", dtype="float32")
    assert_same_up_to_rounding([answer.tokens for answer in answers], expected, prompts, exact, GREEDY)


def test_host_memory_is_what_was_told_and_no_more_than_can_be_used(
    npu: Npu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(write_tiny(tmp_path, "llama-gqa-tied", num_hidden_layers=2))

    def num_blocks(**options: object) -> int | None:
        config = WorkerConfig(folder, max_num_seqs=4, **{"device": "npu:0", **options})  # type: ignore[arg-type]
        model = open_model(config.model, config.dtype, None, device=config.device)
        memory = open_memory(config, model, model.layout(config.block_size), epoch=7)
        space = open_swap_space(config, model, memory)
        block_bytes.append(memory.layout.block_bytes)
        memory.close()
        return None if space is None else space.num_blocks

    block_bytes: list[int] = []
    assert num_blocks() == 4 * 8, "each of four sequences has at most eight blocks"
    assert num_blocks(swap_space_gib=3.5 * block_bytes[0] / 2**30) == 3
    assert num_blocks(swap_space_gib=0.0) is None
    assert num_blocks(device="cpu", kv_shared_memory_dir="none") is None, "its pool is host memory"

    def refuse(*_: object) -> None:
        raise RuntimeError("out of pinned memory")

    monkeypatch.setattr("kvstore.device_memory.DeviceMemory.host_planes", refuse)
    with pytest.raises(ConfigError, match=r"--swap-space-gib: no room for 0\.0 GiB of host memory, got 4: "):
        num_blocks()
