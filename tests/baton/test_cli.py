"""The command line: subcommands, exit codes, what is printed, and the processes that `serve` would start."""

from __future__ import annotations

import asyncio
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from fake_router import FakeRouter

from baton import cli
from baton.options import ServeConfig
from baton.progress import Progress
from baton.supervisor import Change
from baton.topology import PORT_RANGE, choose_ports, plan_topology, split_cpus
from engine.config import WorkerConfig
from router.config import RouterConfig
from runtime import config as configuration
from runtime import errors
from runtime.errors import ConfigError
from runtime.status import Report


async def baton(*argv: str, input_text: str = "") -> tuple[int, str, str]:
    """Runs the command as a process: exit code, standard output, standard error."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "baton",
        *argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={name: value for name, value in os.environ.items() if not name.startswith("BATON_")},
    )
    output, errors_text = await asyncio.wait_for(process.communicate(input_text.encode()), 30)
    assert process.returncode is not None
    return process.returncode, output.decode(), errors_text.decode()


async def test_generate_streams_to_output_and_stats_to_errors(address: str, router: FakeRouter) -> None:
    argv = ["generate", "hello there", "--address", address, "--temperature=0", "--max-tokens=3", "--stats"]
    code, output, errors_text = await baton(*argv)
    assert (code, output) == (0, "hello there \n")
    assert "prefilled by p0, decoded by d0" in errors_text
    assert "time to first token 1.5 ms, inter-token latency 0.5 ms, 4096 KV bytes handed off by shm" in errors_text
    assert (router.requests[0].sampling.max_tokens, router.requests[0].sampling.HasField("temperature")) == (3, True)
    assert not router.requests[0].sampling.HasField("top_p")


async def test_generate_reads_standard_input(address: str, router: FakeRouter) -> None:
    code, output, _ = await baton("generate", "-", "--chat", "--address", address, input_text="from a pipe")
    assert (code, output) == (0, "from a pipe \n")
    assert router.requests[0].messages[0].content == "from a pipe"


async def test_chat_keeps_the_conversation_and_ends_the_session(address: str, router: FakeRouter) -> None:
    lines = "first\n\nsecond\n/quit\nnever\n"
    code, output, errors_text = await baton("chat", "--address", address, "--system", "be kind", input_text=lines)
    assert (code, errors_text) == (0, "")
    said = [[(message.role, message.content) for message in request.messages] for request in router.requests]
    assert said == [[("system", "be kind"), ("user", "first")], [("user", "second")]]
    first, second = router.requests
    # The scripted router counts 3 tokens of prompt, and three words were its answer.
    assert (first.append, second.append, second.session_tokens) == (False, True, 6)
    assert first.session_id == second.session_id
    assert router.ended_sessions == [router.requests[0].session_id] != [""]
    assert output.startswith("be kind first \n")


async def test_chat_sends_everything_where_the_session_is_lost(address: str, router: FakeRouter) -> None:
    router.loses_sessions = True
    code, output, errors_text = await baton("chat", "--address", address, input_text="first\nsecond\n")
    assert (code, errors_text) == (0, "")
    assert [request.append for request in router.requests] == [False, True, False]
    said = [(message.role, message.content) for message in router.requests[-1].messages]
    assert said == [("user", "first"), ("assistant", "first "), ("user", "second")]
    assert output == "first \nfirst first second \n"


async def test_generate_takes_a_turn_of_a_session(address: str, router: FakeRouter) -> None:
    argv = ["generate", "more", "--session-id=s", "--append", "--address", address]
    assert (await baton(*argv))[:2] == (0, "more \n")
    assert (router.requests[0].session_id, router.requests[0].append) == ("s", True)


async def test_end_session(address: str, router: FakeRouter) -> None:
    assert (await baton("end-session", "known", "--address", address))[:2] == (0, "ended\n")
    assert (await baton("end-session", "other", "--address", address))[:2] == (0, "nothing was known of it\n")
    assert router.ended_sessions == ["known", "other"]


async def test_a_failed_turn_is_taken_back(address: str, router: FakeRouter) -> None:
    router.error = errors.Overloaded("queue full", 1.0)
    code, _, errors_text = await baton("chat", "--address", address, input_text="one\ntwo\n")
    assert (code, errors_text.count("queue full")) == (1, 2), "a pipe that lost turns is told"
    assert [len(request.messages) for request in router.requests] == [1, 1]


async def test_workers_prints_a_table(address: str) -> None:
    code, output, _ = await baton("workers", "--address", address)
    header, row = output.splitlines()
    assert code == 0
    assert header.split("  ")[0] == "worker"
    assert row.split() == ["p0", "prefill", "serving", "127.0.0.1:9", "5", "4", "2", "1", "10"]


@pytest.mark.parametrize(
    ("argv", "code", "text"),
    [
        (["nonsense"], 2, "no subcommand 'nonsense'; there are: serve, "),
        (["serve"], 2, "a value is needed for MODEL (or BATON_MODEL)"),
        (["serve", "m", "--num-decode=0"], 2, "at least one decode or mixed worker is needed"),
        (["serve", "m", "--port=65535", "--num-routers=2"], 2, "--port"),
        (["generate", "x", "--temperature=hot"], 2, "--temperature: 'hot' is not accepted"),
        (["version", "x"], 2, "takes no options"),
        (["workers", "--address=127.0.0.1:1", "--timeout-s=5"], 1, "baton workers: "),
    ],
)
async def test_what_is_wrong_is_one_line_and_an_exit_code(argv: list[str], code: int, text: str) -> None:
    actual, output, errors_text = await baton(*argv)
    assert (actual, output) == (code, "")
    assert text in errors_text
    assert len(errors_text.splitlines()) == 1


async def test_serve_shows_the_error_of_a_child_once_and_exits_1() -> None:
    code, output, errors_text = await baton("serve", "/nonexistent/model", "--log-level=error", "--port=0")
    assert code == 1
    assert "ready" not in [line.split(": ")[0] for line in output.splitlines()]
    assert "/nonexistent/model" in errors_text
    assert "Traceback" not in errors_text


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["--help"]) == 0
    text = capsys.readouterr().out
    for command in cli.COMMANDS:
        assert re.search(rf"^  {command.name} ", text, re.MULTILINE)
    assert cli.run([]) == 2
    capsys.readouterr()
    assert cli.run(["version"]) == cli.run(["--version"]) == 0
    assert capsys.readouterr().out == 2 * f"baton {configuration.version()}\n"


def test_the_package_is_light() -> None:
    program = "import sys, baton; sys.exit('torch' in sys.modules or 'engine' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def plan(config: ServeConfig, cpus: range = range(4)) -> dict[str, dict[str, str]]:
    """The flags of each process by its name."""
    topology = plan_topology(config, "redis://127.0.0.1:7/0", cpus, iter(range(101, 400)), "run")
    return {
        spec.name: dict(flag.removeprefix("--").split("=", 1) for flag in spec.argv[4:]) for spec in topology.processes
    }


def test_every_process_understands_its_flags() -> None:
    options = ServeConfig(
        "tracer", num_routers=2, num_mixed=1, served_model_name="name", dtype="float32", max_model_len=64,
        max_num_seqs=8, max_num_tokens=64, chunk_size=32, kv_block_size=4, num_kv_blocks=9,
        target_step_ms=80.0, min_step_ms=1.5, max_queue_latency_ms=20.0, expected_sequence_tokens=48,
        speculation="ngram", draft_model_path="small", draft_length=7, acceptance_threshold=0.4,
        spec_memory_budget_mb=64, swap_space_gib=1.5,
        kv_transports=("grpc",), otlp_endpoint="http://127.0.0.1:4317", log_level="debug", drain_timeout_s=3.5,
        trace=True, trace_exporter="console", trace_sample_ratio=0.5, trace_slow_total_ms=7.0, trace_text=True,
    )  # fmt: skip
    topology = plan_topology(options, "redis://127.0.0.1:7/0", range(4), iter(range(101, 200)), "run")
    for spec in topology.processes:
        cls = RouterConfig if spec.name.startswith("router") else WorkerConfig
        loaded = configuration.load(cls, [*spec.argv[4:], "--status-fd=3"], prog="p", description="d", env={})
        assert loaded.model == "tracer" and loaded.log_level == "debug" and loaded.drain_timeout_s == 3.5
        if isinstance(loaded, RouterConfig):
            assert loaded.trace and loaded.trace_text and loaded.trace_exporter == "console"
            assert (loaded.trace_sample_ratio, loaded.trace_slow_total_ms) == (0.5, 7.0)
        if isinstance(loaded, WorkerConfig):
            assert (loaded.kv_block_size, loaded.kv_transports, loaded.chunk_size) == (4, ("grpc",), 32)
            assert (loaded.target_step_ms, loaded.min_step_ms) == (80.0, 1.5)
            assert (loaded.speculation, loaded.draft_length, loaded.acceptance_threshold) == ("ngram", 7, 0.4)
            assert (loaded.spec_memory_budget_mb, loaded.draft_model_path) == (64, "small")
            assert loaded.swap_space_gib == 1.5
            assert (loaded.role == "mixed") == spec.name.startswith("mixed")
            assert loaded.cpu_set() == set(spec.cpus)
    assert [spec.name for spec in topology.processes] == ["router-0", "router-1", "prefill-0", "decode-0", "mixed-0"]
    assert topology.addresses == ("127.0.0.1:50051", "127.0.0.1:50052")


def test_routers_know_all_workers_and_workers_share_redis() -> None:
    flags = plan(ServeConfig("m", num_prefill=2, num_decode=1, num_mixed=1, port=0))
    assert flags["router-0"]["prefill-workers"] == "127.0.0.1:101,127.0.0.1:102"
    assert flags["router-0"]["decode-workers"] == "127.0.0.1:103,127.0.0.1:104"
    assert flags["router-0"]["port"] == "105"
    assert {flag["redis-url"] for flag in flags.values()} == {"redis://127.0.0.1:7/0"}
    assert len({flags[name]["worker-id"] for name in ("prefill-0", "prefill-1", "decode-0", "mixed-0")}) == 4


def test_each_process_shows_its_metrics_at_a_port_of_its_own() -> None:
    """Routers first, then workers, as they are shown; pages are the routers' alone, and nothing is open unasked."""
    flags = plan(ServeConfig("m", num_routers=2, metrics_port=9464, page_port=8000, request_log=Path("-")))
    assert [flags[name]["metrics-port"] for name in ("router-0", "router-1", "prefill-0", "decode-0")] == [
        "9464", "9465", "9466", "9467",
    ]  # fmt: skip
    assert [flags[name].get("page-port") for name in flags] == ["8000", "8001", None, None]
    assert [flags[name].get("request-log") for name in flags] == ["-", "-", None, None]
    assert not any(
        {"metrics-port", "page-port", "metrics-host"} & set(each) for each in plan(ServeConfig("m")).values()
    )
    with pytest.raises(ConfigError, match="--metrics-port: 3 processes"):
        ServeConfig("m", metrics_port=65534)


