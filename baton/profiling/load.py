"""A service of the profile's own under a load that does not change: prompts one after another, or so many streams.

Owns the service and its clients. A load runs for as long as the steps of a profile take, and is given up then. Streams
that come to their end begin anew; what is profiled begins when all are where they are to be measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from baton.bench.asks import Ask, Asks
from baton.bench.system import until_settled
from baton.client import AsyncClient
from baton.profiling.options import ProfileConfig, read_batch_sizes
from baton.profiling.workers import Profile, WorkerCalls
from baton.progress import Progress
from baton.serving import running
from protos import inference_pb2, worker_pb2
from runtime.doors import Pass, Secret
from runtime.errors import ConfigError, Unavailable

MAX_OUTPUT_TOKENS = 1024
START_TIMEOUT_S = 120.0
"""For every stream to get there."""
Say = Callable[[str], None]
Answers = tuple[list[worker_pb2.ProfileResponse], list[Profile]]
"""What devices can do, by worker (none where nobody measured), and what the steps were."""


@dataclass(slots=True)
class Pools:
    """The workers, by what they compute."""

    prefill: list[WorkerCalls] = field(default_factory=list)
    """Prompts."""
    decode: list[WorkerCalls] = field(default_factory=list)
    """Everything else."""


async def drive(config: ProfileConfig, say: Say) -> Answers:
    """Starts the service, profiles each load, stops it. StartFailed, ConfigError or Unavailable when that fails."""
    serve_config, progress = config.serve_config(), Progress(sys.stderr)
    try:
        async with (
            running(serve_config, progress.on_change) as system,
            AsyncClient(system.topology.addresses[0]) as client,
            contextlib.AsyncExitStack() as stack,
        ):
            progress.finish_loading()
            secret = Secret(system.cluster_secret_file)
            shown = Pass(bearer=lambda: secret.shown)
            model = await client.get_model()
            check_lengths(config, model.max_model_len)
            await until_settled(client)
            pools, measured = Pools(), []
            for status in await client.workers():
                calls = await stack.enter_async_context(WorkerCalls(status.address, shown))
                is_prefill = status.role == inference_pb2.WORKER_ROLE_PREFILL
                (pools.prefill if is_prefill else pools.decode).append(calls)
                if not config.peaks:
                    say(f"measuring what {status.worker_id} can do")
                    measured.append(await calls.measure())
            return measured, await _profile_loads(config, client, model, pools, say)
    finally:
        progress.abandon_loading()


def check_lengths(config: ProfileConfig, max_model_len: int) -> None:
    """ConfigError for prompts that the model's context has no room for."""
    longest = max(config.context_tokens, config.prompt_tokens)
    if longest > max_model_len - 2:
        text = f"must leave room for 2 tokens in the model's context of {max_model_len}, got {longest}"
        raise ConfigError(f"--prompt-tokens, --context-tokens: {text}")


async def _profile_loads(
    config: ProfileConfig, client: AsyncClient, model: inference_pb2.GetModelResponse, pools: Pools, say: Say
) -> list[Profile]:
    asks, profiles = Asks(model.vocab_size, seed=0), []
    say(f"prefill of {config.prompt_tokens} tokens")
    # Without prefill workers the others do it.
    prefill = profile_all(pools.prefill or pools.decode, f"prefill {config.prompt_tokens}", config)
    profiles += await _under_load(client, lambda: asks.one(config.prompt_tokens, 1), 1, prefill)
    num_output = min(MAX_OUTPUT_TOKENS, model.max_model_len - config.context_tokens)
    for num_streams in read_batch_sizes(config.batch_sizes):
        say(f"decode of {num_streams} stream{'s' if num_streams > 1 else ''}")
        decode = profile_all(pools.decode, f"decode {num_streams}", config)
        profiles += await _under_load(client, lambda: asks.one(config.context_tokens, num_output), num_streams, decode)
    return profiles


async def profile_all(workers: Sequence[WorkerCalls], load: str, config: ProfileConfig) -> list[Profile]:
    """Of each, at the same time."""
    asking = (worker.profile(load, config.num_steps, config.max_wait_s) for worker in workers)
    return await asyncio.gather(*asking)


async def _under_load(
    client: AsyncClient, make: Callable[[], Ask], num_streams: int, profiling: Coroutine[Any, Any, list[Profile]]
) -> list[Profile]:
    """Has that done while so many requests are kept running. Raises what any of them raises."""
    flowing = asyncio.Semaphore(0)
    try:
        async with asyncio.TaskGroup() as tasks:
            streams = [tasks.create_task(_keep(client, make, flowing)) for _ in range(num_streams)]
            try:
                async with asyncio.timeout(START_TIMEOUT_S):
                    for _ in streams:
                        await flowing.acquire()
            except TimeoutError:
                raise Unavailable(f"not all of {num_streams} streams began in {START_TIMEOUT_S:g} s") from None
            profiles = await profiling
            for stream in streams:
                stream.cancel()
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    finally:
        profiling.close()  # where it was never begun
    return profiles


async def _keep(client: AsyncClient, make: Callable[[], Ask], flowing: asyncio.Semaphore) -> NoReturn:
    """One request after another; `flowing` is released by each when decode has computed a token of it."""
    while True:
        ask, num_messages = make(), 0
        answer = client.generate(
            prompt_token_ids=ask.prompt_token_ids, max_tokens=ask.output_tokens, temperature=0.0, ignore_eos=True
        )
        async with contextlib.aclosing(answer) as chunks:
            async for chunk in chunks:
                num_messages += bool(chunk.tokens)
                # The first token is of prefill.
                if chunk.tokens and num_messages == min(2, ask.output_tokens):
                    flowing.release()
