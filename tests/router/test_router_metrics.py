"""What a router and its workers show at a scrape after requests of every outcome, and the line that each leaves."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from pathlib import Path

import grpc
import pytest
from cluster import LIMIT_S, PROMPT, Cluster, cluster, held, request_of
from failures import failure
from prometheus_client.parser import text_string_to_metric_families

from baton.topology import choose_ports
from protos import inference_pb2
from runtime.errors import ConfigError

TIMEOUT_S = 10.0


class Scrape:
    """The values of one scrape."""

    def __init__(self, text: str) -> None:
        self._samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]

    def value(self, name: str, **labels: str) -> float:
        """The sum over the samples of a name that have these labels; AssertionError where there is none."""
        found = [s.value for s in self._samples if s.name == name and labels.items() <= s.labels.items()]
        assert found, f"nothing is shown of {name} {labels}"
        return sum(found)


async def scrape(port: int) -> Scrape:
    def read() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=TIMEOUT_S) as answer:
            return answer.read().decode()  # type: ignore[no-any-return]

    return Scrape(await asyncio.to_thread(read))


async def settled(port: int, name: str, number: float, **labels: str) -> Scrape:
    """A scrape in which that value has been reached: what a call's end causes may follow on it."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            last = await scrape(port)
            if last.value(name, **labels) >= number:
                return last


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def play_all(c: Cluster) -> None:
    """Two that end well, one of them a turn of a session; one that is wrong; one whose client leaves."""
    await c.generate(request_of(8, request_id="first"))
    await c.generate(request_of(1, session_id="secret session", priority=inference_pb2.PRIORITY_HIGH))
    error = await failure(c.stub.Generate(request_of(sampling={"temperature": -1.0})))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    await c.balanced(LIMIT_S)  # none of them is what is seen to run next
    with held(c.decodes[0]):
        call = c.stub.Generate(request_of(request_id="leaves"))
        await c.until_running()
        call.cancel()
    # The step that was held keeps its blocks until it has ended.
    await c.balanced(LIMIT_S)


async def test_a_router_counts_what_it_served(tmp_path: Path) -> None:
    """Each request once, by its outcome; histograms have those that ended well; the log has a line for each."""
    port, log = choose_ports(1)[0], tmp_path / "requests.jsonl"
    async with cluster(metrics_port=port, request_log=log) as c:
        await play_all(c)
        seen = await settled(port, "baton_requests_total", 1, outcome="cancelled")
        assert seen.value("baton_requests_total") == 4
        assert seen.value("baton_requests_total", outcome="length", role="router", model_name="tracer") == 2
        assert seen.value("baton_requests_total", outcome="error", reason="INVALID_ARGUMENT") == 1
        assert seen.value("vllm:request_success_total", finished_reason="length", engine="0") == 2
        assert seen.value("gen_ai_server_request_duration_seconds_count") == 4
        assert seen.value("gen_ai_server_request_duration_seconds_count", error_type="CANCELLED") == 1
        assert seen.value("gen_ai_server_time_to_first_token_seconds_count") == 2
        assert seen.value("vllm:request_generation_tokens_sum") == 9
        assert seen.value("vllm:request_prompt_tokens_sum") == 2 * len(PROMPT)
        assert seen.value("vllm:inter_token_latency_seconds_count") == 7, "one token has no gap"
        assert seen.value("baton_request_part_seconds_count", part="prefill") == 2
        assert seen.value("baton_attempts_total") == 3, "what is wrong is never dispatched"
        assert seen.value("baton_session_turns_total") == 1 and seen.value("baton_sessions_lost_total") == 0
        assert seen.value("baton_running_requests") == seen.value("baton_queued_requests") == 0
        for role in ("prefill", "decode"):
            assert seen.value("baton_workers", worker_role=role, state="serving") == 1
    written = lines(log)
    assert [line["outcome"] for line in written] == ["length", "length", "error", "cancelled"]
    first, second, wrong, left = written
    assert first["request_id"] == "first" and first["completion_tokens"] == 8 and first["num_attempts"] == 1
    assert first["prefill_worker_id"] == "prefill-0" and float(str(first["total_ms"])) > 0
    assert (second["priority"], second["has_session"], second["prompt_tokens"]) == ("high", True, len(PROMPT))
    assert wrong["reason"] == "INVALID_ARGUMENT" and left["request_id"] == "leaves"
    assert "secret session" not in log.read_text()


