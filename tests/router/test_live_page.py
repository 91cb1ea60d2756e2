"""The live page's documents while requests wait, are prefilled and decode, and the page in a browser."""

from __future__ import annotations

import asyncio
import json
import re
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from browser import browser
from cluster import LIMIT_S, Cluster, cluster, collect, held, request_of

from baton.topology import choose_ports
from protos import inference_pb2
from router.waterfalls import MAX_SHOWN

TIMEOUT_S = 10.0
TELEPHONE = (390, 844)


async def read(port: int, path: str) -> Any:
    """What a browser is sent."""

    def fetch() -> bytes:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=TIMEOUT_S) as answer:
            return answer.read()  # type: ignore[no-any-return]

    body = await asyncio.to_thread(fetch)
    return json.loads(body) if path.endswith(".json") else body.decode()


async def phases(c: Cluster, port: int, wanted: list[str]) -> dict[str, Any]:
    """The state in which requests are in these phases."""
    state: dict[str, Any] = {}
    try:
        async with asyncio.timeout(LIMIT_S):
            while True:
                state = await read(port, "/state.json")
                if sorted(each["phase"] for each in state["requests"]) == wanted:
                    return state
    except TimeoutError:
        raise AssertionError(f"no {wanted} in {state}") from None


async def test_state_while_requests_run() -> None:
    """Who waits, who is prefilled and who decodes, at which workers; ids and numbers alone."""
    port = choose_ports(1)[0]
    async with cluster(page_port=port, decode={"max_num_seqs": 1}) as c:
        with held(c.prefills[0]):
            calls = [c.stub.Generate(request_of(200, prompt=[n] * 40, request_id=f"r{n}")) for n in (1, 2, 3)]
            state = await phases(c, port, ["prefill", "waiting", "waiting"])
            assert (state["num_waiting"], state["num_placed"], state["num_requests"]) == (2, 1, 3)
            assert {each["id"] for each in state["requests"]} == {"r1", "r2", "r3"}
            running = next(each for each in state["requests"] if each["phase"] == "prefill")
            assert (running["prefill"], running["decode"]) == ("prefill-0", "decode-0")
            assert (running["num_prompt_tokens"], running["num_tokens"], running["max_tokens"]) == (40, 0, 200)
        for call in calls:
            assert [response async for response in call][-1].HasField("finish")
        await c.balanced(LIMIT_S)
        state = await phases(c, port, [])
        assert state["num_ended"] == 3 and state["num_tokens"] == 600 and state["num_placed"] == 0
        decode, prefill = sorted(state["workers"], key=lambda worker: worker["role"])
        assert (prefill["id"], prefill["role"], prefill["state"]) == ("prefill-0", "prefill", "serving")
        assert decode["num_seats"] == 1 and decode["num_unaccounted"] == 0
        assert sum(decode["blocks"][what] for what in ("used", "cached", "free")) <= decode["blocks"]["ceiling"] == 256


async def shown(c: Cluster, port: int) -> list[dict[str, Any]]:
    """The last requests, once their traces are written."""
    async with asyncio.timeout(LIMIT_S):
        await c.router.service.idle.wait()
    await asyncio.sleep(0)
    answer = await read(port, "/traces.json")
    assert answer["is_traced"] is c.router.tracer.keeps_recent
    return answer["requests"]  # type: ignore[no-any-return]


def events(span: dict[str, Any]) -> list[str]:
    """Names of its events."""
    return [event["name"] for event in span["events"]]


