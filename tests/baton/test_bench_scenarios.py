"""Every scenario once, tiny, over real processes of the tracer; what the results look like, and bad options."""

from __future__ import annotations

import asyncio
import io
import json
import typing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_router import FakeRouter
from transports_here import WHY_NO_MOONCAKE

from baton.bench import plot
from baton.bench.command import SCENARIOS, bench
from baton.bench.options import BenchConfig, ScenarioName
from baton.bench.scenario import Ticker
from runtime import config as configuration
from runtime.errors import BatonError, ConfigError, Overloaded

SPREADS = ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms")
KEYS = {
    "name",
    "requests",
    "failed",
    "refused",
    "duration_s",
    "output_tok_s",
    "total_tok_s",
    "goodput_rps",
    "cpu_s_per_token",
    "cached_tokens",
    "recomputed",
    *SPREADS,
}
TIMEOUT_S = 60


def options(scenario: str, *flags: str) -> BenchConfig:
    argv = [scenario, *flags]
    return configuration.load(BenchConfig, argv, prog="baton bench", description="", env={})


def results(scenario: str, *flags: str, code: int = 0) -> dict[str, Any]:
    """The JSON of a run over the tracer."""
    output = io.StringIO()
    config = options(scenario, "--model=tracer", "--json=-", f"--timeout-s={TIMEOUT_S}", *flags)
    assert asyncio.run(bench(config, output)) == code
    found: dict[str, Any] = json.loads(output.getvalue())
    return found


