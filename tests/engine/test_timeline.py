"""What a worker tells a trace: durations since the attempt arrived, in order, and no more than fit."""

from __future__ import annotations

import pytest

from engine.timeline import MAX_MOMENTS, Timeline


def test_moments_are_told_since_arrival() -> None:
    now_s = 50.0
    timeline = Timeline(49.0, lambda: now_s)
    timeline.note("credit")
    now_s = 50.5
    timeline.note("chunk", 64)
    now_s = 52.0
    told = timeline.to_proto()
    assert [(each.name, each.at_ms, each.num_tokens) for each in told.moments] == [
        ("credit", 1000.0, 0),
        ("chunk", 1500.0, 64),
    ]
    assert (told.age_ms, told.num_left_out) == (pytest.approx(3000.0), 0)


def test_the_first_moments_stay() -> None:
    timeline = Timeline(0.0, lambda: 1.0)
    for number in range(MAX_MOMENTS + 3):
        timeline.note("chunk", number)
    told = timeline.to_proto()
    assert [each.num_tokens for each in told.moments] == list(range(MAX_MOMENTS))
    assert told.num_left_out == 3
