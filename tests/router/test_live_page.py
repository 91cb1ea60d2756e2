"""The live page's documents while requests wait, are prefilled and decode, and the page in a browser."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from cluster import LIMIT_S, Cluster, cluster, held, request_of

from baton.topology import choose_ports

TIMEOUT_S = 10.0
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


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


async def test_last_requests_are_waterfalls() -> None:
    """Latest first; spans begin within their request and say where they were; nothing of a failed one."""
    port = choose_ports(1)[0]
    async with cluster(page_port=port) as c:
        for name in ("one", "two"):
            await c.generate(request_of(20, request_id=name))
        traces = await read(port, "/traces.json")
    assert [trace["request_id"] for trace in traces] == ["two", "one"]
    spans = {span["name"]: span for span in traces[0]["spans"]}
    assert {"router queue", "prefill", "decode"} <= spans.keys()
    assert spans["prefill"]["where"] == "prefill-0" and spans["decode"]["where"] == "decode-0"
    for span in spans.values():
        assert span["start_ms"] >= 0 and span["start_ms"] + span["duration_ms"] <= traces[0]["total_ms"] + 5


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
    """In a window of a telephone's size, during load: the workers, a batch, a running request, a waterfall."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"no browser is installed: none of {', '.join(BROWSERS)} is on PATH")
    port = choose_ports(1)[0]
    async with cluster(page_port=port) as c:
        await c.generate(request_of(20, request_id="a finished one"))
        with held(c.decodes[0]):
            call = c.stub.Generate(request_of(200, request_id="a <b>running</b> one"))
            await phases(c, port, ["decode"])  # its first token came from prefill
            dom = await asyncio.to_thread(dump, browser, f"http://127.0.0.1:{port}/", tmp_path)
        call.cancel()
    assert 'data-worker="prefill-0"' in dom and 'data-worker="decode-0"' in dom
    assert "1 of 32 seats" in dom and "a &lt;b&gt;running&lt;/b&gt; one" in dom
    trace = dom.partition('class="trace"')[2]
    assert "a finished one" in trace and re.search(r'<i class="decode" style="left: [\d.]+%; width: [\d.]+%', trace)


def dump(browser: str, address: str, folder: Path) -> str:
    """The document after its script has run for a moment."""
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=390,844", f"--user-data-dir={folder}"]
    argv = [browser, *flags, "--virtual-time-budget=1500", "--dump-dom", address]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True).stdout
