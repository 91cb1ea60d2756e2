"""From what was noted of a request to its trace: spans over all processes, and the critical path.

Generate (the request) > admission, then for each attempt: route, attempt > prefill.queue, prefill, decode.queue,
kv.transfer, decode. Workers report durations since an attempt arrived at them. They are laid on this router's clock so
that the way there and the way back took equally long. What a worker could not report, since it died or the request was
cancelled, is told as this router saw it, with `baton.unreported`. Invariant: the parts of the critical path, of which
those up to the first token are the time to it, follow each other without gaps from arrival to end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from protos import inference_pb2, worker_pb2
from router.links import Incarnation
from router.request_trace import RequestTrace, TracedAttempt
from runtime.traces import AttributeValue, Part, Span, SpanEvent, Trace, new_span_id

ROUTER_SERVICE = "baton-router"
SERVICES = {
    inference_pb2.WORKER_ROLE_PREFILL: "baton-prefill",
    inference_pb2.WORKER_ROLE_DECODE: "baton-decode",
    inference_pb2.WORKER_ROLE_MIXED: "baton-mixed",
}
UNREPORTED: Mapping[str, AttributeValue] = {"baton.unreported": True}
Attributes = dict[str, AttributeValue]


def build(
    request: RequestTrace, router_id: str, attributes: Mapping[str, AttributeValue], error: str, is_notable: bool
) -> Trace:
    """The trace of a request that is over; `attributes` are those of the whole."""
    assert request.context is not None
    trace = _Building(request, router_id)
    placed_s = request.placed_s if request.placed_s is not None else request.ended_s
    trace.part("admission", placed_s)
    events = [] if request.validated_s is None else [trace.event("validated", request.validated_s)]
    trace.add("admission", request.arrived_s, placed_s, events=events)
    before_s = placed_s
    for number, attempt in enumerate(request.attempts, 1):
        _add_attempt(trace, attempt, number, before_s)
        before_s = attempt.ended_s
    trace.part("finish" if request.attempts else "route", request.ended_s)
    totals: dict[str, float] = {}
    for part in trace.parts:
        name = f"baton.critical_path.{part.name}_ms"
        totals[name] = totals.get(name, 0.0) + 1000 * (part.end_s - part.start_s)
    whole = Span(
        "baton.v1.Inference/Generate",
        request.context.span_id,
        request.parent_id,
        ROUTER_SERVICE,
        router_id,
        0.0,
        trace.at(request.ended_s),
        {**attributes, **{name: round(total, 3) for name, total in totals.items()}},
        tuple(_events_of_the_whole(trace)),
        error,
    )
    first_token_s = request.first_token_s
    return Trace(
        trace_id=request.context.trace_id,
        request_id=request.request_id,
        state=request.context.state,
        began_unix_s=request.began_unix_s,
        first_token_s=None if first_token_s is None else trace.at(first_token_s),
        spans=(whole, *trace.spans),
        parts=tuple(trace.parts),
        is_notable=is_notable,
    )


def _events_of_the_whole(trace: _Building) -> Iterable[SpanEvent]:
    request = trace.request
    if request.first_token_s is not None:
        yield trace.event("first_token", request.first_token_s)
    for number, attempt in enumerate(request.attempts, 1):
        if attempt.failure:
            what = "eviction" if attempt.is_eviction else "recovery"
            about: Attributes = {"baton.attempt_number": number, "baton.reason": attempt.failure}
            yield trace.event(what, attempt.ended_s, **about)


@dataclass(slots=True)
class _Building:
    """A trace on its way."""

    request: RequestTrace
    router_id: str
    spans: list[Span] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)

    def at(self, clock_s: float) -> float:
        """A time of the router's clock, since arrival."""
        return max(0.0, clock_s - self.request.arrived_s)

    def event(self, name: str, clock_s: float, **attributes: AttributeValue) -> SpanEvent:
        return SpanEvent(name, self.at(clock_s), attributes)

    def part(self, name: str, until_s: float) -> None:
        """The client waits for `name` from where the last part ended; nothing is added where that is later."""
        start_s = self.parts[-1].end_s if self.parts else 0.0
        end_s = self.at(min(until_s, self.request.ended_s))
        if end_s > start_s:
            self.parts.append(Part(name, start_s, end_s))

    def add(
        self,
        name: str,
        start_s: float,
        end_s: float,
        *,
        at: Incarnation | None = None,
        within: TracedAttempt | None = None,
        span_id: int = 0,
        attributes: Mapping[str, AttributeValue] | None = None,
        events: Iterable[SpanEvent] = (),
        error: str = "",
    ) -> None:
        """A span at a worker, or here; `within` an attempt and its time, or below the whole request."""
        start_s, end_s, parent = self.at(start_s), self.at(end_s), self.request.context
        if within is not None:
            earliest_s, latest_s = self.at(within.marks.began_s), self.at(within.ended_s)
            start_s, end_s = (min(max(each, earliest_s), latest_s) for each in (start_s, end_s))
            parent = within.context
        assert parent is not None
        end_s = max(start_s, end_s)
        self.spans.append(
            Span(
                name,
                span_id or new_span_id(),
                parent.span_id,
                ROUTER_SERVICE if at is None else SERVICES[at.role],
                self.router_id if at is None else at.worker_id,
                start_s,
                end_s,
                attributes or {},
                tuple(
                    SpanEvent(event.name, min(max(event.at_s, start_s), end_s), event.attributes) for event in events
                ),
                error,
            )
        )


