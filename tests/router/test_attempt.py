"""One attempt against workers that misbehave, over real sockets: who is blamed, and that nothing stays open."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from fake_workers import (
    DECODE,
    LIMIT_S,
    PREFILL,
    PROMPT,
    FakeWorker,
    accepted,
    answer_of,
    attempt_of,
    finished,
    first_token,
    good_decode,
    linked,
    next_tokens,
)
from wire import Wire

from protos import worker_pb2
from router import attempts
from router.answer import Answer
from router.attempts import Attempt, AttemptFailed, Served
from router.links import Incarnation
from runtime.errors import Aborted, FailedPrecondition, InvalidArgument, Unavailable


class Pair:
    """A prefill and a decode worker, and the wires to them."""

    def __init__(self, p: FakeWorker, d: FakeWorker) -> None:
        self.p, self.d = p, d
        self.prefill: Incarnation
        self.decode: Incarnation
        self.to_p: Wire
        self.to_d: Wire

    def attempt(self, answer: Answer, local: bool = False) -> Attempt:
        return attempt_of(answer, self.decode, None if local else self.prefill)

    async def run(self, answer: Answer, local: bool = False) -> Served:
        async with asyncio.timeout(LIMIT_S):
            return await self.attempt(answer, local).run()

    async def failure(self, answer: Answer, local: bool = False) -> AttemptFailed:
        with pytest.raises(AttemptFailed) as caught:
            await self.run(answer, local)
        return caught.value


@contextlib.asynccontextmanager
async def pair(prefill: Any = None, decode: Any = None, silence_s: float = 2.0) -> AsyncIterator[Pair]:
    """The workers with these scripts. At the end none of their calls is open and no load is left."""
    p, d = FakeWorker(PREFILL, "p", prefill=prefill), FakeWorker(DECODE, "d", decode=decode)
    both = Pair(p, d)
    async with linked(p, silence_s) as (both.prefill, both.to_p), linked(d, silence_s) as (both.decode, both.to_d):
        yield both
        assert (both.decode.num_assigned, both.prefill.num_assigned_tokens) == (0, 0)
        async with asyncio.timeout(LIMIT_S):
            await p.idle.wait()
            await d.idle.wait()


@pytest.fixture(autouse=True)
def no_forgotten_errors(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Every error that a task ended with was looked at."""
    yield
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR and record.name == "asyncio"]


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


async def wait_for_prefill(worker: FakeWorker, request: Any) -> worker_pb2.DecodeRunResponse:
    """A decode worker whose fetch hangs."""
    worker.reached.set()
    await worker.may_go_on.wait()
    return await good_decode(worker, request)


async def accept_and_hang(worker: FakeWorker, request: Any) -> AsyncIterator[Any]:
    yield accepted(worker)
    worker.reached.set()
    await worker.may_go_on.wait()


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
        await answer.progressed.wait()
        both.to_p.cut()
        failure = await running
        assert failure.culprit is both.prefill
        assert bytes(answer.token_ids) == b"a"


# Decode


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
            answer.progressed.clear()
            await answer.progressed.wait()
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
        await answer.progressed.wait()
        assert (both.decode.num_assigned, both.prefill.num_assigned_tokens) == (1, 0)
        both.d.may_go_on.set()
        await running
