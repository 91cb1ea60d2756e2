"""The `baton` command against a running system, as a user types it."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
from served import BATON, Served

from baton import Client

QUESTION = "What is the capital of France?"


def baton(*arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run([BATON, *arguments], input=text, capture_output=True, text=True, timeout=120, check=False)


def test_generate_streams_an_answer_by_two_workers(system: Served) -> None:
    done = baton(
        "generate", "--address", system.address, "--chat", "--stats", "--temperature=0", "--max-tokens=24", QUESTION
    )
    assert done.returncode == 0 and "Paris" in done.stdout, done
    served_by = re.search(r"prefilled by (prefill-0-\w+), decoded by (decode-0-\w+)", done.stderr)
    assert served_by is not None, done.stderr
    assert re.search(r"time to first token [\d.]+ ms, inter-token latency [\d.]+ ms, \d+ KV bytes handed", done.stderr)
    table = baton("workers", "--address", system.address).stdout
    assert all(worker_id in table for worker_id in served_by.groups())


def test_generate_reads_a_prompt_from_standard_input_and_repeats_by_seed(system: Served) -> None:
    options = ("--address", system.address, "--seed=5", "--temperature=0.9", "--max-tokens=12", "--ignore-eos", "-")
    first, second = (baton("generate", *options, text="Seven ships sailed from") for _ in range(2))
    assert first.returncode == 0 and first.stdout.strip() and first.stderr == "", first
    assert second.stdout == first.stdout


def test_generate_ends_before_a_stop_string(system: Served) -> None:
    options = ("--address", system.address, "--temperature=0", "--max-tokens=40", "--stop= four")
    done = baton("generate", *options, "one, two, three, four, five, six, one, two, three,")
    assert done.returncode == 0 and "four" not in done.stdout, done


def test_workers_shows_a_line_for_each(system: Served) -> None:
    done = baton("workers", "--address", system.address)
    header, *rows = done.stdout.splitlines()
    assert done.returncode == 0 and header.split()[:4] == ["worker", "role", "state", "address"]
    assert [row.split()[1:3] for row in rows] == [["prefill", "serving"], ["decode", "serving"]]


def test_drain_needs_what_serve_says_at_its_start(system: Served) -> None:
    """Without it nothing happens to the worker, and the command says where it is to be had."""
    system.wait_for_line("to empty a worker", 10.0)
    told = re.search(r"baton drain ADDRESS --cluster-secret-file (\S+)\n", system.output())
    assert told is not None and told[1] == system.flag("decode-0", "cluster-secret-file")
    worker = baton("workers", "--address", system.address).stdout.splitlines()[1].split()
    done = baton("drain", worker[3])
    assert done.returncode == 1 and "--cluster-secret-file" in done.stderr and "baton serve" in done.stderr, done
    assert baton("workers", "--address", system.address).stdout.splitlines()[1].split()[:4] == worker[:4]


def test_chat_remembers_the_turns_before(system: Served) -> None:
    turns = "What is the capital of France?\n\nRepeat the name of that city.\n/quit\nNever read.\n"
    done = baton("chat", "--address", system.address, "--temperature=0", "--max-tokens=24", text=turns)
    first, second = done.stdout.strip().split("\n", 1)
    assert done.returncode == 0 and done.stderr == "" and "Paris" in first and "Paris" in second, done


def test_demo_shows_answer_workers_and_durations() -> None:
    done = baton("demo", "--max-tokens=24")
    assert done.returncode == 0 and "Paris" in done.stdout and done.stderr == "", done
    assert re.search(r"prefilled by prefill-0-\w+, decoded by decode-0-\w+", done.stdout)
    assert re.search(r"first token [\d.]+ ms, inter-token latency [\d.]+ ms, [1-9]\d* KV bytes handed off", done.stdout)


def test_version_and_help() -> None:
    version = baton("version")
    assert version.returncode == 0 and re.fullmatch(r"baton \d+\.\d+\.\d+\S*\n", version.stdout)
    usage = baton("--help")
    assert usage.returncode == 0
    for command in ("serve", "chat", "generate", "workers", "version"):
        assert re.search(rf"^  {command}\s", usage.stdout, re.MULTILINE)
        assert baton(command, "--help").returncode == 0 or command == "version"


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("generate", "--address=ADDRESS", ""), 1, "empty"),
        (("generate", "--address=ADDRESS", "--temperature=-1", "x"), 1, "temperature"),
        (("generate", "--address=ADDRESS", "--max-tokens=0", "x"), 1, "max_tokens"),
        (("generate", "--address=ADDRESS", "--max-tokens=many", "x"), 2, "max-tokens"),
        (("workers", "--address=127.0.0.1:1"), 1, "127.0.0.1:1"),
        (("serve", "/nowhere/at/all"), 1, "/nowhere/at/all"),
        (("sing",), 2, "sing"),
    ],
)
def test_bad_input_is_one_line_and_an_exit_code(
    system: Served, arguments: tuple[str, ...], code: int, text: str
) -> None:
    done = baton(*(argument.replace("ADDRESS", system.address) for argument in arguments))
    assert done.returncode == code and text in done.stderr.splitlines()[-1], done
    assert "Traceback" not in done.stderr


def test_profile_of_a_worker_that_serves(system: Served) -> None:
    """Whatever it computes, for who has the cluster's secret, and for nobody else."""
    with Client(system.address) as client:
        (address,) = [worker.address for worker in client.workers() if worker.worker_id.startswith("decode")]
    stranger = baton("profile", "--address", address, "--num-steps=4")
    assert stranger.returncode == 1 and stranger.stdout == "" and "Traceback" not in stranger.stderr, stranger
    secret = f"--cluster-secret-file={system.flag('decode-0', 'cluster-secret-file')}"
    asking = [BATON, "generate", "--address", system.address, "--max-tokens=400", "--ignore-eos", "One, two, three"]
    with subprocess.Popen(asking, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as generating:
        done = baton("profile", "--address", address, secret, "--num-steps=4", "--max-wait-s=60", "--peaks=20,200")
        generating.terminate()
    assert done.returncode == 0, done
    row, worker = done.stdout.splitlines()[1], done.stdout.splitlines()[-1]
    assert row.startswith("decode 1  decode-0-") and row.split()[3] == "4"
    assert "cpu float32; peaks 200 GFLOP/s, 20.0 GB/s (given)" in worker


def test_profile_shows_what_bounds_the_real_model(tmp_path: Path) -> None:
    """Its own service, from nothing to a table: shares of peaks that were measured beside the steps."""
    trace = tmp_path / "trace.json"
    options = ("--prompt-tokens=128", "--context-tokens=32", "--batch-sizes=1,4", "--num-steps=3")
    done = baton("profile", "smollm2", *options, "--json", "--perfetto", str(trace))
    assert done.returncode == 0, done
    found = json.loads(done.stdout)
    rows = {row["name"]: row for row in found["results"]}
    assert list(rows) == ["prefill 128", "decode 1", "decode 4"]
    assert rows["decode 4"]["num_sequences"] == 4 and rows["prefill 128"]["num_tokens"] == 128
    # What a step computes and reads follows from the model alone: 135 million weights of 4 bytes.
    for name, least_rows in (("decode 1", 1), ("decode 4", 4), ("prefill 128", 100)):
        (steps,) = (profile["steps"] for profile in found["profiles"] if profile["load"] == name)
        assert all(step["num_flops"] > least_rows * 2 * 1.06e8 for step in steps)
        assert all(5.3e8 < step["num_bytes"] < 6e8 for step in steps), name
    for row in rows.values():
        # Other tests compute on the same cores, so how much it is says nothing here.
        assert 0 < row["roofline_share"] == max(row["compute_share"], row["bandwidth_share"])
    assert len(json.loads(trace.read_text())["traceEvents"]) > 18
