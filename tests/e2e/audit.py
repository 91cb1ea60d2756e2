"""When workers have given everything back: read from their own load reports.

A worker is idle when nothing is queued, running or leased, no block is used or accounted for, and free and cached
blocks are all there are.
"""

from __future__ import annotations

import asyncio
import time

from protos import inference_pb2, worker_pb2, worker_pb2_grpc
from runtime.doors import Pass
from runtime.rpc import create_channel

REPORT_INTERVAL_S = 1.0
"""A worker reports at least so often."""


def is_idle(load: inference_pb2.WorkerLoad) -> bool:
    """Whether this load is none, with the pool's accounts in balance."""
    pool = load.pool
    assert pool.free + pool.used + pool.cached == pool.total, f"the pool's accounts are broken: {pool}"
    return not (load.num_queued or load.num_running or load.num_leases or pool.used or pool.accounted)


async def seconds_until_idle(addresses: list[str], shown: Pass, limit_s: float) -> float:
    """How long it takes from now until all workers are idle and stay so; watches for `limit_s` and one report more.
    `shown` is what they ask of callers.

    AssertionError, showing the load, for a worker that is not.
    """
    watched_s = limit_s + 1.5 * REPORT_INTERVAL_S
    return max(await asyncio.gather(*(_watch(address, shown, watched_s) for address in addresses)))


async def _watch(address: str, shown: Pass, watched_s: float) -> float:
    started_s = time.monotonic()
    idle_after_s: float | None = None
    report = None
    async with create_channel(address, shown) as channel:
        call = worker_pb2_grpc.WorkerStub(channel).Watch(worker_pb2.WatchRequest())
        try:
            async with asyncio.timeout(watched_s):
                async for report in call:
                    if not is_idle(report.load):
                        idle_after_s = None
                    elif idle_after_s is None:
                        idle_after_s = time.monotonic() - started_s
        except TimeoutError:
            call.cancel()
    assert idle_after_s is not None, f"{address} is not idle after {watched_s:.1f} s: {report}"
    return idle_after_s
