"""What is told of an NPU's units and memory: from the profiler's table to the profile of a whole worker."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import grpc.aio
import pytest
from harness import Cell, attempt, cell
from npu_runner import write_tiny
from simulated_host import Npu

from baton.profiling import workers
from baton.profiling.figures import rows_of
from baton.profiling.options import Limits
from baton.profiling.workers import WorkerCalls
from kernels import Counted, DeviceUnavailable, DeviceUse, load_ops
from kernels.npu import counting
from protos import worker_pb2
from runtime.doors import NO_PASS

ANALYSE = counting.analyse
KERNELS: list[dict[str, object]] = [
    {  # a product of matrices that waits for its weights
        "Duration(us)": 1000,
        "aic_mac_time(us)": 300,
        "aic_mte2_time(us)": 900,
        "aiv_vec_time(us)": "N/A",
        "aic_main_mem_read_bw(GB/s)": 800,
        "aic_main_mem_write_bw(GB/s)": 10,
    },
    {  # attention: both kinds of core at once
        "Duration(us)": 500,
        "aic_mac_time(us)": 100,
        "aic_mte2_time(us)": 200,
        "aiv_vec_time(us)": 150,
        "aiv_mte2_time(us)": 250,
        "aic_main_mem_read_bw(GB/s)": 300,
        "aiv_main_mem_read_bw(GB/s)": 100,
        "aiv_main_mem_write_bw(GB/s)": 20,
    },
]


def count(npu: Npu, counted: Counted) -> DeviceUse:
    counter = load_ops("npu").new_counter(counted)
    assert counter is not None
    try:
        counter.start()
        counter.stop()
        return counter.read()
    finally:
        counter.close()


def test_units_are_summed_over_kernels(npu: Npu) -> None:
    npu.profiler.kernels = KERNELS
    use = count(npu, "units")
    assert (use.kernels_s, use.cube_s, use.vector_s) == pytest.approx((1.5e-3, 4e-4, 1.5e-4))
    assert use.load_s == pytest.approx(9e-4 + 2.5e-4), "of both kinds of core, the one that took longer"
    assert (use.read_bytes, use.written_bytes) == (0, 0)


def test_memory_is_rates_times_durations(npu: Npu) -> None:
    npu.profiler.kernels = KERNELS
    use = count(npu, "memory")
    assert use.kernels_s == pytest.approx(1.5e-3)
    assert use.read_bytes == pytest.approx(800e9 * 1e-3 + 400e9 * 5e-4)
    assert use.written_bytes == pytest.approx(10e9 * 1e-3 + 20e9 * 5e-4)
    assert (use.cube_s, use.load_s) == (0, 0)


def test_other_releases_call_the_cube_otherwise(npu: Npu) -> None:
    npu.profiler.kernels = KERNELS
    npu.profiler.renamed = {"aic_mac_time(us)": "aic_cube_time(us)", "Duration(us)": "Task Duration(us)"}
    assert count(npu, "units").cube_s == pytest.approx(4e-4)


def test_a_table_without_the_columns_is_not_taken_for_idleness(npu: Npu) -> None:
    npu.profiler.kernels = KERNELS
    npu.profiler.renamed = {"aiv_mte2_time(us)": "aiv_mte2_cycles"}
    with pytest.raises(DeviceUnavailable, match=r"kernel_details\.csv has no column aiv_mte2_time\(us\)"):
        count(npu, "units")


def test_a_run_that_left_nothing(npu: Npu) -> None:
    npu.profiler.leaves_nothing = True
    with pytest.raises(DeviceUnavailable, match="left nothing behind"):
        count(npu, "units")


def test_nothing_stays_on_disk(npu: Npu) -> None:
    count(npu, "units")
    assert not npu.profiler.runs[0].options["folder"].exists()


def test_an_analysis_that_fails_says_why(npu: Npu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the program cannot import torch_npu."""
    monkeypatch.setattr(counting, "ANALYSIS", "import sys; sys.exit('no msprof in ' + sys.argv[1])")
    with pytest.raises(DeviceUnavailable, match=f"the analysis of a profile failed: no msprof in {tmp_path}"):
        ANALYSE(tmp_path)
    monkeypatch.setattr(counting, "ANALYSIS", "import sys; open(sys.argv[1] + '/done', 'w')")
    ANALYSE(tmp_path)
    assert (tmp_path / "done").exists()


