"""One attempt against decode workers that misbehave, its stop strings and its cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fake_workers import (
    PROMPT,
    FakeWorker,
    accepted,
    answer_of,
    finished,
    first_token,
    next_tokens,
)
from pair import accept_and_hang, pair, wait_for_prefill

from protos import worker_pb2
from router import attempts
from runtime.errors import Aborted, InvalidArgument, Unavailable


async def test_decode_that_drains_refuses_and_has_not_died() -> None:
    async def refuse(worker: FakeWorker, request: Any) -> Any:
        raise Unavailable("worker d is draining")

    async with pair(decode=refuse) as both:
        failure = await both.failure(answer_of())
        assert failure.culprit is both.decode and not failure.worker_died


async def test_an_invalid_argument_at_decode_is_the_requests_own_error() -> None:
    async def refuse(worker: FakeWorker, request: Any) -> Any:
        raise InvalidArgument("sampling", "impossible")

    async with pair(accept_and_hang, refuse) as both:
        with pytest.raises(InvalidArgument, match="impossible"):
            await both.run(answer_of())


async def test_a_step_that_fails_counts_as_a_death() -> None:
    async def fail(worker: FakeWorker, request: Any) -> Any:
        raise Aborted("the attempt failed: the step failed")

    async with pair(decode=fail) as both:
        failure = await both.failure(answer_of(), local=True)
        assert failure.culprit is both.decode and failure.worker_died


async def test_decode_dies_mid_stream() -> None:
    async def die(worker: FakeWorker, request: Any) -> Any:
        worker.emit(request, *b"abc")
        worker.reached.set()
        await worker.may_go_on.wait()

    async with pair(decode=die) as both:
        answer = answer_of()
        running = asyncio.create_task(both.failure(answer))
        await both.d.reached.wait()
        while len(answer.token_ids) < 3:
            await answer.changed.wait()
        both.to_d.cut()
        failure = await running
        assert failure.culprit is both.decode and failure.worker_died
        assert bytes(answer.token_ids) == b"abc"


async def test_decode_falls_silent_mid_stream() -> None:
    """Its connection stands, so no call ends by itself; the router itself closes them, and that is no cancellation."""

    async def hang(worker: FakeWorker, request: Any) -> Any:
        worker.emit(request, *b"abc")
        worker.reached.set()
        await worker.may_go_on.wait()

    async with pair(decode=hang, silence_s=0.5) as both:
        running = asyncio.create_task(both.failure(answer_of()))
        await both.d.reached.wait()
        both.to_d.freeze()
        failure = await running
        assert failure.culprit is both.decode and failure.worker_died
        both.to_d.thaw()


async def test_decode_is_lost_while_prefill_accepts() -> None:
    async def slow(worker: FakeWorker, request: Any) -> AsyncIterator[Any]:
        worker.reached.set()
        await worker.may_go_on.wait()
        yield accepted(worker)
        await asyncio.Event().wait()

    async with pair(slow) as both:
        running = asyncio.create_task(both.failure(answer_of()))
        await both.p.reached.wait()
        both.to_d.cut()
        await both.decode.lost.wait()
        both.p.may_go_on.set()
        failure = await running
        assert failure.culprit is both.decode and failure.worker_died


async def test_an_attempt_with_workers_that_are_lost_already() -> None:
    async with pair() as both:
        both.to_p.cut()
        both.to_d.cut()
        await both.prefill.lost.wait()
        await both.decode.lost.wait()
        failure = await both.failure(answer_of())
        assert failure.culprit in (both.prefill, both.decode) and failure.worker_died
        failure = await both.failure(answer_of(), local=True)
        assert failure.culprit is both.decode and failure.worker_died


async def test_kv_that_was_lost_is_blamed_on_prefill_which_has_not_died() -> None:
    async def lose(worker: FakeWorker, request: Any) -> Any:
        return worker_pb2.DecodeRunResponse(outcome=worker_pb2.OUTCOME_KV_LOST, detail="checksum differs")

    async def lease_broken(worker: FakeWorker, request: Any) -> AsyncIterator[Any]:
        yield accepted(worker)
        yield worker_pb2.PrefillRunResponse(finished=worker_pb2.PrefillFinished(intact=False))

    async with pair(lease_broken, lose) as both:
        failure = await both.failure(answer_of())
        assert failure.culprit is both.prefill and not failure.worker_died
        assert "KV_LOST" in failure.message and "checksum differs" in failure.message


async def test_an_eviction_is_blamed_on_decode_which_has_not_died() -> None:
    async def evict(worker: FakeWorker, request: Any) -> Any:
        worker.emit(request, *b"ab")
        return worker_pb2.DecodeRunResponse(outcome=worker_pb2.OUTCOME_EVICTED, detail="no KV block")

    async with pair(decode=evict) as both:
        failure = await both.failure(answer_of())
        assert failure.culprit is both.decode and not failure.worker_died


async def test_a_gap_in_the_tokens_ends_the_attempt() -> None:
    async def skip(worker: FakeWorker, request: Any) -> Any:
        worker.emit(request, *b"ab")
        worker.emit(request, *b"de", position=len(PROMPT) + 3)
        await worker.may_go_on.wait()

    async with pair(decode=skip) as both:
        answer = answer_of()
        failure = await both.failure(answer)
        assert failure.culprit is both.decode and "left out a token" in failure.message
        assert bytes(answer.token_ids) == b"ab"


async def test_a_record_that_overtakes_its_tokens_waits_for_them() -> None:
    async def late(worker: FakeWorker, request: Any) -> Any:
        asyncio.get_running_loop().call_later(0.2, worker.emit, request, *next_tokens(request))
        return finished(request, 6)

    async with pair(decode=late) as both:
        answer = answer_of(6)
        await both.run(answer, local=True)
        assert bytes(answer.token_ids) == b"abcdef"


async def test_tokens_that_never_come_end_the_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "LAST_TOKENS_S", 0.3)

    async def withhold(worker: FakeWorker, request: Any) -> Any:
        worker.emit(request, *b"abc")
        return finished(request, 6)

    async with pair(decode=withhold) as both:
        failure = await both.failure(answer_of(6), local=True)
        assert failure.culprit is both.decode and failure.worker_died


# Stop strings


async def test_a_stop_string_finishes_decode_at_its_last_token() -> None:
    async def until_finished(worker: FakeWorker, request: Any) -> Any:
        worker.emit(request, *b"abcdefgh")
        await worker.finished.wait()
        return finished(request, worker.finishes[0].num_output_tokens)

    async with pair(decode=until_finished) as both:
        answer = answer_of(20, stops=["cd"])
        served = await both.run(answer)
        assert (answer.matched_stop, bytes(answer.token_ids)) == ("cd", b"abcd")
        (finish,) = both.d.finishes
        assert finish.num_output_tokens == 4 and finish.attempt_id == both.d.decodes[0].attempt.attempt_id
        assert served.record.num_tokens == len(PROMPT) + 4


async def test_a_stop_string_counts_the_output_of_earlier_attempts() -> None:
    async def until_finished(worker: FakeWorker, request: Any) -> Any:
        worker.emit(request, *b"defg")
        await worker.finished.wait()
        return finished(request, 1)

    async with pair(decode=until_finished) as both:
        answer = answer_of(20, stops=["cd"])
        for index, byte in enumerate(b"abc"):
            answer.add(worker_pb2.DecodedToken(position=len(PROMPT) + index, token_id=byte))
        await both.run(answer)
        assert both.d.finishes[0].num_output_tokens == 4


async def test_cancelling_closes_both_calls() -> None:
    async with pair(accept_and_hang, wait_for_prefill) as both:
        running = asyncio.create_task(both.attempt(answer_of()).run())
        await both.d.reached.wait()
        assert (both.p.num_open, both.d.num_open) == (1, 1)
        assert (both.decode.num_assigned, both.prefill.num_assigned_tokens) == (1, len(PROMPT))
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running


async def test_a_computed_prompt_is_no_load_for_prefill() -> None:
    async def first_then_wait(worker: FakeWorker, request: Any) -> AsyncIterator[Any]:
        yield accepted(worker)
        yield first_token(request, ord("a"))
        await worker.may_go_on.wait()

    async with pair(first_then_wait, wait_for_prefill) as both:
        answer = answer_of(6)
        running = asyncio.create_task(both.run(answer))
        await answer.changed.wait()
        assert (both.decode.num_assigned, both.prefill.num_assigned_tokens) == (1, 0)
        both.d.may_go_on.set()
        await running
