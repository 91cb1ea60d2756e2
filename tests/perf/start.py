"""How long a start takes, and what workers hold: `python tests/perf/start.py [TIMES [OPTION ...]]`.

Starts the packaged model so many times (3), one after the other, and prints for each the seconds to the line that says
ready, and for each worker the resident MiB beyond weights and KV pool. The first start after a change of kernels
compiles them. Not a test: machines differ.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

from engine.model_runner import model_spec
from runtime.checkpoint import open_checkpoint

MODEL = "smollm2"
READY = "ready: "


def resident_mib(pid: int) -> float:
    """Pages of a process that are in memory."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+)", status)
    assert found is not None
    return int(found[1]) / 1024


def pool_mib(pid: int) -> float:
    """Of these, what is its pool's file."""
    total, is_pool = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            is_pool = "baton-kv-" in line
        elif is_pool and line.startswith("Rss:"):
            total += int(line.split()[1])
    return total / 1024


def weights_mib(dtype: str) -> float:
    """Of the model, in the dtype it runs in; a head that is tied to the embedding has an order of its own."""
    checkpoint = open_checkpoint(MODEL)
    shape = model_spec(checkpoint, dtype).decoder
    query, key = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    layer = shape.hidden_size * (2 * query + 2 * key + 3 * shape.intermediate_size)
    num_elements = shape.num_layers * layer + 2 * shape.vocab_size * shape.hidden_size
    return num_elements * {"float32": 4, "bfloat16": 2, "float16": 2}[model_spec(checkpoint, dtype).dtype] / 2**20


def start_once(options: list[str]) -> float:
    """Seconds until ready; prints what the workers hold then, and stops them."""
    began_s = time.monotonic()
    argv = [sys.executable, "-m", "baton", "serve", MODEL, "--port=0", "--drain-timeout-s=1", *options]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as serving:
        assert serving.stdout is not None
        pids: dict[str, int] = {}
        for line in serving.stdout:
            if found := re.match(r"(\S+)\s+pid (\d+)", line):
                pids[found[1]] = int(found[2])
            if line.startswith(READY):
                break
        seconds = time.monotonic() - began_s
        dtype = next((option.split("=")[1] for option in options if option.startswith("--dtype=")), "auto")
        for name, pid in pids.items():
            if name.startswith(("prefill", "decode", "mixed")):
                resident, pool = resident_mib(pid), pool_mib(pid)
                beyond = resident - pool - weights_mib(dtype)
                print(
                    f"  {name}: {resident:.0f} MiB resident, {pool:.0f} of them KV, {beyond:.0f} beyond weights and KV"
                )
        serving.terminate()
    return seconds


def main(times: str = "3", *options: str) -> None:
    """Prints a line for each start and worker."""
    for index in range(int(times)):
        print(f"start {index + 1}")
        seconds = start_once(list(options))
        print(f"  ready after {seconds:.2f} s")


if __name__ == "__main__":
    main(*sys.argv[1:])
