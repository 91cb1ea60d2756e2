"""What a decode plan and commit cost as sequences run and wait: `python tests/perf/scheduler_cost.py`.

Prints the median over many steps for each pair of sizes; no model, no I/O. Not a test: machines differ.
"""

from __future__ import annotations

import statistics
import time

from decode_svc.scheduler import DecodeScheduler
from engine.holdings import Holdings
from engine.request import Priority, Request, Sample, SamplingParams
from engine.scheduling import Limits
from engine.sequence import DECODE_MOVES, Sequence
from kvstore.blocks import BlockPool
from kvstore.hashing import PrefixHasher

NUM_STEPS = 300


def measure(num_running: int, num_waiting: int) -> float:
    """Median seconds of plan and commit."""
    holdings = Holdings(BlockPool(num_running * 64), PrefixHasher("m", "l", 16), 16)
    limits = Limits(8192, num_running, max(512, num_running), 512)
    scheduler = DecodeScheduler(holdings, limits, 10**9)
    for index in range(num_running + num_waiting):
        sampling = SamplingParams(max_tokens=10**6)
        request = Request(index.to_bytes(16, "big"), "r", (index % 50000, 7, 9), (), sampling, Priority(1 + index % 3))
        scheduler.add(Sequence(request, DECODE_MOVES, float(index)), None)
    durations = []
    # Time stands still: none of those that wait comes to outrank one that runs.
    for _ in range(NUM_STEPS):
        started_s = time.perf_counter()
        plan = scheduler.plan(0.0)
        scheduler.commit(plan, [Sample(5) for part in plan.slices if part.samples], 0.0)
        durations.append(time.perf_counter() - started_s)
    assert scheduler.num_queued == num_waiting
    return statistics.median(durations[50:])


def main() -> None:
    """Prints the table."""
    print(f"{'running':>8}{'waiting':>9}{'plan + commit, ms':>20}")
    for num_running, num_waiting in ((32, 0), (64, 0), (128, 0), (256, 0), (256, 1_000), (256, 10_000), (512, 10_000)):
        print(f"{num_running:>8}{num_waiting:>9}{1000 * measure(num_running, num_waiting):>20.3f}")


if __name__ == "__main__":
    main()