OPTIONS = {"dtype": "auto", "device": "npu:0", "num_kv_blocks": 24, "kv_block_size": None, "max_num_seqs": 8}
LIMITS = Limits(bytes_per_s=1e12, flops_per_s=1e14)


async def stepping(c: Cell, fingerprint: str) -> None:
    """Steps without end."""
    while True:
        request = attempt(range(20), max_tokens=60)
        request.fingerprint = fingerprint
        await c.router.generate(request)


async def test_a_worker_tells_times_then_units_then_memory(
    npu: Npu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three profiles of one load, made into a row whose verdict is the device's."""
    npu.profiler.kernels = KERNELS
    # The simulated device is memory of this machine, and that is what a worker calls it.
    monkeypatch.setattr(workers, "COUNTING_DEVICES", ("cpu",))
    folder = str(write_tiny(tmp_path, "llama-gqa-tied"))
    async with cell(mixed=True, model=folder, **OPTIONS) as c, WorkerCalls(c.decode.address, NO_PASS) as calls:
        load = asyncio.create_task(stepping(c, c.decode.parts.identity.model.fingerprint))
        try:
            profile = await asyncio.wait_for(calls.profile("decode 1", 6, 20.0), 60)
        finally:
            load.cancel()
            await asyncio.wait([load])
        await c.balanced()
    assert [run.options["metrics"] for run in npu.profiler.runs] == ["PipeUtilization", "Memory"]
    assert not profile.response.HasField("device_use") and len(profile.response.steps) == 6
    memory = profile.response.memory
    assert (memory.device_used_bytes, memory.device_total_bytes) == (4 << 30, 64 << 30)
    (row,) = rows_of([profile], {"mixed": LIMITS})
    assert row.units is not None and row.bound_by == "bandwidth", "MTE2 is busier than cube and vector"
    assert (row.units.cube, row.units.vector) == (pytest.approx(4 / 15), pytest.approx(1 / 10))
    assert row.units.load == pytest.approx(1.15 / 1.5)
    assert row.units.memory_bytes_per_s == pytest.approx((1e9 + 2e7) / 1.5e-3)


async def test_the_device_counts_for_one_profile_at_a_time(npu: Npu, tmp_path: Path) -> None:
    npu.profiler.kernels = KERNELS
    folder = str(write_tiny(tmp_path, "qwen2"))
    request = worker_pb2.ProfileRequest(num_steps=4, max_wait_ms=20_000, device_counted=1)
    async with cell(mixed=True, model=folder, **OPTIONS) as c:
        first, second = (asyncio.ensure_future(c.d.worker.Profile(request, timeout=60)) for _ in range(2))
        done, (waiting,) = await asyncio.wait([first, second], return_when=asyncio.FIRST_COMPLETED)
        error = done.pop().exception()
        assert isinstance(error, grpc.aio.AioRpcError) and error.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "counts for another profile" in (error.details() or "")
        load = asyncio.create_task(stepping(c, c.decode.parts.identity.model.fingerprint))
        try:
            answer = await waiting
        finally:
            load.cancel()
            await asyncio.wait([load])
        assert answer.device_use.cube_s == pytest.approx(4e-4)
        assert (await c.d.worker.Profile(worker_pb2.ProfileRequest(), timeout=10)).memory.device_total_bytes


async def test_a_profiler_that_fails_is_said_and_frees_the_device(npu: Npu, tmp_path: Path) -> None:
    npu.profiler.leaves_nothing = True
    folder = str(write_tiny(tmp_path, "qwen3"))
    request = worker_pb2.ProfileRequest(num_steps=1, max_wait_ms=1, device_counted=2)
    async with cell(mixed=True, model=folder, **OPTIONS) as c:
        for _ in range(2):
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await c.d.worker.Profile(request, timeout=10)
            assert raised.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert "left nothing behind" in (raised.value.details() or "")
    assert [run.state for run in npu.profiler.runs] == ["over", "over"]
