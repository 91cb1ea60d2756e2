"""What metrics cost: `python tests/perf/metrics_cost.py [PAIRS]`.

Two systems over the tracer, one with metrics, the request log and a scrape of every process each second, one without,
get the same load in turns, PAIRS times (20). Printed are the CPU microseconds of all processes, and of the router, for
each token, their ratio in each pair, and the median of the ratios with its 95 % interval. Not a test: machines differ.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import statistics
import sys
import tempfile
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

from baton import AsyncClient
from baton.bench.system import System, cpu_between_s, started
from baton.options import ServeConfig
from baton.topology import choose_ports

NUM_STREAMS, NUM_ROUNDS, NUM_TOKENS = 64, 8, 64
NUM_PROCESSES = 3
SCRAPE_S = 1.0
NUM_RESAMPLES = 10_000


async def ask(client: AsyncClient, seed: int) -> None:
    """Requests of one stream, one after another."""
    rng = random.Random(seed)
    for _ in range(NUM_ROUNDS):
        prompt = [rng.randrange(256) for _ in range(40)]
        async for _ in client.generate(prompt_token_ids=prompt, max_tokens=NUM_TOKENS, ignore_eos=True):
            pass


async def scrape(port: int) -> None:
    """Every process, again and again, until cancelled."""
    while True:
        for index in range(NUM_PROCESSES):
            await asyncio.to_thread(_read, f"http://127.0.0.1:{port + index}/metrics")
        await asyncio.sleep(SCRAPE_S)


def _read(address: str) -> None:
    with urllib.request.urlopen(address) as answer:
        assert b"baton_build_info" in answer.read()


@contextlib.asynccontextmanager
async def scraped(port: int | None) -> AsyncIterator[None]:
    task = None if port is None else asyncio.create_task(scrape(port))
    yield
    if task is not None:
        task.cancel()
        await asyncio.wait([task])


async def cost_us(system: System, port: int | None, seed: int) -> tuple[float, float]:
    """CPU microseconds a token, of all processes and of the router."""
    async with AsyncClient(system.addresses[0]) as client, scraped(port):
        before = system.cpu_times_s()
        await asyncio.gather(*(ask(client, NUM_STREAMS * seed + stream) for stream in range(NUM_STREAMS)))
        after = system.cpu_times_s()
    everything, router = cpu_between_s(before, after), cpu_between_s(before, after, set(system.router_pids()))
    assert everything is not None and router is not None, "a process was started again"
    num_tokens = NUM_STREAMS * NUM_ROUNDS * NUM_TOKENS
    return 1e6 * everything / num_tokens, 1e6 * router / num_tokens


def interval(ratios: list[float]) -> tuple[float, float]:
    """Of the median, by resampling."""
    rng = random.Random(1)
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(NUM_RESAMPLES))
    return medians[NUM_RESAMPLES // 40], medians[-NUM_RESAMPLES // 40]


async def measure(num_pairs: int) -> None:
    port = choose_ports(1)[0]
    options = {"port": 0, "max_num_seqs": NUM_STREAMS, "kv_cache_gpu_mem_utilization": 0.02}
    with tempfile.TemporaryDirectory() as folder:
        shown = {"metrics_port": port, "request_log": Path(folder, "requests")}
        async with contextlib.AsyncExitStack() as stack:
            without = await stack.enter_async_context(started(ServeConfig("tracer", **options), lambda _: None))  # type: ignore[arg-type]
            with_ = await stack.enter_async_context(
                started(ServeConfig("tracer", **options, **shown), lambda _: None)  # type: ignore[arg-type]
            )
            ratios: dict[str, list[float]] = {"all processes": [], "router": []}
            for pair in range(-1, num_pairs):  # the first warms up
                order = [(without, None), (with_, port)]
                costs = {}
                for system, its_port in order if pair % 2 else order[::-1]:
                    costs[its_port] = await cost_us(system, its_port, pair + 1)
                for index, what in enumerate(ratios):
                    off, on = costs[None][index], costs[port][index]
                    print(f"{pair:3} {what}: {off:.1f} us a token without, {on:.1f} with, {on / off:.4f}", flush=True)
                    if pair >= 0:
                        ratios[what].append(on / off)
    for what, values in ratios.items():
        low, high = interval(values)
        print(f"{what}: median ratio {statistics.median(values):.4f}, 95 % interval {low:.4f} to {high:.4f}")


if __name__ == "__main__":
    asyncio.run(measure(int(sys.argv[1]) if len(sys.argv) > 1 else 20))
