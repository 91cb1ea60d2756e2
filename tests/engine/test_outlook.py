"""The most blocks that sequences will hold together, against playing their steps one by one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from decode_svc.outlook import Forecast, Future

FUTURES = st.builds(
    lambda steps, tokens, borrowed: Future(-steps, tokens, min(borrowed, tokens // 8), 0),
    st.integers(1, 40),
    st.integers(1, 60),
    st.integers(0, 3),
)


def played(futures: list[Future], block_size: int) -> int:
    most = 0
    for step in range(1, 1 - min(future.negative_steps for future in futures)):
        running = [future for future in futures if -future.negative_steps >= step]
        held = sum(-(-(each.num_tokens + step - 1) // block_size) - each.num_borrowed for each in running)
        most = max(most, held)
    return most


@given(st.lists(FUTURES, min_size=1, max_size=8), st.sampled_from([1, 2, 4, 7, 16]), st.booleans())
def test_a_newcomer_fits_where_the_most_that_is_held_at_once_does(futures, block_size, is_grown):
    newcomer, others = futures[-1], futures[:-1]
    forecast = Forecast(block_size, [] if is_grown else others)
    for future in others if is_grown else ():
        forecast.add(future)
    most = played(futures, block_size)
    assert forecast.fits(newcomer, most) and not forecast.fits(newcomer, most - 1)
    assert len(forecast) == len(others)
    assert forecast.num_tokens == sum(future.num_tokens for future in others)


def test_those_that_end_make_room_for_those_that_grow():
    # Ten tokens each now; one gives its ten up after a step, the other then has grown to as many more.
    short, long = Future(-1, 10, 0, 10), Future(-11, 10, 0, 10)
    assert Forecast(1, [short]).fits(long, 20) and not Forecast(1, [short]).fits(long, 19)
    assert not Forecast(1, [Future(-11, 10, 0, 10)]).fits(long, 39)