def _add_attempt(trace: _Building, attempt: TracedAttempt, number: int, before_s: float) -> None:
    marks, context, prefill = attempt.marks, attempt.context, attempt.prefill or attempt.decode
    assert context is not None
    trace.part("route" if number == 1 else "recovery", marks.began_s)
    route: Attributes = {
        "baton.route.reason": attempt.why,
        "baton.route.placement": attempt.placement,
        "baton.decode_worker_id": attempt.decode.worker_id,
        "baton.prefill_worker_id": prefill.worker_id,
        "baton.num_held_tokens": attempt.num_held,
    }
    trace.add("route", before_s, marks.began_s, attributes=route)
    about: Attributes = {
        "baton.attempt_id": attempt.label,
        "baton.attempt_number": number,
        "baton.num_input_tokens": attempt.num_input_tokens,
        "baton.num_new_tokens": attempt.num_new_tokens,
    }
    if marks.record is not None and marks.record.failed_check:
        about["baton.failed_check"] = worker_pb2.KVCheck.Name(marks.record.failed_check)
    if attempt.failure:
        about["baton.reason"] = attempt.failure
    error = attempt.failure if attempt.is_fault else ""
    trace.add("attempt", marks.began_s, attempt.ended_s, span_id=context.span_id, attributes=about, error=error)
    times = _Times.of(attempt)
    if attempt.prefill is not None:
        _add_prefill(trace, attempt, attempt.prefill, times)
    _add_decode(trace, attempt, times)
    _add_parts(trace, attempt, times)


@dataclass(slots=True)
class _Times:
    """When workers did what, on the router's clock; None: not known."""

    prefill_arrived_s: float | None = None
    credit_s: float | None = None
    prefill_started_s: float | None = None
    computed_s: float | None = None
    decode_arrived_s: float | None = None
    decode_started_s: float | None = None

    @staticmethod
    def of(attempt: TracedAttempt) -> _Times:
        marks, times = attempt.marks, _Times()
        report, record = marks.first_token, marks.record
        if report is not None and marks.prefill_asked_s is not None and marks.computed_s is not None:
            done_ms = report.queue_ms + report.prefill_ms
            age_ms = report.timeline.age_ms if report.HasField("timeline") else done_ms
            arrived_s = _arrival(marks.prefill_asked_s, marks.computed_s, age_ms)
            times.prefill_arrived_s = arrived_s
            times.prefill_started_s = arrived_s + report.queue_ms / 1000
            times.computed_s = arrived_s + done_ms / 1000
            credit = next((moment for moment in report.timeline.moments if moment.name == "credit"), None)
            times.credit_s = None if credit is None else arrived_s + credit.at_ms / 1000
        if record is not None and marks.decode_asked_s is not None and marks.decided_s is not None:
            life_ms = 1000 * (marks.decided_s - marks.decode_asked_s)
            age_ms = record.timeline.age_ms if record.HasField("timeline") else life_ms
            times.decode_arrived_s = _arrival(marks.decode_asked_s, marks.decided_s, age_ms)
            times.decode_started_s = times.decode_arrived_s + record.queue_ms / 1000
        return times


