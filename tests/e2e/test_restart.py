"""Processes that die, and the end of the whole system."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator

import pytest
from asked import Asked, ask_together, prompts
from served import Served, descendants, is_alive, pool_files
from ties import count_near_ties

from baton import AsyncClient, Client

RESTART_LIMIT_S = 60.0


@pytest.fixture(scope="module")
def mortal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A system of which every process dies once."""
    served = Served(tmp_path_factory.mktemp("mortal"), "--dtype=float32")
    yield served
    served.close()


def test_streams_survive_the_death_of_their_decode_worker(mortal: Served, measured: Callable[[str], None]) -> None:
    """SIGKILL under 4 streams that have begun: the worker is started again and the streams say what they would have."""
    seeds = (None, 1, None, 2)
    found = prompts([12, 40, 90, 140], seed=9)
    requests = [Asked(prompt, max_tokens=24, seed=seed) for prompt, seed in zip(found, seeds, strict=True)]
    undisturbed = ask_together(mortal.address, requests)
    first_pid = mortal.pids["decode-0"]
    answers, num_attempts = asyncio.run(_ask_and_kill(mortal, requests))
    assert min(num_attempts) >= 2
    assert mortal.pids["decode-0"] != first_pid
    ties = count_near_ties(requests, undisturbed, answers, "after a restart")
    measured(f"decode worker killed under 4 streams: {ties} answers part at near-ties")


async def _ask_and_kill(system: Served, requests: list[Asked]) -> tuple[list[list[int]], list[int]]:
    """Token ids and attempts of each; the decode worker dies as soon as each has three tokens."""
    answers: list[list[int]] = [[] for _ in requests]
    num_attempts = [0] * len(requests)
    begun = asyncio.Event()
    async with AsyncClient(system.address, timeout_s=180) as client, asyncio.TaskGroup() as group:

        async def read(index: int, request: Asked) -> None:
            async for chunk in request.stream(client):
                assert [token.index for token in chunk.tokens] == [
                    len(answers[index]) + i for i in range(len(chunk.tokens))
                ]
                answers[index] += [token.token_id for token in chunk.tokens]
                if all(len(answer) >= 3 for answer in answers):
                    begun.set()
                if chunk.finish is not None:
                    num_attempts[index] = chunk.finish.served_by.num_attempts

        for index, request in enumerate(requests):
            group.create_task(read(index, request))
        await begun.wait()
        assert all(len(answer) < 24 for answer in answers)
        os.kill(system.pids["decode-0"], signal.SIGKILL)
    return answers, num_attempts


def test_every_process_is_started_again_and_serves(mortal: Served) -> None:
    """Router, prefill worker and Redis, killed one after another."""
    for name, replaced in (("prefill-0", 1), ("router-0", 1), ("redis", 1)):
        pid = mortal.pids[name]
        os.kill(pid, signal.SIGKILL)
        mortal.wait_for_line(f"{name}: killed by SIGKILL", RESTART_LIMIT_S, replaced)
        # A line with the new process follows when it is ready.
        mortal.wait_for_line(f"{name:<12} pid", RESTART_LIMIT_S, 1 + replaced)
        assert mortal.pids[name] != pid
        with Client(mortal.address, timeout_s=60) as client:
            assert client.complete("One, two,", max_tokens=3, ignore_eos=True).usage.completion_tokens == 3


def test_sigterm_ends_everything(serve: Callable[..., Served], measured: Callable[[str], None]) -> None:
    """A stream that runs is finished first; then no process and no shared memory is left, and the exit code is 0."""
    system = serve()
    pids = [system.process.pid, *descendants(system.process.pid)]
    # The command, router, two workers, the keeper of Valkey and Valkey itself.
    assert len(pids) >= 6 and len(pool_files(pids)) == 2
    with Client(system.address, timeout_s=60) as client:
        stream = client.generate("Count: one, two,", max_tokens=40, ignore_eos=True)
        tokens = list(next(stream).tokens)
        started_s = time.monotonic()
        system.process.send_signal(signal.SIGTERM)
        for chunk in stream:
            tokens += chunk.tokens
    assert len(tokens) == 40
    assert system.process.wait(60) == 0, system.errors()
    measured(f"SIGTERM: gone after {time.monotonic() - started_s:.1f} s, 40 tokens included")
    assert [pid for pid in pids if is_alive(pid)] == []
    assert pool_files(pids) == []
    assert system.errors() == ""
