"""Streams take turns: in order, a few in each pass of the loop, and what comes while one waits is in its message."""

from __future__ import annotations

import asyncio

from fake_workers import PROMPT, TOKENIZER, request_of

from protos import worker_pb2
from router.answer import Answer
from router.turns import NUM_AT_ONCE, Signal, Turns


async def waiting_on(signals: list[Signal], woken: list[int]) -> list[asyncio.Task[None]]:
    """A task for each signal that notes its number when it is woken, again and again."""

    async def wait(number: int, signal: Signal) -> None:
        while True:
            await signal.wait()
            woken.append(number)

    tasks = [asyncio.create_task(wait(number, signal)) for number, signal in enumerate(signals)]
    await asyncio.sleep(0)
    return tasks


async def passes(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def end(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def test_a_few_in_each_pass_and_in_the_order_in_which_they_asked() -> None:
    turns, woken = Turns(), list[int]()
    signals = [Signal(turns) for _ in range(2 * NUM_AT_ONCE + 3)]
    tasks = await waiting_on(signals, woken)
    order = list(range(len(signals)))[::-1]
    for number in order:
        signals[number].set()
    await passes(2)
    assert woken == order[:NUM_AT_ONCE], "turns were given, and those who got one ran"
    await passes(1)
    assert woken == order[: 2 * NUM_AT_ONCE]
    await passes(1)
    assert woken == order
    await end(tasks)


async def test_who_has_more_comes_after_all_that_wait() -> None:
    turns, woken = Turns(), list[int]()
    signals = [Signal(turns) for _ in range(NUM_AT_ONCE + 2)]
    tasks = await waiting_on(signals, woken)
    for signal in signals:
        signal.set()
    await passes(1)
    signals[0].set()  # its turn is given, and not used yet: what comes now is of that turn
    await passes(1)
    assert woken == list(range(NUM_AT_ONCE))
    signals[1].set()
    await passes(3)
    assert woken == [*range(len(signals)), 1]
    await end(tasks)


async def test_one_that_gave_up_costs_no_turn() -> None:
    turns, woken = Turns(), list[int]()
    signals = [Signal(turns) for _ in range(NUM_AT_ONCE + 1)]
    tasks = await waiting_on(signals, woken)
    for signal in signals:
        signal.set()
    tasks[0].cancel()
    await passes(3)
    assert woken == list(range(1, len(signals)))
    await end(tasks)


async def test_what_was_said_before_the_wait_ends_it_and_only_once() -> None:
    signal, woken = Signal(Turns()), list[int]()
    signal.set()
    signal.set()
    tasks = await waiting_on([signal], woken)
    await passes(4)
    assert woken == [0]
    signal.set()
    await passes(3)
    assert woken == [0, 0]
    await end(tasks)


async def test_tokens_that_come_while_streams_wait_for_their_turn_join_one_message() -> None:
    """Two steps, the second of which is heard while the first is written: who had no turn yet gets both at once."""
    turns, taken = Turns(), list[list[int]]()
    answers = [Answer(request_of(), TOKENIZER, 0.0, turns=turns) for _ in range(NUM_AT_ONCE + 1)]

    async def write(answer: Answer) -> None:
        while True:
            await answer.changed.wait()
            taken.append([token.index for token in answer.take().tokens])

    tasks = [asyncio.create_task(write(answer)) for answer in answers]
    await passes(1)
    for step in range(2):
        for answer in answers:
            answer.add(worker_pb2.DecodedToken(position=len(PROMPT) + step, token_id=65))
        await passes(2)
    await passes(3)
    assert taken == [[0]] * NUM_AT_ONCE + [[0, 1]] + [[1]] * NUM_AT_ONCE
    await end(tasks)
