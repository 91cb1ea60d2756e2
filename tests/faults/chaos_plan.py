"""What happens in a chaos run, drawn from its seed: faults of one thread of misfortune after another, and requests.

Everything here is a pure function of the seed, so that a run that went wrong can be played again with the same faults
and the same requests; only how the machine's processes are timed is not.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from asked import Asked

from engine import tracer
from engine.batch import SampleRow
from engine.request import SamplingParams

WORKER_KINDS = {"kill": 4, "stop": 2, "cut": 2, "drain": 1}
"""Weights of what befalls workers."""
PARTED = {"part": 1}
"""A prefill worker from a decode worker alone."""
REDIS_KINDS = {"redis killed": 1, "redis flushed": 2, "redis stopped": 1}
NUM_FLOOD = 48
"""Long requests of a flood, which together need more blocks than there are."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that goes wrong."""

    kind: str
    """What."""
    target: int
    """Which worker of its pool."""
    pause_s: float
    """How long after the fault before it, and the recovery from that."""
    duration_s: float
    """How long it lasts, where it lasts."""


def faults(seed: int, thread: str, kinds: dict[str, int], mean_pause_s: float) -> Iterator[Fault]:
    """The faults of one thread of misfortune, without end."""
    draws = random.Random(f"{seed} {thread}")
    while True:
        yield Fault(
            draws.choices(list(kinds), list(kinds.values()))[0],
            draws.randrange(2),
            draws.uniform(0.2, 1.8) * mean_pause_s,
            draws.choice((0.5, 1.5, 4.0, 6.0)),
        )


@dataclass(frozen=True, slots=True)
class Move:
    """What a client does next."""

    index: int
    """The request it makes."""
    leaves_after_tokens: int | None
    """It goes away then; None: it does not, for that reason."""
    leaves_after_s: float | None
    """It goes away then, if it is not done; None: it does not."""


def moves(seed: int, client: int, num_requests: int) -> Iterator[Move]:
    """A client's moves, without end. A third of the requests are cancelled."""
    draws = random.Random(f"{seed} client {client}")
    while True:
        index, how = draws.randrange(num_requests), draws.random()
        yield Move(
            index,
            draws.choice((0, 1, 5, 30)) if how < 0.15 else None,
            0.002 * 2 ** draws.uniform(0, 9) if 0.15 <= how < 0.33 else None,
        )


def tracer_requests(seed: int) -> list[Asked]:
    """Short and long, alone and with shared beginnings, greedy and drawn."""
    draws = random.Random(f"{seed} requests")
    shared = [draws.randbytes(length) for length in (40, 400, 2000)]
    asked = []
    for index in range(40):
        beginning = draws.choice([b"", *shared])
        prompt = beginning + draws.randbytes(draws.choice((3, 30, 300, 1500)))
        asked.append(Asked(tuple(prompt), draws.choice((2, 20, 120, 300)), seed=None if index % 3 else index + 1))
    return asked


def flood_requests(seed: int) -> list[Asked]:
    """More than the pools hold."""
    draws = random.Random(f"{seed} flood")
    return [Asked(tuple(draws.randbytes(1200)), 60) for _ in range(NUM_FLOOD)]


def tracer_answer(asked: Asked) -> list[int]:
    """The only right answer."""
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    if asked.seed is not None:
        params = SamplingParams(temperature=asked.temperature, top_p=asked.top_p, seed=asked.seed, ignore_eos=True)
    return tracer.expected_tokens(asked.prompt_token_ids, asked.max_tokens, SampleRow(0, 0, params))
