"""When the step loop audits the pool: while it has nothing to do, and within a small part of its time."""

from __future__ import annotations

import asyncio

import pytest
from test_pool_growth import DEADLINE_S, MemoryOf, Worker

from engine import step_loop


class Audits:
    """Counts them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, worker: Worker, pause_s: float) -> None:
        """Between two of them so much time is to pass."""
        self.num = 0
        self.made = asyncio.Event()
        check = worker.holdings.check

        def audit() -> None:
            check()
            self.num += 1
            self.made.set()

        monkeypatch.setattr(worker.holdings, "check", audit)
        monkeypatch.setattr(step_loop, "AUDIT_PAUSE_S", pause_s / worker.holdings.pool.num_total)


async def answer(worker: Worker, first: int) -> None:
    sequence = worker.add(20, first=first)
    await worker.until(lambda: sequence.is_over)


async def test_audits_take_a_small_part_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(64, 64, MemoryOf(64))
    audits = Audits(monkeypatch, worker, 1000.0)
    async with worker.running():
        for first in range(100, 500, 100):
            await answer(worker, first)
        assert audits.num == 1, "answers came one by one, and only the first wait had time for it"


async def test_who_has_nothing_more_to_do_is_audited_when_it_is_time(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(64, 64, MemoryOf(64))
    audits = Audits(monkeypatch, worker, 0.1)
    async with worker.running(), asyncio.timeout(DEADLINE_S):
        await audits.made.wait()
        audits.made.clear()
        await answer(worker, 100)
        await audits.made.wait()
        num_audits = audits.num
        await asyncio.sleep(0.3)
        assert audits.num == num_audits, "nothing has changed since"
