"""What a bench run adds up to."""

from __future__ import annotations

import pytest

from baton.bench import Timeline, spread, summarize


def test_report_counts_tokens_gaps_and_retries() -> None:
    """Two requests: one with gaps of 10 and 30 ms, one that was tried twice."""
    timelines = [
        Timeline(0.0, (0.1, 0.11, 0.14), 3, 2**20, 1),
        Timeline(0.5, (0.7, 0.72), 5, 2**20, 2),
    ]
    report = summarize(timelines, num_failed=1, duration_s=2.0)
    assert (report.num_requests, report.num_failed, report.num_retried) == (2, 1, 1)
    assert report.output_tokens_per_s == pytest.approx(4.0)
    assert report.kv_mib == pytest.approx(2.0)
    assert report.time_to_first_token_ms.p50 == pytest.approx(150.0)
    assert report.inter_token_latency_ms.p50 == pytest.approx(20.0)
    assert report.inter_token_latency_ms.highest == pytest.approx(30.0)


def test_percentiles_lie_within_the_values() -> None:
    """1 to 100: the percentiles are near their names, the worst is the worst."""
    result = spread([float(value) for value in range(1, 101)])
    assert result.p50 == pytest.approx(50.5)
    assert 90 <= result.p90 <= 91
    assert 99 <= result.p99 <= 100
    assert result.highest == 100


@pytest.mark.parametrize(("values", "expected"), [([], 0.0), ([7.0], 7.0)])
def test_too_few_values_have_no_percentiles(values: list[float], expected: float) -> None:
    """None is zero, one is itself."""
    assert spread(values).p99 == expected
