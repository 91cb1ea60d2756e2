"""The failure table, row by row, on real processes: answers stay those of the oracle, token for token."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from cluster import LIMIT_S, PROMPT, Reply, collect, expected, holds_nothing, load_of, request_of
from processes import SILENCE_S, Process, System

from baton.topology import choose_ports
from protos import inference_pb2, inference_pb2_grpc
from runtime.rpc import create_channel

LONG_PROMPT = [i % 251 for i in range(3000)]


@pytest.fixture
async def stub(system: System) -> AsyncIterator[inference_pb2_grpc.InferenceStub]:
    async with create_channel(system.router.address) as channel:
        yield inference_pb2_grpc.InferenceStub(channel)


class Streaming:
    """A request under way: its answer is read in the background, and a test may wait for some of it."""

    def __init__(self, stub: inference_pb2_grpc.InferenceStub, request: inference_pb2.GenerateRequest) -> None:
        self.request = request
        self.num_tokens = 0
        self._changed = asyncio.Event()
        self._messages = self._observed(stub.Generate(request))
        self.reply = asyncio.create_task(collect(self._messages))

    async def _observed(self, call: Any) -> AsyncIterator[Any]:
        async for message in call:
            self.num_tokens += len(message.tokens)
            self._changed.set()
            yield message

    async def has(self, num_tokens: int) -> None:
        """Waits until the client has so many tokens."""
        async with asyncio.timeout(LIMIT_S):
            while self.num_tokens < num_tokens:
                assert not self.reply.done(), self.reply.result()
                self._changed.clear()
                await self._changed.wait()

    async def complete(self, limit_s: float = LIMIT_S) -> Reply:
        """The whole answer, which must be the oracle's."""
        reply = await asyncio.wait_for(self.reply, limit_s)
        prompt = list(self.request.prompt_token_ids)
        assert reply.tokens == expected(prompt, self.request.sampling.max_tokens)
        assert reply.text == bytes(token for token in reply.tokens if token < 256).decode()
        assert reply.finish.usage.completion_tokens == len(reply.tokens)
        return reply


async def until_load(workers: list[Process], wanted: Callable[[inference_pb2.WorkerLoad], bool]) -> Process:
    """The first of the workers to report such a load."""
    watching = {asyncio.create_task(load_of(worker.address, wanted, LIMIT_S)): worker for worker in workers}
    done, pending = await asyncio.wait(watching, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    await asyncio.wait(watching)
    first = done.pop()
    first.result()
    return watching[first]


async def running_decode(system: System) -> Process:
    """The decode worker that runs something."""
    return await until_load(system.decodes, lambda load: load.num_running > 0)


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
    streams = [Streaming(stub, request_of(20, [i, *LONG_PROMPT])) for i in range(4)]
    victim = await until_load(system.prefills, lambda load: load.num_running > 0)
    victim.kill()
    replies = [await stream.complete() for stream in streams]
    assert any(reply.finish.served_by.num_attempts > 1 for reply in replies)


async def test_every_prefill_worker_dies(system: System, stub: Any) -> None:
    """Decode prefills for itself."""
    streams = [Streaming(stub, request_of(20, [i, *LONG_PROMPT])) for i in range(4)]
    await until_load(system.prefills, lambda load: load.num_running > 0)
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
    streams = [Streaming(stub, request_of(20, [i, *LONG_PROMPT])) for i in range(6)]
    victim = await until_load(system.prefills, lambda load: load.num_running > 0)
    victim.terminate()
    for stream in streams:
        await stream.complete(30)
    assert victim.wait(LIMIT_S) == 0


async def test_kv_layout_differs(system: System, stub: Any) -> None:
    """A decode worker of another layout gets no KV of these prefill workers, and nothing fails."""
    (port,) = choose_ports(1)
    redis = f"--redis-url={system.redis.url}"
    other = Process("decode_svc", "other", port, "--worker-id=other", redis, "--block-size=32", "--num-kv-blocks=256")
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


async def worker_ids(stub: Any) -> set[str]:
    """The workers that the router lists."""
    return {each.worker_id for each in (await stub.ListWorkers(inference_pb2.ListWorkersRequest())).workers}


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
    streams = [Streaming(stub, request_of(20, [i, *LONG_PROMPT])) for i in range(4)]
    victim = await until_load(system.prefills, lambda load: load.num_running > 0)
    victim.stop()
    stopped_s = time.monotonic()
    replies = [await stream.complete(20) for stream in streams]
    assert time.monotonic() - stopped_s < SILENCE_S + 6
    assert all(reply.finish.served_by.prefill_worker_id != victim.name for reply in replies)
    victim.go_on()
    await load_of(victim.address, holds_nothing, LIMIT_S)


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
    streams = [Streaming(stub, request_of(20, [i, *LONG_PROMPT])) for i in range(4)]
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
