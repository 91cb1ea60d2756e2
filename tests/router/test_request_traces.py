"""The trace of a request over a whole system: its spans, its parts, which ones are kept, and what is left out."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest
from cluster import LIMIT_S, PROMPT, Cluster, cluster, collect, request_of
from dispatching import d, failing, p, system
from failures import failure
from fake_workers import FakeWorker, answer_of, finished, good_decode
from traced import check, events_of, span_of, tree, waited

from protos import inference_pb2, worker_pb2
from router.dispatch import Dispatcher
from router.request_trace import RequestTrace
from router.trace_spans import build
from runtime.errors import Unavailable
from runtime.traces import Trace, TraceContext

LONG = [*PROMPT, *(i % 251 for i in range(180))]
CALLER = f"00-{'1f' * 16}-{'2e' * 8}-0"


async def ended(c: Cluster) -> list[Trace]:
    """What is kept once no request runs any more."""
    async with asyncio.timeout(LIMIT_S):
        await c.router.service.idle.wait()
    await asyncio.sleep(0)  # a trace is written just after its request has left
    traces = c.router.tracer.recent_traces()
    for trace in traces:
        check(trace)
    return traces


async def test_a_request_is_one_trace_over_all_processes() -> None:
    async with cluster(trace=True) as c:
        reply = await c.generate(request_of(6, LONG, request_id="traced", session_id="talk"))
        (trace,) = await ended(c)
        router, prefill, decode = "router-0", "prefill-0", "decode-0"
        assert tree(trace) == [
            ("admission", router, "Generate"),
            ("route", router, "Generate"),
            ("attempt", router, "Generate"),
            ("prefill.queue", prefill, "attempt"),
            ("prefill", prefill, "attempt"),
            ("decode.queue", decode, "attempt"),
            ("kv.transfer", decode, "attempt"),
            ("decode", decode, "attempt"),
        ]
        assert [span.service for span in trace.spans[-4:]] == ["baton-prefill", *["baton-decode"] * 3]
        assert (trace.request_id, trace.is_notable) == ("traced", False)
        whole, transfer = trace.spans[0], span_of(trace, "kv.transfer")
        assert whole.attributes["gen_ai.response.id"] == "traced"
        assert whole.attributes["gen_ai.conversation.id"] == "talk"
        assert whole.attributes["gen_ai.usage.input_tokens"] == len(LONG)
        assert whole.attributes["gen_ai.usage.output_tokens"] == 6
        assert whole.attributes["gen_ai.response.finish_reasons"] == ("length",)
        assert (whole.attributes["rpc.status_code"], whole.error) == ("OK", "")
        assert span_of(trace, "route").attributes["baton.route.reason"] == (
            "decode of 1 by session_affinity; prefill of 1 by session_affinity"
        )
        assert events_of(span_of(trace, "prefill")) == ["chunk"] * 4, "64 tokens a chunk"
        assert events_of(span_of(trace, "prefill.queue")) == ["credit"]
        assert events_of(span_of(trace, "decode")) == ["first_token"]
        by = reply.finish.served_by
        assert transfer.attributes["baton.kv.transport"] == by.transport
        assert transfer.attributes["baton.kv.bytes"] == by.kv_bytes
        assert transfer.attributes["baton.kv.num_blocks"] == -(-len(LONG) // 16)
        told_ms = sum(float(transfer.attributes[f"baton.kv.{name}_ms"]) for name in ("overlap", "exposed"))  # type: ignore[arg-type]
        assert told_ms == pytest.approx(1000 * (transfer.end_s - transfer.start_s), abs=0.01)
        await c.balanced()


async def test_the_parts_are_the_time_to_the_first_token_and_to_the_end() -> None:
    async with cluster(trace=True) as c:
        reply = await c.generate(request_of(20, LONG))
        (trace,) = await ended(c)
        assert trace.first_token_s is not None
        to_first = waited(trace, trace.first_token_s)
        assert sum(to_first.values()) == pytest.approx(reply.finish.timing.time_to_first_token_ms / 1000, abs=0.001)
        assert to_first.keys() <= {"admission", "route", "decode.queue", "prefill.queue", "prefill"}
        total = waited(trace)
        assert sum(total.values()) == pytest.approx(trace.duration_s)
        assert total.keys() >= {"admission", "prefill", "kv.transfer", "decode"}
        told = {
            name.removeprefix("baton.critical_path.").removesuffix("_ms"): value
            for name, value in trace.spans[0].attributes.items()
            if name.startswith("baton.critical_path.")
        }
        assert told == pytest.approx({name: 1000 * s for name, s in total.items()}, abs=0.001)


async def test_traces_are_listed_for_whoever_asks() -> None:
    async with cluster(trace=True) as c:
        for name in ("one", "two", "three"):
            await c.generate(request_of(request_id=name))
        last = (await c.stub.ListTraces(inference_pb2.ListTracesRequest(limit=2))).traces
        assert [trace.request_id for trace in last] == ["two", "three"]
        (found,) = (await c.stub.ListTraces(inference_pb2.ListTracesRequest(request_id="one"))).traces
        (kept,) = c.router.tracer.recent_traces("one")
        assert int(found.trace_id, 16) == kept.trace_id and found.first_token_s == kept.first_token_s
        assert [(each.name, each.start_s, each.end_s) for each in found.spans] == [
            (each.name, each.start_s, each.end_s) for each in kept.spans
        ]
        assert [each.name for each in found.parts] == [each.name for each in kept.parts]
        assert found.spans[0].attributes["gen_ai.response.finish_reasons"] == "length"


async def test_without_an_option_nothing_is_kept_and_workers_are_not_asked() -> None:
    async with cluster() as c:
        await c.generate()
        assert not c.router.tracer.is_on and await ended(c) == []
        assert not (await c.stub.ListTraces(inference_pb2.ListTracesRequest())).traces


async def test_decode_that_prefills_by_itself() -> None:
    async with cluster(0, 1, trace=True) as c:
        await c.generate(request_of(6, LONG))
        (trace,) = await ended(c)
        names = [(name, process) for name, process, parent in tree(trace) if parent == "attempt"]
        assert names == [(name, "decode-0") for name in ("decode.queue", "prefill", "decode")]
        assert events_of(span_of(trace, "prefill")) == ["chunk"] * 4
        assert "kv.transfer" not in waited(trace)


async def test_one_that_yields_its_place_is_paused_and_resumed() -> None:
    async with cluster(trace=True, decode={"max_batch_size": 1}) as c:
        first = asyncio.create_task(c.generate(request_of(400)))
        await c.until_running()
        await c.generate(request_of(4, request_id="second"))
        await first
        (trace,) = [trace for trace in await ended(c) if trace.request_id == "second"]
        assert events_of(span_of(trace, "decode")) == ["first_token", "paused", "resumed"]


async def test_at_ratio_zero_only_what_failed_or_was_wanted_is_kept() -> None:
    async with cluster(trace=True, trace_sample_ratio=0.0) as c:
        await c.generate(request_of(request_id="ordinary"))
        await failure(c.stub.Generate(request_of(sampling={"top_p": 7.0})))
        for flag in "01":
            request = request_of(request_id=f"caller-{flag}")
            await collect(c.stub.Generate(request, metadata=(("traceparent", CALLER + flag),)))
        (wanted,) = await ended(c)
        assert (wanted.request_id, f"{wanted.trace_id:032x}") == ("caller-1", "1f" * 16)
        assert f"{wanted.spans[0].parent_id:016x}" == "2e" * 8
        await c.decodes[0].server.stop(0)
        async with asyncio.timeout(LIMIT_S):
            while c.router.fleet.is_ready:
                await c.router.fleet.change.wait()
        await failure(c.stub.Generate(request_of(request_id="failed")))
        _, failed = await ended(c)
        assert (failed.request_id, failed.is_notable) == ("failed", True)
        assert failed.spans[0].error == "no decode worker is ready"
        assert failed.spans[0].attributes["rpc.status_code"] == "UNAVAILABLE"
        assert list(waited(failed)) == ["admission"]


async def test_of_a_refused_request_no_more_is_kept_than_a_name_may_have() -> None:
    async with cluster(trace=True, trace_text=True) as c:
        endless = "x" * 100_000
        await failure(c.stub.Generate(inference_pb2.GenerateRequest(request_id=endless, model=endless, prompt=endless)))
        (trace,) = await ended(c)
        assert trace.request_id == "x" * 256 and len(str(trace)) < 10_000


async def test_a_callers_mistake_is_no_failure() -> None:
    async with cluster(trace=True) as c:
        await failure(c.stub.Generate(request_of(request_id="wrong", sampling={"top_p": 7.0})))
        (trace,) = await ended(c)
        assert (trace.request_id, trace.is_notable, trace.spans[0].error) == ("wrong", False, "")
        assert trace.spans[0].attributes["rpc.status_code"] == "INVALID_ARGUMENT"


@pytest.mark.parametrize("limit", ["trace_slow_total_ms", "trace_slow_first_token_ms"])
async def test_slow_requests_are_kept(limit: str) -> None:
    async with cluster(trace=True, trace_sample_ratio=0.0, **{limit: 0.0}) as c:
        await c.generate()
        (trace,) = await ended(c)
        assert trace.is_notable and not trace.spans[0].error


async def test_a_cancelled_request_is_told_as_far_as_it_was_seen() -> None:
    async with cluster(trace=True) as c:
        call, num_tokens = c.stub.Generate(request_of(3000, LONG)), 0
        while num_tokens < 2:  # the second one comes from decode
            num_tokens += len((await call.read()).tokens)
        call.cancel()
        (trace,) = await ended(c)
        whole, decode = trace.spans[0], span_of(trace, "decode")
        assert (whole.attributes["rpc.status_code"], whole.error, trace.is_notable) == ("CANCELLED", "", False)
        assert decode.attributes["baton.unreported"] is True and events_of(decode)[0] == "first_token"
        assert span_of(trace, "kv.transfer").attributes == {"baton.unreported": True}
        assert events_of(span_of(trace, "prefill")) == ["chunk"] * 4


async def test_text_stays_out_unless_it_is_asked_for() -> None:
    sampling = inference_pb2.SamplingParams(temperature=0, ignore_eos=True, max_tokens=3, stop=["never said"])
    request = inference_pb2.GenerateRequest(prompt="a secret", sampling=sampling)
    async with cluster(trace=True) as c:
        await c.generate(request)
        assert "secret" not in str(await ended(c)) and "never said" not in str(await ended(c))
    async with cluster(trace=True, trace_text=True) as c:
        reply = await c.generate(request)
        (trace,) = await ended(c)
        facts = trace.spans[0].attributes
        said = [json.loads(str(facts[f"gen_ai.{way}.messages"])) for way in ("input", "output")]
        assert [(message["role"], message["parts"][0]["content"]) for (message,) in said] == [
            ("user", "a secret"),
            ("assistant", reply.text),
        ]
        assert facts["gen_ai.request.stop_sequences"] == ("never said",)


async def built(dispatcher: Dispatcher, num_tokens: int) -> Trace:
    """The trace of a request that a dispatcher serves."""
    trace, answer = RequestTrace(time.monotonic(), context=TraceContext(7, 8)), answer_of(num_tokens)
    trace.answer, trace.placed_s = answer, trace.arrived_s
    async with asyncio.timeout(LIMIT_S):
        await dispatcher.serve(answer, None, trace)
    trace.ended_s = trace.attempts[-1].ended_s
    found = build(trace, "r", {}, "", trace.is_recovered)
    check(found)
    return found


async def test_a_lost_attempt_stays_in_the_trace() -> None:
    async with system(p(), d("d0", failing(1, Unavailable("it goes"), num_tokens=2)), d("d1")) as s:
        trace = await built(s.dispatcher, 6)
        attempts = [span for span in trace.spans if span.name == "attempt"]
        assert [(span.attributes["baton.num_new_tokens"], bool(span.error)) for span in attempts] == [
            (2, True),
            (4, False),
        ]
        lost, _ = (span for span in trace.spans if span.name == "decode")
        assert lost.attributes["baton.unreported"] is True and "it goes" in lost.error
        assert events_of(lost) == ["first_token", "last_token"]
        assert events_of(trace.spans[0]) == ["first_token", "recovery"]
        assert waited(trace)["recovery"] > 0 and trace.is_notable
        second = [span for span in trace.spans if span.name == "route"][1]
        assert second.attributes["baton.route.reason"].endswith("prefill has computed it before")  # type: ignore[union-attr]


async def test_drafts_are_told_at_the_span_that_had_them() -> None:
    async def drafting(worker: FakeWorker, request: Any) -> worker_pb2.DecodeRunResponse:
        record = await good_decode(worker, request)
        drafts = {"num_drafts": 9, "num_accepted_drafts": 5, "num_draft_steps": 4, "drafting_ms": 1.5}
        record.MergeFrom(worker_pb2.DecodeRunResponse(**drafts))
        return record

    async with system(p(), d(script=drafting)) as s:
        decode = span_of(await built(s.dispatcher, 6), "decode")
        told = {name: value for name, value in decode.attributes.items() if "draft" in name}
        assert told == {
            "baton.num_drafts": 9,
            "baton.num_accepted_drafts": 5,
            "baton.num_draft_steps": 4,
            "baton.mean_draft_length": 2.25,
            "baton.drafting_ms": 1.5,
        }


async def test_kv_that_was_given_to_others_is_nobodys_fault() -> None:
    """Decode says at once that it has kept less of the session than the router believed."""
    num_calls = 0

    async def lose_once(worker: FakeWorker, request: Any) -> worker_pb2.DecodeRunResponse:
        nonlocal num_calls
        num_calls += 1
        if num_calls > 1:
            return await good_decode(worker, request)
        return finished(request, 0, outcome=worker_pb2.OUTCOME_KV_LOST, detail="too little is kept", kv_bytes=0)

    async with system(d(script=lose_once)) as s:
        trace = await built(s.dispatcher, 6)
        lost, again = (span for span in trace.spans if span.name == "attempt")
        assert "too little is kept" in str(lost.attributes["baton.reason"]) and not again.attributes.get("baton.reason")
        assert not (lost.error or again.error or trace.is_notable)


async def test_workers_of_an_older_version_report_no_timeline() -> None:
    """Their durations alone are in their messages."""
    async with system(p(), d()) as s:
        trace = await built(s.dispatcher, 6)
        assert [span.name for span in trace.spans if span.instance in ("p", "d")] == [
            "prefill.queue",
            "prefill",
            "decode.queue",
            "decode",
        ]