def test_each_pool_may_have_options_of_its_own() -> None:
    config = ServeConfig(
        "m",
        num_mixed=1,
        chunk_size=64,
        prefill_options=("chunk-size=128", "max_num_seqs=9"),
        decode_options=("max-batch-size=5", "batch-schedule=static"),
    )
    flags = plan(config)
    assert (flags["prefill-0"]["chunk-size"], flags["prefill-0"]["max-num-seqs"]) == ("128", "9")
    assert "max-batch-size" not in flags["prefill-0"]
    for name in ("decode-0", "mixed-0"):
        assert (flags[name]["chunk-size"], flags[name]["max-batch-size"]) == ("64", "5")
        assert flags[name]["batch-schedule"] == "static" and "max-num-seqs" not in flags[name]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("max-batch-size",), "'max-batch-size' is not accepted; give name=value, of: "),
        (("max-batch-size=0",), "max-batch-size: 0 is not accepted; give a whole number, at least 1"),
        (("max-batch-size=1", "max_batch_size=2"), "max_batch_size is given twice"),
        (("kv-block-size=4",), "'kv-block-size=4' is not accepted"),
        (("port=4",), "'port=4' is not accepted"),
    ],
)
def test_an_option_of_one_pool_that_cannot_be_is_refused(words: tuple[str, ...], text: str) -> None:
    with pytest.raises(ConfigError, match="--decode-options: ") as caught:
        ServeConfig("m", decode_options=words)
    assert text in caught.value.message


