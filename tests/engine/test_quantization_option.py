"""The option --quantization: what it accepts, whom it separates, and that it reaches the workers."""

from __future__ import annotations

import pytest

from baton.options import ServeConfig
from baton.topology import plan_topology
from engine.config import WorkerConfig
from engine.loading import open_model
from runtime import config
from runtime.errors import ConfigError

CALL = {"prog": "worker", "description": "", "env": {}}


def test_only_known_kinds_are_accepted() -> None:
    with pytest.raises(ConfigError, match=r"--quantization: 'int3' is not accepted; give none or int8"):
        config.load(WorkerConfig, ["--model=tracer", "--quantization=int3"], **CALL)
    assert config.load(WorkerConfig, ["--model=tracer", "--quantization=int8"], **CALL).quantization == "int8"


def test_workers_of_unlike_quantisation_are_not_paired() -> None:
    """Their fingerprints differ, though both are of the checkpoint that routers serve."""
    kinds = [("float32", "none"), ("float32", "int8"), ("bfloat16", "none"), ("bfloat16", "int8")]
    prints = [open_model("smollm2", dtype, None, quantization).fingerprint for dtype, quantization in kinds]
    assert len(set(prints)) == len(kinds)
    assert len({fingerprint.split("-")[0] for fingerprint in prints}) == 1


def test_serve_tells_every_worker_and_no_router() -> None:
    served = ServeConfig(model="smollm2", quantization="int8", num_mixed=1)
    processes = plan_topology(served, "redis://x", [0], range(20_000, 20_010), "run").processes
    told = {process.name: "--quantization=int8" in process.argv for process in processes}
    assert told == {"router-0": False, "prefill-0": True, "decode-0": True, "mixed-0": True}
    silent = plan_topology(ServeConfig(model="smollm2"), "redis://x", [0], range(20_000, 20_010), "run").processes
    assert not any("--quantization" in word for process in silent for word in process.argv)
