"""Trace context in metadata, the choice of a ratio, the ring of recent traces, and what exporters make of a trace."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.errors import ConfigError
from runtime.trace_export import OTLP_MODULE, open_exporter
from runtime.traces import (
    MAX_STATE_BYTES,
    Part,
    Span,
    SpanEvent,
    Trace,
    TraceContext,
    TraceRing,
    extract,
    inject,
    is_in_ratio,
)

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CALLER = f"00-{TRACE_ID}-{SPAN_ID}-01"
contexts = st.builds(
    TraceContext,
    st.integers(1, 2**128 - 1),
    st.integers(1, 2**64 - 1),
    st.booleans(),
    st.sampled_from(["", "congo=t61rcWkgMzE,rojo=00f067aa0ba902b7"]),
)


@given(contexts)
def test_a_context_travels_through_metadata(context: TraceContext) -> None:
    assert extract([("user-agent", "x"), *inject(context), ("binary-bin", b"\x00")]) == context


def test_a_callers_context_is_read() -> None:
    found = extract([("traceparent", CALLER), ("tracestate", "a=1"), ("tracestate", "b=2")])
    assert found == TraceContext(int(TRACE_ID, 16), int(SPAN_ID, 16), True, "a=1,b=2")
    assert inject(None) == ()


@pytest.mark.parametrize(
    ("sent", "is_sampled"), [(CALLER[:-2] + "00", False), (CALLER[:-2] + "03", True), ("cc" + CALLER[2:] + "-x", True)]
)
def test_flags_and_later_versions(sent: str, is_sampled: bool) -> None:
    """Only the lowest flag is known, and of a later version what this one knows."""
    found = extract([("traceparent", sent)])
    assert found is not None and found.is_sampled == is_sampled


@pytest.mark.parametrize(
    "metadata",
    [
        None,
        [],
        [("other", "x")],
        [("traceparent", "nonsense")],
        [("traceparent", b"bytes")],
        [("traceparent", CALLER), ("traceparent", CALLER)],
        [("traceparent", CALLER + "-x")],
        [("traceparent", CALLER.upper())],
        [("traceparent", "ff" + CALLER[2:])],
        [("traceparent", f"00-{'0' * 32}-{SPAN_ID}-01")],
        [("traceparent", f"00-{TRACE_ID}-{'0' * 16}-01")],
    ],
)
def test_no_valid_context_is_none(metadata: list[tuple[str, str | bytes]] | None) -> None:
    assert extract(metadata) is None


def test_a_tracestate_that_is_too_long_is_left_out() -> None:
    state = "a=" + "1" * MAX_STATE_BYTES
    found = extract([("traceparent", CALLER), ("tracestate", state)])
    assert found is not None and found.state == ""


def test_a_ratio_is_chosen_by_the_id() -> None:
    low, high = 1 << 100, (1 << 64) - 1
    assert is_in_ratio(high, 1.0) and not is_in_ratio(low, 0.0)
    assert is_in_ratio(low, 0.5) and not is_in_ratio(high, 0.5)


def trace_of(name: str, began_unix_s: float = 1000.0, is_notable: bool = False) -> Trace:
    """A request that took two seconds, of which a worker had one and failed."""
    events = (SpanEvent("chunk", 1.25, {"baton.num_tokens": 7}),)
    spans = (
        Span("baton.v1.Inference/Generate", 1, 9, "baton-router", "router-0", 0.0, 2.0, {"reasons": ("stop",)}),
        Span("prefill", 2, 1, "baton-prefill", "p0", 1.0, 2.0, {"baton.num_chunks": 1}, events, "it broke"),
    )
    parts = (Part("admission", 0.0, 1.0), Part("prefill", 1.0, 1.5), Part("prefill", 1.5, 2.0))
    return Trace(int(TRACE_ID, 16), name, "a=1", began_unix_s, 1.5, spans, parts, is_notable)


def test_the_ring_keeps_the_latest_and_notable_ones_apart() -> None:
    ring = TraceRing(2)
    for number, is_notable in enumerate([True, False, False, False]):
        ring.add(trace_of(str(number), began_unix_s=10 - number, is_notable=is_notable))
    assert [trace.request_id for trace in ring.recent()] == ["3", "2", "0"]
    assert [trace.request_id for trace in ring.recent("2")] == ["2"]
    assert ring.recent("1") == []


def test_parts_of_one_name_add_up() -> None:
    trace = trace_of("a")
    assert (trace.total_s("prefill"), trace.total_s("admission"), trace.total_s("other")) == (1.0, 1.0, 0.0)
    assert trace.duration_s == 2.0


def test_the_console_exporter_prints_spans_of_every_process(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the environment says of this process's resource is not said of a worker."""
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "k8s.pod.name=router-pod")
    exporter = open_exporter("console", None, "router-0")
    assert exporter is not None
    exporter.send(trace_of("a"))
    exporter.shut_down()
    whole, prefill = sorted(printed(capsys.readouterr().out), key=lambda span: span["start_time"])
    assert {span["context"]["trace_id"] for span in (whole, prefill)} == {f"0x{TRACE_ID}"}
    assert (whole["parent_id"], prefill["parent_id"]) == ("0x0000000000000009", whole["context"]["span_id"])
    assert (whole["kind"], prefill["kind"]) == ("SpanKind.SERVER", "SpanKind.INTERNAL")
    assert (whole["start_time"], prefill["end_time"]) == ("1970-01-01T00:16:40.000000Z", "1970-01-01T00:16:42.000000Z")
    assert (whole["status"], prefill["status"]["description"]) == ({"status_code": "UNSET"}, "it broke")
    (event,) = prefill["events"]
    assert (event["name"], event["timestamp"]) == ("chunk", "1970-01-01T00:16:41.250000Z")
    resources = [span["resource"]["attributes"] for span in (whole, prefill)]
    assert [each["service.name"] for each in resources] == ["baton-router", "baton-prefill"]
    assert [each["service.instance.id"] for each in resources] == ["router-0", "p0"]
    assert ["k8s.pod.name" in each for each in resources] == [True, False]


def printed(text: str) -> list[dict[str, Any]]:
    """JSON objects, one after another."""
    decoder, found, text = json.JSONDecoder(), [], text.strip()
    while text:
        value, end = decoder.raw_decode(text)
        found.append(value)
        text = text[end:].lstrip()
    return found


def test_no_exporter() -> None:
    assert open_exporter("none", None, "router-0") is None


def test_otlp_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, OTLP_MODULE, None)
    with pytest.raises(ConfigError, match=r"install baton-llm\[otlp\]"):
        open_exporter("otlp", "http://127.0.0.1:4317", "router-0")
