"""Sending requests: one, a closed loop, an open loop; and what the client saw of each.

Owns the clients' side of a measurement. A request that the service refuses, for want of room or because it has lost the
session, is neither a success nor a failure: it is counted by itself. Times are of one monotonic clock. Pacing sleeps
until a request is due; nothing here sleeps to wait for something to happen.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from baton.answers import Finish
from baton.bench.asks import Ask
from baton.client import AsyncClient
from runtime.errors import BatonError, Overloaded, SessionLost


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request as its client saw it."""

    num_prompt_tokens: int
    """Tokens sent."""
    sent_s: float
    """When it was sent."""
    message_times_s: tuple[float, ...]
    """When each message with tokens came."""
    message_tokens: tuple[int, ...]
    """Tokens in each of them."""
    ended_s: float
    """When it ended, however it did."""
    finish: Finish | None
    """What the service said at the end; None for one that did not end well."""
    error: str = ""
    """What went wrong."""
    is_refused: bool = False
    """The service had no room for it and said so."""
    retry_after_s: float = 0.0
    """When to come again, as it said."""
    is_lost: bool = False
    """The service did not know the session any more and said so."""
    token_ids: tuple[int, ...] = ()
    """What was answered."""

    @property
    def num_output_tokens(self) -> int:
        """Tokens that came."""
        return sum(self.message_tokens)

    @property
    def has_failed(self) -> bool:
        """Whether it ended badly, and not because the service said no."""
        return self.finish is None and not self.is_refused and not self.is_lost


class Load:
    """Sends requests and keeps their outcomes by label."""

    def __init__(self, clients: Sequence[AsyncClient], on_token: Callable[[], None]) -> None:
        """Requests go to `clients` in turn. `on_token` is called for each message with tokens and each end, so that
        someone can show progress."""
        self._clients = itertools.cycle(clients)
        self._on_token = on_token
        self.outcomes: dict[str, list[Outcome]] = {}
        """What came of the requests, by label, in order of their ends."""
        self.streaming = asyncio.Semaphore(0)
        """Released once by each request when its first token has come, or when it has ended without one: acquire it n
        times to wait for n."""

    def all_outcomes(self) -> list[Outcome]:
        """Those of all labels."""
        return [outcome for outcomes in self.outcomes.values() for outcome in outcomes]

    async def send(self, label: str, ask: Ask) -> Outcome:
        """One request until its end."""
        outcome = await self._send(ask)
        if not outcome.message_times_s:
            self.streaming.release()
        self.outcomes.setdefault(label, []).append(outcome)
        self._on_token()
        return outcome

    async def closed(self, label: str, asks: Iterable[Ask], concurrency: int) -> None:
        """`concurrency` clients, each sending its next request when the last one has ended; until `asks` ends."""
        remaining = iter(asks)

        async def work() -> None:
            for ask in remaining:
                await self.send(label, ask)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(concurrency):
                tasks.create_task(work())

    async def keep(self, label: str, make: Callable[[], Ask], concurrency: int, stop: asyncio.Event) -> None:
        """Streams that are kept running until `stop` is set. One that is refused comes again when it was told to. One
        that fails is not begun again: a service that answers nothing must not be asked in a tight loop."""

        async def work() -> None:
            while not stop.is_set():
                outcome = await self.send(label, make())
                if outcome.is_refused:
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(stop.wait(), outcome.retry_after_s)
                elif outcome.finish is None:
                    return

        async with asyncio.TaskGroup() as tasks:
            for _ in range(concurrency):
                tasks.create_task(work())

    async def open(self, label: str, asks: Sequence[Ask], arrivals_s: Sequence[float]) -> None:
        """Sends each request when it is due, counted from now, and waits for all answers."""
        started_s = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            for ask, due_s in zip(asks, arrivals_s, strict=True):
                await asyncio.sleep(max(0.0, started_s + due_s - time.monotonic()))
                tasks.create_task(self.send(label, ask))

    async def _send(self, ask: Ask) -> Outcome:
        sent_s = time.monotonic()
        times: list[float] = []
        counts: list[int] = []
        token_ids: list[int] = []
        finish: Finish | None = None
        failure: BatonError | None = None
        stream = next(self._clients).generate(
            prompt_token_ids=ask.prompt_token_ids,
            priority=ask.priority,
            session_id=ask.session_id,
            append=ask.session_tokens is not None,
            session_tokens=ask.session_tokens,
            max_tokens=ask.output_tokens,
            temperature=0.0,
            ignore_eos=True,
        )
        try:
            async with contextlib.aclosing(stream):
                async for chunk in stream:
                    if chunk.tokens:
                        if not times:
                            self.streaming.release()
                        times.append(time.monotonic())
                        counts.append(len(chunk.tokens))
                        token_ids += [token.token_id for token in chunk.tokens]
                        self._on_token()
                    finish = chunk.finish or finish
        except BatonError as error:
            finish, failure = None, error
        return Outcome(
            num_prompt_tokens=len(ask.prompt_token_ids),
            sent_s=sent_s,
            message_times_s=tuple(times),
            message_tokens=tuple(counts),
            ended_s=time.monotonic(),
            finish=finish,
            error="" if failure is None else failure.message,
            is_refused=isinstance(failure, Overloaded),
            retry_after_s=failure.retry_after_s if isinstance(failure, Overloaded) else 0.0,
            is_lost=isinstance(failure, SessionLost),
            token_ids=tuple(token_ids),
        )


def arrival_times(rate: float, burstiness: float, seed: int) -> Iterator[float]:
    """Seconds at which requests arrive, without end: gaps are gamma-distributed with mean 1 / `rate` and shape
    `burstiness`; shape 1 is Poisson."""
    draw = random.Random(seed)
    return itertools.accumulate(iter(lambda: draw.gammavariate(burstiness, 1 / (rate * burstiness)), None))
