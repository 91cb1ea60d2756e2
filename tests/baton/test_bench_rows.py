"""The arithmetic of rows: percentiles, gaps, windows, goodput, refusals, padding and the handoff."""

from __future__ import annotations

import pytest

from baton.answers import Finish, ServedBy, Timing, Usage
from baton.bench.asks import Ask
from baton.bench.comparisons import handoff_figures, num_padding_tokens
from baton.bench.load import Outcome
from baton.bench.options import Slo, read_slo
from baton.bench.rows import Row, Spread, gaps_of, meets, spread, summarize
from baton.bench.system import cpu_between_s
from runtime.errors import ConfigError


def finish(
    *,
    cached_tokens: int = 0,
    num_attempts: int = 1,
    transport: str = "shm",
    transfer_ms: float = 0,
    prefill_ms: float = 0,
) -> Finish:
    timing = Timing(0, 0, prefill_ms, transfer_ms, 200.0, 0, 0)
    served_by = ServedBy("p", "d", transport, 2**20, num_attempts)
    return Finish("length", None, Usage(8, 3, cached_tokens), timing, served_by, 0)


def outcome(sent_s: float, *times_s: float, counts: tuple[int, ...] = (), **finish_fields: int) -> Outcome:
    """A request that ended well with its last message."""
    counts = counts or (1,) * len(times_s)
    return Outcome(8, sent_s, times_s, counts, times_s[-1], finish(**finish_fields))


def refusal(sent_s: float, ended_s: float) -> Outcome:
    return Outcome(8, sent_s, (), (), ended_s, None, "full", is_refused=True)


def failure(sent_s: float, ended_s: float) -> Outcome:
    return Outcome(8, sent_s, (), (), ended_s, None, "broken")


def row(*outcomes: Outcome, slo: Slo | None = None, window: tuple[float, float] | None = None) -> Row:
    return summarize("row", outcomes, slo=slo or Slo(), cpu_s_per_token=None, window=window)


def test_percentiles_lie_within_the_values() -> None:
    result = spread([float(value) for value in range(1, 101)])
    assert result is not None
    assert (result.mean, result.p50, result.max) == (50.5, 50.5, 100)
    assert 90 <= result.p90 <= 91 and 99 <= result.p99 <= 100


def test_one_value_is_every_percentile_and_none_is_no_distribution() -> None:
    assert spread([7.0]) == Spread(7.0, 7.0, 7.0, 7.0, 7.0)
    assert spread([]) is None


def test_gaps_include_that_from_the_first_to_the_second_token() -> None:
    assert gaps_of(outcome(0.0, 1.0, 1.5, 1.6)) == pytest.approx([500.0, 100.0])
    figures = row(outcome(0.0, 1.0, 1.5, 1.6)).itl_ms
    assert figures is not None and (figures.mean, figures.max) == pytest.approx((300.0, 500.0))


def test_rates_and_times_of_two_requests() -> None:
    result = row(outcome(0.0, 0.1, 0.3, cached_tokens=3), outcome(1.0, 1.4, 2.0, counts=(1, 4), num_attempts=3))
    assert (result.requests, result.failed, result.refused, result.duration_s) == (2, 0, 0, 2.0)
    assert (result.output_tok_s, result.total_tok_s) == (3.5, 11.5)
    assert result.ttft_ms is not None and result.ttft_ms.max == pytest.approx(400.0)
    assert result.tpot_ms is not None and result.tpot_ms.mean == pytest.approx((200.0 + 150.0) / 2)
    assert result.e2e_ms is not None and result.e2e_ms.p50 == pytest.approx(650.0)
    assert (result.cached_tokens, result.recomputed) == (3, 2)
    assert result.goodput_rps is None


def test_a_window_leaves_out_what_happened_outside_it() -> None:
    early, across = outcome(0.0, 0.5, 0.9), outcome(0.5, 0.8, 2.0, 3.5)
    result = row(early, across, window=(1.0, 3.0))
    assert (result.requests, result.duration_s, result.output_tok_s) == (0, 2.0, 0.5)
    assert result.itl_ms is not None and result.itl_ms.max == pytest.approx(1200.0)
    assert result.ttft_ms is None and result.e2e_ms is None


