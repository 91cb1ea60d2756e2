"""One attempt against workers that misbehave, over real sockets: who is blamed, and that nothing stays open."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fake_workers import (
    LIMIT_S,
    PROMPT,
    FakeWorker,
    accepted,
    answer_of,
    finished,
    first_token,
)
from pair import accept_and_hang, pair, wait_for_prefill

from protos import worker_pb2
from router import attempts
from runtime.errors import FailedPrecondition, InvalidArgument, Unavailable


async def test_a_good_attempt() -> None:
    async with pair() as both:
        answer = answer_of(6)
        served = await both.run(answer)
        assert bytes(answer.token_ids) == b"abcdef"
        assert served.record.outcome == worker_pb2.OUTCOME_FINISHED
        assert served.first_token is not None and served.first_token.token.token_id == ord("a")
        (told,) = both.d.decodes
        assert (told.source.worker_id, told.source.epoch) == ("p", both.p.epoch)
        assert told.source.address == both.to_p.address
        assert told.attempt == both.p.prefills[0].attempt
        assert len(told.attempt.attempt_id) == 16


async def test_decode_prefills_where_there_is_no_prefill_worker() -> None:
    async with pair() as both:
        answer = answer_of(6)
        served = await both.run(answer, local=True)
        assert bytes(answer.token_ids) == b"abcdef"
        assert served.first_token is None
        assert not both.d.decodes[0].HasField("source") and not both.p.prefills


async def test_a_later_attempt_carries_what_the_client_has() -> None:
    async with pair() as both:
        answer = answer_of(6)
        for index, byte in enumerate(b"abc"):
            answer.add(worker_pb2.DecodedToken(position=len(PROMPT) + index, token_id=byte))
        await both.run(answer)
        assert bytes(both.p.prefills[0].attempt.output_token_ids) == b"abc"
        assert bytes(answer.token_ids) == b"abcdef"


async def test_a_first_token_that_overtakes_decode_is_not_part_of_its_input() -> None:
    """Prefill may report before decode has been asked; both must be told of the same attempt."""

    async def eager(worker: FakeWorker, request: Any) -> AsyncIterator[Any]:
        yield accepted(worker)
        yield first_token(request, ord("a"))
        await worker.may_go_on.wait()

    async with pair(eager) as both:
        answer = answer_of(6)
        await both.run(answer)
        assert both.d.decodes[0].attempt == both.p.prefills[0].attempt
        assert bytes(answer.token_ids) == b"abcdef"


async def reporting_late(worker: FakeWorker, request: Any) -> AsyncIterator[Any]:
    yield accepted(worker)
    worker.reached.set()
    await worker.may_go_on.wait()
    report = first_token(request, ord("a"))
    report.first_token.cached_tokens = 3
    yield report


async def test_decodes_record_may_overtake_prefills_report_which_is_waited_for() -> None:
    async with pair(reporting_late) as both:
        attempt = both.attempt(answer := answer_of(1))
        running = asyncio.create_task(attempt.run())
        async with asyncio.timeout(LIMIT_S):
            await answer.complete.wait()
        assert attempt.marks.record is not None and not running.done()
        both.p.may_go_on.set()
        served = await running
        assert served.first_token is not None and served.first_token.cached_tokens == 3
        assert bytes(answer.token_ids) == b"a", "it is there once"


@pytest.mark.parametrize("is_lost", [False, True])
async def test_an_answer_ends_without_a_report_that_does_not_come(
    monkeypatch: pytest.MonkeyPatch, is_lost: bool
) -> None:
    async def ending(worker: FakeWorker, request: Any) -> AsyncIterator[Any]:
        yield accepted(worker)
        await worker.may_go_on.wait()
        raise Unavailable("it goes")

    monkeypatch.setattr(attempts, "REPORT_S", 100 * LIMIT_S if is_lost else 0.05)
    async with pair(ending) as both:
        running = asyncio.create_task(both.run(answer := answer_of()))
        async with asyncio.timeout(LIMIT_S):
            await answer.complete.wait()
        if is_lost:
            both.p.may_go_on.set()
        served = await running
        both.p.may_go_on.set()
        assert served.first_token is None and served.record.outcome == worker_pb2.OUTCOME_FINISHED


# Prefill


async def refuse_draining(worker: FakeWorker, request: Any) -> AsyncIterator[Any]:
    raise Unavailable("worker p is draining")
    yield


async def test_prefill_that_drains_refuses_and_has_not_died() -> None:
    async with pair(refuse_draining) as both:
        failure = await both.failure(answer_of())
        assert failure.culprit is both.prefill and not failure.worker_died
        assert not both.d.decodes


async def test_prefill_that_does_not_fit_refuses_and_has_not_died() -> None:
    async def refuse(worker: FakeWorker, request: Any) -> AsyncIterator[Any]:
        raise FailedPrecondition("fingerprint: differs")
        yield

    async with pair(refuse) as both:
        failure = await both.failure(answer_of())
        assert failure.culprit is both.prefill and not failure.worker_died


async def test_an_invalid_argument_at_prefill_is_the_requests_own_error() -> None:
    async def refuse(worker: FakeWorker, request: Any) -> AsyncIterator[Any]:
        raise InvalidArgument("prompt_token_ids", "too many")
        yield

    async with pair(refuse) as both:
        with pytest.raises(InvalidArgument, match="prompt_token_ids: too many"):
            await both.run(answer_of())


async def test_prefill_dies_before_it_accepts() -> None:
    async def silent(worker: FakeWorker, request: Any) -> AsyncIterator[Any]:
        worker.reached.set()
        await worker.may_go_on.wait()
        yield

    async with pair(silent) as both:
        running = asyncio.create_task(both.failure(answer_of()))
        await both.p.reached.wait()
        both.to_p.cut()
        failure = await running
        assert failure.culprit is both.prefill and failure.worker_died


async def test_prefill_ends_without_a_word() -> None:
    async def nothing(worker: FakeWorker, request: Any) -> AsyncIterator[Any]:
        return
        yield

    async with pair(nothing) as both:
        failure = await both.failure(answer_of())
        assert failure.culprit is both.prefill and failure.worker_died


async def test_prefill_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its reports go on, so it is not lost; but acceptance is promised at once."""
    monkeypatch.setattr(attempts, "ACCEPT_S", 0.3)

    async def silent(worker: FakeWorker, request: Any) -> AsyncIterator[Any]:
        await worker.may_go_on.wait()
        yield

    async with pair(silent) as both:
        failure = await both.failure(answer_of())
        assert failure.culprit is both.prefill and not failure.worker_died
        assert not both.prefill.lost.is_set()


