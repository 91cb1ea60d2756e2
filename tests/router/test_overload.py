"""More requests than seats, over the public service: who waits, who is refused and how, and what frees a place."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import grpc
import grpc.aio
from cluster import LIMIT_S, PROMPT, Reply, cluster, collect, expected, load_of, request_of
from failures import details_of, failure
from fake_workers import MIXED, FakeWorker, good_decode, started
from google.rpc import error_details_pb2

from protos import inference_pb2, inference_pb2_grpc, worker_pb2
from protos.inference_pb2 import PRIORITY_HIGH, PRIORITY_LOW, PRIORITY_NORMAL
from router import fleet as router_fleet
from router.config import RouterConfig
from router.model import open_text_model
from router.process import RunningRouter, serving
from runtime.rpc import create_channel
from runtime.status import StatusReporter

LONG_LIMIT_S = 60.0
"""For thousands of tokens, which take a busy machine most of LIMIT_S."""


@dataclass
class Small:
    """A router over one worker of one seat, whose requests end one by one as the test says."""

    router: RunningRouter
    worker: FakeWorker
    stub: inference_pb2_grpc.InferenceStub
    turns: asyncio.Semaphore
    """Each release lets one request end, in the order in which they came to the worker."""
    wire: Any

    def ask(self, name: str, priority: int = PRIORITY_NORMAL) -> asyncio.Task[Reply]:
        return asyncio.create_task(collect(self.stub.Generate(self.request(name, priority))))

    def request(self, name: str, priority: int = PRIORITY_NORMAL) -> inference_pb2.GenerateRequest:
        return request_of(3, request_id=name, priority=priority)  # type: ignore[arg-type]

    async def present(self, num_requests: int) -> None:
        """Waits until so many requests are in the router."""
        async with asyncio.timeout(LIMIT_S):
            while self.router.service.num_requests != num_requests:
                await self.router.fleet.change.wait()

    async def asked(self, *names: str) -> list[asyncio.Task[Reply]]:
        """Requests of the ordinary class that have come one after another, all of them to stay."""
        num_before = self.router.service.num_requests
        tasks = []
        for index, name in enumerate(names):
            tasks.append(self.ask(name))
            await self.present(num_before + index + 1)
        return tasks

    @property
    def served(self) -> list[str]:
        """Requests in the order in which the worker got them."""
        return [each.attempt.request_id for each in self.worker.decodes[1:]]  # the first was the probe


@contextlib.asynccontextmanager
async def small(**options: Any) -> AsyncIterator[Small]:
    turns = asyncio.Semaphore(1)

    async def decode(worker: FakeWorker, request: Any) -> worker_pb2.DecodeRunResponse:
        await turns.acquire()
        return await good_decode(worker, request)

    worker = FakeWorker(MIXED, "m", decode=decode)
    worker.description.num_seats = 1
    worker.report_interval_s = 0.02
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(mock.patch.object(router_fleet, "PREFILL_GRACE_S", 0.0))
        wire = await stack.enter_async_context(started(worker))
        config = RouterConfig(model="tracer", port=0, decode_workers=(wire.address,), **options)
        running = await stack.enter_async_context(
            serving(config, "router-0", open_text_model("tracer", None), StatusReporter(None))
        )
        async with asyncio.timeout(LIMIT_S):
            while not running.fleet.is_ready:
                await running.fleet.change.wait()
        channel = await stack.enter_async_context(create_channel(running.address))
        yield Small(running, worker, inference_pb2_grpc.InferenceStub(channel), turns, wire)


def end_all(s: Small) -> None:
    for _ in range(64):
        s.turns.release()


async def test_what_waits_goes_to_the_worker_in_order_of_rank() -> None:
    async with small() as s:
        tasks = await s.asked("seated")
        for name, priority in (("low", PRIORITY_LOW), ("normal", PRIORITY_NORMAL), ("normal-2", PRIORITY_NORMAL)):
            tasks.append(s.ask(name, priority))
            await s.present(len(tasks))
        # One of its class may wait at the worker, where it could take the seat; the second one waits here.
        for name in ("high", "high-2"):
            tasks.append(s.ask(name, PRIORITY_HIGH))
            await s.present(len(tasks))
        assert s.served == ["seated", "high"]
        end_all(s)
        replies = await asyncio.gather(*tasks)
        assert [reply.text for reply in replies] == ["abc"] * 6
        assert s.served == ["seated", "high", "high-2", "normal", "normal-2", "low"]
        waited_ms = [each.attempt.waited_ms for each in s.worker.decodes]
        assert waited_ms[-1] == max(waited_ms)
        assert replies[1].finish.timing.router_queue_ms >= waited_ms[-1] - 1


async def test_requests_over_the_limit_are_told_when_to_come_again() -> None:
    async with small(max_num_queued=1) as s:
        tasks = await s.asked("seated", "waits")
        error = await failure(s.stub.Generate(s.request("refused")))
        info, retry = details_of(error, error_details_pb2.ErrorInfo, error_details_pb2.RetryInfo)
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and info.reason == "OVERLOADED"
        assert info.metadata["limit"] == "1" and retry.retry_delay.ToMilliseconds() > 0
        assert int(dict(error.trailing_metadata())["grpc-retry-pushback-ms"]) > 0
        end_all(s)
        assert [(await task).text for task in tasks] == ["abc"] * 2
        assert (await s.ask("later")).text == "abc"


async def test_a_full_queue_of_a_low_class_keeps_no_higher_one_out() -> None:
    async with small(max_num_queued=1) as s:
        (seated,) = await s.asked("seated")
        call = s.stub.Generate(s.request("low", PRIORITY_LOW))
        await s.present(2)
        normal = s.ask("normal")
        error = await failure(call)
        (retry,) = details_of(error, error_details_pb2.RetryInfo)
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and "higher class" in error.details()
        assert retry.retry_delay.ToMilliseconds() > 0
        end_all(s)
        assert (await seated).text == (await normal).text == "abc"


async def test_many_requests_at_once_never_exceed_the_limit() -> None:
    """A request counts from its arrival, while it is still being validated too."""
    async with small(max_num_queued=8) as s:
        tasks = [s.ask(str(number)) for number in range(40)]
        async with asyncio.timeout(LIMIT_S):
            for _ in range(31):
                await asyncio.wait([t for t in tasks if not t.done()], return_when=asyncio.FIRST_COMPLETED)
                if sum(t.done() for t in tasks) == 31:
                    break
        assert s.router.service.num_requests == 9
        end_all(s)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        errors = [result for result in results if isinstance(result, grpc.aio.AioRpcError)]
        assert len(errors) == 31 and len(s.served) == 9
        assert {error.code() for error in errors} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert s.router.service.idle.is_set()


async def test_what_is_refused_is_not_tokenised() -> None:
    async with small(max_num_queued=0) as s:
        (seated,) = await s.asked("seated")
        with mock.patch("router.service.validate", side_effect=AssertionError("it was validated")):
            error = await failure(s.stub.Generate(s.request("refused")))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        end_all(s)
        await seated


async def test_bad_input_gives_its_place_back() -> None:
    async with small() as s:
        end_all(s)
        for _ in range(3):
            error = await failure(s.stub.Generate(request_of(sampling={"top_p": 3.0}, priority=99)))
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert s.router.service.idle.is_set()
        assert (await s.ask("good")).text == "abc"


async def test_who_gives_up_waiting_leaves_at_once() -> None:
    async with small() as s:
        (seated,) = await s.asked("seated")
        cancelled = s.stub.Generate(s.request("cancelled"))
        late = s.stub.Generate(s.request("late"), timeout=0.3)
        await s.present(3)
        (last,) = await s.asked("last")
        cancelled.cancel()
        began_s = time.monotonic()
        error = await failure(late)
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and time.monotonic() - began_s < 1.0
        await s.present(2)
        end_all(s)
        await asyncio.gather(seated, last)
        assert s.served == ["seated", "last"]


async def test_a_draining_router_serves_what_waits_and_refuses_it_when_time_is_up() -> None:
    async with small() as s:
        tasks = await s.asked("seated", "first", "second")
        s.router.service.is_draining = True
        s.turns.release()
        assert (await tasks[0]).text == "abc"
        async with asyncio.timeout(LIMIT_S):
            while s.served != ["seated", "first"]:
                await s.router.fleet.change.wait()
        s.router.service.refuse_waiting()
        (result,) = await asyncio.gather(tasks[2], return_exceptions=True)
        assert isinstance(result, grpc.aio.AioRpcError) and result.code() is grpc.StatusCode.UNAVAILABLE
        assert details_of(result, error_details_pb2.RetryInfo) and "draining" in (result.details() or "")
        end_all(s)
        assert (await tasks[1]).text == "abc"


async def test_what_waits_outlives_its_worker_if_another_comes_in_time() -> None:
    async with small(worker_wait_s=LIMIT_S) as s:
        tasks = await s.asked("seated", "waits")
        s.wire.cut()
        end_all(s)
        assert [(await task).text for task in tasks] == ["abc"] * 2


async def test_what_waits_is_refused_when_no_worker_has_come_for_too_long() -> None:
    async with small(worker_wait_s=0.3) as s:
        tasks = await s.asked("seated", "waits")
        await s.worker.server.stop(0)
        results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), LIMIT_S)
        for result in results:
            assert isinstance(result, grpc.aio.AioRpcError) and result.code() is grpc.StatusCode.UNAVAILABLE
            assert details_of(result, error_details_pb2.RetryInfo)


async def test_a_high_request_takes_a_low_ones_seat_and_that_one_goes_on() -> None:
    """What was begun never waits here again: the evicted one has no seat, and others wait."""
    async with cluster(worker={"num_kv_blocks": 1024}, decode={"max_num_seqs": 2}) as c:
        request = request_of(1500, priority=PRIORITY_LOW)  # type: ignore[arg-type]
        low = [asyncio.create_task(collect(c.stub.Generate(request))) for _ in range(4)]
        await load_of(c.decodes[0].address, lambda load: load.num_running == 2, LIMIT_S)
        high = await c.generate(request_of(priority=PRIORITY_HIGH))  # type: ignore[arg-type]
        assert high.tokens == expected(PROMPT, 8) and not any(task.done() for task in low)
        async with asyncio.timeout(LONG_LIMIT_S):
            replies = await asyncio.gather(*low)
        assert all(reply.tokens == expected(PROMPT, 1500) for reply in replies)
        assert max(reply.finish.served_by.num_attempts for reply in replies) > 1
        await c.balanced()
