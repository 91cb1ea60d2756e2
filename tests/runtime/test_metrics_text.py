"""The text of a scrape, read by the reader of Prometheus' own library, and histograms."""

from __future__ import annotations

import math

import pytest
from prometheus_client.parser import text_string_to_metric_families

from runtime.gen_ai import FIRST_TOKEN_S, GenAi
from runtime.metrics import Family, Histogram, HistogramSet, Metrics, counter, gauge


def read(text: str) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Values by name and labels."""
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            values = found.setdefault(sample.name, {})
            labels = tuple(sorted(sample.labels.items()))
            assert labels not in values, f"{sample.name} has two values for {labels}"
            values[labels] = sample.value
    return found


def test_what_is_written_is_read() -> None:
    """Names with colons, awkward labels, every kind of number; labels of the process on each sample."""
    awkward = 'a "quoted" back\\slash\nand a line'

    def collect() -> list[Family]:
        return [
            gauge("vllm:one", awkward).add(0.25, text=awkward).add(True, text="yes"),
            counter("two_total", "Counted.").add_each({"a": 3, "b": math.inf}, "kind"),
            gauge("vllm:one", awkward).add(-1e-9, text="more"),
            gauge("three", "Has a label of the process.").add(math.nan, role="other"),
        ]

    found = read(Metrics(collect, role="test").text())
    assert found["vllm:one"] == {
        (("role", "test"), ("text", awkward)): 0.25,
        (("role", "test"), ("text", "yes")): 1.0,
        (("role", "test"), ("text", "more")): -1e-9,
    }
    assert found["two_total"] == {(("kind", "a"), ("role", "test")): 3, (("kind", "b"), ("role", "test")): math.inf}
    ((labels, value),) = found["three"].items()
    assert labels == (("role", "other"),) and math.isnan(value)
    assert found["process_cpu_seconds_total"][(("role", "test"),)] > 0
    assert found["process_resident_memory_bytes"][(("role", "test"),)] > 1e6


def test_a_name_has_one_meaning() -> None:
    with pytest.raises(AssertionError, match="two meanings of one"):
        Metrics(lambda: [gauge("one", "This."), gauge("one", "That.")]).text()


def test_buckets_are_cumulative_and_closed_above() -> None:
    """A value that equals a bound is within it; counts add up to what was observed."""
    histogram = Histogram((0.5, 1.0))
    for value in (0.1, 0.5, 0.7, 9.0):
        histogram.observe(value)
    histogram.observe(0.8, count=3)
    family = histogram.add_to(Family("h", "histogram", "Values."))
    found = read(Metrics(lambda: [family]).text())
    assert found["h_bucket"] == {(("le", "0.5"),): 2, (("le", "1.0"),): 6, (("le", "+Inf"),): 7}
    assert found["h_count"] == {(): 7} and found["h_sum"][()] == pytest.approx(0.1 + 0.5 + 0.7 + 9.0 + 2.4)


def test_a_set_shows_what_it_was_promised() -> None:
    """Known values are there before anything is observed, others from their first on."""
    parts = HistogramSet((1.0,), "part", ("a", "b"))
    parts.observe("b", 0.5)
    parts.observe("c", 2.0)
    found = read(Metrics(lambda: [parts.add_to(Family("h", "histogram", "Values."))]).text())
    assert found["h_count"] == {(("part", "a"),): 0, (("part", "b"),): 1, (("part", "c"),): 1}


def test_instruments_of_the_conventions() -> None:
    """Three histograms under the names, buckets and attributes that the conventions give them; one that fails has a
    type of error and no first token."""
    gen_ai = GenAi("service", "model")
    gen_ai.record("chat", 0.5, 0.02, 0.03, None)
    gen_ai.record("chat", 0.1, None, None, "UNAVAILABLE")
    found = read(Metrics(gen_ai.families).text())
    common = {
        "gen_ai_operation_name": "chat",
        "gen_ai_provider_name": "baton",
        "gen_ai_request_model": "model",
        "gen_ai_response_model": "model",
    }
    well, badly = tuple(sorted(common.items())), tuple(sorted({**common, "error_type": "UNAVAILABLE"}.items()))
    assert found["gen_ai_server_request_duration_seconds_count"] == {well: 1, badly: 1}
    assert found["gen_ai_server_time_per_output_token_seconds_sum"] == {well: pytest.approx(0.03)}
    buckets = {
        dict(labels)["le"]: value for labels, value in found["gen_ai_server_time_to_first_token_seconds_bucket"].items()
    }
    assert list(buckets) == [*map(repr, FIRST_TOKEN_S), "+Inf"]
    assert (buckets["0.01"], buckets["0.02"], buckets["+Inf"]) == (0, 1, 1)
    gen_ai.shut_down()


def test_a_console_gets_them_too(capsys: pytest.CaptureFixture[str]) -> None:
    """What goes to a collector is sent at the latest at the end."""
    gen_ai = GenAi("service", "model", "console", instance_id="router-x")
    gen_ai.record("chat", 0.5, 0.02, 0.03, None)
    gen_ai.shut_down()
    printed = capsys.readouterr().out
    assert all(text in printed for text in ("gen_ai.server.time_to_first_token", "gen_ai.request.model", "router-x"))