def test_options_that_were_not_given_are_left_to_the_processes() -> None:
    assert {"dtype", "max-model-len", "max-num-seqs", "kv-block-size"}.isdisjoint(plan(ServeConfig("m"))["decode-0"])


@pytest.mark.parametrize(("num_decode", "total", "share"), [(1, 0.6, 0.3), (2, 0.6, 0.2), (3, 0.8, 0.2)])
def test_workers_divide_the_memory_of_their_machine(num_decode: int, total: float, share: float) -> None:
    flags = plan(ServeConfig("m", num_decode=num_decode, kv_cache_gpu_mem_utilization=total))
    workers = [flag for name, flag in flags.items() if not name.startswith("router")]
    assert [float(flag["kv-cache-gpu-mem-utilization"]) for flag in workers] == [pytest.approx(share)] * (
        num_decode + 1
    )


def test_names_that_other_servers_use_are_understood() -> None:
    argv = ["m", "--max-num-batched-tokens=600", "--block-size=8"]
    config = configuration.load(ServeConfig, argv, prog="p", description="d", env={})
    assert (config.max_num_tokens, config.kv_block_size) == (600, 8)


@pytest.mark.parametrize(
    ("cpus", "num_prefill", "num_decode", "expected"),
    [
        ([0], 1, 1, [set(), set()]),
        ([], 2, 1, [set(), set(), set()]),
        ([0, 1], 1, 1, [{0}, {1}]),
        ([3, 5, 7], 1, 1, [{3, 5}, {7}]),
        ([0, 1, 2, 3], 2, 1, [{0}, {1}, {2, 3}]),
        ([0, 1], 2, 1, [{0}, {0}, {1}]),
        ([0, 1, 2, 3], 0, 2, [{0, 1}, {2, 3}]),
        ([0, 1, 2], 0, 2, [{0}, {1, 2}]),
    ],
)
def test_cpus_are_split_between_pools_then_workers(
    cpus: list[int], num_prefill: int, num_decode: int, expected: list[set[int]]
) -> None:
    assert split_cpus(cpus, num_prefill, num_decode) == expected


