"""Conversations over two routers while Redis is killed, flushed or stopped for a while: what failed, what was lost.

`python tests/tools/session_faults.py 10` takes ten seconds for each fault, over tracer processes of its own, and prints
a line for each: turns answered, turns that failed, turns for which the session was lost, and whether every
conversation found all of its KV again afterwards. Every answer is checked against the oracle. The exit code is 1 if a
turn failed. Run from the repository root.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "router"))
sys.path.insert(0, str(Path(__file__).parents[1] / "faults"))

from processes import System
from streaming import all_proved
from talking import Talker, all_have, talking

from baton.topology import choose_ports
from protos import inference_pb2_grpc
from runtime.rpc import create_channel

NUM_TALKERS = 8


async def killed(system: System, duration_s: float) -> None:
    """Redis is gone, and comes back empty."""
    system.redis.kill()
    await asyncio.sleep(duration_s)
    system.redis.start()


async def flushed(system: System, duration_s: float) -> None:
    """Redis forgets everything, every second."""
    for _ in range(max(1, round(duration_s))):
        system.redis.flush()
        await asyncio.sleep(1)


async def paused(system: System, duration_s: float) -> None:
    """Redis answers nothing."""
    system.redis.freeze()
    await asyncio.sleep(duration_s)
    system.redis.thaw()


async def suffer(system: System, stubs: list[Any], fault: Callable[..., Awaitable[None]], duration_s: float) -> int:
    """Talks through one fault and prints what came of it; answers how many turns failed."""
    talkers = [Talker(stubs, f"{fault.__name__}-{i}") for i in range(NUM_TALKERS)]
    num_failed = 0
    try:
        async with talking(talkers):
            await all_have(talkers, 2)
            await fault(system, duration_s)
            await all_have(talkers, 3)
    except* Exception as errors:
        num_failed = len(errors.exceptions)
        print(errors.exceptions, file=sys.stderr)
    for talker in talkers:
        for _ in range(3):
            await talker.turn()
    is_back = all(each.last.finish.usage.cached_tokens == each.num_reusable for each in talkers)
    num_turns, num_lost = sum(each.num_turns for each in talkers), sum(each.num_lost for each in talkers)
    print(f"{fault.__name__}: {num_turns} turns, {num_failed} failed, {num_lost} lost, reuse is back: {is_back}")
    return num_failed


async def main(duration_s: float) -> int:
    """Every fault on one system; the exit code."""
    system = System()
    (port,) = choose_ports(1)
    second = system.new_router("r1", port)
    try:
        system.start()
        await all_proved(system)
        second.start()
        second.until("ready")
        async with create_channel(system.router.address) as one, create_channel(second.address) as other:
            stubs = [inference_pb2_grpc.InferenceStub(channel) for channel in (one, other)]
            failed = [await suffer(system, stubs, fault, duration_s) for fault in (killed, flushed, paused)]
        return 1 if any(failed) else 0
    finally:
        if second.is_running:
            second.kill()
        system.end()


if __name__ == "__main__":
    sys.exit(asyncio.run(main(float(sys.argv[1]) if len(sys.argv) > 1 else 10.0)))
