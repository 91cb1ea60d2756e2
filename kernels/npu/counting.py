"""What steps use of an NPU, by torch_npu's profiler: the time of cube, vector and transfer units, or bytes of HBM.

Owns a profiler's run and the reading of the table that it leaves (`kernel_details.csv`, a line a kernel). The device
counts one thing a run: units (`PipeUtilization`) or memory (`Memory`). Raw counts are made into the table by a process
of its own, since that takes seconds of Python. Column names differ between releases, so each has its alternatives.
"""

from __future__ import annotations

import csv
import importlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kernels import Counted, DeviceCounter, DeviceUnavailable, DeviceUse
from kernels.npu import opening

METRICS: Mapping[Counted, str] = {"units": "PipeUtilization", "memory": "Memory"}
"""Names in torch_npu's AiCMetrics."""
TABLE = "kernel_details.csv"
ANALYSIS = "import sys; from torch_npu.profiler.profiler import analyse; analyse(sys.argv[1], max_process_number=1)"
ANALYSIS_TIMEOUT_S = 300.0
MICRO, GIGA = 1e-6, 1e9

DURATION = ("Duration(us)", "Task Duration(us)")
CUBE = ("aic_cube_time(us)", "aic_mac_time(us)")
VECTOR = ("aiv_vec_time(us)",)
LOADS = (("aic_mte2_time(us)",), ("aiv_mte2_time(us)",))
"""From HBM to cube cores, and to vector cores."""
READS = (("aic_main_mem_read_bw(GB/s)",), ("aiv_main_mem_read_bw(GB/s)",))
"""By cube cores, and by vector cores, over a kernel's duration."""
WRITES = (("aic_main_mem_write_bw(GB/s)",), ("aiv_main_mem_write_bw(GB/s)",))
NEEDED: Mapping[Counted, tuple[tuple[str, ...], ...]] = {"units": (CUBE, VECTOR, *LOADS), "memory": READS}
"""Columns without which nothing was counted."""


def analyse(folder: Path) -> None:
    """Makes tables of the raw counts in `folder`. Raises DeviceUnavailable with what the program said."""
    command = [sys.executable, "-c", ANALYSIS, str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ANALYSIS_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise DeviceUnavailable(f"the analysis of a profile took longer than {ANALYSIS_TIMEOUT_S:g} s") from None
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise DeviceUnavailable(f"the analysis of a profile failed: {lines[-1] if lines else done.returncode}")


class NpuCounter(DeviceCounter):
    """One run of the profiler."""

    def __init__(self, counted: Counted) -> None:
        self._counted = counted
        # Letters, digits and underscores: the profiler takes no other paths.
        self._folder = Path(tempfile.mkdtemp(prefix="baton_profile_"))
        self._profile: Any = None

    def start(self) -> None:
        opening.import_npu()
        profiler = importlib.import_module("torch_npu").profiler
        self._profile = profiler.profile(
            activities=[profiler.ProfilerActivity.NPU],
            on_trace_ready=profiler.tensorboard_trace_handler(str(self._folder), analyse_flag=False),
            experimental_config=profiler._ExperimentalConfig(
                profiler_level=profiler.ProfilerLevel.Level1,
                aic_metrics=getattr(profiler.AiCMetrics, METRICS[self._counted]),
                data_simplification=True,
                export_type=[profiler.ExportType.Text],
            ),
        )
        self._profile.start()

    def stop(self) -> None:
        self._profile.stop()

    def read(self) -> DeviceUse:
        runs = sorted(self._folder.glob("*_ascend_pt"))
        if not runs:
            raise DeviceUnavailable("the profiler of torch_npu left nothing behind")
        analyse(runs[0])
        tables = sorted(runs[0].rglob(TABLE))
        if not tables:
            raise DeviceUnavailable(f"the profiler of torch_npu has no {TABLE}: no kernel ran, or it could not count")
        return read_table(tables[0], self._counted)

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


def read_table(path: Path, counted: Counted) -> DeviceUse:
    """Sums over the kernels of a table. Raises DeviceUnavailable if it does not have the columns."""
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        columns = set(reader.fieldnames or ())
        for names in (DURATION, *NEEDED[counted]):
            if columns.isdisjoint(names):
                raise DeviceUnavailable(f"{path.name} has no column {' or '.join(names)}")
        kernels = list(reader)
    use = DeviceUse(kernels_s=MICRO * sum(_number(kernel, DURATION) for kernel in kernels))
    if counted == "units":
        return DeviceUse(
            kernels_s=use.kernels_s,
            cube_s=MICRO * sum(_number(kernel, CUBE) for kernel in kernels),
            vector_s=MICRO * sum(_number(kernel, VECTOR) for kernel in kernels),
            # Both kinds of core of one kernel load at the same time.
            load_s=MICRO * sum(max(_number(kernel, names) for names in LOADS) for kernel in kernels),
        )
    return DeviceUse(
        kernels_s=use.kernels_s,
        read_bytes=sum(_num_bytes(kernel, READS) for kernel in kernels),
        written_bytes=sum(_num_bytes(kernel, WRITES) for kernel in kernels),
    )


def _num_bytes(kernel: Mapping[str, str], rates: tuple[tuple[str, ...], ...]) -> float:
    duration_s = MICRO * _number(kernel, DURATION)
    return GIGA * duration_s * sum(_number(kernel, names) for names in rates)


def _number(kernel: Mapping[str, str], names: tuple[str, ...]) -> float:
    """The value of the first column that there is; 0 for N/A, which stands where a kernel did not use a unit."""
    text = next((kernel[name] for name in names if kernel.get(name)), "")
    try:
        return float(text)
    except ValueError:
        return 0.0
