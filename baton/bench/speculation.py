"""The scenario that compares decoding with and without speculation, for each drafter, kind of text and batch size.

All services run all the time and get the same requests in turn, so that what else the machine does meets all alike; one
that has nothing to do takes no CPU time. Rows are the middle ones of the rounds by throughput.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from statistics import median_low

from baton.bench.asks import Ask
from baton.bench.options import Sizes, known
from baton.bench.rows import Figure, Row
from baton.bench.scenario import Phase, Run, Scenario, Service
from baton.bench.texts import SETS

OFF = "off"
WAYS = {OFF: "none", "ngram": "ngram", "self": "self"}
"""Drafter of each service; those that need no other model."""
BATCH_SIZES = (1, 4, 16, 32)
"""Clients at once, up to --max-concurrency."""
NUM_ROUNDS = 3


async def _speculation(run: Run) -> list[Row]:
    """Each text at each batch size, without speculation and with each drafter in turn."""
    sizes, rows = run.sizes, list[Row]()
    lengths = known(sizes.prompt_tokens), known(sizes.output_tokens)
    async with contextlib.AsyncExitStack() as stack:
        services = {
            name: await stack.enter_async_context(run.service(name, max_num_seqs=max(BATCH_SIZES), speculation=drafter))
            for name, drafter in WAYS.items()
        }
        asks = services[OFF].asks
        for text, make in SETS.items():
            for batch_size in BATCH_SIZES:
                if batch_size > known(sizes.max_concurrency):
                    continue
                count = max(batch_size, known(sizes.num_requests))
                drawn = asks.from_texts(make, count, *lengths, run.model)
                rows += await _compared(services, f"{text}-{batch_size}", drawn, batch_size)
    return rows


async def _compared(services: Mapping[str, Service], label: str, asks: list[Ask], batch_size: int) -> list[Row]:
    phases: dict[str, list[Phase]] = {name: [] for name in services}
    for _ in range(NUM_ROUNDS):
        for name, service in services.items():
            async with service.phase(label) as phase:
                await phase.load.closed("all", asks, batch_size)
            phases[name].append(phase)
    plain = [phase.row(OFF).output_tok_s for phase in phases[OFF]]
    rows = []
    for name, measured in phases.items():
        by_rate = {phase.row(name).output_tok_s: phase for phase in measured}
        phase = by_rate[median_low(by_rate)]
        figures = {} if name == OFF else _figures(measured, plain, phase, phases[OFF])
        rows.append(phase.row(f"{name}-{label}", figures=figures))
    return rows


def _figures(measured: list[Phase], plain: list[float], shown: Phase, without: list[Phase]) -> dict[str, Figure]:
    """What speculation gave: by pairs of rounds, and in the round that is shown."""
    ratios = [phase.row("").output_tok_s / rate for phase, rate in zip(measured, plain, strict=True) if rate > 0]
    outcomes, others = shown.load.all_outcomes(), without[0].load.all_outcomes()
    finishes = [outcome.finish for outcome in outcomes if outcome.finish is not None]
    return {
        "speedup": median_low(ratios) if ratios else None,
        "drafted_tokens": sum(finish.usage.drafted_tokens for finish in finishes),
        "accepted_tokens": sum(finish.usage.accepted_tokens for finish in finishes),
        "other_answers": len({outcome.token_ids for outcome in outcomes} - {other.token_ids for other in others}),
    }


SPECULATION = (
    Scenario(
        "speculation",
        "what drafts are worth, by kind of text and number of streams",
        Sizes(num_requests=2, max_concurrency=32, prompt_tokens=128, output_tokens=128),
        _speculation,
        needs_own_service=True,
    ),
)
