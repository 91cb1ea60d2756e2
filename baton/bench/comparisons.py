"""Scenarios that compare configurations under one load: throughput, batching, handoff.

Each configuration is a service of its own, started and warmed one after the other, and gets the same requests.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from baton.bench.asks import Ask
from baton.bench.load import Outcome, arrival_times
from baton.bench.options import Sizes, known
from baton.bench.rows import Figure, Row, spread
from baton.bench.scenario import Run, Scenario, Service
from kvstore.transport.mooncake import import_engine
from runtime.errors import ConfigError

MIB = 2**20
WHOLE_PROMPTS = 4096
"""Tokens of a step, and of a chunk, that no ShareGPT prompt exceeds."""
CHUNK_TOKENS = 256
"""Tokens of a step and of a chunk where prompts are cut up."""
LENGTH_STEPS = (16, 4, 1)
"""The handoff is measured at the longest prompt divided by each of these."""
HANDOFF_OUTPUT_TOKENS = 2
"""The second token is the first that needs the KV at its new place."""


async def _throughput(run: Run) -> list[Row]:
    """One load on one service: a closed loop, or an open one at a rate."""
    sizes = run.sizes
    rate = known(sizes.request_rate)
    async with run.service() as service:
        asks = service.draw()
        async with service.phase("throughput") as phase:
            if rate:
                times = arrival_times(rate, known(sizes.burstiness), run.config.seed)
                await phase.load.open("all", asks, list(itertools.islice(times, len(asks))))
            else:
                await phase.load.closed("all", asks, known(sizes.max_concurrency))
    return [phase.row("throughput")]


async def _static_vs_continuous(run: Run) -> list[Row]:
    """One closed loop on static batches, continuous ones, and continuous ones with prompts in chunks."""
    num_seats = known(run.sizes.max_concurrency)
    whole, cut = max(WHOLE_PROMPTS, num_seats), max(CHUNK_TOKENS, num_seats)
    configurations = (
        ("static", "static", whole),
        ("continuous", "dynamic", whole),
        ("continuous-chunked", "dynamic", cut),
    )
    rows = []
    for name, schedule, num_tokens in configurations:
        options = {"batch_schedule": schedule, "chunk_size": num_tokens, "max_num_tokens": num_tokens}
        async with run.service(name, max_num_seqs=num_seats, **options) as service:
            asks = service.draw()
            async with service.phase("load") as phase:
                await phase.load.closed("all", asks, num_seats)
        figures: dict[str, Figure] = {"padding_tokens": num_padding_tokens(asks, num_seats)} if name == "static" else {}
        rows.append(phase.row(name, figures=figures))
    return rows


def num_padding_tokens(asks: Sequence[Ask], batch_size: int) -> int:
    """What a batch padded to its longest prompt and held to its longest answer would compute for nothing, were the
    requests batched in their order. Computed from lengths: no batch here is ever padded."""
    batches = [asks[start : start + batch_size] for start in range(0, len(asks), batch_size)]
    padded = sum(
        len(batch) * (max(len(ask.prompt_token_ids) for ask in batch) + max(ask.output_tokens for ask in batch))
        for batch in batches
    )
    return padded - sum(len(ask.prompt_token_ids) + ask.output_tokens for ask in asks)


async def _handoff(run: Run) -> list[Row]:
    """Requests one at a time, by each transport that there is: at three lengths, prompts whole, so that no byte moves
    while another is computed and the handoff can be seen alone; and at the longest, in the chunks that services use."""
    longest = known(run.sizes.long_prompt_tokens)
    num_tokens = max(longest, WHOLE_PROMPTS)
    whole = {"chunk_size": num_tokens, "max_num_tokens": num_tokens}
    rows = []
    for transport in _transports(run):
        options = {"kv_transports": (transport,), "trusted_transfer_network": transport == "mooncake"}
        async with run.service(transport, **options, **whole) as service:
            for length in sorted({max(1, longest // step) for step in LENGTH_STEPS}):
                rows.append(await _handoff_row(run, service, transport, length))
        async with run.service(transport, **options) as service:
            rows.append(await _handoff_row(run, service, transport, longest, "-chunked"))
    return rows


def _transports(run: Run) -> list[str]:
    """All that this machine has, the best first."""
    names = ["shm", "mooncake", "grpc"]
    try:
        import_engine()
    except ConfigError as error:
        run.ticker.say(f"mooncake is left out: {error.message}")
        names.remove("mooncake")
    return names


async def _handoff_row(run: Run, service: Service, transport: str, length: int, suffix: str = "") -> Row:
    asks = service.asks.many(known(run.sizes.num_requests), length, HANDOFF_OUTPUT_TOKENS)
    async with service.phase(f"{length} tokens{suffix}") as phase:
        await phase.load.closed("all", asks, 1)
    figures = handoff_figures(phase.load.all_outcomes(), transport)
    if suffix:
        del figures["handoff_mib_s"]  # most bytes had moved before that time began
    return phase.row(f"{transport}-{length}{suffix}", figures=figures)


def handoff_figures(outcomes: Sequence[Outcome], transport: str) -> dict[str, Figure]:
    """What the handoff by `transport` cost: from the first token at the prefilling worker to the attested copy."""
    finishes = [outcome.finish for outcome in outcomes if outcome.finish is not None]
    moved = [finish for finish in finishes if finish.served_by.transport == transport]
    times_ms = [finish.timing.transfer_ms - finish.timing.prefill_ms for finish in moved]
    first_ms = [finish.timing.time_to_first_token_ms for finish in moved]
    num_bytes = sum(finish.served_by.kv_bytes for finish in moved)
    return {
        "handoff_ms": spread(times_ms),
        "exposed_percent": spread([100 * late / first for late, first in zip(times_ms, first_ms, strict=True)]),
        "handoff_mib_s": 1000 * num_bytes / MIB / sum(times_ms) if sum(times_ms) > 0 else None,
        "kv_bytes": num_bytes / len(moved) if moved else None,
        "other_transport": len(finishes) - len(moved),
    }


COMPARISONS = (
    Scenario(
        "throughput",
        "what a service gives to a number of clients, or at a rate",
        Sizes(
            num_requests=64,
            max_concurrency=16,
            request_rate=0.0,
            burstiness=1.0,
            dataset="random",
            prompt_tokens=128,
            output_tokens=64,
        ),
        _throughput,
    ),
    Scenario(
        "static-vs-continuous",
        "what continuous batching and chunked prefill are worth on lengths of real conversations",
        Sizes(num_requests=96, max_concurrency=32, dataset="sharegpt", prompt_tokens=128, output_tokens=64),
        _static_vs_continuous,
        needs_own_service=True,
    ),
    Scenario(
        "handoff",
        "what moving KV costs, by transport and length of prompt",
        Sizes(num_requests=8, long_prompt_tokens=2048),
        _handoff,
        needs_own_service=True,
        needs_pair=True,
    ),
)
