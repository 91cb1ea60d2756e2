"""One system of processes for all fault tests; each finds it whole and leaves nothing in its pools."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

# The pieces that start and stop things are those of the router's tests.
sys.path.insert(0, str(Path(__file__).parents[1] / "router"))

from cluster import holds_nothing, load_of
from processes import System
from streaming import all_proved

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