def _arrival(asked_s: float, heard_s: float, age_ms: float) -> float:
    """When a call arrived at a worker that says something of its age `age_ms`: the ways there and back are equal."""
    return asked_s + max(0.0, heard_s - asked_s - age_ms / 1000) / 2


def _add_prefill(trace: _Building, attempt: TracedAttempt, worker: Incarnation, times: _Times) -> None:
    marks, report = attempt.marks, attempt.marks.first_token
    if report is None or times.prefill_arrived_s is None:
        if marks.prefill_asked_s is not None:
            # Whether it was computed already, nobody knows any more.
            asked_s, until_s = marks.prefill_asked_s, attempt.ended_s
            trace.add("prefill.queue", asked_s, until_s, at=worker, within=attempt, attributes=UNREPORTED)
        return
    assert times.prefill_started_s is not None and times.computed_s is not None
    arrived_s = times.prefill_arrived_s
    events = _events(trace, report.timeline, arrived_s, {"credit": "credit", "queued": "taken_back"})
    trace.add("prefill.queue", arrived_s, times.prefill_started_s, at=worker, within=attempt, events=events)
    trace.add(
        "prefill",
        times.prefill_started_s,
        times.computed_s,
        at=worker,
        within=attempt,
        attributes=_prefill_attributes(attempt, report.cached_tokens, report.timeline),
        events=_events(trace, report.timeline, arrived_s, {"chunk": "chunk"}),
    )


def _prefill_attributes(attempt: TracedAttempt, num_cached: int, timeline: worker_pb2.Timeline) -> Attributes:
    num_chunks = sum(moment.name == "chunk" for moment in timeline.moments)
    return {
        "baton.num_computed_tokens": max(0, attempt.num_input_tokens - num_cached),
        "baton.num_cached_tokens": num_cached,
        "baton.num_chunks": num_chunks + timeline.num_left_out,
    }


def _add_decode(trace: _Building, attempt: TracedAttempt, times: _Times) -> None:
    marks, record, worker = attempt.marks, attempt.marks.record, attempt.decode
    if marks.decode_asked_s is None:
        return
    if record is None or times.decode_arrived_s is None or times.decode_started_s is None:
        _add_unreported_decode(trace, attempt, times, marks.decode_asked_s)
        return
    arrived_s, started_s, timeline = times.decode_arrived_s, times.decode_started_s, record.timeline
    reached = {moment.name: arrived_s + moment.at_ms / 1000 for moment in reversed(timeline.moments)}
    trace.add("decode.queue", arrived_s, started_s, at=worker, within=attempt)
    assert marks.decided_s is not None
    until_s = reached.get("decoding", marks.handed_off_s or marks.decided_s)
    if record.transport or "fetching" in reached:
        ended_s = min(until_s, started_s + record.transfer_ms / 1000) if record.transport else until_s
        _add_transfer(trace, attempt, record, started_s, ended_s, times)
    elif record.prefill_ms or "prefilling" in reached:
        trace.add(
            "prefill",
            started_s,
            started_s + record.prefill_ms / 1000 if record.prefill_ms else until_s,
            at=worker,
            within=attempt,
            attributes=_prefill_attributes(attempt, record.cached_tokens, timeline),
            events=_events(trace, timeline, arrived_s, {"chunk": "chunk"}),
        )
    if marks.handed_off_s is not None:
        names = {"paused": "paused", "decoding": "resumed", "evicted": "evicted", "failed": "failed"}
        later = [event for event in _events(trace, timeline, arrived_s, names) if event.at_s > trace.at(until_s)]
        trace.add(
            "decode",
            until_s,
            arrived_s + timeline.age_ms / 1000 if timeline.age_ms else marks.decided_s,
            at=worker,
            within=attempt,
            attributes={"baton.num_new_tokens": attempt.num_new_tokens, **_drafts(record)},
            events=[trace.event("first_token", until_s), *later],
        )


