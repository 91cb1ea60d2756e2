"""Requests to the real model, ways to send them, and prompts to send.

A request is (prompt token ids, sampling), so that the same one can be sent to any configuration. Prompts are pieces of
one generated chronicle: natural enough that the model is sure of some tokens and unsure of others, and with a first
token of their own, so that no two share a KV block.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import cache

from baton import AsyncClient, Chunk, Completion, Sampling
from baton.answers import join
from router.tokenizer import load_tokenizer
from runtime.checkpoint import open_checkpoint

ANSWER_LIMIT_S = 240.0
FIRST_TOKEN_ID = 20_000
SET_SIZE = 256


@dataclass(frozen=True, slots=True)
class Asked:
    """One request."""

    prompt_token_ids: tuple[int, ...]
    """The prompt."""
    max_tokens: int
    """Exactly so many are generated."""
    seed: int | None = None
    """Of a sampled request; None: greedy."""
    temperature: float = 0.8
    """Of a sampled request."""
    top_p: float = 0.95
    """Of a sampled request."""

    def stream(self, client: AsyncClient) -> AsyncIterator[Chunk]:
        """The answer in pieces, with the log-probabilities of the two likeliest tokens."""
        sampled: Sampling = {"temperature": self.temperature, "top_p": self.top_p}
        return client.generate(
            prompt_token_ids=self.prompt_token_ids,
            max_tokens=self.max_tokens,
            ignore_eos=True,
            logprobs=True,
            top_logprobs=2,
            **({"temperature": 0.0} if self.seed is None else {**sampled, "seed": self.seed}),
        )

    async def send(self, client: AsyncClient) -> Completion:
        """The whole answer."""
        return join([chunk async for chunk in self.stream(client)])


def ask_together(address: str, requests: Sequence[Asked]) -> list[Completion]:
    """Sends all at once."""

    async def ask() -> list[Completion]:
        async with AsyncClient(address, timeout_s=ANSWER_LIMIT_S) as client:
            return await asyncio.gather(*(request.send(client) for request in requests))

    return asyncio.run(ask())


def ask_in_turn(address: str, requests: Sequence[Asked]) -> list[Completion]:
    """Sends each when the one before is complete."""

    async def ask() -> list[Completion]:
        async with AsyncClient(address, timeout_s=ANSWER_LIMIT_S) as client:
            return [await request.send(client) for request in requests]

    return asyncio.run(ask())


@cache
def chronicle_tokens() -> tuple[int, ...]:
    """The chronicle, as the model's tokens."""
    rng = random.Random(23)
    ports, wares = ["Alder Quay", "Bitter Bay", "Cormorant", "Dunlin Sands"], ["amber", "herring", "paper", "tin"]
    deeds = ["sank off the cape", "came home with {}", "was sold for {} in debts", "carried {} and two mapmakers"]
    text = " ".join(
        f"The {rng.choice(['brig', 'sloop', 'ketch'])} of {rng.choice(ports)}, built in {rng.randrange(1600, 1899)}, "
        f"{rng.choice(deeds).format(rng.choice(wares))}; of its crew of {rng.randrange(9, 99)} "
        f"{rng.choice(['all', 'few', 'most', 'none'])} signed on again."
        for _ in range(400)
    )
    return tuple(load_tokenizer(open_checkpoint("smollm2")).encode(text, False))


def prompts(lengths: Sequence[int], seed: int) -> list[tuple[int, ...]]:
    """Pieces of the chronicle that long; the first token of each is its own, so that nothing cached for others fits.

    `seed` also numbers the set: sets of different seeds have different first tokens.
    """
    assert len(lengths) <= SET_SIZE
    tokens, first = chronicle_tokens(), FIRST_TOKEN_ID + SET_SIZE * seed
    starts = random.Random(seed).sample(range(len(tokens) - max(lengths)), len(lengths))
    return [
        (first + index, *tokens[start : start + length - 1])
        for index, (start, length) in enumerate(zip(starts, lengths, strict=True))
    ]


def varied_lengths(count: int, longest: int, seed: int) -> list[int]:
    """Lengths from 5 up, most of them short, the last one `longest`."""
    rng = random.Random(seed)
    return [*(int(5 + (longest - 5) * rng.random() ** 5) for _ in range(count - 1)), longest]
