"""What a worker learns of how fast it is."""

from __future__ import annotations

import random

import pytest

from engine.rates import FORGET_S, PromptTimes, Rate


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_rate_follows_what_was_last() -> None:
    rate = Rate(Clock())
    assert rate.per_s == 0
    for amount, duration_s in ((100, 1.0),) * 50 + ((400, 1.0),) * 500:
        rate.observe(amount, duration_s)
    assert rate.per_s == pytest.approx(400, rel=0.02)


def test_what_was_long_ago_is_not_known() -> None:
    clock = Clock()
    rate, times = Rate(clock), PromptTimes(clock)
    rate.observe(100, 1.0)
    times.observe(100, 0, 1.0)
    clock.now_s += FORGET_S + 1
    assert rate.per_s == 0 and times.fit() == (0.0, 0.0)
    rate.observe(3, 1.0)
    times.observe(3, 0, 1.0)
    assert rate.per_s == pytest.approx(3) and times.fit()[1] == pytest.approx(3), "nothing of before is mixed in"


def test_a_steps_own_time_and_that_of_tokens_are_told_apart() -> None:
    times, draws = PromptTimes(Clock()), random.Random(1)
    for _ in range(300):
        num_tokens = draws.choice((16, 64, 512))
        times.observe(num_tokens, 0, (0.01 + num_tokens / 4000) * draws.uniform(0.95, 1.05))
    step_s, tokens_per_s = times.fit()
    assert step_s == pytest.approx(0.01, abs=0.003)
    assert tokens_per_s == pytest.approx(4000, rel=0.05)


def test_rows_that_decode_in_the_same_step_are_not_counted() -> None:
    times, draws = PromptTimes(Clock()), random.Random(1)
    for _ in range(600):
        num_tokens = draws.choice((0, 0, 16, 64, 256))
        times.observe(num_tokens, 8, 0.02 + (0.005 + num_tokens / 1000 if num_tokens else 0.0))
    step_s, tokens_per_s = times.fit()
    assert step_s == pytest.approx(0.005, abs=0.001)
    assert tokens_per_s == pytest.approx(1000, rel=0.05)


def test_chunks_of_one_size_say_what_a_token_takes() -> None:
    times = PromptTimes(Clock())
    for _ in range(50):
        times.observe(64, 0, 0.064)
    assert times.fit() == (pytest.approx(0.0, abs=1e-9), pytest.approx(1000))


def test_nothing_impossible_is_learned_from_chance() -> None:
    """Longer chunks that happened to be faster: no negative time."""
    times = PromptTimes(Clock())
    for num_tokens, duration_s in ((100, 0.2), (200, 0.1), (100, 0.2), (200, 0.1)):
        times.observe(num_tokens, 0, duration_s)
    step_s, tokens_per_s = times.fit()
    assert step_s > 0 and tokens_per_s > 0