async def test_workers_count_what_they_computed() -> None:
    """Tokens, steps, reuse, handoffs, leases and endings of both pools, and accounts that add up."""
    prefill_port, decode_port = choose_ports(2)
    async with cluster(prefill={"metrics_port": prefill_port}, decode={"metrics_port": decode_port}) as c:
        before = await scrape(prefill_port)  # a probe has crossed
        await play_all(c)
        decode = await settled(decode_port, "baton_sequences_ended_total", 1, state="cancelled")
        prefill = await scrape(prefill_port)
        num_prompts = 3
        computed = prefill.value("vllm:prompt_tokens_total") - before.value("vllm:prompt_tokens_total")
        assert computed == num_prompts * len(PROMPT)
        reused = prefill.value("vllm:prefix_cache_hits_total")
        wanted = prefill.value("vllm:prefix_cache_queries_total")
        assert 0 < reused < wanted, "the second prompt was the first one's"
        assert prefill.value("baton_session_wanted_tokens_total") == len(PROMPT)
        assert decode.value("vllm:generation_tokens_total") >= 9
        assert decode.value("baton_step_duration_seconds_count") >= 7
        assert decode.value("vllm:iteration_tokens_total_count") == decode.value("baton_step_sequences_count")
        assert decode.value("baton_handoff_bytes_count", transport="shm") >= 2
        assert decode.value("baton_handoff_bytes_sum") > 0 and decode.value("baton_handoffs_lost_total") == 0
        assert prefill.value("baton_leases_ended_total", how="released") >= 2
        assert prefill.value("baton_leases_opened_total") == prefill.value("baton_leases_ended_total")
        assert decode.value("baton_sessions_kept") == 1
        for seen, role in ((prefill, "prefill"), (decode, "decode")):
            assert seen.value("baton_kv_unaccounted_blocks", role=role) == 0
            assert seen.value("baton_kv_blocks", state="used") == seen.value("baton_running_requests") == 0
            assert seen.value("baton_kv_ceiling_blocks") == 256 and seen.value("baton_seats") == 32
            assert seen.value("vllm:cache_config_info", num_gpu_blocks="256", block_size="16") == 1


async def test_load_is_shown_while_it_is_there() -> None:
    """What waits and what runs, at the router and at the pool that holds it up."""
    port, decode_port = choose_ports(2)
    async with cluster(0, decode={"metrics_port": decode_port, "max_num_seqs": 1}, metrics_port=port) as c:
        with held(c.decodes[0]):
            calls = [c.stub.Generate(request_of(prompt=[number] * 20)) for number in (3, 4, 5, 6)]
            seen = await settled(decode_port, "baton_running_requests", 1)
            assert seen.value("vllm:num_requests_running") == 1 and seen.value("vllm:num_requests_waiting") == 0
            assert seen.value("baton_queued_tokens") == 20, "of the one that cannot be computed"
            assert 0 < seen.value("vllm:kv_cache_usage_perc") < 0.1
            seen = await settled(port, "baton_queued_requests", 3)
            assert seen.value("vllm:num_requests_running") == 1 and seen.value("vllm:num_requests_waiting") == 3
            await settled(port, "vllm:kv_cache_usage_perc", 1e-6)
        for call in calls:
            assert [response async for response in call][-1].HasField("finish")


async def test_deaths_and_broken_accounts_outlive_the_worker(caplog: pytest.LogCaptureFixture) -> None:
    """The router counts a worker's death and a leak that its last reports showed; both stay when it is gone. It warns
    of a death, not of an end that was wanted."""
    port = choose_ports(1)[0]
    async with cluster(0, 2, metrics_port=port) as c:
        first, second = c.decodes
        first.parts.holdings.pool.allocate(1)  # nobody's
        first.service.note_change()
        await settled(port, "baton_worker_unaccounted_blocks", 1)
        await settled(port, "baton_audit_failures_total", 1, worker_role="decode")
        await first.server.stop(0)
        seen = await settled(port, "baton_workers_lost_total", 1, how="died")
        assert seen.value("baton_workers", state="lost") == seen.value("baton_workers", state="serving") == 1
        assert seen.value("baton_audit_failures_total") == 1
        draining = asyncio.create_task(second.service.drain(None))
        await settled(port, "baton_workers", 1, state="draining")
        await draining
        await second.server.stop(0)
        seen = await settled(port, "baton_workers_lost_total", 1, how="drained")
        assert seen.value("baton_workers_lost_total") == 2
        warned = [record.getMessage() for record in caplog.records if record.name == "router.links"]
        assert len(warned) == 1 and f"{first.address} is lost" in warned[0]


async def test_a_recovery_has_a_cause() -> None:
    """An attempt that its worker gave back is one more attempt, and one recovery of that cause."""
    port = choose_ports(1)[0]
    async with cluster(0, 2, metrics_port=port) as c:
        with held(c.decodes[0]), held(c.decodes[1]):
            call = c.stub.Generate(request_of(4))
            async with asyncio.timeout(LIMIT_S):
                while not (busy := [each for each in c.decodes if each.role.live_attempts()]):
                    await c.router.fleet.change.wait()
            busy[0].role.evict_all("the worker drains")
            await settled(port, "baton_recoveries_total", 1, cause="evicted")
            seen = await settled(port, "baton_attempts_total", 2)
            assert seen.value("baton_recoveries_total") == 1 and seen.value("baton_attempts_total") == 2
        assert [response async for response in call][-1].finish.served_by.num_attempts == 2


async def test_a_log_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--request-log .*no-folder"):
        async with cluster(request_log=tmp_path / "no-folder" / "log"):
            pass


async def test_a_log_that_was_moved_begins_anew(tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with cluster(0, request_log=log) as c:
        await c.generate(request_of(1))
        log.rename(tmp_path / "old")
        await c.generate(request_of(2))
    assert [line["completion_tokens"] for line in lines(log)] == [2]
