"""The option --device: what it accepts, what follows from it, and that it reaches the workers."""

from __future__ import annotations

from typing import Any

import pytest

from baton.options import ServeConfig
from baton.topology import plan_topology
from engine.config import WorkerConfig
from runtime import config
from runtime.errors import ConfigError

CALL: dict[str, Any] = {"prog": "worker", "description": "", "env": {}}


@pytest.mark.parametrize("device", ["cpu", "npu", "npu:0", "npu:15", "cuda:1"])
def test_devices_that_are_known(device: str) -> None:
    loaded = config.load(WorkerConfig, ["--model=m", f"--device={device}"], **CALL)
    assert loaded.device == device


@pytest.mark.parametrize("device", ["gpu", "npu:", "npu:x", "cpu:0", "npu:0,npu:1", "", "npu:-1", "cuda:1234"])
def test_others_are_refused(device: str) -> None:
    for cls in (WorkerConfig, ServeConfig):
        with pytest.raises(ConfigError, match="--device: must be cpu, npu:N or cuda:N, got"):
            cls(model="m", device=device)


def test_the_tracer_needs_none() -> None:
    for cls in (WorkerConfig, ServeConfig):
        with pytest.raises(ConfigError, match="--device: the tracer computes nothing, so only cpu is accepted"):
            cls(model="tracer", device="npu:0")


def test_block_sizes() -> None:
    assert WorkerConfig("m").block_size == WorkerConfig("m", device="cuda:0").block_size == 16
    assert WorkerConfig("m", kv_block_size=4).block_size == 4
    assert WorkerConfig("m", device="npu:0").block_size == 128
    assert WorkerConfig("m", device="npu:0", kv_block_size=128).block_size == 128
    with pytest.raises(ConfigError, match="--kv-block-size: on an NPU attention reads blocks of 128, got 16"):
        WorkerConfig("m", device="npu:0", kv_block_size=16)


def workers_of(**options: Any) -> list[tuple[str, ...]]:
    served = ServeConfig(model="m", num_prefill=2, num_decode=1, num_mixed=1, **options)
    processes = plan_topology(served, "redis://x", [0], range(20_000, 20_010), "run").processes
    assert not any("--device" in word for word in processes[0].argv), "routers compute nothing"
    return [process.argv for process in processes[1:]]


def flags(argv: tuple[str, ...], name: str) -> list[str]:
    return [word.partition("=")[2] for word in argv if word.startswith(f"--{name}=")]


@pytest.mark.parametrize("kind", ["npu", "cuda"])
def test_each_worker_has_a_device_and_all_of_its_share(kind: str) -> None:
    workers = workers_of(device=kind, kv_cache_gpu_mem_utilization=0.8)
    assert [flags(argv, "device") for argv in workers] == [[f"{kind}:{index}"] for index in range(4)]
    assert all(flags(argv, "kv-cache-gpu-mem-utilization") == ["0.8"] for argv in workers)


@pytest.mark.parametrize("device", ["npu:3", "cpu"])
def test_workers_on_one_device_share_its_memory(device: str) -> None:
    workers = workers_of(device=device, kv_cache_gpu_mem_utilization=0.8)
    assert [flags(argv, "device") for argv in workers] == [[device]] * 4
    assert all(flags(argv, "kv-cache-gpu-mem-utilization") == ["0.2"] for argv in workers)


def test_graphs_can_be_turned_off() -> None:
    assert all("--no-decode-graphs" in argv for argv in workers_of(device="npu", decode_graphs=False))
    assert not any("decode-graphs" in word for argv in workers_of(device="npu") for word in argv)
    assert not config.load(WorkerConfig, ["--model=m", "--no-decode-graphs"], **CALL).decode_graphs
