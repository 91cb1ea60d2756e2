"""A worker that is drained and takes another role, while requests run: none fails, and it serves as what it is now."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import Any

import grpc
import grpc.aio
import pytest
from cluster import LIMIT_S, PROMPT, Cluster, cluster, request_of
from processes import Process, System
from streaming import Streaming

from baton import AsyncClient
from baton.options import ServeConfig
from baton.serving import running
from baton.supervisor import Change
from baton.topology import choose_ports
from protos import inference_pb2, worker_pb2, worker_pb2_grpc
from runtime.rpc import create_channel

ROLES = {
    "prefill": inference_pb2.WORKER_ROLE_PREFILL,
    "decode": inference_pb2.WORKER_ROLE_DECODE,
    "mixed": inference_pb2.WORKER_ROLE_MIXED,
}


async def baton_drain(address: str, role: str, *flags: str) -> str:
    """What `baton drain` prints."""
    argv = [sys.executable, "-m", "baton", "drain", address, f"--next-role={role}", "--drain-timeout-s=0.5", *flags]
    process = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE)
    output, _ = await asyncio.wait_for(process.communicate(), LIMIT_S)
    assert process.returncode == 0
    return output.decode()


async def known_as(stub: Any, worker: Process, role: str) -> inference_pb2.WorkerStatus:
    """Waits until the router sees the worker serve in a role; requests go on meanwhile."""
    async with asyncio.timeout(2 * LIMIT_S):
        while True:
            listed = (await stub.ListWorkers(inference_pb2.ListWorkersRequest())).workers
            for status in listed:
                is_there = status.worker_id == worker.name and status.state == inference_pb2.WORKER_STATE_SERVING
                if is_there and status.role == ROLES[role]:
                    return status
            await Streaming(stub, request_of(20)).complete()


async def test_a_worker_changes_its_role_under_load(system: System, stub: Any) -> None:
    """A decode worker becomes a mixed one, and a decode worker again."""
    worker = system.decodes[0]
    epochs = {(await known_as(stub, worker, "decode")).epoch}
    for role in ("mixed", "decode"):
        streams = [Streaming(stub, request_of(600, [*PROMPT, i])) for i in range(6)]
        for stream in streams:
            await stream.has(5)
        text = await baton_drain(worker.address, role)
        assert f"{worker.address} is empty" in text and f"starting again as {role}" in text
        for stream in streams:
            await stream.complete(30)
        status = await known_as(stub, worker, role)
        assert status.address == worker.address, "it stays where it was"
        epochs.add(status.epoch)
        async with asyncio.timeout(2 * LIMIT_S):
            while (await Streaming(stub, request_of(5)).complete()).finish.served_by.decode_worker_id != worker.name:
                pass
    assert len(epochs) == 3


async def test_a_prefill_worker_becomes_a_decode_worker(system: System, stub: Any) -> None:
    worker = system.prefills[0]
    await baton_drain(worker.address, "decode")
    await known_as(stub, worker, "decode")
    async with asyncio.timeout(2 * LIMIT_S):
        while (by := (await Streaming(stub, request_of(5)).complete()).finish.served_by).decode_worker_id != "p0":
            pass
    assert by.prefill_worker_id == "p1"
    await baton_drain(worker.address, "prefill")
    await known_as(stub, worker, "prefill")


async def test_a_process_that_cannot_start_itself_again_refuses_and_goes_on() -> None:
    async with cluster(1, 1) as c:
        await _refuses_a_role(c)
        assert (await c.generate(num_tokens=3)).finish.usage.completion_tokens == 3


async def _refuses_a_role(c: Cluster) -> None:
    request = worker_pb2.DrainRequest(next_role=inference_pb2.WORKER_ROLE_MIXED)
    async with create_channel(c.decodes[0].address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await worker_pb2_grpc.WorkerStub(channel).Drain(request)
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "next_role" in (caught.value.details() or "")


async def test_a_changed_role_survives_the_death_of_the_process() -> None:
    """The supervisor starts it again as what it was last, and the list of workers says so."""
    pids: dict[str, int] = {}

    def on_change(change: Change) -> None:
        pids[change.name] = change.pid

    config = ServeConfig("tracer", port=choose_ports(1)[0], num_decode=2)
    async with running(config, on_change) as system, AsyncClient(system.topology.addresses[0]) as client:
        before = await serving_as(client, "decode-1", "decode")
        await baton_drain(before.address, "prefill", f"--cluster-secret-file={system.cluster_secret_file}")
        changed = await serving_as(client, "decode-1", "prefill")
        os.kill(pids["decode-1"], signal.SIGKILL)
        again = await serving_as(client, "decode-1", "prefill", but=changed.epoch)
        assert len({before.epoch, changed.epoch, again.epoch}) == 3
        assert before.address == changed.address == again.address


async def serving_as(client: AsyncClient, name: str, role: str, but: int = 0) -> inference_pb2.WorkerStatus:
    """Waits until a worker serves in a role, in another incarnation than `but`; requests go on meanwhile."""
    async with asyncio.timeout(3 * LIMIT_S):
        while True:
            for status in await client.workers():
                is_there = status.worker_id.startswith(name) and status.state == inference_pb2.WORKER_STATE_SERVING
                if is_there and status.role == ROLES[role] and status.epoch != but:
                    return status
            await client.complete("On and on", max_tokens=20, ignore_eos=True)