async def test_without_traces_waterfalls_are_made_of_last_messages() -> None:
    """Latest first; spans begin within their request and say where they were; nothing of a failed one."""
    port = choose_ports(1)[0]
    async with cluster(page_port=port) as c:
        for name in ("one", "two"):
            await c.generate(request_of(20, request_id=name))
        requests = await shown(c, port)
    assert [request["request_id"] for request in requests] == ["two", "one"]
    assert requests[0]["num_output_tokens"] == 20 and not requests[0]["waits_ms"]
    spans = {span["name"]: span for span in requests[0]["spans"]}
    assert {"request", "admission", "prefill", "kv.transfer", "decode"} <= spans.keys()
    assert spans["prefill"]["where"] == "prefill-0" and spans["decode"]["where"] == "decode-0"
    assert spans["kv.transfer"]["facts"] == {"kv.transport": "shm"}
    for span in spans.values():
        assert span["start_ms"] >= 0 and span["start_ms"] + span["duration_ms"] <= requests[0]["total_ms"] + 5


async def test_traces_are_waterfalls_with_chunks_and_what_the_client_waited_for() -> None:
    """As the trace has it, but for the whole's attributes: there are texts and names of sessions among them."""
    port, text = choose_ports(1)[0], "a secret " * 30
    async with cluster(page_port=port, trace=True, trace_text=True) as c:
        sampling = inference_pb2.SamplingParams(temperature=0, ignore_eos=True, max_tokens=6)
        request = inference_pb2.GenerateRequest(prompt=text, sampling=sampling, session_id="whose", request_id="it")
        await c.generate(request)
        (told,) = await shown(c, port)
        (trace,) = c.router.tracer.recent_traces()
    assert "a secret" in str(trace) and "whose" in str(trace)
    assert "secret" not in str(told) and "whose" not in str(told)
    assert (told["request_id"], told["status"], told["num_input_tokens"]) == ("it", "OK", len(text))
    assert [(span["depth"], span["name"]) for span in told["spans"]] == [
        *((0, "request"), (1, "admission"), (1, "route"), (1, "attempt"), (2, "prefill.queue"), (2, "prefill")),
        *((2, "decode.queue"), (2, "kv.transfer"), (2, "decode")),
    ]
    spans = {span["name"]: span for span in told["spans"]}
    chunks = [event["facts"]["num_tokens"] for event in spans["prefill"]["events"]]
    assert len(chunks) > 1 and sum(map(int, chunks)) == len(text)
    assert spans["route"]["facts"]["route.reason"].startswith("decode of 1")
    assert events(spans["decode"]) == events(spans["request"]) == ["first_token"]
    assert sum(told["waits_ms"].values()) == pytest.approx(told["total_ms"], abs=0.1)
    assert {"prefill", "decode"} <= told["waits_ms"].keys()


async def test_evictions_and_recoveries_are_shown_and_stay_in_sight() -> None:
    """Of one request: given back by a worker, then the next one died. Any number of others does not push it out."""
    port = choose_ports(1)[0]
    async with cluster(num_decode=2, page_port=port, trace=True) as c:
        with held(c.decodes[0]), held(c.decodes[1]):
            call = c.stub.Generate(request_of(20, request_id="moved"))
            (running,) = (await phases(c, port, ["decode"]))["requests"]
            first = int(running["decode"].removeprefix("decode-"))
            c.decodes[first].role.evict_all("to make room")
            async with asyncio.timeout(LIMIT_S):
                while (await read(port, "/state.json"))["requests"][0]["decode"] != f"decode-{1 - first}":
                    pass
            await c.decodes[1 - first].server.stop(0)
        await collect(call)
        for number in range(MAX_SHOWN + 1):
            await c.generate(request_of(2, request_id=f"ordinary {number}"))
        requests = await shown(c, port)
    assert [request["request_id"] for request in requests[:-1]] == [
        f"ordinary {number}" for number in range(MAX_SHOWN, 0, -1)
    ]
    moved = requests[-1]
    assert (moved["request_id"], moved["is_notable"], moved["num_attempts"]) == ("moved", True, 3)
    assert events(moved["spans"][0]) == ["first_token", "eviction", "recovery"]
    attempts = [span for span in moved["spans"] if span["name"] == "attempt"]
    assert [bool(span["error"]) for span in attempts] == [False, True, False]
    assert "to make room" in attempts[0]["facts"]["reason"] and moved["waits_ms"]["recovery"] > 0


