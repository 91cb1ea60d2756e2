"""The failure table's row about a worker whose steps stand still while its calls and reports go on."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from cluster import LIMIT_S, PROMPT, request_of
from processes import Process, System
from streaming import Streaming, worker_ids

from baton.topology import choose_ports

STALL_S = 0.4


async def test_a_step_stands_still(system: System, stub: Any) -> None:
    """Its streams go on elsewhere, and it ends by itself in the end, loudly."""
    (port,) = choose_ports(1)
    flags = ("--worker-id=hanging", f"--redis-url={system.redis.url}", f"--step-stall-s={STALL_S}")
    hanging = Process(str(Path(__file__).with_name("hanging_worker.py")), "hanging", port, *flags)
    hanging.start()
    try:
        async with asyncio.timeout(2 * LIMIT_S):
            while "hanging" not in await worker_ids(stub):
                await Streaming(stub, request_of(1)).complete()
        began_s = time.monotonic()
        served, number = set[str](), 0
        async with asyncio.timeout(2 * LIMIT_S):
            while hanging.is_running:
                number += 1
                streams = [Streaming(stub, request_of(60, [*PROMPT, number, i])) for i in range(6)]
                replies = [await stream.complete() for stream in streams]
                served |= {"again" for reply in replies if reply.finish.served_by.num_attempts > 1}
        assert "again" in served, "nothing was running there when it hung"
        assert time.monotonic() - began_s < 2 * LIMIT_S
        assert await asyncio.to_thread(hanging.wait, LIMIT_S) == 70
    finally:
        if hanging.is_running:
            hanging.kill()
