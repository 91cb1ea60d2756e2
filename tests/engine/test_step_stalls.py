"""When a step stands still: what is usual decides, and only time in which this process could look counts."""

from __future__ import annotations

from typing import Any

import pytest

from engine import step_stalls
from engine.step_stalls import FACTOR, GIVE_UP, LOOK_S, StepClock

LIMIT_S = 2.0


class Time:
    """In place of the event loop: timers go off when the test says so."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.timers: list[tuple[float, Any]] = []

    def time(self) -> float:
        return self.now_s

    def call_later(self, delay_s: float, callback: Any) -> object:
        self.timers.append((self.now_s + delay_s, callback))
        return object()

    def pass_(self, duration_s: float) -> None:
        """Every timer goes off when it is due."""
        ends_s = self.now_s + duration_s
        while self.timers and self.timers[0][0] <= ends_s:
            self.now_s, callback = self.timers.pop(0)
            callback()
        self.now_s = ends_s

    def jump(self, duration_s: float) -> None:
        """The process was stopped: what is due goes off once, late."""
        self.now_s += duration_s
        due, self.timers = self.timers, []
        for _, callback in due:
            callback()


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    found = Time()
    monkeypatch.setattr(step_stalls.asyncio, "get_running_loop", lambda: found)
    return found


def step(clock: StepClock, time: Time, duration_s: float, num_tokens: int = 1) -> None:
    clock.begin(num_tokens)
    time.pass_(duration_s)
    clock.end()


def changes(clock: StepClock) -> list[bool]:
    """What is noted from now on."""
    seen: list[bool] = []
    clock.on_change = lambda: seen.append(clock.is_stalled)
    return seen


def test_a_step_that_does_not_end_is_noticed_and_one_that_ends_late_is_forgiven(time: Time) -> None:
    clock = StepClock(LIMIT_S)
    seen = changes(clock)
    step(clock, time, 0.01)
    clock.begin(1)
    time.pass_(LIMIT_S)
    assert not clock.is_stalled
    time.pass_(2 * LOOK_S)
    assert seen == [True]
    clock.end()
    assert seen == [True, False] and not clock.hopeless.is_set()


def test_the_first_step_may_take_as_long_as_it_likes(time: Time) -> None:
    clock = StepClock(LIMIT_S)
    step(clock, time, 50 * LIMIT_S)
    assert changes(clock) == [] and not clock.hopeless.is_set()


def test_a_step_beyond_hope_is_said_to_be(time: Time) -> None:
    clock = StepClock(LIMIT_S)
    step(clock, time, 0.01)
    clock.begin(1)
    time.pass_(GIVE_UP * LIMIT_S)
    assert clock.is_stalled and not clock.hopeless.is_set()
    time.pass_(2 * LOOK_S)
    assert clock.hopeless.is_set()


def test_a_process_that_was_stopped_did_not_stand_still(time: Time) -> None:
    clock = StepClock(LIMIT_S)
    step(clock, time, 0.01)
    clock.begin(1)
    time.jump(1000.0)
    assert not clock.is_stalled
    clock.end()
    allowed_s = clock.allowed_s(1)
    assert allowed_s is not None and allowed_s <= LIMIT_S, "nor is it usual that steps take so long"


@pytest.mark.parametrize(("num_tokens", "times_usual"), [(512, 1), (1024, 2), (4096, 8), (1, 1)])
def test_what_is_usual_goes_by_size(time: Time, num_tokens: int, times_usual: float) -> None:
    clock = StepClock(LIMIT_S)
    step(clock, time, 3.0, 512)
    assert clock.allowed_s(num_tokens.bit_length()) == pytest.approx(times_usual * FACTOR * 3.0)


def test_a_long_step_is_forgotten_in_time(time: Time) -> None:
    clock = StepClock(LIMIT_S)
    step(clock, time, 30.0)
    for _ in range(500):
        step(clock, time, 0.01)
    assert clock.allowed_s(1) == LIMIT_S


def test_without_a_limit_nothing_stands_still(time: Time) -> None:
    clock = StepClock(0.0)
    step(clock, time, 0.01)
    clock.begin(1)
    time.pass_(1000.0)
    assert not clock.is_stalled and not time.timers


def test_an_idle_worker_is_not_looked_at(time: Time) -> None:
    clock = StepClock(LIMIT_S)
    step(clock, time, 0.01)
    time.pass_(1.0)
    assert not time.timers
