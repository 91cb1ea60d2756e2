"""Circuit breakers: what opens them, what does not, and how they close again."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fake_workers import DECODE, PREFILL, FakeWorker, linked

from router import breakers
from router.breakers import FIRST_OPEN_S, MAX_OPEN_S, NUM_REQUESTS, Breakers
from router.links import Incarnation


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(breakers.random, "uniform", lambda low, high: low)
    return Clock()


@contextlib.asynccontextmanager
async def pair() -> AsyncIterator[tuple[Incarnation, Incarnation]]:
    async with linked(FakeWorker(PREFILL, "p")) as (p, _), linked(FakeWorker(DECODE, "d")) as (d, _):
        yield p, d


def fail(found: Breakers, *circuit: Incarnation, num_requests: int = NUM_REQUESTS) -> None:
    for number in range(num_requests):
        found.note_failure(f"request {number}", *circuit)


async def test_several_requests_running_open_a_circuit_and_no_other(clock: Clock) -> None:
    async with pair() as (p, d):
        found = Breakers(clock)
        fail(found, p, num_requests=NUM_REQUESTS - 1)
        assert not found.is_open(p)
        found.note_failure("another", p)
        assert found.is_open(p) and not found.is_open(p, d) and not found.is_open(d)
        fail(found, p, d)
        assert found.is_open(p, d) and not found.is_open(d)


async def test_one_request_opens_nothing_however_often_it_fails(clock: Clock) -> None:
    async with pair() as (p, _):
        found = Breakers(clock)
        for _ in range(20):
            found.note_failure("poison", p)
        assert not found.is_open(p)


async def test_a_success_between_them_starts_the_count_anew(clock: Clock) -> None:
    async with pair() as (p, _):
        found = Breakers(clock)
        for number in range(20):
            found.note_failure(f"request {number}", p)
            if number % 2:
                found.note_success(p)
        assert not found.is_open(p)


async def test_an_open_circuit_is_tried_by_one_request_at_a_time(clock: Clock) -> None:
    async with pair() as (p, _):
        found = Breakers(clock)
        fail(found, p)
        clock.now_s += FIRST_OPEN_S
        assert not found.is_open(p)
        found.note_use(p)
        assert found.is_open(p), "the others wait for the outcome"
        found.note_success(p)
        assert not found.is_open(p)
        fail(found, p, num_requests=NUM_REQUESTS - 1)
        assert not found.is_open(p), "it is closed, and counts from nothing"


async def test_it_stays_open_longer_after_each_try_that_failed(clock: Clock) -> None:
    async with pair() as (p, _):
        found, open_s = Breakers(clock), FIRST_OPEN_S
        fail(found, p)
        for _ in range(8):
            found.note_failure("it was under way", p)
            clock.now_s += open_s - 0.01
            assert found.is_open(p)
            clock.now_s += 0.01
            assert not found.is_open(p)
            found.note_use(p)
            found.note_failure("the one that tried", p)
            open_s = min(2 * open_s, MAX_OPEN_S)
        assert open_s == MAX_OPEN_S


async def test_a_try_without_an_outcome_is_followed_by_another(clock: Clock) -> None:
    """Its client may have gone."""
    async with pair() as (p, _):
        found = Breakers(clock)
        fail(found, p)
        clock.now_s += FIRST_OPEN_S
        found.note_use(p)
        clock.now_s += FIRST_OPEN_S
        assert not found.is_open(p)


async def test_lives_that_are_over_are_forgotten(clock: Clock) -> None:
    found: Any = Breakers(clock)
    async with linked(FakeWorker(PREFILL, "p")) as (p, wire), linked(FakeWorker(DECODE, "d")) as (d, _):
        fail(found, p, d)
        wire.cut()
        await asyncio.wait_for(p.lost.wait(), 5)
        found.note_failure("request", d)
        assert list(found._failing) == [(d,)]