async def test_prefill_falls_silent_before_it_accepts() -> None:
    async def silent(worker: FakeWorker, request: Any) -> AsyncIterator[Any]:
        worker.reached.set()
        await worker.may_go_on.wait()
        yield

    async with pair(silent, silence_s=0.5) as both:
        running = asyncio.create_task(both.failure(answer_of()))
        await both.p.reached.wait()
        both.to_p.freeze()
        failure = await running
        assert failure.culprit is both.prefill and failure.worker_died
        assert both.prefill.lost.is_set()
        both.to_p.thaw()


async def test_prefill_dies_after_it_accepted_and_decode_says_so() -> None:
    async def lose(worker: FakeWorker, request: Any) -> worker_pb2.DecodeRunResponse:
        worker.reached.set()
        await worker.may_go_on.wait()
        return worker_pb2.DecodeRunResponse(outcome=worker_pb2.OUTCOME_KV_LOST, detail="p is gone")

    async with pair(accept_and_hang, lose) as both:
        running = asyncio.create_task(both.failure(answer_of()))
        await both.d.reached.wait()
        both.to_p.cut()
        both.d.may_go_on.set()
        failure = await running
        assert failure.culprit is both.prefill and failure.worker_died
        assert "p is gone" in failure.message


async def test_prefill_dies_after_it_accepted_and_decode_says_nothing() -> None:
    async with pair(accept_and_hang, wait_for_prefill) as both:
        running = asyncio.create_task(both.failure(answer_of()))
        await both.d.reached.wait()
        both.to_p.cut()
        failure = await running
        assert failure.culprit is both.prefill and failure.worker_died


