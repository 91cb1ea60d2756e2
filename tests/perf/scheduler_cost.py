"""What a decode plan and commit cost as sequences run and wait: `python tests/perf/scheduler_cost.py`.

Prints the median over many steps for each pair of sizes; then what a drafter adds to a step that never pays, so that
it is hardly ever asked: the deciding and the learning from steps, and the part of all time, and of what comes after the
first steps, that its drafts would take if each took half a step. No model, no I/O. Not a test: machines differ.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

from decode_svc.scheduler import DecodeScheduler
from engine.drafters import Drafter, ngram
from engine.holdings import Holdings
from engine.planning import Plan
from engine.request import Priority, Request, Sample, SamplingParams
from engine.scheduling import Limits
from engine.sequence import DECODE_MOVES, Sequence
from engine.step_time import StepLoad
from kvstore.blocks import BlockPool
from kvstore.hashing import PrefixHasher

NUM_STEPS = 300
STEP_MS = 20.0
"""What a step is said to take that has no drafts."""
DRAFT_MS = 10.0
"""And each draft more: half a step, which none is worth here."""
FIRST_STEPS = 60
"""In which times become known."""


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


def samples_of(plan: Plan) -> Iterator[Sample]:
    """The same token again and again, which is what prompt lookup guesses; where it has guessed, always another."""
    for part in plan.slices:
        yield from [Sample(draft + 1) for draft in part.drafts]
        yield Sample(5)


def measure_idle_drafter(num_running: int, drafter: Drafter | None) -> tuple[float, list[int]]:
    """Median seconds of plan, learning and commit, and drafts of each step."""
    holdings = Holdings(BlockPool(num_running * 256), PrefixHasher("m", "l", 16), 16)
    scheduler = DecodeScheduler(holdings, Limits(8192, num_running, max(512, num_running), 512), 10**9, drafter=drafter)
    for index in range(num_running):
        request = Request(index.to_bytes(16, "big"), "r", (5, 5, 5, 5), (), SamplingParams(max_tokens=10**6))
        scheduler.add(Sequence(request, DECODE_MOVES, float(index)), None)
    durations, drafts = [], []
    for _ in range(4 * NUM_STEPS):
        started_s = time.perf_counter()
        plan = scheduler.plan(0.0)
        if scheduler.step_times is not None:
            num_drafts = sum(len(part.drafts) for part in plan.slices)
            drafts.append(num_drafts)
            context_lens = sum(part.sequence.num_tokens for part in plan.slices)
            load = StepLoad(num_running, context_lens, num_draft_rows=num_drafts)
            scheduler.step_times.observe(load, STEP_MS + DRAFT_MS * num_drafts)
        scheduler.commit(plan, list(samples_of(plan)), 0.0)
        durations.append(time.perf_counter() - started_s)
    return statistics.median(durations[NUM_STEPS:]), drafts


def main() -> None:
    """Prints the tables."""
    print(f"{'running':>8}{'waiting':>9}{'plan + commit, ms':>20}")
    for num_running, num_waiting in ((32, 0), (64, 0), (128, 0), (256, 0), (256, 1_000), (256, 10_000), (512, 10_000)):
        print(f"{num_running:>8}{num_waiting:>9}{1000 * measure(num_running, num_waiting):>20.3f}")
    print(f"{'running':>8}{'a drafter adds, ms':>20}{'steps with drafts':>20}{'their time':>12}{'later':>8}")
    for num_running in (1, 4, 16, 32):
        plain_s, _ = measure_idle_drafter(num_running, None)
        idle_s, drafts = measure_idle_drafter(num_running, ngram.Drafter())
        num_drafting = sum(number > 0 for number in drafts)
        shares = [DRAFT_MS * statistics.mean(some) / STEP_MS for some in (drafts, drafts[FIRST_STEPS:])]
        print(
            f"{num_running:>8}{1000 * (idle_s - plain_s):>20.3f}{num_drafting:>12} of {len(drafts)}"
            f"{shares[0]:>12.2%}{shares[1]:>8.2%}"
        )


if __name__ == "__main__":
    main()