async def test_pauses_are_marked_where_they_were() -> None:
    port = choose_ports(1)[0]
    async with cluster(page_port=port, trace=True, decode={"max_batch_size": 1}) as c:
        first = asyncio.create_task(c.generate(request_of(400)))
        await c.until_running()
        await c.generate(request_of(4, request_id="second"))
        await first
        (second,) = (each for each in await shown(c, port) if each["request_id"] == "second")
    assert events(second["spans"][-1]) == ["first_token", "paused", "resumed"]


async def test_the_page_brings_all_it_needs() -> None:
    """One document that loads nothing from elsewhere and writes what it is sent as text alone."""
    port = choose_ports(1)[0]
    async with cluster(page_port=port) as c:
        page = await read(port, "/")
        assert c.router.fleet.is_ready
    assert not re.findall(r"(?:src|href)=\"(?!data:)|https?://|@import", page)
    assert "innerHTML" not in page and "insertAdjacentHTML" not in page and "default-src 'none'" in page
    assert 'name="viewport"' in page


async def test_a_browser_shows_a_system_at_work(tmp_path: Path) -> None:
    """In a window of a telephone's size, during load: the workers, a batch, a running request, a waterfall that says
    more when it is touched. Nothing is wider than the window."""
    port = choose_ports(1)[0]
    async with cluster(page_port=port, trace=True) as c:
        await c.generate(request_of(20, request_id="a finished one"))
        with held(c.decodes[0]):
            call = c.stub.Generate(request_of(200, request_id="a <b>running</b> one"))
            await phases(c, port, ["decode"])  # its first token came from prefill
            await asyncio.to_thread(look, port, tmp_path)
        call.cancel()


def look(port: int, folder: Path) -> None:
    with browser(folder) as shown:
        shown.open(f"http://127.0.0.1:{port}/", *TELEPHONE)
        shown.wait_for("document.querySelectorAll('.trace').length === 1", LIMIT_S)
        text = shown.ask("document.body.innerText")
        assert "prefill-0" in text and "decode-0" in text and "1 of 32 seats" in text
        assert "a <b>running</b> one" in text and "a finished one" in text and "waited for" in text
        bars = shown.ask("[...document.querySelectorAll('.track i')].map((bar) => [bar.className, bar.style.left])")
        names = ["request", "admission", "route", "attempt", "prefill-queue", "prefill", "decode-queue", "kv-transfer"]
        assert [name for name, _ in bars] == [*names, "decode"]
        starts = {name: float(left.removesuffix("%")) for name, left in bars}
        assert 0 == starts["request"] <= starts["prefill"] < starts["decode"] < 100
        assert shown.ask("document.querySelectorAll('.track b.chunk, .track b.first_token').length") >= 3
        assert "route.reason" not in text
        shown.ask("document.querySelectorAll('.span summary')[2].click()")
        assert "route.reason=decode of 1" in shown.ask("document.body.innerText")
        shown.wait_for(f"document.documentElement.scrollWidth === {TELEPHONE[0]}", LIMIT_S)
        shown.picture(folder / "page.png")  # shows that the page can be painted, too


async def test_a_browser_is_told_where_traces_are_missing(tmp_path: Path) -> None:
    """Then waterfalls are coarser, and the page says why."""
    port = choose_ports(1)[0]

    def ask() -> tuple[str, int]:
        with browser(tmp_path) as shown:
            shown.open(f"http://127.0.0.1:{port}/", *TELEPHONE)
            shown.wait_for("document.querySelectorAll('.trace').length === 1", LIMIT_S)
            return shown.ask("document.body.innerText"), shown.ask("document.querySelectorAll('i.decode').length")

    async with cluster(page_port=port) as c:
        await c.generate(request_of(20, request_id="a finished one"))
        text, num_bars = await asyncio.to_thread(ask)
    assert "--trace to see" in text and "a finished one" in text and num_bars == 1
