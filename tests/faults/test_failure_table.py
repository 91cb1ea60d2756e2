"""The failure table's rows about workers, on real processes: answers stay those of the oracle, token for token."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from cluster import LIMIT_S, PROMPT, holds_nothing, load_of, request_of
from processes import SILENCE_S, Process, System
from streaming import MANY, Streaming, busy_prefill, long_prompt, running_decode, until_load, worker_ids

from baton.topology import choose_ports


async def test_prefill_dies_before_the_fetch(system: System, stub: Any) -> None:
    for decode in system.decodes:
        decode.stop()
    streams = [Streaming(stub, request_of(20, [*PROMPT, i])) for i in range(4)]
    # Accepted, and nobody has asked for the KV.
    victim = await until_load(system.prefills, lambda load: load.num_leases > 0)
    victim.kill()
    for decode in system.decodes:
        decode.go_on()
    replies = [await stream.complete() for stream in streams]
    assert any(reply.finish.served_by.num_attempts > 1 for reply in replies)
    assert all(reply.finish.served_by.prefill_worker_id != victim.name for reply in replies)


async def test_prefill_dies_during_the_fetch(system: System, stub: Any) -> None:
    streams = [Streaming(stub, request_of(20, long_prompt())) for _ in range(MANY)]
    victim = await busy_prefill(system)
    victim.kill()
    replies = [await stream.complete() for stream in streams]
    assert any(reply.finish.served_by.num_attempts > 1 for reply in replies)


async def test_every_prefill_worker_dies(system: System, stub: Any) -> None:
    """Decode prefills for itself."""
    streams = [Streaming(stub, request_of(20, long_prompt())) for _ in range(MANY)]
    await busy_prefill(system)
    for prefill in system.prefills:
        prefill.kill()
    served = [(await stream.complete()).finish.served_by for stream in streams]
    again = [by for by in served if by.num_attempts > 1]
    assert again and all(by.prefill_worker_id == by.decode_worker_id for by in again)
    later = await Streaming(stub, request_of(20)).complete()
    assert later.finish.served_by.num_attempts == 1


async def test_decode_dies_mid_stream(system: System, stub: Any) -> None:
    streams = [Streaming(stub, request_of(800, [*PROMPT, i])) for i in range(6)]
    for stream in streams:
        await stream.has(20)
    (await running_decode(system)).kill()
    replies = [await stream.complete() for stream in streams]
    assert any(reply.finish.served_by.num_attempts > 1 for reply in replies)
    assert len({reply.finish.served_by.decode_worker_id for reply in replies}) == 1


async def test_decode_dies_mid_stream_and_comes_back_at_its_address(system: System, stub: Any) -> None:
    """Both die, so the request waits for the next incarnation of either."""
    stream = Streaming(stub, request_of(400))
    await stream.has(20)
    for decode in system.decodes:
        decode.kill()
    system.decodes[0].start()
    reply = await stream.complete(3 * LIMIT_S)
    assert reply.finish.served_by.decode_worker_id == system.decodes[0].name
    assert reply.finish.served_by.num_attempts > 1


async def test_decode_lacks_blocks(system: System, stub: Any) -> None:
    """More output than both pools hold: some are evicted and go on elsewhere or later, none is lost."""
    streams = [Streaming(stub, request_of(800, [i] * 100)) for i in range(16)]
    replies = [await stream.complete(60) for stream in streams]
    assert any(reply.finish.served_by.num_attempts > 1 for reply in replies)


async def test_decode_drains(system: System, stub: Any) -> None:
    streams = [Streaming(stub, request_of(1200, [*PROMPT, i])) for i in range(4)]
    for stream in streams:
        await stream.has(20)
    victim = await running_decode(system)
    victim.terminate()
    replies = [await stream.complete(30) for stream in streams]
    assert victim.wait(LIMIT_S) == 0
    moved = [reply for reply in replies if reply.finish.served_by.num_attempts > 1]
    assert moved and all(reply.finish.served_by.decode_worker_id != victim.name for reply in moved)


async def test_prefill_drains(system: System, stub: Any) -> None:
    streams = [Streaming(stub, request_of(20, long_prompt())) for _ in range(6)]
    victim = await until_load(system.prefills, lambda load: load.num_running > 0)
    victim.terminate()
    for stream in streams:
        await stream.complete(30)
    assert victim.wait(LIMIT_S) == 0


async def test_kv_layout_differs(system: System, stub: Any) -> None:
    """A decode worker of another layout gets no KV of these prefill workers, and nothing fails."""
    (port,) = choose_ports(1)
    redis = f"--redis-url={system.redis.url}"
    other = Process(
        "decode_svc", "other", port, "--worker-id=other", redis, "--kv-block-size=32", "--num-kv-blocks=256"
    )
    other.start()
    try:
        other.until("ready")
        async with asyncio.timeout(2 * LIMIT_S):
            while "other" not in await worker_ids(stub):
                await Streaming(stub, request_of(5)).complete()
        replies = [await Streaming(stub, request_of(20, [*PROMPT, i])).complete() for i in range(20)]
        for reply in replies:
            by = reply.finish.served_by
            assert by.decode_worker_id != "other" or by.prefill_worker_id == "other"
            assert by.num_attempts == 1
    finally:
        other.kill()


async def test_decode_is_stopped_mid_stream(system: System, stub: Any) -> None:
    """It keeps its connections and says nothing. When it goes on it finds its calls closed and does no harm."""
    streams = [Streaming(stub, request_of(800, [*PROMPT, i])) for i in range(4)]
    for stream in streams:
        await stream.has(20)
    victim = await running_decode(system)
    victim.stop()
    stopped_s = time.monotonic()
    replies = [await stream.complete() for stream in streams]
    assert time.monotonic() - stopped_s < SILENCE_S + 4
    moved = [reply for reply in replies if reply.finish.served_by.num_attempts > 1]
    assert moved and all(reply.finish.served_by.decode_worker_id != victim.name for reply in moved)
    victim.go_on()
    await load_of(victim.address, holds_nothing, LIMIT_S)
    await Streaming(stub, request_of(20)).complete()


async def test_prefill_is_stopped_during_the_fetch(system: System, stub: Any) -> None:
    streams = [Streaming(stub, request_of(20, long_prompt())) for _ in range(MANY)]
    victim = await busy_prefill(system)
    victim.stop()
    stopped_s = time.monotonic()
    replies = [await stream.complete(20) for stream in streams]
    assert time.monotonic() - stopped_s < SILENCE_S + 10
    served = [reply.finish.served_by for reply in replies]
    moved = [by for by in served if by.num_attempts > 1]
    assert moved and all(by.prefill_worker_id != victim.name for by in moved)
    victim.go_on()
    await load_of(victim.address, holds_nothing, LIMIT_S)
