"""Where the turn of a session is served, and who computes what is new in it."""

from __future__ import annotations

from typing import Any

import pytest
from dispatching import LONG, d, failing, p, system, turn_of
from fake_workers import FakeWorker, answer_of, good_decode

from protos import worker_pb2
from runtime.errors import Aborted


async def test_a_session_goes_to_its_holder() -> None:
    workers = [d("d1"), d("d2")]
    async with system(*workers) as s:
        assert (await s.serve(answer_of(), turn_of("d2", workers[1].epoch)))[1].worker_id == "d2"
        assert (await s.serve(answer_of(), turn_of("d2", workers[1].epoch + 1)))[1].worker_id == "d1"
        assert (await s.serve(answer_of(), turn_of("d9", 1)))[1].worker_id == "d1"
        told = workers[1].decodes[0].attempt.session
        assert (told.session_key, told.fence, told.ttl_ms) == (b"k" * 16, 2, 60_000)


async def test_a_holder_that_failed_is_avoided() -> None:
    bad, good = d("d1", failing(99, Aborted("the step failed"), num_tokens=2)), d("d2")
    async with system(bad, good) as s:
        answer = answer_of(6)
        assert (await s.serve(answer, turn_of("d1", bad.epoch)))[1].worker_id == "d2"
        assert bytes(answer.token_ids) == b"abcdef"


@pytest.mark.parametrize(
    ("limit", "said_before", "num_held", "is_local"),
    [
        (8, LONG, 32, True),
        (7, LONG, 32, False),
        (8, (*LONG[:31], 99, *LONG[32:]), 32, False),
        (9, (*LONG[:31], 99, *LONG[32:]), 32, True),
        (8, LONG[:20], 16, False),
        (0, LONG, 32, False),
    ],
)
async def test_a_short_new_part_is_prefilled_by_the_holder(
    limit: int, said_before: tuple[int, ...], num_held: int, is_local: bool
) -> None:
    """What is new is what the holder does not have: whole blocks up to the first token that differs."""
    prefill, holder = p(), d("d2")
    async with system(prefill, d("d1"), holder, local_turn_max_tokens=limit) as s:
        turn = turn_of("d2", holder.epoch, said_before, num_held)
        await s.serve(answer_of(prompt_token_ids=LONG), turn)
        (request,) = holder.decodes
        assert request.HasField("source") != is_local and len(prefill.prefills) == (not is_local)
        assert request.max_local_tokens == (limit + 16 if is_local else 0)


async def test_another_worker_than_the_holder_has_nothing() -> None:
    prefill, other = p(), d("d1")
    async with system(prefill, other, local_turn_max_tokens=8) as s:
        await s.serve(answer_of(prompt_token_ids=LONG), turn_of("d2", 1, LONG, 32))
        assert other.decodes[0].HasField("source")


async def test_a_holder_that_has_given_up_the_kv_gets_it_from_prefill() -> None:
    """It is not the worker's fault: the second attempt goes to the same one."""

    async def given_up(worker: FakeWorker, request: Any) -> Any:
        if request.max_local_tokens:
            return worker_pb2.DecodeRunResponse(outcome=worker_pb2.OUTCOME_KV_LOST, detail="needed for others")
        return await good_decode(worker, request)

    prefill, holder = p(), d("d2", given_up)
    async with system(prefill, d("d1"), holder, local_turn_max_tokens=8) as s:
        finish, decode = await s.serve(answer_of(prompt_token_ids=LONG), turn_of("d2", holder.epoch, LONG, 32))
        assert decode.worker_id == "d2" and finish.served_by.num_attempts == 2
        assert finish.served_by.prefill_worker_id == "p"
