"""Requests under way in fault tests, and what workers report meanwhile."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from typing import Any

from cluster import LIMIT_S, Reply, collect, expected, load_of, request_of
from grpc_health.v1 import health_pb2, health_pb2_grpc
from processes import Process, System

from protos import inference_pb2, inference_pb2_grpc
from runtime.rpc import create_channel


def long_prompt() -> list[int]:
    """3,008 tokens that no worker has cached: their prefill takes a while."""
    return [*secrets.token_bytes(8), *(i % 251 for i in range(3000))]


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


MANY = 24
"""Long prompts that keep two prefill workers busy for far longer than a load report takes to arrive."""


async def busy_prefill(system: System) -> Process:
    """A prefill worker that computes and still has most of `MANY` long prompts before it."""
    return await until_load(
        system.prefills, lambda load: load.num_running > 0 and load.num_queued_tokens > MANY // 4 * len(long_prompt())
    )


async def running_decode(system: System) -> Process:
    """The decode worker that runs something."""
    return await until_load(system.decodes, lambda load: load.num_running > 0)


async def worker_ids(stub: Any) -> set[str]:
    """The workers that the router lists."""
    return {each.worker_id for each in (await stub.ListWorkers(inference_pb2.ListWorkersRequest())).workers}


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