def test_failures_count_whenever_they_happen() -> None:
    assert row(failure(0.0, 0.1), outcome(0.0, 2.0, 2.5), window=(1.0, 3.0)).failed == 1


def test_a_refusal_is_neither_success_nor_failure() -> None:
    result = row(outcome(0.0, 1.0, 1.5), refusal(0.2, 0.3))
    assert (result.requests, result.failed, result.refused) == (1, 0, 1)
    assert result.e2e_ms is not None and result.e2e_ms.max == pytest.approx(1500.0)


def test_a_row_of_refusals_tells_how_long_they_took() -> None:
    result = row(refusal(0.0, 0.2), refusal(1.0, 1.4))
    assert (result.refused, result.output_tok_s) == (2, 0.0)
    assert result.e2e_ms is not None and result.e2e_ms.mean == pytest.approx(300.0)


@pytest.mark.parametrize(
    ("limits", "good"),
    [
        ("ttft:1000", True),
        ("ttft:999", False),
        ("itl:500", True),
        ("itl:499", False),
        ("tpot:301", True),
        ("tpot:299", False),
        ("e2e:1600", True),
        ("e2e:1599", False),
        ("ttft:1000,itl:499", False),
    ],
)
def test_a_request_is_good_within_every_limit(limits: str, good: bool) -> None:
    slo = read_slo(tuple(limits.split(",")))
    assert meets(outcome(0.0, 1.0, 1.5, 1.6), slo) == good


def test_goodput_counts_good_requests_alone() -> None:
    good, slow, refused = outcome(0.0, 0.1, 0.2), outcome(0.0, 0.1, 4.0), refusal(0.0, 0.1)
    assert row(good, slow, refused, failure(0.0, 0.1), slo=Slo(e2e=1000)).goodput_rps == pytest.approx(0.25)


@pytest.mark.parametrize("text", ["ttft", "ttft:", "ttft:fast", "ttft:0", "ttft:-1", "ttft:nan", "ttft:inf", "x:1"])
def test_bad_limits_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--slo"):
        read_slo((text,))


def test_a_limit_given_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="once"):
        read_slo(("ttft:1", "ttft:2"))


def test_padding_is_what_shorter_members_of_a_batch_lack() -> None:
    asks = [Ask((1,) * 10, 5), Ask((1,) * 4, 20), Ask((1,) * 7, 7)]
    assert num_padding_tokens(asks, 2) == (10 - 10) + (20 - 5) + (10 - 4) + (20 - 20)
    assert num_padding_tokens(asks, 1) == 0


def test_the_handoff_begins_with_the_first_token_and_knows_its_transport() -> None:
    outcomes = [
        Outcome(8, 0.0, (1.0,), (1,), 1.0, finish(transfer_ms=150.0, prefill_ms=100.0)),
        Outcome(8, 0.0, (1.0,), (1,), 1.0, finish(transfer_ms=900.0, transport="grpc")),
        failure(0.0, 1.0),
    ]
    figures = handoff_figures(outcomes, "shm")
    assert figures["handoff_ms"] == spread([50.0])
    assert figures["exposed_percent"] == spread([25.0])
    assert figures["handoff_mib_s"] == pytest.approx(20.0)
    assert figures["other_transport"] == 1


def test_cpu_time_is_unknown_when_a_process_was_replaced() -> None:
    assert cpu_between_s({1: 1.0, 2: 5.0}, {1: 1.5, 2: 6.0}) == pytest.approx(1.5)
    assert cpu_between_s({1: 1.0, 2: 5.0}, {1: 1.5, 2: 6.0}, {2}) == pytest.approx(1.0)
    assert cpu_between_s({1: 1.0}, {3: 1.5}) is None
    assert cpu_between_s(None, {1: 1.0}) is None
