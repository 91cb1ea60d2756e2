"""Scenarios in which requests get in each other's way: long prompts, classes, more load than there is room for.

Each measures the same streams undisturbed as well, on the same service, for a row to compare with.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from functools import partial

from baton.bench.load import arrival_times
from baton.bench.options import Sizes, known, read_slo
from baton.bench.rows import Row, Window
from baton.bench.scenario import Phase, Run, Scenario, Service

OVERLOAD_FACTOR = 3.0
"""Load of the open loop, in capacities."""
MAX_QUEUE_WAIT_S = 1.0
"""Who would wait longer for a seat is refused; with a limit on the time to first token, half of that."""
STREAMS_PER_SEAT = 1.25
"""Low-priority streams for each seat: some of them always wait, though not for as long as classes are apart, when they
would rank with the highest."""
DEFAULT_CHUNK_TOKENS = 512
"""Of a service that is told nothing else."""
NUM_CHUNK_PROMPTS = 3
"""Prompts of each length from which the time of a chunk is taken."""


async def _interference(run: Run) -> list[Row]:
    """Steady streams with and without long prompts arriving."""
    async with run.service() as service:
        disturbed, window = await _steady(run, service, "with long prompts", with_long=True)
        alone, quiet = await _steady(run, service, "alone", with_long=False)
    return [
        disturbed.row("steady", "steady", window),
        disturbed.row("long", "long"),
        alone.row("steady-alone", "steady", quiet),
    ]


async def _steady(run: Run, service: Service, name: str, *, with_long: bool) -> tuple[Phase, Window]:
    """Streams that are kept running, and the window in which long prompts are prefilled or would be."""
    sizes, asks = run.sizes, service.asks
    delay_s, duration_s = known(sizes.delay_s), known(sizes.duration_s)
    count, output_tokens = known(sizes.num_long), known(sizes.output_tokens)
    long_lengths = known(sizes.long_prompt_tokens), known(sizes.long_output_tokens)
    longs = asks.many(count if with_long else 0, *long_lengths)
    arrivals_s = [delay_s + index * known(sizes.period_s) for index in range(len(longs))]
    make, stop = partial(asks.one, known(sizes.prompt_tokens), output_tokens), asyncio.Event()
    async with service.phase(name) as phase, asyncio.TaskGroup() as tasks:
        tasks.create_task(phase.load.keep("steady", make, known(sizes.max_concurrency), stop))
        await phase.load.open("long", longs, arrivals_s)
        await asyncio.sleep(max(0.0, phase.started_s + duration_s - time.monotonic()))
        stop.set()
    prefilled_s = [(*each.message_times_s, each.ended_s)[0] for each in phase.load.outcomes.get("long", [])]
    return phase, (phase.started_s + delay_s, max([phase.started_s + duration_s, *prefilled_s]))


async def _long_short(run: Run) -> list[Row]:
    """Short prompts that arrive while a long one is prefilled; each kind alone."""
    sizes = run.sizes
    num_short, delay_s, output_tokens = known(sizes.num_requests), known(sizes.delay_s), known(sizes.output_tokens)
    async with run.service() as service:
        chunk_ms = await _chunk_ms(run, service)
        draw_short = partial(service.asks.many, num_short, known(sizes.prompt_tokens), output_tokens)
        draw_long = partial(service.asks.many, known(sizes.num_long), known(sizes.long_prompt_tokens), output_tokens)
        async with service.phase("together") as together, asyncio.TaskGroup() as tasks:
            longs = draw_long()
            tasks.create_task(together.load.open("long", longs, [0.0] * len(longs)))
            tasks.create_task(together.load.open("short", draw_short(), [delay_s] * num_short))
        async with service.phase("short alone") as short_alone:
            await short_alone.load.open("short", draw_short(), [0.0] * num_short)
        async with service.phase("long alone") as long_alone:
            await long_alone.load.open("long", draw_long(), [0.0] * len(longs))
    return [
        together.row("short", "short"),
        together.row("long", "long"),
        short_alone.row("short-alone", "short", figures={"chunk_ms": chunk_ms}),
        long_alone.row("long-alone", "long"),
    ]


async def _priority(run: Run) -> list[Row]:
    """High-priority requests one by one: on an idle service, while low-priority streams fill every seat of decode, and
    while low-priority prompts fill prefill."""
    sizes = run.sizes
    num_low, lengths = known(sizes.max_concurrency), (known(sizes.prompt_tokens), known(sizes.output_tokens))
    long_lengths = known(sizes.long_prompt_tokens), known(sizes.long_output_tokens)
    num_seats = max(1, int(num_low / STREAMS_PER_SEAT))
    # However long an answer takes: some of the low ones always wait for one.
    async with run.service(max_num_seqs=num_seats, max_queue_wait_s=0) as service:
        chunk_ms = await _chunk_ms(run, service)
        draw_high = partial(service.asks.many, known(sizes.num_requests), *lengths, "high")
        async with service.phase("idle") as idle:
            await idle.load.closed("high", draw_high(), 1)
        saturated_rows = []
        for kind, low_lengths in (("", lengths), ("-prefill", long_lengths)):
            make_low, stop = partial(service.asks.one, *low_lengths, "low"), asyncio.Event()
            async with service.phase(f"saturated{kind}") as saturated, asyncio.TaskGroup() as tasks:
                tasks.create_task(saturated.load.keep("low", make_low, num_low, stop))
                for _ in range(num_seats):
                    await saturated.load.streaming.acquire()
                first_s = time.monotonic()
                await saturated.load.closed("high", draw_high(), 1)
                last_s = time.monotonic()
                stop.set()
            saturated_rows += [
                saturated.row(f"high{kind}", "high"),
                saturated.row(f"low{kind}", "low", (first_s, last_s), {"most_recomputed": _most_recomputed(saturated)}),
            ]
    return [*saturated_rows, idle.row("high-idle", "high", figures={"chunk_ms": chunk_ms})]


async def _chunk_ms(run: Run, service: Service) -> float:
    """Milliseconds that a chunk of prefill takes on the idle service: what a second chunk adds to the first token."""
    chunk_tokens = run.serve_config({}).chunk_size or DEFAULT_CHUNK_TOKENS
    medians_ms = []
    async with service.phase("one chunk more") as phase:
        for num_tokens in (chunk_tokens, 2 * chunk_tokens):
            asks = service.asks.many(NUM_CHUNK_PROMPTS, num_tokens, 1)
            await phase.load.closed(str(num_tokens), asks, 1)
            ttft_ms = phase.row("", str(num_tokens)).ttft_ms
            medians_ms.append(ttft_ms.p50 if ttft_ms else 0.0)
    return medians_ms[1] - medians_ms[0]


def _most_recomputed(phase: Phase) -> int:
    """Attempts beyond the first of the low-priority request that had most, of the whole phase."""
    finishes = [outcome.finish for outcome in phase.load.outcomes.get("low", []) if outcome.finish]
    return max((finish.served_by.num_attempts - 1 for finish in finishes), default=0)


async def _overload(run: Run) -> list[Row]:
    """Capacity, three times as much for a while, and capacity again from the moment when that is over."""
    sizes = run.sizes
    concurrency, duration_s = known(sizes.max_concurrency), known(sizes.duration_s)
    ttft_ms = read_slo(run.config.slo).ttft
    max_wait_s = MAX_QUEUE_WAIT_S if ttft_ms is None else ttft_ms / 2000
    async with run.service(max_num_seqs=concurrency, max_queue_wait_s=max_wait_s) as service:
        one = partial(service.asks.one, known(sizes.prompt_tokens), known(sizes.output_tokens))

        async def full(phase: Phase, label: str) -> Window:
            """Every seat is taken, from `delay_s` on for a third as long as the overload."""
            began_s, stop = time.monotonic() + known(sizes.delay_s), asyncio.Event()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(phase.load.keep(label, one, concurrency, stop))
                await asyncio.sleep(known(sizes.delay_s) + duration_s / 3)
                stop.set()
                ended_s = time.monotonic()
            return began_s, ended_s

        async with service.phase("at 1x") as before:
            window = await full(before, "full")
        at_1x = before.row("at-1x", "full", window)
        rate = max(OVERLOAD_FACTOR * at_1x.output_tok_s / known(sizes.output_tokens), 1 / duration_s)
        times = arrival_times(rate, known(sizes.burstiness), run.config.seed)
        arrivals_s = list(itertools.takewhile(lambda due_s: due_s < duration_s, times))
        async with service.phase("at 3x") as above, asyncio.TaskGroup() as tasks:
            tasks.create_task(above.load.open("open", [one() for _ in arrivals_s], arrivals_s))
            await asyncio.sleep(duration_s)
            window = await full(above, "after")
    outcomes = above.load.outcomes.get("open", [])
    offered: dict[str, float] = {"offered_rps": rate, "offered_requests": len(arrivals_s)}
    accepted = [outcome for outcome in outcomes if not outcome.is_refused]
    refused = [outcome for outcome in outcomes if outcome.is_refused]
    return [
        at_1x,
        above.row_of("at-3x-accepted", accepted, figures=offered),
        above.row_of("refused", refused),
        # Those that got in before still have seats then, and what they are given counts.
        above.row_of("after", [*accepted, *above.load.outcomes.get("after", [])], window),
    ]


CONTENTION = (
    Scenario(
        "interference",
        "what long prompts do to the gaps of streams that run",
        Sizes(
            max_concurrency=16,
            prompt_tokens=128,
            output_tokens=160,
            num_long=6,
            long_prompt_tokens=2048,
            long_output_tokens=8,
            delay_s=4.0,
            period_s=3.0,
            duration_s=22.0,
        ),
        _interference,
    ),
    Scenario(
        "long-short",
        "what a long prompt does to the first tokens of short ones behind it",
        Sizes(num_requests=20, prompt_tokens=64, output_tokens=16, num_long=1, long_prompt_tokens=6000, delay_s=1.0),
        _long_short,
    ),
    Scenario(
        "priority",
        "what a saturated service does to urgent requests",
        Sizes(
            num_requests=8,
            max_concurrency=20,
            prompt_tokens=128,
            output_tokens=64,
            long_prompt_tokens=128,
            long_output_tokens=2,
        ),
        _priority,
    ),
    Scenario(
        "overload",
        "what three times the capacity does to those who get in, and how fast the others are told",
        Sizes(
            max_concurrency=16,
            burstiness=1.0,
            delay_s=5.0,
            duration_s=60.0,
            prompt_tokens=128,
            output_tokens=64,
        ),
        _overload,
    ),
)
