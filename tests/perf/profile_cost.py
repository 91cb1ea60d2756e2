"""What a profile costs a worker while it runs: `python tests/perf/profile_cost.py`.

Prints microseconds of CPU time a step: a look at the empty list of recorders, which every step pays, and the record of
a step of SmolLM2 by its batch, which a step pays in the event loop while somebody profiles. Least of several rounds.
Not a test: machines differ.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

from model_steps import make_batch

from engine.batch import Batch
from engine.model_runner import model_spec
from engine.profiling import Profiler
from engine.step_loop import StepTime
from engine.work import Work, step_work
from kvstore.blocks import BlockPool
from runtime.checkpoint import open_checkpoint

NUM_CALLS, NUM_ROUNDS = 2000, 7


def least_us(call: Callable[[], object]) -> float:
    """CPU microseconds of a call."""
    rounds = []
    for _ in range(NUM_ROUNDS):
        started_s = time.process_time()
        for _ in range(NUM_CALLS):
            call()
        rounds.append(time.process_time() - started_s)
    return 1e6 * min(rounds) / NUM_CALLS


def main() -> None:
    """Prints the figures."""
    spec = model_spec(open_checkpoint("smollm2"))
    recorders: list[Callable[[Batch, StepTime], None]] = []
    batch, step_time = make_batch([(1, 128)]), StepTime(1.0, 1.001)

    def look() -> None:
        for record in recorders:
            record(batch, step_time)

    print(f"{'nobody profiles':<20}{least_us(look) - least_us(lambda: None):>8.2f} us")
    measures = SimpleNamespace(work=lambda each: step_work(spec.decoder, each, 4, 4))
    layout = spec.kv_layout(16)
    profiler = Profiler(cast(Any, None), BlockPool(1), layout, cast(Any, measures))
    assert isinstance(measures.work(batch), Work)
    for name, sequences in (("1 x 128", [(1, 128)]), ("32 x 512", [(1, 512)] * 32), ("chunk 512", [(512, 512)])):
        step = make_batch(sequences)
        print(f"{name:<20}{least_us(lambda step=step: profiler._step(step, step_time, 0.5)):>8.2f} us")  # type: ignore[misc]


if __name__ == "__main__":
    main()
