"""Ranks on simulated NPUs: each has its heads' KV in its own device, and all say what one device says."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from model_driver import Driver
from npu_runner import BLOCK_SIZE, load_runner, write_tiny
from rank_threads import RankThreads
from simulated_host import Npu

from baton.options import ServeConfig
from baton.topology import plan_topology
from engine.config import WorkerConfig
from engine.model_runner import model_spec
from kernels import load_ops
from kvstore.cache import KVCache
from kvstore.device_memory import DeviceMemory
from runtime.checkpoint import open_checkpoint
from runtime.devices import device_of_rank
from runtime.errors import ConfigError

NUM_NEW = 12


@pytest.mark.parametrize("family", ["llama-biases-linear", "qwen2", "qwen3"])
def test_two_ranks_say_what_one_device_says(npu: Npu, family: str, tmp_path: Path) -> None:
    """Every call keeps its contract with half of the heads."""
    model = write_tiny(tmp_path, family)
    rng = random.Random(1)
    prompts = [[rng.randrange(320) for _ in range(length)] for length in (1, 129, 300)]
    capacities = [len(prompt) + NUM_NEW for prompt in prompts]
    layout = model_spec(open_checkpoint(str(model)), "bfloat16").kv_layout(BLOCK_SIZE, num_ranks=2)

    def part(rank: int) -> tuple[Any, KVCache]:
        ops = load_ops("npu")
        return ops, KVCache(DeviceMemory(layout.of_one_rank, 24, ops.device))

    ranks = RankThreads(model, layout, tmp_path, part)
    two = Driver(ranks, capacities)  # type: ignore[arg-type]
    one = Driver(load_runner(model, "npu"), capacities)
    exact = Driver(load_runner(model, "reference", dtype="float32"), capacities)
    assert [len(answer) for answer in two.generate(prompts, NUM_NEW, chunk_size=100)] == [NUM_NEW] * 3
    places = [0, 127, 128, 200, 299]
    expected, mine, others = (each.logits(2, prompts[2], 100, places) for each in (exact, two, one))
    assert (mine - expected).abs().mean() < 1.5 * (others - expected).abs().mean()
    ranks.close()
    assert npu.operators.num_calls["npu_fused_infer_attention_score"] and not npu.operators.refused


def test_each_rank_has_the_device_after_the_one_before() -> None:
    assert [device_of_rank("npu:4", rank) for rank in range(3)] == ["npu:4", "npu:5", "npu:6"]
    assert (device_of_rank("npu", 1), device_of_rank("cpu", 2)) == ("npu:1", "cpu")
    served = ServeConfig(model="m", device="npu", tensor_parallel_size=4, num_prefill=0, num_decode=0, num_mixed=2)
    processes = plan_topology(served, "redis://x", [0], range(20_000, 20_010), "run").processes
    devices = [word for process in processes for word in process.argv if word.startswith("--device=")]
    assert devices == ["--device=npu:0", "--device=npu:4"]


def test_devices_that_have_no_ranks() -> None:
    with pytest.raises(ConfigError, match="--tensor-parallel-size: on cuda:0 only 1 is accepted, more on cpu or npu"):
        WorkerConfig("m", device="cuda:0", tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="--tensor-parallel-size: the tracer has no layers to share"):
        WorkerConfig("tracer", tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="--kv-shared-memory-dir: 2 ranks share the KV pool"):
        WorkerConfig("m", tensor_parallel_size=2, kv_shared_memory_dir="none")
