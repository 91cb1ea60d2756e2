"""What metrics cost: `python tests/perf/metrics_cost.py [PAIRS]`.

Two systems over the tracer live in this one process, each with a router and two workers; one shows metrics, is scraped
now and then, and writes the request log. They get the same short load in turns, PAIRS times (300), so that a busy
machine slows both alike. Printed are the CPU microseconds of a token, that of its client included, what metrics add to
it (the median of the differences with its 95 % interval), and the CPU of a scrape. Not a test: machines differ.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "router"))

from cluster import Cluster, cluster, request_of

from baton.topology import choose_ports

NUM_STREAMS, NUM_TOKENS = 32, 64
SCRAPE_S = 1.0
NUM_RESAMPLES = 10_000


async def cost_us(system: Cluster, rng: random.Random) -> float:
    """CPU microseconds a token of one block of load."""
    prompts = [[rng.randrange(256) for _ in range(40)] for _ in range(NUM_STREAMS)]
    before_s = time.process_time()
    await asyncio.gather(*(system.generate(request_of(NUM_TOKENS, prompt=prompt)) for prompt in prompts))
    return 1e6 * (time.process_time() - before_s) / (NUM_STREAMS * NUM_TOKENS)


async def scrape_us(ports: list[int]) -> float:
    """CPU microseconds of a scrape of all three, that of the reader included."""
    before_s = time.process_time()
    for port in ports:
        await asyncio.to_thread(_read, f"http://127.0.0.1:{port}/metrics")
    return 1e6 * (time.process_time() - before_s)


def _read(address: str) -> None:
    with urllib.request.urlopen(address) as answer:
        assert b"baton_build_info" in answer.read()


def interval(values: list[float]) -> tuple[float, float]:
    """Of the median, by resampling."""
    rng = random.Random(1)
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(NUM_RESAMPLES))
    return medians[NUM_RESAMPLES // 40], medians[-NUM_RESAMPLES // 40]


async def measure(num_pairs: int, log: Path) -> None:
    ports = choose_ports(3)
    shown = {
        "prefill": {"metrics_port": ports[0]},
        "decode": {"metrics_port": ports[1]},
        "metrics_port": ports[2],
        "request_log": log,
    }
    rng, costs, scrapes = random.Random(2), dict[bool, list[float]]({False: [], True: []}), list[float]()
    async with cluster() as without, cluster(**shown) as with_:
        scraped_s = 0.0
        for pair in range(-10, num_pairs):  # the first ones warm up
            for is_shown in (True, False) if pair % 2 else (False, True):
                cost = await cost_us(with_ if is_shown else without, rng)
                if pair >= 0:
                    costs[is_shown].append(cost)
            # Half of the time is the other system's.
            if time.monotonic() - scraped_s >= 2 * SCRAPE_S:
                scrapes.append(await scrape_us(ports))
                scraped_s = time.monotonic()
    differences = [on - off for off, on in zip(costs[False], costs[True], strict=True)]
    low, high = interval(differences)
    print(f"a token: {statistics.median(costs[False]):.1f} us without, {statistics.median(costs[True]):.1f} us with")
    print(f"metrics add {statistics.median(differences):.2f} us a token, 95 % interval {low:.2f} to {high:.2f}")
    print(f"a scrape of all three processes: {statistics.median(scrapes):.0f} us, of the reader as well")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(int(sys.argv[1]) if len(sys.argv) > 1 else 300, Path(folder, "requests")))