def test_workers_that_own_cpus_share_a_board() -> None:
    config, board = ServeConfig("tracer", num_mixed=1), Path("/run/cores")
    for cpus, expected in ((range(4), {"prefill-0": 0, "decode-0": 1, "mixed-0": 2}), (range(1), {})):
        topology = plan_topology(config, "redis://127.0.0.1:7/0", cpus, iter(range(101, 200)), "run", board)
        slots = {}
        for spec in topology.processes[1:]:
            loaded = configuration.load(WorkerConfig, spec.argv[4:], prog="p", description="d", env={})
            if loaded.core_board is not None:
                assert (loaded.core_board, loaded.core_shares) == (board, ("0+1", "2", "3"))
                slots[spec.name] = loaded.core_slot
        assert slots == expected


def test_chosen_ports_differ_and_are_outside_the_range_of_outgoing_connections() -> None:
    ports = choose_ports(20)
    assert len(set(ports)) == 20
    assert all(port in PORT_RANGE for port in ports)


def changes() -> list[Change]:
    reports = [Report("loading", progress=0.1, detail="weights"), Report("loading", progress=0.9, detail="weights")]
    reports += [Report("listening", address="127.0.0.1:5"), Report("ready")]
    return [Change("w", "started", 7), *(Change("w", "report", 7, report=report) for report in reports)]


def test_plain_progress_is_one_line_a_phase() -> None:
    stream = io.StringIO()
    progress = Progress(stream)
    for change in changes():
        progress.on_change(change)
    progress.finish_loading()
    progress.on_change(Change("w", "died", 7, exit_text="killed by SIGKILL", restart_in_s=0.5))
    progress.on_change(Change("w", "started", 8))
    progress.on_change(Change("w", "report", 8, report=Report("ready")))
    assert [line.rstrip() for line in stream.getvalue().splitlines()] == [
        "w: loading weights",
        "w: listening",
        "w: ready",
        "w            pid 7        127.0.0.1:5",
        "w: killed by SIGKILL; starts again in 0.5 s",
        "w            pid 8        127.0.0.1:5",
    ]


def test_progress_on_a_terminal_is_one_changing_line(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: True)
    progress = Progress(stream)
    for change in changes()[:3]:
        progress.on_change(change)
    assert "\n" not in stream.getvalue()
    assert stream.getvalue().endswith("\r\x1b[2Kw: loading weights 90%")
    progress.abandon_loading()
    assert stream.getvalue().endswith("\r\x1b[2K")