def _drafts(record: worker_pb2.DecodeRunResponse) -> Attributes:
    if not record.num_drafts:
        return {}
    return {
        "baton.num_drafts": record.num_drafts,
        "baton.num_accepted_drafts": record.num_accepted_drafts,
        "baton.num_draft_steps": record.num_draft_steps,
        "baton.mean_draft_length": round(record.num_drafts / max(1, record.num_draft_steps), 2),
        "baton.drafting_ms": round(record.drafting_ms, 3),
    }


def _add_transfer(
    trace: _Building,
    attempt: TracedAttempt,
    record: worker_pb2.DecodeRunResponse,
    started_s: float,
    ended_s: float,
    times: _Times,
) -> None:
    computed_s = min(max(times.computed_s or started_s, started_s), ended_s)
    attributes: Attributes = {
        "baton.kv.transport": record.transport,
        "baton.kv.bytes": record.kv_bytes,
        "baton.kv.num_blocks": record.kv_bytes // max(1, attempt.decode.description.block_bytes),
        "baton.kv.overlap_ms": round(1000 * (computed_s - started_s), 3),
        "baton.kv.exposed_ms": round(1000 * (ended_s - computed_s), 3),
    }
    trace.add(
        "kv.transfer",
        started_s,
        ended_s,
        at=attempt.decode,
        within=attempt,
        attributes=attributes,
        events=_events(trace, record.timeline, times.decode_arrived_s or started_s, {"first_bytes": "first_bytes"}),
        error="" if record.transport else record.detail,
    )


def _add_unreported_decode(trace: _Building, attempt: TracedAttempt, times: _Times, asked_s: float) -> None:
    """Of a worker that died, or of a request that was cancelled: what was seen from here."""
    worker, ended_s, failure = attempt.decode, attempt.ended_s, attempt.failure
    handed_off_s, queued_until_s = attempt.marks.handed_off_s, times.credit_s
    if queued_until_s is None:
        queued_until_s = ended_s if handed_off_s is None else asked_s
    error = failure if queued_until_s == ended_s else ""
    trace.add("decode.queue", asked_s, queued_until_s, at=worker, within=attempt, attributes=UNREPORTED, error=error)
    if attempt.prefill is not None and times.credit_s is not None:
        until_s, error = handed_off_s or ended_s, "" if handed_off_s is not None else failure
        trace.add("kv.transfer", times.credit_s, until_s, at=worker, within=attempt, attributes=UNREPORTED, error=error)
    if handed_off_s is not None:
        about: Attributes = {**UNREPORTED, "baton.num_new_tokens": attempt.num_new_tokens}
        events = [trace.event("first_token", handed_off_s)]
        if attempt.last_token_s is not None:
            events.append(trace.event("last_token", attempt.last_token_s))
        trace.add(
            "decode", handed_off_s, ended_s, at=worker, within=attempt, attributes=about, events=events, error=failure
        )


def _events(
    trace: _Building, timeline: worker_pb2.Timeline, arrived_s: float, names: Mapping[str, str]
) -> list[SpanEvent]:
    """The moments of a worker that are named, by the names they get."""
    return [
        trace.event(
            names[moment.name],
            arrived_s + moment.at_ms / 1000,
            **({"baton.num_tokens": moment.num_tokens} if moment.num_tokens else {}),
        )
        for moment in timeline.moments
        if moment.name in names
    ]


def _add_parts(trace: _Building, attempt: TracedAttempt, times: _Times) -> None:
    """What the client waited for. The time up to a moment that is not known belongs to the next one that is."""
    marks = attempt.marks
    if attempt.prefill is None:
        steps = [("decode.queue", times.decode_started_s), ("prefill", marks.handed_off_s)]
    elif times.computed_s is None:
        steps = [("unreported", marks.handed_off_s)]
    else:
        steps = [
            ("decode.queue", times.credit_s),
            ("prefill.queue", times.prefill_started_s),
            ("prefill", marks.computed_s),
            ("kv.transfer", marks.handed_off_s),
        ]
    for name, until_s in steps:
        if until_s is not None:
            trace.part(name, until_s)
    if marks.handed_off_s is not None:
        last_s = attempt.last_token_s or marks.handed_off_s
        trace.part("decode", last_s if attempt.failure else attempt.ended_s)
    rest = "unreported" if marks.record is None else "decode"
    trace.part("recovery" if attempt.failure else rest, attempt.ended_s)
