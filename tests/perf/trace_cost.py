"""What traces cost: `python tests/perf/trace_cost.py [MODEL [ROUNDS [FLAG ...]]]`.

Two systems of MODEL (tracer), one of them with the flags (--trace), serve the same load in turns, ROUNDS (20) times:
128 requests, 32 at once, of 128 tokens and 64 of output. Prints the CPU microseconds of all processes for each output
token, and the median of the ratios with the interval in which 95 % of resampled medians lie. Not a test. The tracer
computes nothing, so its ratio is an upper bound.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator

from baton import AsyncClient
from baton.bench.system import cpu_between_s, session_cpu_times_s
from baton.topology import choose_ports

NUM_REQUESTS, NUM_AT_ONCE, NUM_PROMPT, NUM_OUTPUT = 128, 32, 128, 64
READY = "ready: "


@contextlib.contextmanager
def served(model: str, flags: list[str]) -> Iterator[tuple[str, list[int]]]:
    """A system: its address and its processes."""
    (port,) = choose_ports(1)
    argv = [sys.executable, "-m", "baton", "serve", model, f"--port={port}", "--drain-timeout-s=1", *flags]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as serving:
        assert serving.stdout is not None
        pids: list[int] = []
        for line in serving.stdout:
            if found := re.match(r"\S+\s+pid (\d+)", line):
                pids.append(int(found[1]))
            if line.startswith(READY):
                break
        try:
            yield f"127.0.0.1:{port}", pids
        finally:
            serving.terminate()


async def load(address: str, seed: int) -> None:
    """The same prompts for the same seed."""
    draws, places = random.Random(seed), asyncio.Semaphore(NUM_AT_ONCE)
    prompts = [[draws.randrange(200) for _ in range(NUM_PROMPT)] for _ in range(NUM_REQUESTS)]
    async with AsyncClient(address) as client:

        async def ask(prompt: list[int]) -> None:
            async with places:
                await client.complete(prompt_token_ids=prompt, max_tokens=NUM_OUTPUT, ignore_eos=True, temperature=0.0)

        await asyncio.gather(*map(ask, prompts))


def cost_us(address: str, pids: list[int], seed: int) -> float:
    """CPU microseconds of the system for each output token."""
    before = session_cpu_times_s(pids)
    asyncio.run(load(address, seed))
    spent_s = cpu_between_s(before, session_cpu_times_s(pids))
    assert spent_s is not None, "a process has ended"
    return 1e6 * spent_s / (NUM_REQUESTS * NUM_OUTPUT)


def main(model: str = "tracer", rounds: str = "20", *flags: str) -> None:
    """Prints a line for each round, and the medians."""
    pairs: list[tuple[float, float]] = []
    with served(model, []) as plain, served(model, list(flags) or ["--trace"]) as traced:
        for system in (plain, traced):
            cost_us(*system, seed=-1)
        for number in range(int(rounds)):
            first, second = (plain, traced) if number % 2 == 0 else (traced, plain)
            one, two = cost_us(*first, seed=number), cost_us(*second, seed=number)
            pairs.append((one, two) if number % 2 == 0 else (two, one))
            print(f"{pairs[-1][0]:7.1f} us without, {pairs[-1][1]:7.1f} with", flush=True)
    ratios = [with_ / without for without, with_ in pairs]
    draws = random.Random(0)
    medians = sorted(statistics.median(draws.choices(ratios, k=len(ratios))) for _ in range(2000))
    without, with_ = (statistics.median(each) for each in zip(*pairs, strict=True))
    print(
        f"{model}: medians {without:.1f} and {with_:.1f} us a token; "
        f"ratio {statistics.median(ratios):.4f} ({medians[50]:.4f} to {medians[1949]:.4f})"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