async def test_prefill_gives_the_attempt_back_and_has_not_died() -> None:
    async def give_back(worker: FakeWorker, request: Any) -> AsyncIterator[Any]:
        yield accepted(worker)
        raise Unavailable("the attempt was given back: the worker drains")

    async with pair(give_back, wait_for_prefill) as both:
        failure = await both.failure(answer_of())
        assert failure.culprit is both.prefill and not failure.worker_died
        assert "given back" in failure.message


async def test_prefill_may_go_once_its_kv_has_been_handed_over() -> None:
    async def slow(worker: FakeWorker, request: Any) -> worker_pb2.DecodeRunResponse:
        worker.emit(request, *b"abc")
        worker.reached.set()
        await worker.may_go_on.wait()
        worker.emit(request, *b"def", position=len(PROMPT) + 3)
        return finished(request, 6)

    async with pair(accept_and_hang, slow) as both:
        answer = answer_of(6)
        running = asyncio.create_task(both.run(answer))
        await both.d.reached.wait()
        both.to_p.cut()
        await both.prefill.lost.wait()
        asyncio.get_running_loop().call_later(1.3 * attempts.VERDICT_S, both.d.may_go_on.set)
        await running
        assert bytes(answer.token_ids) == b"abcdef"


async def test_the_first_token_and_then_death() -> None:
    async def die(worker: FakeWorker, request: Any) -> AsyncIterator[Any]:
        yield accepted(worker)
        yield first_token(request, ord("a"))
        worker.reached.set()
        await worker.may_go_on.wait()

    async with pair(die, wait_for_prefill) as both:
        answer = answer_of()
        running = asyncio.create_task(both.failure(answer))
        await both.p.reached.wait()
        await answer.changed.wait()
        both.to_p.cut()
        failure = await running
        assert failure.culprit is both.prefill
        assert bytes(answer.token_ids) == b"a"


async def test_workers_are_told_the_clients_deadline() -> None:
    """So that they stop by themselves when the router cannot tell them to."""
    async with pair() as both:
        answer = answer_of(6)
        answer.deadline_s = time.monotonic() + 20.0
        await both.run(answer)
        for worker in (both.p, both.d):
            (allowed_s,) = worker.times_allowed_s
            assert allowed_s is not None and 18.0 < allowed_s < 23.0


async def test_workers_have_no_deadline_when_the_client_has_none() -> None:
    async with pair() as both:
        await both.run(answer_of(6))
        assert both.p.times_allowed_s == both.d.times_allowed_s == [None]


async def test_last_tokens_are_waited_for_while_their_stream_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under load the token stream lags the record by more than any fixed time, without anything being lost."""
    monkeypatch.setattr(attempts, "LAST_TOKENS_S", 0.3)

    async def decode(worker: FakeWorker, request: Any) -> worker_pb2.DecodeRunResponse:
        async def lag() -> None:
            other = worker_pb2.DecodeRunRequest(attempt=worker_pb2.Attempt(attempt_id=b"o" * 16))
            for _ in range(6):
                await asyncio.sleep(0.15)  # the stream brings tokens of others meanwhile
                worker.emit(other, 1)
            worker.emit(request, *b"abcdef")

        worker.lagging = asyncio.ensure_future(lag())  # type: ignore[attr-defined]
        return finished(request, 6)

    async with pair(decode=decode) as both:
        answer = answer_of(6)
        await both.run(answer, local=True)
        assert bytes(answer.token_ids) == b"abcdef"
