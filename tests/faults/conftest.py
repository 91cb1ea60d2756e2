"""One system of processes for all fault tests; each finds it whole and leaves nothing in its pools."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

# The pieces that start and stop things are those of the router's tests.
sys.path.insert(0, str(Path(__file__).parents[1] / "router"))

from cluster import LIMIT_S, collect, holds_nothing, load_of, request_of
from grpc_health.v1 import health_pb2, health_pb2_grpc
from processes import System

from protos import inference_pb2_grpc
from runtime.rpc import create_channel


@pytest.fixture(scope="session")
def processes() -> Iterator[System]:
    system = System()
    try:
        yield system
    finally:
        system.end()


@pytest.fixture
async def system(processes: System) -> AsyncIterator[System]:
    """The system with all its processes, every worker proved; afterwards every worker that is left holds nothing."""
    processes.start()
    await all_proved(processes)
    yield processes
    for worker in processes.workers:
        if worker.is_running and not worker.is_stopped:
            await load_of(worker.address, holds_nothing, 2.0)


@pytest.fixture
async def stub(system: System) -> AsyncIterator[inference_pb2_grpc.InferenceStub]:
    async with create_channel(system.router.address) as channel:
        yield inference_pb2_grpc.InferenceStub(channel)


async def all_proved(system: System) -> None:
    """Asks for small answers until every worker has served one: then all are proved."""
    missing = {worker.name for worker in system.workers}
    async with create_channel(system.router.address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        health = health_pb2_grpc.HealthStub(channel)
        async with asyncio.timeout(3 * LIMIT_S):
            request = health_pb2.HealthCheckRequest(service="baton.v1.Inference")
            async for state in health.Watch(request, wait_for_ready=True):
                if state.status == health_pb2.HealthCheckResponse.SERVING:
                    break
            while missing:
                by = (await collect(stub.Generate(request_of(1)))).finish.served_by
                missing -= {by.prefill_worker_id, by.decode_worker_id}
