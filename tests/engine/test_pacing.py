"""Steps of at least a given time: they end at an even rate while there is work, and none is held up after a pause."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine.batch import Batch
from engine.pacing import PacedRunner
from engine.request import Sample


class Timed:
    """A runner whose steps take what they are told, on a clock that moves only so and by sleeping."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.step_s = 0.0
        self.called: list[Callable[[], None]] = []

    def run(self, batch: Batch) -> list[Sample]:
        self.now_s += self.step_s
        return [Sample(7)]

    def call_between_layers(self, call: Callable[[], None]) -> None:
        self.called.append(call)

    def sleep(self, duration_s: float) -> None:
        assert duration_s > 0
        self.now_s += duration_s


@pytest.fixture
def timed() -> Timed:
    return Timed()


@pytest.fixture
def paced(timed: Timed) -> PacedRunner:
    return PacedRunner(timed, 0.05, lambda: timed.now_s, timed.sleep)


def test_steps_end_at_an_even_rate_whatever_is_done_between_them(timed: Timed, paced: PacedRunner) -> None:
    ends = []
    for timed.step_s, between_s in ((0.0, 0.02), (0.03, 0.01), (0.01, 0.0), (0.05, 0.0)):
        assert [sample.token_id for sample in paced.run(Batch())] == [7]
        ends.append(timed.now_s)
        timed.now_s += between_s
    assert ends == pytest.approx([100.0, 100.05, 100.1, 100.15])


def test_a_step_that_takes_longer_is_not_made_up_for(timed: Timed, paced: PacedRunner) -> None:
    timed.step_s = 0.2
    paced.run(Batch())
    assert timed.now_s == pytest.approx(100.2)
    timed.step_s = 0.0
    paced.run(Batch())
    assert timed.now_s == pytest.approx(100.25)


def test_the_first_step_after_a_pause_is_not_held_up(timed: Timed, paced: PacedRunner) -> None:
    paced.run(Batch())
    timed.now_s += 3
    paced.run(Batch())
    assert timed.now_s == pytest.approx(103.0)


def test_what_happens_between_layers_is_the_runners_own(timed: Timed, paced: PacedRunner) -> None:
    def call() -> None:
        raise AssertionError("it is only handed on")

    paced.call_between_layers(call)
    assert timed.called == [call]
