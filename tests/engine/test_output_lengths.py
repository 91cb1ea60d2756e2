"""Expected output lengths against the plain definition, and what they are bounded by."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.lengths import MIN_FINISHED, WINDOW, OutputLengths


def quantile_of(lengths: list[int], quantile: float) -> int:
    """The smallest length that so many do not exceed."""
    return next(x for x in sorted(lengths) if sum(y <= x for y in lengths) >= quantile * len(lengths))


@given(
    st.lists(st.integers(1, 50), max_size=60),
    st.integers(0, 60),
    st.integers(1, 80),
    st.integers(1, 9),
    st.sampled_from([0.5, 0.75, 1.0]),
)
def test_what_is_expected_is_a_quantile_of_those_that_were_longer_as_far_as_one_looks(
    finished, num_outputs, most, least, quantile
):
    lengths = OutputLengths(quantile, prior_tokens=20, least_tokens=least)
    for length in finished:
        lengths.record(length)
    longer = [length for length in finished if length > num_outputs]
    more = 20
    if len(finished) >= MIN_FINISHED:
        if longer:
            more = quantile_of(longer, quantile) - num_outputs
        more = min(more, quantile_of(finished, 1 - quantile) if quantile < 1 else min(finished))
    assert lengths.expected_more(num_outputs, most) == min(most, max(more, least))


@pytest.mark.parametrize("most", [0, -3])
def test_one_that_runs_has_a_token_to_come(most):
    assert OutputLengths(prior_tokens=100).expected_more(50, most) == 1


def test_answers_of_one_length_are_foreseen_to_their_end():
    lengths = OutputLengths(least_tokens=4)
    for _ in range(MIN_FINISHED):
        lengths.record(200)
    assert [lengths.expected_more(num_outputs, 500) for num_outputs in (0, 150, 198)] == [200, 50, 4]


def test_old_answers_are_forgotten():
    lengths = OutputLengths(prior_tokens=1)
    for length in [900] + [30] * (WINDOW - 1):
        lengths.record(length)
    assert lengths.expected_more(40, 1000) == 30, "one was longer; so far ahead one looks"
    lengths.record(30)
    assert lengths.expected_more(40, 1000) == 1, "none was"
