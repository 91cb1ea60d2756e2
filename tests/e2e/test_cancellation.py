"""Clients that go, politely or not: all workers give everything back within a second, or two chunks if that is more."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from asked import prompts
from audit import is_idle, seconds_until_idle
from served import Served

from baton import AsyncClient, Client
from protos import worker_pb2, worker_pb2_grpc
from runtime.rpc import create_channel

NUM_STREAMS = 200
SEED = 20
CHUNK_TOKENS = 512
LONG_TOKENS = 4000
LONG_LIMIT_S = 90.0
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


def test_a_long_prompt_is_left_within_two_chunks(system: Served, measured: Callable[[str], None]) -> None:
    """Of some thousand tokens; after three chunks its client goes. What runs then ends, and another may have begun."""
    (prompt,) = prompts([LONG_TOKENS], seed=SEED)
    chunks_s, idle_s, num_more = asyncio.run(_leave_after_chunks(system, prompt, 3))
    measured(
        f"prompt of {LONG_TOKENS} tokens left after {len(chunks_s)} chunks of {max(chunks_s):.2f} s: "
        f"idle after {idle_s:.2f} s and {num_more} tokens more"
    )
    assert num_more <= CHUNK_TOKENS, "of the second chunk's end only its being idle is to be seen"


async def _leave_after_chunks(
    system: Served, prompt: tuple[int, ...], num_chunks: int
) -> tuple[list[float], float, int]:
    """How long each chunk took; how long the prefill worker took to be idle once the client had gone, and tokens that
    it was seen to compute meanwhile."""
    async with AsyncClient(system.address) as client:
        address = next(each.address for each in await client.workers() if each.worker_id.startswith("prefill"))

        async def ask() -> None:
            await client.complete(prompt_token_ids=prompt, max_tokens=4)

        async with create_channel(address, system.shown()) as channel, asyncio.timeout(LONG_LIMIT_S):
            reports = aiter(worker_pb2_grpc.WorkerStub(channel).Watch(worker_pb2.WatchRequest()))
            asking = asyncio.create_task(ask())
            chunk_ends_s: list[float] = []
            num_left = len(prompt)
            while len(chunk_ends_s) <= num_chunks:
                load = (await anext(reports)).load
                if load.num_running and load.num_queued_tokens < num_left:
                    num_left = load.num_queued_tokens
                    chunk_ends_s.append(time.monotonic())
            asking.cancel()
            left_s = time.monotonic()
            await asyncio.wait([asking])
            num_left_then = num_left
            while not is_idle(load := (await anext(reports)).load):
                if load.num_running:
                    num_left = load.num_queued_tokens
            idle_s = time.monotonic() - left_s
    assert num_left_then > 2 * CHUNK_TOKENS, "it was to be left long before its end"
    chunks_s = [after_s - before_s for before_s, after_s in itertools.pairwise(chunk_ends_s)]
    return chunks_s, idle_s, num_left_then - num_left


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
