"""Handoffs by the transfer engine of Mooncake between real processes, of which one is killed."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from cluster import PROMPT, request_of
from processes import System
from streaming import MANY, Streaming, all_proved, busy_prefill, long_prompt, until_load
from transports_here import needs_mooncake

from protos import inference_pb2_grpc
from runtime.rpc import create_channel

pytestmark = needs_mooncake


@pytest.fixture
def by_mooncake() -> Iterator[System]:
    system = System("--kv-transports=mooncake", "--trusted-transfer-network")
    try:
        system.start()
        yield system
    finally:
        system.end()


async def test_prefill_dies_during_a_fetch_by_mooncake(by_mooncake: System) -> None:
    """Noticed within a second, and answered by what is left."""
    await all_proved(by_mooncake)
    async with create_channel(by_mooncake.router.address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        first = await Streaming(stub, request_of(20, [*PROMPT])).complete()
        assert first.finish.served_by.transport == "mooncake" and first.finish.served_by.kv_bytes > 0
        streams = [Streaming(stub, request_of(20, long_prompt())) for _ in range(MANY)]
        victim = await busy_prefill(by_mooncake)
        killed_s = time.monotonic()
        victim.kill()
        await until_load(by_mooncake.decodes, lambda load: load.num_handoffs_lost > 0)
        assert time.monotonic() - killed_s < 1
        replies = [await stream.complete(60) for stream in streams]
        assert any(reply.finish.served_by.num_attempts > 1 for reply in replies)
        assert {reply.finish.served_by.transport for reply in replies} <= {"mooncake", ""}