def rows_of(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    rows = {row["name"]: row for row in found["results"]}
    assert len(rows) == len(found["results"])
    assert all(row["failed"] == 0 for row in rows.values())
    return rows


def test_throughput_json_has_all_keys() -> None:
    found = results(
        "throughput", "--num-requests=6", "--prompt-tokens=12", "--output-tokens=8", "--max-concurrency=3",
        "--slo=ttft:60000,itl:60000",
    )  # fmt: skip
    assert found.keys() == {"scenario", "version", "commit", "machine", "config", "results"}
    assert (found["scenario"], found["config"]["model"], found["config"]["max_concurrency"]) == (
        "throughput",
        "tracer",
        3,
    )
    assert found["machine"].keys() >= {"cpu", "num_cpus", "memory_gib"}
    (row,) = found["results"]
    assert row.keys() == KEYS
    assert (row["requests"], row["failed"], row["refused"], row["recomputed"]) == (6, 0, 0, 0)
    assert row["output_tok_s"] * row["duration_s"] == pytest.approx(48)
    assert row["total_tok_s"] * row["duration_s"] == pytest.approx(48 + 72)
    assert row["goodput_rps"] * row["duration_s"] == pytest.approx(6)
    assert row["cpu_s_per_token"] >= 0
    for name in SPREADS:
        values = [row[name][key] for key in ("p50", "p90", "p99", "max")]
        assert row[name].keys() == {"mean", "p50", "p90", "p99", "max"}
        assert values == sorted(values) and values[0] >= 0


def test_an_open_loop_reuses_shared_prefixes_and_draws_what_happened(tmp_path: Path) -> None:
    found = results(
        "throughput", "--request-rate=40", "--burstiness=0.5", "--num-requests=24", "--dataset=prefix",
        "--prompt-tokens=128", "--output-tokens=4", f"--plot={tmp_path / 'picture.png'}",
    )  # fmt: skip
    (row,) = rows_of(found).values()
    assert row["requests"] == 24 and row["cached_tokens"] > 0
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("role", ["pair", "mixed"])
def test_interference(role: str) -> None:
    found = results(
        "interference", f"--role={role}", "--max-concurrency=3", "--prompt-tokens=16", "--output-tokens=12",
        "--num-long=2", "--long-prompt-tokens=200", "--long-output-tokens=3",
        "--delay-s=0.2", "--period-s=0.1", "--duration-s=0.6",
    )  # fmt: skip
    rows = rows_of(found)
    assert list(rows) == ["steady", "long", "steady-alone"]
    assert rows["long"]["requests"] == 2 and rows["steady"]["itl_ms"]["max"] > 0
    assert rows["steady-alone"]["requests"] > 0


def test_long_short() -> None:
    rows = rows_of(results("long-short", "--num-requests=4", "--long-prompt-tokens=400", "--delay-s=0"))
    assert {name: row["requests"] for name, row in rows.items()} == {
        "short": 4, "long": 1, "short-alone": 4, "long-alone": 1,
    }  # fmt: skip


def test_priority() -> None:
    rows = rows_of(
        results(
            "priority", "--num-requests=2", "--max-concurrency=4", "--output-tokens=16", "--long-prompt-tokens=200",
            "--serve=chunk-size=64",
        )
    )  # fmt: skip
    assert list(rows) == ["high", "low", "high-prefill", "low-prefill", "high-idle"]
    assert {rows[name]["requests"] for name in ("high", "high-prefill", "high-idle")} == {2}
    for name in ("low", "low-prefill"):
        assert rows[name]["output_tok_s"] > 0 and 0 <= rows[name]["most_recomputed"] <= 3
    assert "chunk_ms" in rows["high-idle"]


def test_overload_counts_refusals_apart_from_failures() -> None:
    rows = rows_of(
        results(
            "overload", "--max-concurrency=1", "--delay-s=0.5", "--duration-s=1.5", "--prompt-tokens=16",
            "--output-tokens=64", "--burstiness=0.2", "--slo=ttft:20",
        )
    )  # fmt: skip
    assert list(rows) == ["at-1x", "at-3x-accepted", "refused", "after"]
    for name in ("at-1x", "after"):
        assert rows[name]["output_tok_s"] > 0 and rows[name]["duration_s"] > 0.49
    refused, accepted = rows["refused"]["refused"], rows["at-3x-accepted"]["requests"]
    assert refused > 0 and accepted + refused == rows["at-3x-accepted"]["offered_requests"]
    assert rows["refused"]["e2e_ms"]["max"] > 0 and rows["refused"]["requests"] == 0


def test_static_vs_continuous(tmp_path: Path) -> None:
    turns = [[("human", "q" * (4 + 9 * index)), ("gpt", "a" * (1 + 3 * index))] for index in range(6)]
    conversations = [{"conversations": [{"from": who, "value": text} for who, text in pair]} for pair in turns]
    path = tmp_path / "conversations.json"
    path.write_text(json.dumps(conversations)[:-5])
    found = results("static-vs-continuous", "--num-requests=5", "--max-concurrency=5", f"--dataset-file={path}")
    rows = rows_of(found)
    assert list(rows) == ["static", "continuous", "continuous-chunked"]
    assert {row["requests"] for row in rows.values()} == {5}
    assert rows["static"]["padding_tokens"] == sum(12 * (4 - index) for index in range(5))
    assert "padding_tokens" not in rows["continuous"]


def test_handoff() -> None:
    rows = rows_of(results("handoff", "--num-requests=2", "--long-prompt-tokens=64"))
    transports = ["shm", "grpc"] if WHY_NO_MOONCAKE else ["shm", "mooncake", "grpc"]
    lengths = ["4", "16", "64", "64-chunked"]
    assert list(rows) == [f"{transport}-{length}" for transport in transports for length in lengths]
    assert all(row["other_transport"] == 0 and row["handoff_ms"]["mean"] > 0 for row in rows.values())
    assert all(row["exposed_percent"]["mean"] > 0 for row in rows.values())
    assert {name for name, row in rows.items() if "handoff_mib_s" not in row} == {f"{t}-64-chunked" for t in transports}
    assert {rows[f"{transport}-64"]["kv_bytes"] for transport in transports} == {64 * 32}


def test_sessions() -> None:
    rows = rows_of(results("sessions", "--num-requests=2", "--long-prompt-tokens=70", "--prompt-tokens=9"))
    assert list(rows) == [f"{way}-{turn}" for way in ("whole", "append", "cold") for turn in range(1, 6)]
    assert {row["requests"] for row in rows.values()} == {2}
    for turn in range(1, 6):
        assert rows[f"cold-{turn}"]["cached_tokens"] == rows[f"cold-{turn}"]["common_tokens"] == 0
        for way in ("whole", "append"):
            row = rows[f"{way}-{turn}"]
            assert row["common_tokens"] == (2 * (71 + 32 * (turn - 1) + 9 * (turn - 2)) if turn > 1 else 0)
            assert 0 <= row["most_missed"] <= 16 and row["session_lost"] == 0
            assert row["ttft_vs_cold"] > 0


def test_router() -> None:
    rows = rows_of(results("router", "--num-requests=40", "--max-concurrency=40", "--output-tokens=32"))
    assert rows.keys() == {"router", "two-routers", "saturated", "offered"}
    for row in rows.values():
        assert row["router_cpu_s"] > 0 and row["tokens_per_message"] >= 1 and 0 < row["machine_busy"] <= 1.001
        assert row["router_cpu_us_per_token"] == pytest.approx(1e6 * row["router_cpu_s"] / (40 * 32))
    offered = rows["offered"]
    assert 0 < offered["offered_tok_s"] < 1.02 * 40 / 0.05, "two workers, whose steps take 50 ms and no less"
    assert offered["added_ms"]["p50"] > 0


def test_speculation() -> None:
    found = results(
        "speculation", "--num-requests=2", "--max-concurrency=4", "--prompt-tokens=24", "--output-tokens=12"
    )
    rows = rows_of(found)
    assert rows.keys() == {
        f"{way}-{text}-{n}" for way in ("off", "ngram", "self") for text in ("story", "records") for n in (1, 4)
    }
    for name, row in rows.items():
        assert row["requests"] == (4 if name.endswith("4") else 2)
        if not name.startswith("off"):
            assert row["speedup"] > 0 and row["other_answers"] == 0
            assert 0 <= row["accepted_tokens"] <= row["drafted_tokens"]


async def test_a_service_at_an_address_has_no_cpu_time(address: str, router: FakeRouter, tmp_path: Path) -> None:
    """The scripted router says the prompt's ids, after a first request that is not counted."""
    output, file = io.StringIO(), tmp_path / "results.json"
    config = options("throughput", f"--address={address}", "--num-requests=3", f"--json={file}")
    assert await bench(config, output) == 0
    (row,) = json.loads(file.read_text())["results"]
    assert (row["requests"], row["cpu_s_per_token"]) == (3, None)
    assert row["output_tok_s"] * row["duration_s"] == pytest.approx(3 * 128)
    assert "throughput" in output.getvalue() and len(router.requests) == 4


async def test_refusals_leave_the_exit_code_and_failures_set_it(
    address: str, router: FakeRouter, capsys: pytest.CaptureFixture[str]
) -> None:
    for error, code, counts in ((Overloaded("full", 1.0), 0, (0, 0, 3)), (BatonError("broken"), 1, (0, 3, 0))):
        router.requests.clear()
        router.error, router.num_spared = error, 1
        output = io.StringIO()
        assert (
            await bench(options("throughput", f"--address={address}", "--num-requests=3", "--json=-"), output) == code
        )
        (row,) = json.loads(output.getvalue())["results"]
        assert (row["requests"], row["failed"], row["refused"]) == counts
    assert "3 failed: broken" in capsys.readouterr().err


def test_the_names_that_are_accepted_are_the_scenarios() -> None:
    assert set(typing.get_args(ScenarioName)) == SCENARIOS.keys()


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["nonsense"], "SCENARIO"),
        (["throughput", "--slo=fast"], "--slo"),
        (["throughput", "--burstiness=2"], "--burstiness: needs --request-rate"),
        (["throughput", "--num-long=2"], "--num-long: scenario throughput has no such size"),
        (["handoff", "--dataset=prefix"], "--dataset: scenario handoff has no such size"),
        (["interference", "--dataset-file=x.json"], "--dataset-file: scenario interference reads none"),
        (["throughput", "--dataset=random", "--dataset-file=x.json"], "--dataset-file: scenario throughput reads none"),
        (["throughput", "--request-rate=2", "--max-concurrency=2"], "--max-concurrency: with --request-rate"),
        (["static-vs-continuous", "--prompt-tokens=9"], "--prompt-tokens: --dataset sharegpt has lengths of its own"),
        (["router", "--address=127.0.0.1:1"], "--address: scenario router starts its services itself"),
        (["throughput", "--address=127.0.0.1:1", "--role=mixed"], "--serve and --role"),
        (["throughput", "--address=127.0.0.1:1", "--serve=dtype=float32"], "--serve and --role"),
        (["handoff", "--role=mixed"], "prefill and decode apart"),
        (["priority", "--serve=max-num-seqs=9"], "scenario priority sets max_num_seqs itself"),
        (["throughput", "--role=mixed", "--serve=num-decode=2"], "sets num_decode itself"),
        (["throughput", "--serve=colour=red"], "colour"),
        (["throughput", "--json=/nowhere/at/all.json"], "--json: the folder of '/nowhere/at/all.json'"),
        (["throughput", "--plot=/nowhere/at/all.png"], "--plot: the folder"),
        (["static-vs-continuous", "--dataset-file=/nowhere.json", "--model=tracer"], "/nowhere.json cannot be read"),
    ],
)
def test_bad_options_are_refused(argv: list[str], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        asyncio.run(bench(options(*argv), io.StringIO()))
    assert text in caught.value.message


def test_a_picture_without_the_library_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(plot.importlib, "import_module", missing)
    with pytest.raises(ConfigError, match="matplotlib is not installed"):
        asyncio.run(bench(options("throughput", "--plot=picture.png"), io.StringIO()))


@pytest.mark.parametrize(("is_live", "shown"), [(True, ["0", "1", "2", "3"]), (False, ["2\n", "3\n"])])
def test_what_is_going_on_is_said_on_a_terminal_at_once_and_elsewhere_now_and_then(
    monkeypatch: pytest.MonkeyPatch, is_live: bool, shown: list[str]
) -> None:
    times_s, stream = [100.0], io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: is_live)
    monkeypatch.setattr("baton.bench.scenario.time", SimpleNamespace(monotonic=lambda: times_s[-1]))
    ticker = Ticker(stream)
    for text, time_s in (("0", 101.0), ("1", 114.5), ("2", 115.0), ("3", 130.5)):
        times_s.append(time_s)
        ticker.show(lambda text=text: text)  # type: ignore[misc]
        ticker.show(lambda: "too soon")
    begin = "\r\x1b[2K" if is_live else ""
    assert stream.getvalue() == begin + begin.join(shown)
