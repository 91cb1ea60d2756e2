"""`baton bench`: load on a service, and what its clients see of it.

A closed loop: a fixed number of clients, each sending its next request when the last one has ended. Prompts are drawn
token ids of one length, so that no prefix is shared and every answer has the length asked for. All figures are taken at
the client: time to first token from the call to the first token, gaps between messages that carried tokens. Figures of
one run say little on a shared machine: compare runs that alternate, by their medians.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import TextIO

from baton.client import AsyncClient
from baton.options import ServeConfig
from baton.progress import Progress
from baton.serving import running
from runtime.errors import BatonError


@dataclass(frozen=True, slots=True)
class BenchConfig:
    """`baton bench`."""

    address: str | None = None
    """host:port of a router that runs; default: a service of one prefill and one decode worker is started."""
    model: str = "smollm2"
    """What to serve when no address is given."""
    num_requests: int = field(default=64, metadata={"min": 1})
    """Requests in total."""
    max_concurrency: int = field(default=16, metadata={"min": 1})
    """Requests in flight."""
    prompt_tokens: int = field(default=128, metadata={"min": 1})
    """Tokens of each prompt."""
    output_tokens: int = field(default=64, metadata={"min": 1})
    """Tokens of each answer; end-of-sequence is ignored."""
    seed: int = 0
    """Of the prompts."""
    json: bool = False
    """Print one JSON object in place of the table."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """One request as its client saw it."""

    started_s: float
    """When it was sent."""
    token_times_s: tuple[float, ...]
    """When each message with tokens came."""
    num_tokens: int
    """Tokens that came."""
    kv_bytes: int
    """Bytes handed from prefill to decode."""
    num_attempts: int
    """1 when nothing went wrong."""


@dataclass(frozen=True, slots=True)
class Spread:
    """A distribution in four numbers, in milliseconds."""

    p50: float
    """Median."""
    p90: float
    """90th percentile."""
    p99: float
    """99th percentile."""
    highest: float
    """The worst one."""


@dataclass(frozen=True, slots=True)
class Report:
    """What a run came to."""

    num_requests: int
    """Requests that ended well."""
    num_failed: int
    """Requests that did not."""
    num_retried: int
    """Requests that took more than one attempt."""
    duration_s: float
    """From the first request to the last answer."""
    output_tokens_per_s: float
    """Generated tokens over the duration."""
    time_to_first_token_ms: Spread
    """From the call to the first token."""
    inter_token_latency_ms: Spread
    """Gaps between messages with tokens."""
    kv_mib: float
    """KV handed off."""


async def bench(config: BenchConfig, output: TextIO) -> int:
    """Runs the load and prints the report; the exit code is 1 if a request failed."""
    async with contextlib.AsyncExitStack() as stack:
        address = config.address
        if address is None:
            address = await stack.enter_async_context(_service(config.model))
        client = await stack.enter_async_context(AsyncClient(address))
        report = await _load(config, client)
    if config.json:
        print(json.dumps({"config": asdict(config), "report": asdict(report)}), file=output)
    else:
        _print(report, output)
    return 1 if report.num_failed else 0


@contextlib.asynccontextmanager
async def _service(model: str) -> AsyncIterator[str]:
    progress = Progress(sys.stderr)
    try:
        async with running(ServeConfig(model=model, port=0, drain_timeout_s=5.0), progress.on_change) as system:
            progress.finish_loading()
            yield system.topology.addresses[0]
    finally:
        progress.abandon_loading()


async def _load(config: BenchConfig, client: AsyncClient) -> Report:
    vocab_size = (await client.get_model()).vocab_size
    draw = random.Random(config.seed)
    prompts = iter(
        [[draw.randrange(vocab_size) for _ in range(config.prompt_tokens)] for _ in range(config.num_requests)]
    )
    timelines: list[Timeline] = []
    failures: list[str] = []

    async def work() -> None:
        for prompt in prompts:
            try:
                timelines.append(await _request(client, prompt, config.output_tokens))
            except BatonError as error:
                failures.append(error.message)

    started_s = time.monotonic()
    await asyncio.gather(*(work() for _ in range(min(config.max_concurrency, config.num_requests))))
    for message in sorted(set(failures)):
        print(f"failed: {message}", file=sys.stderr)
    return summarize(timelines, len(failures), time.monotonic() - started_s)


async def _request(client: AsyncClient, prompt: Sequence[int], output_tokens: int) -> Timeline:
    started_s, times, num_tokens, served_by = time.monotonic(), [], 0, None
    stream = client.generate(prompt_token_ids=prompt, max_tokens=output_tokens, temperature=0.0, ignore_eos=True)
    async for chunk in stream:
        if chunk.tokens:
            times.append(time.monotonic())
            num_tokens += len(chunk.tokens)
        if chunk.finish is not None:
            served_by = chunk.finish.served_by
    assert served_by is not None, "a stream without error ends with finish"
    return Timeline(started_s, tuple(times), num_tokens, served_by.kv_bytes, served_by.num_attempts)


def summarize(timelines: Sequence[Timeline], num_failed: int, duration_s: float) -> Report:
    """The report of a run."""
    first = [1000 * (each.token_times_s[0] - each.started_s) for each in timelines if each.token_times_s]
    gaps = [
        1000 * (later - earlier)
        for each in timelines
        for earlier, later in zip(each.token_times_s, each.token_times_s[1:], strict=False)
    ]
    return Report(
        num_requests=len(timelines),
        num_failed=num_failed,
        num_retried=sum(each.num_attempts > 1 for each in timelines),
        duration_s=duration_s,
        output_tokens_per_s=sum(each.num_tokens for each in timelines) / duration_s,
        time_to_first_token_ms=spread(first),
        inter_token_latency_ms=spread(gaps),
        kv_mib=sum(each.kv_bytes for each in timelines) / 2**20,
    )


def spread(values: Sequence[float]) -> Spread:
    """Percentiles of `values`; zeros when there are none."""
    if len(values) < 2:
        only = values[0] if values else 0.0
        return Spread(only, only, only, only)
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return Spread(cuts[49], cuts[89], cuts[98], max(values))


def _print(report: Report, output: TextIO) -> None:
    print(
        f"requests            {report.num_requests} ended, {report.num_failed} failed, {report.num_retried} retried",
        file=output,
    )
    print(f"duration            {report.duration_s:.2f} s", file=output)
    print(f"output              {report.output_tokens_per_s:.1f} tokens/s", file=output)
    print(f"KV handed off       {report.kv_mib:.1f} MiB", file=output)
    for name, values in (
        ("first token", report.time_to_first_token_ms),
        ("between tokens", report.inter_token_latency_ms),
    ):
        text = f"p50 {values.p50:.1f}   p90 {values.p90:.1f}   p99 {values.p99:.1f}   worst {values.highest:.1f} ms"
        print(f"{name:<20}{text}", file=output)
