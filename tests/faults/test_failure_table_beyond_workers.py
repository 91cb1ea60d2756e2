"""The failure table's other rows, on real processes: routers, Redis, clients, and everything at once."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from cluster import LIMIT_S, PROMPT, collect, holds_nothing, load_of, request_of
from processes import Process, System
from streaming import Streaming, long_prompt, running_decode, until_load, worker_ids

from baton.topology import choose_ports
from protos import inference_pb2_grpc
from runtime.rpc import create_channel


async def test_router_dies(system: System, stub: Any) -> None:
    streams = [Streaming(stub, request_of(3000, [*PROMPT, i])) for i in range(6)]
    for stream in streams:
        await stream.has(5)
    system.router.kill()
    killed_s = time.monotonic()
    for stream in streams:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(stream.reply, LIMIT_S)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    for worker in system.workers:
        await load_of(worker.address, holds_nothing, 2.0)
    assert time.monotonic() - killed_s < 2.5


async def test_router_drains(system: System) -> None:
    """It finishes what it has, takes nothing new, and ends with 0."""
    (port,) = choose_ports(1)
    router = system.new_router("r1", port, "--drain-timeout-s=20")
    router.start()
    try:
        router.until("ready")
        async with create_channel(router.address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            stream = Streaming(stub, request_of(1500))
            await stream.has(5)
            router.terminate()
            router.until("draining")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await collect(stub.Generate(request_of(1)))
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            assert "draining" in (caught.value.details() or "")
            await stream.complete()
        assert await asyncio.to_thread(router.wait, LIMIT_S) == 0
    finally:
        if router.is_running:
            router.kill()


async def test_router_drains_for_so_long(system: System) -> None:
    """What has not ended by then is cut off, and the workers free it."""
    (port,) = choose_ports(1)
    router = system.new_router("r1", port)
    router.start()
    try:
        router.until("ready")
        async with create_channel(router.address) as channel:
            stream = Streaming(inference_pb2_grpc.InferenceStub(channel), request_of(5000))
            await stream.has(5)
            router.terminate()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stream.reply
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert await asyncio.to_thread(router.wait, LIMIT_S) == 0
    finally:
        if router.is_running:
            router.kill()


async def test_redis_dies(system: System, stub: Any) -> None:
    stream = Streaming(stub, request_of(800, session_id="chat"))
    await stream.has(5)
    system.redis.kill()
    await stream.complete()
    during = await Streaming(stub, request_of(20, session_id="chat")).complete()
    assert during.finish.served_by.num_attempts == 1
    system.redis.start()
    await Streaming(stub, request_of(20, session_id="chat")).complete()


async def test_redis_is_flushed(system: System, stub: Any) -> None:
    stream = Streaming(stub, request_of(800, session_id="chat"))
    await stream.has(5)
    system.redis.flush()
    await stream.complete()
    after = await Streaming(stub, request_of(20, session_id="chat")).complete()
    assert after.finish.served_by.num_attempts == 1
    assert await worker_ids(stub) == {"p0", "p1", "d0", "d1"}


async def test_redis_is_slow(system: System, stub: Any) -> None:
    """It answers nothing at all; a request waits for it only as long as one operation may take."""
    stream = Streaming(stub, request_of(800, session_id="chat"))
    await stream.has(5)
    system.redis.freeze()
    try:
        await stream.complete()
        began_s = time.monotonic()
        await Streaming(stub, request_of(20, session_id="chat")).complete()
        assert time.monotonic() - began_s < 2.5
        began_s = time.monotonic()
        await Streaming(stub, request_of(20)).complete()
        assert time.monotonic() - began_s < 0.5
    finally:
        system.redis.thaw()
    await Streaming(stub, request_of(20, session_id="chat")).complete()


async def test_clients_leave_while_prefill_is_stopped(system: System, stub: Any) -> None:
    """Decode has reserved blocks for KV that does not come; they are free as soon as nobody wants the answer."""
    for prefill in system.prefills:
        prefill.stop()
    calls = [stub.Generate(request_of(20, [*PROMPT, i])) for i in range(4)]
    try:
        # Prefill cannot even accept, so nothing has reached decode.
        for call in calls:
            call.cancel()
        for decode in system.decodes:
            await load_of(decode.address, holds_nothing, 1.0)
    finally:
        for prefill in system.prefills:
            prefill.go_on()
    streams = [Streaming(stub, request_of(20, long_prompt())) for _ in range(4)]
    await until_load(system.decodes, lambda load: load.num_running > 0)
    for prefill in system.prefills:
        prefill.stop()
    try:
        for stream in streams:
            stream.reply.cancel()
        for decode in system.decodes:
            await load_of(decode.address, holds_nothing, 1.0)
    finally:
        for prefill in system.prefills:
            prefill.go_on()


async def test_client_is_slow(system: System) -> None:
    """Its stream is bounded by its window; past that it is cut off with a clear status, and its KV is freed."""
    (port,) = choose_ports(1)
    router = system.new_router("r1", port, "--client-stall-s=0.5")
    router.start()
    options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65536)]
    try:
        router.until("ready")
        async with create_channel(router.address, options=options) as channel:
            request = request_of(3000, request_id="x" * 256)
            messages = aiter(inference_pb2_grpc.InferenceStub(channel).Generate(request, wait_for_ready=True))
            num_before = len((await anext(messages)).tokens)
            await running_decode(system)
            for worker in system.workers:
                await load_of(worker.address, holds_nothing, LIMIT_S)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await collect(messages, num_before)
            assert caught.value.code() is grpc.StatusCode.ABORTED
            assert "the client has taken nothing for 0.5 s" in (caught.value.details() or "")
    finally:
        router.kill()


async def test_pool_accounting_is_broken(system: System, stub: Any) -> None:
    """The worker ends loudly as soon as it is idle; nobody notices but its operator."""
    (port,) = choose_ports(1)
    redis = f"--redis-url={system.redis.url}"
    leaky = Process(str(Path(__file__).with_name("leaky_worker.py")), "leaky", port, "--worker-id=leaky", redis)
    leaky.start()
    streams = [Streaming(stub, request_of(300, [*PROMPT, i])) for i in range(4)]
    assert await asyncio.to_thread(leaky.wait, 2 * LIMIT_S) == 70
    for stream in streams:
        await stream.complete()


async def test_two_routers_share_the_workers(system: System, stub: Any) -> None:
    """The death of one changes nothing for the other's requests."""
    (port,) = choose_ports(1)
    router = system.new_router("r1", port)
    router.start()
    try:
        router.until("ready")
        async with create_channel(router.address) as channel:
            theirs = Streaming(inference_pb2_grpc.InferenceStub(channel), request_of(2000))
            ours = Streaming(stub, request_of(1000, [*PROMPT, 1]))
            await theirs.has(5)
            await ours.has(5)
            router.kill()
            with pytest.raises(grpc.aio.AioRpcError):
                await theirs.reply
            reply = await ours.complete()
            assert reply.finish.served_by.num_attempts == 1
    finally:
        if router.is_running:
            router.kill()


async def test_everything_at_once(system: System, stub: Any) -> None:
    """A prefill and a decode worker die, another decode worker is stopped, Redis is flushed, under 12 streams."""
    streams = [Streaming(stub, request_of(600, [*PROMPT, *[i] * 300])) for i in range(12)]
    for stream in streams[:6]:
        await stream.has(1)
    system.prefills[0].kill()
    system.redis.flush()
    system.decodes[0].kill()
    system.decodes[0].start()
    for stream in streams[6:]:
        await stream.has(20)
    system.decodes[1].stop()
    for stream in streams:
        await stream.complete(60)
    system.decodes[1].go_on()
    await load_of(system.decodes[1].address, holds_nothing, LIMIT_S)
