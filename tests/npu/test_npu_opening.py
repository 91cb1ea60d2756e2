"""What is said where an NPU cannot be used, and how much memory of one that can be used is taken."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch
from npu_runner import write_tiny
from simulated_host import Npu

from engine.config import WorkerConfig
from engine.loading import open_model
from engine.pool_sizing import DEVICE_RESERVE_BYTES, open_memory
from kernels import DeviceUnavailable, load_ops
from kernels.npu import opening
from kvstore.device_memory import DeviceMemory
from runtime.errors import ConfigError

TORCH = torch.__version__.partition("+")[0]
GIB = 2**30


def test_a_working_npu_is_opened(npu: Npu) -> None:
    ops = load_ops("npu", 0)
    assert type(ops).__module__ == "kernels.npu" and npu.device.entered == [0]
    assert npu.device.config.allow_internal_format and not npu.device.jit_compile
    memory = ops.memory_bytes()
    assert memory is not None and (memory.free, memory.total) == (60 * GIB, 64 * GIB)
    ops.enter_thread()
    assert npu.device.entered == [0, 0]


def test_nothing_of_torch_npu_is_imported_before(tmp_path: Path) -> None:
    """Listing and importing the operations works on any machine."""
    script = "import sys, kernels.npu; assert 'npu' in kernels.available_ops() and 'torch_npu' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(__file__).parents[2])


def test_no_wheel(npu: Npu, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(opening, "version", missing)
    with pytest.raises(DeviceUnavailable, match=r"torch_npu is not installed: pip install 'baton-llm\[npu\]' -c"):
        load_ops("npu")


def test_a_wheel_for_another_torch(npu: Npu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "version", lambda name: "1.9.0.post4")
    with pytest.raises(DeviceUnavailable, match=rf"torch_npu 1\.9\.0\.post4 does not belong to torch {TORCH}"):
        load_ops("npu")
    monkeypatch.setattr(opening, "version", lambda name: f"{TORCH}.post4")
    load_ops("npu")


def test_a_torch_for_cuda(npu: Npu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(DeviceUnavailable, match="is built for CUDA; NPUs need the build for CPUs"):
        load_ops("npu")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            ImportError("libhccl.so: cannot open shared object file"),
            "CANN is missing, or its ascend-toolkit/set_env.sh",
        ),
        (OSError("libatb.so: cannot open shared object file"), "NNAL is missing"),
        (ImportError("libascend_hal.so: cannot open shared object file"), "the NPU driver is missing"),
        (ImportError("libtorch_npu.so: undefined symbol: _ZN3c10"), "not of versions that belong together"),
        (RuntimeError("ASCEND_OPP_PATH does not exist"), "CANN's environment is incomplete"),
        (RuntimeError("something else"), "torch_npu cannot be imported: something else"),
    ],
)
def test_what_a_failed_import_means(npu: Npu, error: Exception, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        assert name == "torch_npu"
        raise error

    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.raises(DeviceUnavailable, match=message) as raised:
        opening.open_npu(0)
    assert str(error) in str(raised.value) and "docs/npu.md" in str(raised.value)


def test_no_device(npu: Npu) -> None:
    npu.device.num_devices = 0
    with pytest.raises(DeviceUnavailable, match="no NPU is visible: the driver is missing, /dev/davinci"):
        load_ops("npu")
    npu.device.num_devices = 2
    with pytest.raises(DeviceUnavailable, match="npu:2 does not exist: this process sees 2, npu:0 to npu:1"):
        load_ops("npu", 2)


def test_another_chip(npu: Npu) -> None:
    npu.device.device_name = "Ascend310P3"
    with pytest.raises(DeviceUnavailable, match="npu:0 is an Ascend310P3, which keeps KV in another form"):
        load_ops("npu")


def test_a_worker_says_it_as_its_own_option(npu: Npu) -> None:
    npu.device.num_devices = 1
    with pytest.raises(ConfigError, match="--device: npu:3 does not exist"):
        open_model("smollm2", "auto", None, device="npu:3")
    with pytest.raises(ConfigError, match="--device: cuda:0 does not exist: this process sees 0 CUDA devices"):
        open_model("smollm2", "auto", None, device="cuda")


def test_a_torch_that_fails_with_its_extension_is_said_as_well(tmp_path: Path) -> None:
    """As it does where torch_npu is installed and CANN is not."""
    (tmp_path / "torch.py").write_text(
        "try:\n    raise ImportError('libhccl.so: cannot open')\n"
        "except ImportError as e:\n    raise RuntimeError('Failed to load the backend extension: torch_npu.') from e\n"
    )
    script = "from engine.loading import open_model\ntry: open_model('smollm2', 'auto', None)\n"
    script += "except Exception as error: print(type(error).__name__, error)"
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{root}"}
    call = [sys.executable, "-c", script]
    ran = subprocess.run(call, check=True, env=environment, cwd=root, capture_output=True, text=True)
    assert ran.stdout.strip() == (
        "ConfigError --device: torch cannot be imported: Failed to load the backend extension: torch_npu. "
        "(libhccl.so: cannot open)"
    ), ran.stderr


def test_float32_is_not_computed_in(npu: Npu) -> None:
    with pytest.raises(ConfigError, match="--dtype: device npu:0 computes in bfloat16 or float16, got float32"):
        open_model("smollm2", "float32", None, device="npu:0")
    assert open_model("smollm2", "auto", None, device="npu:0").dtype == "bfloat16"
    assert open_model("smollm2", "float16", None, device="npu:0").dtype == "float16"
    assert open_model("smollm2", "auto", None).dtype == "float32"


def test_kv_in_8_bits_is_refused(npu: Npu) -> None:
    with pytest.raises(ConfigError, match="--kv-cache-dtype: on npu:0 it must be auto, got int8"):
        open_model("smollm2", "bfloat16", None, device="npu:0", kv_dtype="int8")
    rounded, plain = open_model("smollm2", "bfloat16", None, kv_dtype="int8"), open_model("smollm2", "bfloat16", None)
    assert rounded.fingerprint == f"{plain.fingerprint}-kv8"
    assert rounded.layout(16).fingerprint != plain.layout(16).fingerprint


def test_workers_whose_8_bits_differ_are_not_paired(npu: Npu) -> None:
    cpu = open_model("smollm2", "bfloat16", None, "int8").fingerprint
    assert open_model("smollm2", "bfloat16", None, "int8", device="npu:0").fingerprint == f"{cpu}-npu"
    plain = open_model("smollm2", "bfloat16", None).fingerprint
    assert open_model("smollm2", "bfloat16", None, device="npu:0").fingerprint == plain


def opened(model: Path, **options: object) -> DeviceMemory:
    config = WorkerConfig(str(model), device="npu:0", **options)  # type: ignore[arg-type]
    parts = open_model(config.model, config.dtype, None, device=config.device, max_graph_rows=40)
    memory = open_memory(config, parts, parts.layout(config.block_size), epoch=7)
    assert isinstance(memory, DeviceMemory)
    return memory


def test_the_pool_is_a_part_of_the_devices_memory(npu: Npu, tmp_path: Path) -> None:
    model = write_tiny(tmp_path, "qwen3")
    memory = opened(model, max_num_seqs=4)
    assert (memory.ceiling, memory.num_blocks, memory.num_scratch_blocks) == (4 * 8, 4 * 8, 1)
    block_bytes = memory.layout.block_bytes
    npu.device.total_bytes = 40 * block_bytes
    assert opened(model, kv_cache_gpu_mem_utilization=0.25).ceiling == 10
    weights = open_model(str(model), "auto", None, device="npu:0").weight_bytes
    npu.device.free_bytes = weights + DEVICE_RESERVE_BYTES + 5 * block_bytes
    assert opened(model, kv_cache_gpu_mem_utilization=0.25).ceiling == 5
    assert opened(model, num_kv_blocks=17).ceiling == 17
    npu.device.free_bytes = weights + DEVICE_RESERVE_BYTES
    with pytest.raises(ConfigError, match=r"--device: npu:0 has 2\d{3} MiB free; the model's weights take \d+ MiB"):
        opened(model)


def test_weights_are_estimated_well(tmp_path: Path) -> None:
    """To the size of the file."""
    for family in ("qwen3", "llama-mha-untied-llama3"):
        model = write_tiny(tmp_path, family)
        size = (model / "model.safetensors").stat().st_size
        assert open_model(str(model), "float32", None).weight_bytes == pytest.approx(size, rel=0.05)
