"""`baton profile`: shares and verdicts, the table, JSON and the file for Perfetto, over scripted and real workers."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import defaultdict
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from fake_router import FakeRouter
from test_cli import baton

from baton.profiling.figures import Row, kind_of, rows_of
from baton.profiling.options import Limits, ProfileConfig
from baton.profiling.report import table, write_perfetto
from baton.profiling.workers import Profile
from protos import inference_pb2, worker_pb2, worker_pb2_grpc
from runtime import config as configuration
from runtime import rpc
from runtime.errors import ConfigError

PEAKS = Limits(bytes_per_s=10e9, flops_per_s=1e12)


def step(duration_ms: float, gflop: float, mb: float, began_ms: float = 0.0, **changes: Any) -> worker_pb2.ProfiledStep:
    """One row that decodes, unless told otherwise."""
    fields = {"num_tokens": 1, "num_sequences": 1, "kv_bytes": 3 << 20, **changes}
    return worker_pb2.ProfiledStep(
        began_ms=began_ms, duration_ms=duration_ms, num_flops=1e9 * gflop, num_bytes=1e6 * mb, **fields
    )


def profile_of(*steps: worker_pb2.ProfiledStep, load: str = "", worker_id: str = "w", began_s: float = 0.0) -> Profile:
    memory = worker_pb2.MemoryInUse(
        kv_used_bytes=3 << 20, kv_cached_bytes=1 << 20, kv_ceiling_bytes=64 << 20, resident_bytes=700 << 20
    )
    response = worker_pb2.ProfileResponse(
        worker_id=worker_id, device="cpu", dtype="bfloat16", steps=steps, memory=memory
    )
    return Profile(load, response, began_s)


def row_of(*steps: worker_pb2.ProfiledStep, peaks: Limits | None = PEAKS) -> Row:
    (row,) = rows_of([profile_of(*steps, load="load")], {} if peaks is None else {"w": peaks})
    return row


@pytest.mark.parametrize(
    ("gflop", "mb", "shares", "bound"),
    [
        (1.0, 80.0, (0.1, 0.8, 0.8), "bandwidth"),
        (9.0, 20.0, (0.9, 0.2, 0.9), "compute"),
        (1.0, 20.0, (0.1, 0.2, 0.2), "neither"),
    ],
)
def test_the_nearer_peak_bounds_unless_both_are_far(
    gflop: float, mb: float, shares: tuple[float, ...], bound: str
) -> None:
    row = row_of(step(10.0, gflop, mb))
    assert (row.compute_share, row.bandwidth_share, row.roofline_share) == pytest.approx(shares)
    assert row.bound_by == bound
    assert (row.flops_per_s, row.bytes_per_s) == pytest.approx((1e11 * gflop, 1e8 * mb))


def test_a_hiccup_moves_nothing() -> None:
    steady = [step(10.0, 1.0, 80.0)] * 4
    assert row_of(*steady, step(900.0, 1.0, 80.0)).roofline_share == row_of(*steady).roofline_share


def test_without_peaks_or_without_work_there_is_no_verdict() -> None:
    unknown = row_of(step(10.0, 1.0, 80.0), peaks=None)
    assert unknown.flops_per_s == pytest.approx(1e11)
    assert (unknown.compute_share, unknown.roofline_share, unknown.bound_by) == (None, None, None)
    tracer = row_of(step(10.0, 0.0, 0.0))
    assert (tracer.flops_per_s, tracer.bytes_per_s, tracer.bound_by, tracer.step_ms) == (None, None, None, 10.0)


def test_steps_of_unlike_kinds_are_rows_of_their_own() -> None:
    steps = [
        *[step(10.0, 1.0, 80.0, num_tokens=count, num_sequences=count) for count in (1, 5, 8)],
        step(90.0, 80.0, 80.0, num_tokens=512, num_prompt_tokens=512),
        step(95.0, 81.0, 80.0, num_tokens=510, num_prompt_tokens=507, num_sequences=4),
    ]
    names = ["decode 1", "decode 5-8", "decode 5-8", "prefill 257-512", "prefill 257-512 + decode 3-4"]
    assert [kind_of(each) for each in steps] == names
    rows = rows_of([profile_of(*steps)], {"w": PEAKS})
    assert [(row.name, row.num_steps) for row in rows] == [
        ("decode 1", 1),
        ("decode 5-8", 2),
        ("prefill 257-512", 1),
        ("prefill 257-512 + decode 3-4", 1),
    ]


def test_the_table_has_a_line_for_each_row_and_worker() -> None:
    profiles = [
        profile_of(step(10.0, 9.0, 20.0, num_tokens=512), load="prefill 512", worker_id="prefill-0"),
        profile_of(step(10.0, 1.0, 80.0), step(20.0, 1.0, 80.0), load="decode 1", worker_id="decode-0"),
    ]
    limits = {"prefill-0": PEAKS, "decode-0": Limits(8e9, 2e12, "measured on 2 threads")}
    text = table(rows_of(profiles, limits), profiles, limits)
    header, prefill, decode, empty, *workers = text.splitlines()
    columns = "worker steps ms tokens batch GFLOP/s of peak GB/s of peak roofline KV MiB bound by"
    assert " ".join(header.split()) == columns
    assert prefill.split() == (
        ["prefill", "512", "prefill-0", "1", "10.00", "512", "1", "900.0", "90%", "2.0", "20%", "90%", "3", "compute"]
    )
    assert decode.split()[2:] == (
        ["decode-0", "2", "15.00", "1", "1", "75.0", "4%", "6.0", "75%", "75%", "3", "bandwidth"]
    )
    assert empty == "" and workers == [
        "prefill-0: cpu bfloat16; peaks 1000 GFLOP/s, 10.0 GB/s (given); 700 MiB resident; "
        "KV: 3 MiB used, 1 cached, of at most 64",
        "decode-0: cpu bfloat16; peaks 2000 GFLOP/s, 8.0 GB/s (measured on 2 threads); 700 MiB resident; "
        "KV: 3 MiB used, 1 cached, of at most 64",
    ]


def check_trace_file(path: Path) -> dict[str, list[dict[str, Any]]]:
    """That a file is what Perfetto takes; its slices by process. Every event lies on a named track of a named process,
    slices of a track follow each other or lie within each other, counters are numbers in the order of time."""
    found = json.loads(path.read_text())
    assert found.keys() == {"traceEvents", "displayTimeUnit"} and found["displayTimeUnit"] == "ms"
    events = found["traceEvents"]
    processes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    threads = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert len(set(processes.values())) == len(processes)
    slices: dict[str, list[dict[str, Any]]] = defaultdict(list)
    counters: dict[tuple[int, str], list[float]] = defaultdict(list)
    for event in events:
        assert event["pid"] in processes and event["ph"] in "MXCi"
        if event["ph"] == "X":
            assert (event["pid"], event["tid"]) in threads and event["dur"] >= 0 and event["name"]
            slices[processes[event["pid"]]].append(event)
        elif event["ph"] == "C":
            assert isinstance(event["args"]["value"], int | float)
            counters[event["pid"], event["name"]].append(event["ts"])
    assert all(times == sorted(times) for times in counters.values())
    for of_process in slices.values():
        open_until: list[float] = []
        for event in sorted(of_process, key=lambda each: (each["ts"], -each["dur"])):
            while open_until and open_until[-1] <= event["ts"] + 1e-3:
                open_until.pop()
            assert not open_until or event["ts"] + event["dur"] <= open_until[-1] + 1e-3
            open_until.append(event["ts"] + event["dur"])
    return slices


def test_a_file_for_perfetto(tmp_path: Path) -> None:
    """Profiles of two workers on one clock, each with its steps and what they achieved."""
    path = tmp_path / "out.json"
    profiles = [
        profile_of(step(10.0, 9.0, 20.0, 1.0), step(10.0, 9.0, 20.0, 12.0), load="prefill 512", worker_id="p"),
        profile_of(step(4.0, 1.0, 80.0, 2.0), load="decode 1", worker_id="d", began_s=0.5),
    ]
    write_perfetto(profiles, {"p": PEAKS}, path)
    slices = check_trace_file(path)
    assert slices.keys() == {"p cpu", "d cpu"}
    assert [(each["name"], each["ts"], each["dur"]) for each in slices["p cpu"]] == [
        ("prefill 512", pytest.approx(1_000), pytest.approx(10_000)),
        ("prefill 512", pytest.approx(12_000), pytest.approx(10_000)),
    ]
    (decode,) = slices["d cpu"]
    assert decode["ts"] == pytest.approx(502_000) and "roofline" not in decode["args"]
    assert slices["p cpu"][0]["args"] == {
        "tokens": 1,
        "batch": 1,
        "prompt tokens": 0,
        "GFLOP": 9.0,
        "MB read": 20.0,
        "roofline": "90.0%",
        "bound by": "compute",
    }
    events = json.loads(path.read_text())["traceEvents"]
    rates = [(each["ts"], each["args"]["value"]) for each in events if each["name"] == "GFLOP/s" and each["pid"] == 1]
    assert rates[:2] == [(pytest.approx(1_000), pytest.approx(900)), (pytest.approx(11_000), 0.0)]


class FakeWorker(worker_pb2_grpc.WorkerServicer):
    """Answers from a script, and remembers what it was asked."""

    def __init__(self) -> None:
        self.requests: list[worker_pb2.ProfileRequest] = []
        self.steps = [step(10.0, 1.0, 80.0, began_ms=10.0 * index) for index in range(3)]

    async def Profile(self, request: Any, context: Any) -> worker_pb2.ProfileResponse:
        self.requests.append(request)
        answer = profile_of(*self.steps[: request.num_steps], worker_id="fake-0").response
        answer.role = inference_pb2.WORKER_ROLE_DECODE
        if request.measure_peaks:
            answer.peaks.flops_per_s, answer.peaks.bytes_per_s, answer.peaks.num_threads = 1e12, 10e9, 2
        return answer


@contextlib.asynccontextmanager
async def serving(worker: FakeWorker) -> AsyncIterator[str]:
    server = rpc.Server()
    server.add(worker_pb2_grpc.add_WorkerServicer_to_server, worker, "baton.v1.Worker")
    port = await server.start("127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def test_workers_that_run_are_profiled_as_they_are() -> None:
    worker = FakeWorker()
    async with serving(worker) as address:
        code, output, errors_text = await baton("profile", "--address", address, "--num-steps=3", "--max-wait-s=2.5")
    assert code == 0 and "measuring" in errors_text
    measuring, asking = worker.requests
    assert (measuring.measure_peaks, measuring.num_steps) == (True, 0)
    assert (asking.num_steps, asking.max_wait_ms, asking.measure_peaks) == (3, 2500, False)
    assert output.splitlines()[1].split()[:6] == ["decode", "1", "fake-0", "3", "10.00", "1"]
    assert "bandwidth" in output and "(measured on 2 threads)" in output


async def test_given_peaks_are_not_measured_and_json_has_every_step(tmp_path: Path) -> None:
    worker, trace = FakeWorker(), tmp_path / "trace.json"
    async with serving(worker) as address:
        argv = ["--peaks=20,2000", "--json", "--perfetto", str(trace), "--num-steps=2"]
        code, output, _ = await baton("profile", "--address", address, *argv)
    assert code == 0 and not any(request.measure_peaks for request in worker.requests)
    found = json.loads(output)
    assert found.keys() == {"version", "commit", "machine", "config", "peaks", "results", "profiles"}
    assert found["peaks"] == {"fake-0": {"bytes_per_s": 2e10, "flops_per_s": 2e12, "origin": "given"}}
    assert not [name for name in found["config"] if name.startswith("cluster_")]
    (result,), (profiled,) = found["results"], found["profiles"]
    assert result["bandwidth_share"] == pytest.approx(0.4) and result["bound_by"] == "bandwidth"
    assert [each["began_ms"] for each in profiled["steps"]] == [0.0, 10.0]
    assert profiled["steps"][0]["num_flops"] == 1e9 and profiled["memory"]["kv_ceiling_bytes"] == 64 << 20
    assert len(check_trace_file(trace)["fake-0 cpu"]) == 2


async def test_workers_without_steps_are_an_exit_code() -> None:
    worker = FakeWorker()
    worker.steps = []
    async with serving(worker) as address:
        code, _, errors_text = await baton("profile", "--address", address, "--max-wait-s=0.1")
    assert code == 1 and "no step ran in 0.1 s" in errors_text


async def test_a_router_is_no_worker(address: str, router: FakeRouter) -> None:
    code, output, errors_text = await baton("profile", "--address", address)
    assert (code, output) == (2, "")
    assert f"{address} is no worker; `baton workers` shows their addresses" in errors_text


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["smollm2", "--address=h:1"], "--address: the workers there run already"),
        (["--serve=dtype=float32", "--address=h:1"], "--address: the workers there run already"),
        (["--batch-sizes=1,x"], "--batch-sizes: whole numbers from 1 to 512, by commas, got '1,x'"),
        (["--batch-sizes=0"], "--batch-sizes: whole numbers"),
        (["--batch-sizes=513"], "--batch-sizes: whole numbers"),
        (["--peaks=5"], "--peaks: GB/s and GFLOP/s, two positive numbers by a comma, got '5'"),
        (["--peaks=5,nan"], "--peaks: GB/s and GFLOP/s"),
        (["--peaks=0,7"], "--peaks: GB/s and GFLOP/s"),
        (["--peaks=a,b"], "--peaks: GB/s and GFLOP/s"),
        (["--json=/nowhere/x.json"], "--json: the folder of '/nowhere/x.json' does not exist"),
        (["--perfetto=/nowhere/x.json"], "--perfetto: the folder of '/nowhere/x.json' does not exist"),
        (["--cluster-tls-cert-file=/c.pem"], "--cluster-tls"),
    ],
)
def test_options_that_do_not_go_together(argv: list[str], text: str) -> None:
    with pytest.raises(ConfigError) as raised:
        configuration.load(ProfileConfig, argv, prog="baton profile", description="", env={})
    assert text in raised.value.message


def test_the_service_that_is_started_has_a_seat_for_each_stream() -> None:
    argv = ["tracer", "--batch-sizes=3,7", "--serve=num-decode=2,dtype=float32"]
    config = configuration.load(ProfileConfig, argv, prog="baton profile", description="", env={})
    served = config.serve_config()
    assert (served.model, served.max_num_seqs, served.num_decode, served.dtype) == ("tracer", 7, 2, "float32")
    assert (served.port, served.max_queue_wait_s) == (0, 0.0)
    argv = ["tracer", "--serve=max-num-seqs=9"]
    config = configuration.load(ProfileConfig, argv, prog="baton profile", description="", env={})
    with pytest.raises(ConfigError, match="--serve: 'max-num-seqs=9': the profile sets max_num_seqs itself"):
        config.serve_config()


@pytest.mark.parametrize("serve", [(), ("--serve=num-prefill=0,num-decode=0,num-mixed=1",)])
async def test_a_service_of_its_own(serve: tuple[str, ...], tmp_path: Path) -> None:
    """Real processes: prompts one after another, then as many streams at once as was said, each a row."""
    path = tmp_path / "profile.json"
    argv = ["--prompt-tokens=70", "--context-tokens=20", "--batch-sizes=1,3", "--num-steps=6", f"--json={path}", *serve]
    code, output, errors_text = await baton("profile", "tracer", *argv)
    assert code == 0, errors_text
    found = json.loads(await asyncio.to_thread(path.read_text))
    rows = {row["name"]: row for row in found["results"]}
    assert list(rows) == ["prefill 70", "decode 1", "decode 3"]
    assert [rows[name]["num_steps"] for name in rows] == [6, 6, 6]
    assert rows["decode 3"]["num_sequences"] == 3 and rows["decode 1"]["num_tokens"] == 1
    workers = {row["worker_id"].partition("-")[0] for row in rows.values()}
    assert workers == ({"mixed"} if serve else {"prefill", "decode"})
    steps = {profile["load"]: profile["steps"] for profile in found["profiles"]}
    if not serve:
        assert {each["num_tokens"] for each in steps["prefill 70"]} == {70}
    assert output.splitlines()[1].split()[-7:] == ["-", "-", "-", "-", "-", "0", "-"], "the tracer computes nothing"


async def test_prompts_longer_than_the_context_are_refused() -> None:
    code, _, errors_text = await baton("profile", "tracer", "--prompt-tokens=40000", "--batch-sizes=1")
    assert code == 2 and "must leave room for 2 tokens in the model's context of 32768, got 40000" in errors_text
