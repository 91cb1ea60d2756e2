"""From request to finished answer: recovery, poison, fallbacks, and what the last message says."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from dispatching import InOrder, d, failing, p, system
from fake_workers import (
    DRAINING,
    MIXED,
    PREFILL,
    PROMPT,
    FakeWorker,
    accepted,
    answer_of,
    finished,
    fleet_over,
    good_decode,
    next_tokens,
)

from protos import inference_pb2, worker_pb2
from router import recovery
from router.dispatch import Dispatcher
from router.request_trace import RequestTrace
from runtime.errors import Aborted, InvalidArgument, Unavailable


async def test_the_last_message_says_who_served() -> None:
    async with system(p(), d()) as s:
        finish, holder = await s.serve(answer_of(6))
        assert finish.reason == inference_pb2.FINISH_REASON_LENGTH
        assert (finish.usage.prompt_tokens, finish.usage.completion_tokens) == (len(PROMPT), 6)
        by = finish.served_by
        assert (by.prefill_worker_id, by.decode_worker_id, by.num_attempts) == ("p", "d", 1)
        assert by.kv_bytes == 64 and finish.seed == 7
        assert holder.worker_id == "d"
        assert 0 <= finish.timing.router_queue_ms <= finish.timing.total_ms
        assert finish.timing.time_to_first_token_ms <= finish.timing.total_ms


async def test_no_prefill_worker_means_local_prefill() -> None:
    only = d()
    async with system(only) as s:
        finish, _ = await s.serve(answer_of())
        assert finish.served_by.prefill_worker_id == finish.served_by.decode_worker_id == "d"
        assert not only.decodes[0].HasField("source")


async def test_a_mixed_worker_prefills_for_itself() -> None:
    prefill, mixed = p(), FakeWorker(MIXED, "m")
    async with fleet_over(prefill, mixed) as seen:
        dispatcher = Dispatcher(seen.fleet, InOrder(), "r", 0, 0, 1.0)
        await seen.until(lambda _: "m" in seen.usable_ids())
        await dispatcher.serve(answer_of(), None, RequestTrace(time.monotonic()))
        assert not prefill.prefills and not mixed.decodes[0].HasField("source")


async def test_a_short_prompt_is_prefilled_where_it_is_decoded() -> None:
    prefill = p()
    async with system(prefill, d(), local_prefill_max_tokens=len(PROMPT)) as s:
        await s.serve(answer_of())
        assert not prefill.prefills
        await s.serve(answer_of(prompt_token_ids=(*PROMPT, 1)))
        assert len(prefill.prefills) == 1


async def test_only_a_prefill_worker_that_fits_is_asked() -> None:
    other = FakeWorker(PREFILL, "a", layout="another layout")
    fits, decode = p("b"), d()
    async with fleet_over(other, fits, decode) as seen:
        dispatcher = Dispatcher(seen.fleet, InOrder(), "r", 0, 0, 1.0)
        await seen.until(lambda _: seen.usable_ids() == {"b", "d"})
        seen.named("a").is_proved = True
        finish, _ = await dispatcher.serve(answer_of(), None, RequestTrace(time.monotonic()))
        assert finish.served_by.prefill_worker_id == "b" and not other.prefills


async def test_a_dead_prefill_worker_is_avoided() -> None:
    async def die(worker: FakeWorker, request: Any) -> AsyncIterator[Any]:
        raise RuntimeError("as good as dead")
        yield

    bad, good = p("p1", die), p("p2")
    async with system(bad, good, d()) as s:
        answer = answer_of(6)
        finish, _ = await s.serve(answer)
        assert bytes(answer.token_ids) == b"abcdef"
        assert (finish.served_by.prefill_worker_id, finish.served_by.num_attempts) == ("p2", 2)
        assert len(bad.prefills) == 1


async def test_decode_prefills_when_every_prefill_worker_has_failed() -> None:
    async def refuse(worker: FakeWorker, request: Any) -> AsyncIterator[Any]:
        raise Unavailable("worker is draining")
        yield

    async with system(p("p1", refuse), p("p2", refuse), d()) as s:
        answer = answer_of(6)
        finish, _ = await s.serve(answer)
        assert bytes(answer.token_ids) == b"abcdef"
        assert (finish.served_by.prefill_worker_id, finish.served_by.num_attempts) == ("d", 3)


async def test_an_answer_goes_on_at_another_decode_worker() -> None:
    bad, good = d("d1", failing(99, Aborted("the step failed"), num_tokens=3)), d("d2")
    async with system(p(), bad, good) as s:
        answer = answer_of(6)
        finish, holder = await s.serve(answer)
        assert bytes(answer.token_ids) == b"abcdef"
        assert (holder.worker_id, finish.served_by.num_attempts) == ("d2", 2)
        assert bytes(good.decodes[0].attempt.output_token_ids) == b"abc"
        assert good.decodes[0].attempt.attempt_id != bad.decodes[0].attempt.attempt_id
        assert good.decodes[0].attempt.waited_ms >= bad.decodes[0].attempt.waited_ms


async def test_a_request_whose_worker_dies_three_times_fails() -> None:
    """It is probably the cause; a fourth worker is not put at risk."""
    poisoned = [d(f"d{i}", failing(99, Aborted("the step failed"))) for i in range(4)]
    async with system(*poisoned) as s:
        with pytest.raises(Unavailable, match=r"failed 3 times.*the step failed"):
            await s.serve(answer_of())
        assert [len(worker.decodes) for worker in poisoned] == [1, 1, 1, 0]


async def test_deaths_at_prefill_count_too() -> None:
    async def die(worker: FakeWorker, request: Any) -> AsyncIterator[Any]:
        raise RuntimeError("as good as dead")
        yield

    workers = [p(f"p{i}", die) for i in range(4)]
    async with system(*workers, d()) as s:
        with pytest.raises(Unavailable, match="failed 3 times"):
            await s.serve(answer_of())
        assert sum(len(worker.prefills) for worker in workers) == 3


async def test_a_new_token_shows_that_the_request_is_not_the_cause() -> None:
    one = d("d", failing(5, Aborted("the step failed"), num_tokens=1))
    async with system(one) as s:
        answer = answer_of(8)
        finish, _ = await s.serve(answer)
        assert bytes(answer.token_ids) == b"abcdefgh"
        assert finish.served_by.num_attempts == 6


async def test_refusals_and_evictions_are_no_deaths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "MAX_BACKOFF_S", 0.02)
    one = d("d", failing(5, Unavailable("worker d has no room")))
    async with system(one) as s:
        finish, _ = await s.serve(answer_of())
        assert finish.served_by.num_attempts == 6


async def test_failures_without_end_have_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "MAX_BACKOFF_S", 0.02)

    async def evict(worker: FakeWorker, request: Any) -> Any:
        return worker_pb2.DecodeRunResponse(outcome=worker_pb2.OUTCOME_EVICTED, detail="no KV block")

    one = d("d", evict)
    async with system(one) as s:
        with pytest.raises(Unavailable, match=rf"failed {recovery.MAX_FAILURES} times.*no KV block"):
            await s.serve(answer_of())
        assert len(one.decodes) == recovery.MAX_FAILURES


async def test_an_error_of_the_request_itself_is_not_tried_again() -> None:
    async def refuse(worker: FakeWorker, request: Any) -> AsyncIterator[Any]:
        raise InvalidArgument("prompt", "impossible")
        yield

    prefill = p(script=refuse)
    async with system(prefill, d()) as s:
        with pytest.raises(InvalidArgument, match="prompt: impossible"):
            await s.serve(answer_of())
        assert len(prefill.prefills) == 1


async def test_the_first_attempt_does_not_wait_for_workers() -> None:
    only = d()
    async with system(only) as s:
        only.state = DRAINING
        only.report()
        await s.until(lambda fleet: not fleet.is_ready)
        with pytest.raises(Unavailable, match="no decode worker is ready"):
            async with asyncio.timeout(0.5):
                await s.serve(answer_of())


async def test_a_request_that_lost_its_worker_waits_for_the_next() -> None:
    async def die(worker: FakeWorker, request: Any) -> Any:
        worker.emit(request, *next_tokens(request)[:3])
        worker.reached.set()
        await worker.may_go_on.wait()
        return await good_decode(worker, request)

    only = d("d", die)
    async with system(only) as s:
        answer = answer_of(6)
        serving = asyncio.create_task(s.serve(answer))
        await only.reached.wait()
        while len(answer.token_ids) < 3:
            await answer.changed.wait()
        only.may_go_on.set()
        first = s.named("d")
        s.wires[0].cut()
        finish, holder = await serving
        assert bytes(answer.token_ids) == b"abcdef"
        assert finish.served_by.num_attempts == 2 and holder is not first


async def test_a_request_waits_for_a_worker_only_so_long() -> None:
    async def die(worker: FakeWorker, request: Any) -> Any:
        worker.reached.set()
        await worker.may_go_on.wait()

    only = d("d", die)
    async with system(only, worker_wait_s=0.3) as s:
        serving = asyncio.create_task(s.serve(answer_of()))
        await only.reached.wait()
        await s.wires[0].stop()
        with pytest.raises(Unavailable, match="no decode worker is ready"):
            await serving


async def test_a_stop_string_found_before_the_worker_died_is_a_whole_answer() -> None:
    async def die(worker: FakeWorker, request: Any) -> Any:
        worker.emit(request, *b"abcd")
        await worker.finished.wait()
        raise RuntimeError("as good as dead")

    only = d("d", die)
    async with system(only) as s:
        answer = answer_of(20, stops=["cd"])
        finish, _ = await s.serve(answer)
        assert (finish.reason, finish.matched_stop) == (inference_pb2.FINISH_REASON_STOP, "cd")
        assert (finish.usage.completion_tokens, finish.served_by.num_attempts) == (4, 1)


async def test_a_stop_string_in_the_held_back_end_is_the_reason() -> None:
    async with system(d()) as s:
        answer = answer_of(4, stops=["c", "bcde"])
        finish, _ = await s.serve(answer)
        assert (finish.reason, finish.matched_stop) == (inference_pb2.FINISH_REASON_STOP, "c")
        assert finish.usage.completion_tokens == 3


async def test_a_token_that_ended_the_answer_is_named() -> None:
    async def end(worker: FakeWorker, request: Any) -> Any:
        worker.emit(request, 97, 256)
        return finished(request, 2, finish_reason=inference_pb2.FINISH_REASON_STOP, matched_token_id=256)

    async with system(d("d", end)) as s:
        finish, _ = await s.serve(answer_of(6))
        assert (finish.reason, finish.matched_token_id) == (inference_pb2.FINISH_REASON_STOP, 256)


async def test_cached_tokens_come_from_who_prefilled() -> None:
    async def cached(worker: FakeWorker, request: Any) -> AsyncIterator[Any]:
        yield accepted(worker)
        token = worker_pb2.DecodedToken(position=len(PROMPT), token_id=97)
        yield worker_pb2.PrefillRunResponse(
            first_token=worker_pb2.PrefillFirstToken(token=token, cached_tokens=5, queue_ms=1, prefill_ms=2)
        )
        worker.reached.set()
        await worker.may_go_on.wait()

    async def after_prefill(worker: FakeWorker, request: Any) -> Any:
        await prefill.reached.wait()
        worker.emit(request, *next_tokens(request))
        return finished(request, 6, cached_tokens=3, transfer_ms=4)

    prefill = p(script=cached)
    async with system(prefill, d("d", after_prefill)) as s:
        finish, _ = await s.serve(answer_of(6))
        assert finish.usage.cached_tokens == 5
        timing = finish.timing
        assert (timing.prefill_queue_ms, timing.prefill_ms, timing.transfer_ms) == (1, 2, 4)


async def test_cancelling_a_request_closes_its_calls() -> None:
    async def hang(worker: FakeWorker, request: Any) -> Any:
        worker.reached.set()
        await worker.may_go_on.wait()

    only = d("d", hang)
    async with system(only) as s:
        serving = asyncio.create_task(s.serve(answer_of()))
        await only.reached.wait()
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await serving
