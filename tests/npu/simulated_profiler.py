"""What Baton uses of `torch_npu.profiler`: runs that leave a folder behind, of which an analysis makes a table.

The table has the columns that releases write, for kernels that a test gives. Runs that do not end, begin twice, or are
asked for in a way that the real one does not know are refused.
"""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from contracts import require

COMMON = ("Device_id", "Name", "Type", "Accelerator Core", "Start Time(us)", "Duration(us)", "Wait Time(us)")
UNITS = (
    "aicore_time(us)",
    "aic_total_cycles",
    "aic_mac_time(us)",
    "aic_mac_ratio",
    "aic_mte2_time(us)",
    "aic_mte2_ratio",
    "aiv_time(us)",
    "aiv_vec_time(us)",
    "aiv_vec_ratio",
    "aiv_mte2_time(us)",
    "aiv_mte2_ratio",
)
MEMORY = (
    "aicore_time(us)",
    "aic_l1_read_bw(GB/s)",
    "aic_main_mem_read_bw(GB/s)",
    "aic_main_mem_write_bw(GB/s)",
    "aiv_main_mem_read_bw(GB/s)",
    "aiv_main_mem_write_bw(GB/s)",
)
COLUMNS = {"PipeUtilization": UNITS, "Memory": MEMORY}
Kernel = dict[str, object]
PRODUCT: Kernel = {"Duration(us)": 50, "aic_mac_time(us)": 40, "aic_main_mem_read_bw(GB/s)": 200}
"""A product of matrices."""


@dataclass
class Run:
    """`torch_npu.profiler.profile`."""

    options: dict[str, Any]
    ready: Callable[[Run], None]
    state: str = "made"

    def start(self) -> None:
        require(self.state == "made", f"start: the run is {self.state}")
        self.state = "running"

    def stop(self) -> None:
        require(self.state == "running", f"stop: the run is {self.state}")
        self.state = "over"
        self.ready(self)


@dataclass
class SimulatedProfiler:
    """The module."""

    kernels: list[Kernel] = field(default_factory=lambda: [PRODUCT])
    """What ran, by column, whatever did."""
    renamed: dict[str, str] = field(default_factory=dict)
    """Columns that this release calls otherwise."""
    runs: list[Run] = field(default_factory=list)
    """All of them."""
    leaves_nothing: bool = False
    """Whether runs leave no folder."""
    folder: Path | None = None
    """Where the next run leaves its own."""
    ProfilerActivity = SimpleNamespace(CPU="cpu", NPU="npu")
    ProfilerLevel = SimpleNamespace(Level0=0, Level1=1, Level2=2)
    AiCMetrics = SimpleNamespace(**{name: name for name in (*COLUMNS, "ArithmeticUtilization", "L2Cache")})
    ExportType = SimpleNamespace(Text="text", Db="db")

    def _ExperimentalConfig(
        self, *, profiler_level: int, aic_metrics: str, data_simplification: bool, export_type: list[str]
    ) -> SimpleNamespace:
        require(profiler_level >= 1, "level 0 counts nothing")
        require(export_type == ["text"], "a table is text")
        return SimpleNamespace(metrics=aic_metrics)

    def tensorboard_trace_handler(self, dir_name: str, *, analyse_flag: bool) -> Callable[[Run], None]:
        name = Path(dir_name).name
        require(name.replace("_", "").isalnum() and name.isascii(), f"{name}: letters, digits and underscores")
        require(not analyse_flag, "the analysis takes seconds, in which steps would stand still")
        self.folder = Path(dir_name)  # for the process, not for the handler
        return lambda run: None

    def profile(
        self, *, activities: list[str], on_trace_ready: Callable[[Run], None], experimental_config: SimpleNamespace
    ) -> Run:
        require("npu" in activities, "nothing of the device would be seen")
        require(all(run.state != "running" for run in self.runs), "the device counts for one run at a time")
        require(self.folder is not None and callable(on_trace_ready), "a run needs a handler that says where to")
        assert self.folder is not None
        metrics, base = experimental_config.metrics, self.folder

        def leave(run: Run) -> None:
            on_trace_ready(run)
            if not self.leaves_nothing:
                folder = base / f"host_{len(self.runs)}_ascend_pt"
                folder.mkdir()
                (folder / "metrics").write_text(metrics)

        self.runs.append(Run({"metrics": metrics, "folder": base}, leave))
        return self.runs[-1]

    def analyse(self, folder: Path) -> None:
        """In place of the program that does it."""
        columns = (*COMMON, *COLUMNS[(folder / "metrics").read_text()])
        output = folder / "ASCEND_PROFILER_OUTPUT"
        output.mkdir()
        with (output / "kernel_details.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow([self.renamed.get(column, column) for column in columns])
            writer.writerows([kernel.get(column, "N/A") for column in columns] for kernel in self.kernels)
