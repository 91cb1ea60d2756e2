"""Worker settings that contradict each other are refused with the flag, the limit and the value."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.config import WorkerConfig
from runtime.errors import ConfigError


def test_a_chunk_fits_a_step():
    WorkerConfig("tracer", chunk_size=64, max_num_tokens=64)
    with pytest.raises(ConfigError, match=r"--chunk-size: must be at most --max-num-tokens, which is 64; got 65"):
        WorkerConfig("tracer", chunk_size=65, max_num_tokens=64)


def test_every_seat_gets_a_token_each_step():
    with pytest.raises(ConfigError, match=r"--max-num-seqs: .* which is 8.*; got 9"):
        WorkerConfig("tracer", chunk_size=8, max_num_tokens=8, max_num_seqs=9)


@pytest.mark.parametrize("text, numbers", [(None, None), ("0", {0}), ("0,2-3", {0, 2, 3}), ("4-4", {4}), ("1,1", {1})])
def test_lists_of_cpus(text, numbers):
    assert WorkerConfig("tracer", cpus=text).cpu_set() == numbers


@pytest.mark.parametrize("text", ["", "a", "1-", "-1", "1,,2", "1-b", "0x1", "3-1", "²"])
def test_what_is_no_list_of_cpus(text):
    with pytest.raises(ConfigError, match="--cpus"):
        WorkerConfig("tracer", cpus=text).cpu_set()


def test_shared_memory_may_be_turned_off():
    assert WorkerConfig("tracer").shared_memory_dir == Path("/dev/shm")
    assert WorkerConfig("tracer", kv_shared_memory_dir="none").shared_memory_dir is None


@pytest.mark.parametrize(
    ("options", "host"),
    [({}, "127.0.0.1"), ({"advertise_address": "10.0.0.7:7001"}, "10.0.0.7"), ({"advertise_address": "w:1"}, "w")],
)
def test_others_reach_a_worker_where_it_says(options: dict[str, str], host: str) -> None:
    assert WorkerConfig("tracer", **options).reached_host == host  # type: ignore[arg-type]
