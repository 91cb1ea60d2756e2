"""Clients that go, politely or not: all workers give everything back within a second, or two chunks if that is more."""

from __future__ import annotations

import asyncio
import contextlib
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from asked import prompts
from audit import is_idle, seconds_until_idle
from served import Served

from baton import AsyncClient, Client

NUM_STREAMS = 200
SEED = 20
CHUNK_TOKENS = 512
END_S = 12.0
"""When whoever has not left by then leaves."""


def test_cancelling_200_streams_at_random_moments(system: Served, measured: Callable[[str], None]) -> None:
    """All at once: a third at random points in time, a third after some messages, the last third together."""
    rng = random.Random(SEED)
    found = prompts([rng.choice((5, 10, 20, 60, 300)) for _ in range(NUM_STREAMS)], seed=SEED)
    moments = [rng.choice(("time", "message", "end")) for _ in found]
    limit_s = idle_limit_s(system.address)
    streams = [_Stream(prompt, moment, rng.random()) for prompt, moment in zip(found, moments, strict=True)]
    idle_s = asyncio.run(_cancel_all(system, streams, limit_s))
    silent = sum(stream.num_tokens == 0 for stream in streams)
    measured(
        f"200 cancelled streams, {silent} of them before their first token: all workers idle after {idle_s:.2f} s, "
        f"the limit being {limit_s:.2f} s"
    )
    assert idle_s <= limit_s
    assert 0 < silent < NUM_STREAMS, "streams were to be cancelled before their first token and after it"
    assert not any(stream.is_finished for stream in streams), "streams that end by themselves test nothing"
    with Client(system.address) as client:
        assert all(is_idle(worker.load) for worker in client.workers())
        assert client.complete("Still there?", max_tokens=4, ignore_eos=True).usage.completion_tokens == 4


@dataclass(slots=True)
class _Stream:
    prompt: tuple[int, ...]
    moment: str
    share: float
    num_tokens: int = 0
    is_finished: bool = False

    async def read_and_leave(self, client: AsyncClient) -> None:
        """Leaves at its moment; at the end, everyone does."""
        stream = client.generate(prompt_token_ids=self.prompt, max_tokens=1000, ignore_eos=True)
        num_messages = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_S * (self.share if self.moment == "time" else 1)):
                async with contextlib.aclosing(stream):
                    async for chunk in stream:
                        num_messages += 1
                        self.num_tokens += len(chunk.tokens)
                        self.is_finished |= chunk.finish is not None
                        if self.moment == "message" and num_messages > 10 * self.share:
                            return


async def _cancel_all(system: Served, streams: list[_Stream], limit_s: float) -> float:
    """The seconds from the last cancellation until the workers were idle."""
    async with AsyncClient(system.address) as client:
        addresses = [worker.address for worker in await client.workers()]
        await asyncio.gather(*(stream.read_and_leave(client) for stream in streams))
        return await seconds_until_idle(addresses, system.shown(), limit_s)


def test_killed_client_process_leaves_nothing(system: Served, measured: Callable[[str], None]) -> None:
    limit_s = idle_limit_s(system.address)
    with Client(system.address) as client:
        addresses = [worker.address for worker in client.workers()]
    script = str(Path(__file__).with_name("open_streams.py"))
    with subprocess.Popen([sys.executable, script, system.address, "16"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "open\n"
        process.kill()
    idle_s = asyncio.run(seconds_until_idle(addresses, system.shown(), limit_s))
    measured(f"killed client with 16 streams: all workers idle after {idle_s:.2f} s, the limit being {limit_s:.2f} s")
    assert idle_s <= limit_s
    with Client(system.address) as client:
        assert all(is_idle(worker.load) for worker in client.workers())


def idle_limit_s(address: str) -> float:
    """A second, or the time of two chunks as the prefill worker takes it now, whichever is longer."""
    rng = random.Random()
    with Client(address) as client:
        prompt = [rng.randrange(1000, 40000) for _ in range(CHUNK_TOKENS)]
        timing = client.complete(prompt_token_ids=prompt, max_tokens=1, temperature=0).timing
    return max(1.0, 2 * timing.prefill_ms / 1000)
