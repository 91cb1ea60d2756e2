"""Conversations under way in fault tests: each client says something, checks the answer, and goes on from it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import grpc.aio
from cluster import PROMPT, Reply, collect, expected, request_of
from failures import details_of
from google.rpc import error_details_pb2

BLOCK = 16
TURN_TOKENS = 12
LIMIT_S = 30.0


class Talker:
    """One client, which appends its turns at one router after another."""

    def __init__(self, stubs: Sequence[Any], name: str) -> None:
        self._stubs = itertools.cycle(stubs)
        self.name = name
        self.said: list[int] = []
        """The conversation so far."""
        self.num_turns = 0
        self.num_lost = 0
        """Turns for which the session was lost, so that the whole conversation was sent."""
        self.last: Reply
        self.num_reusable = 0
        """Tokens whose KV the last turn could have found."""
        self.changed = asyncio.Event()

    async def turn(self) -> None:
        """One turn, whose answer must be the oracle's."""
        new = [*PROMPT, *self.name.encode(), self.num_turns % 200]
        stub = next(self._stubs)
        async with asyncio.timeout(LIMIT_S):
            reply = await self._append(stub, new) if self.said else await self._send(stub, new)
        assert reply.tokens == expected([*self.said, *new], TURN_TOKENS)
        self.num_reusable = max(0, len(self.said) - 1) // BLOCK * BLOCK
        self.said, self.last = [*self.said, *new, *reply.tokens], reply
        self.num_turns += 1
        self.changed.set()

    async def _send(self, stub: Any, prompt: list[int], **fields: Any) -> Reply:
        request = request_of(TURN_TOKENS, prompt, session_id=self.name, **fields)
        return await collect(stub.Generate(request, wait_for_ready=True))

    async def _append(self, stub: Any, new: list[int]) -> Reply:
        try:
            return await self._send(stub, new, append=True, session_tokens=len(self.said))
        except grpc.aio.AioRpcError as error:
            (info,) = details_of(error, error_details_pb2.ErrorInfo)
            if info.reason != "SESSION_LOST":
                raise
        self.num_lost += 1
        return await self._send(stub, [*self.said, *new])

    async def talk(self, stop: asyncio.Event) -> None:
        """Turn after turn."""
        while not stop.is_set():
            await self.turn()

    async def has(self, num_turns: int) -> None:
        """Waits until so many turns were answered."""
        async with asyncio.timeout(LIMIT_S):
            while self.num_turns < num_turns:
                self.changed.clear()
                await self.changed.wait()


@contextlib.asynccontextmanager
async def talking(talkers: Sequence[Talker]) -> AsyncIterator[None]:
    """While open, all of them talk; what fails one of them fails the block. At its end each finishes its turn."""
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        for talker in talkers:
            group.create_task(talker.talk(stop))
        try:
            yield
        finally:
            stop.set()


async def all_have(talkers: Sequence[Talker], num_more: int) -> None:
    """Waits until each has had so many more turns answered."""
    wanted = [talker.num_turns + num_more for talker in talkers]
    await asyncio.gather(*(talker.has(num) for talker, num in zip(talkers, wanted, strict=True)))
