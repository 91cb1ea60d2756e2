"""Where a new attempt goes, and who is left alone: what failed attempts teach a request, and all of them together."""

from __future__ import annotations

from typing import Any

import pytest
from fake_workers import DRAINING, PROMPT, FakeWorker, answer_of, good_decode
from test_dispatch import InOrder, d, failing, p, system

from protos import worker_pb2
from router import breakers, recovery
from router.links import Incarnation
from router.policies.base import Wanted
from runtime.errors import Aborted, Unavailable


class InTurn(InOrder):
    """Each prefill worker in turn."""

    def __init__(self) -> None:
        self.num_picked = 0

    def pick_prefill(self, candidates: Any, wanted: Wanted) -> Incarnation:
        self.num_picked += 1
        return sorted(candidates, key=lambda worker: worker.worker_id)[(self.num_picked - 1) % len(candidates)]


@pytest.mark.parametrize(("num_queued_tokens", "second"), [(0, "p1"), (len(PROMPT), "p1"), (1000, "p2")])
async def test_a_new_attempt_goes_where_its_kv_is_unless_that_takes_longer(num_queued_tokens: int, second: str) -> None:
    prefills = [p("p1"), p("p2")]
    bad, good = d("d1", failing(99, Aborted("the step failed"), num_tokens=2)), d("d2")
    async with system(*prefills, bad, good) as s:
        s.dispatcher._policy = InTurn()
        prefills[0].load.num_queued_tokens = num_queued_tokens
        prefills[0].report()
        await s.until(lambda _: s.named("p1").load.num_queued_tokens == num_queued_tokens)
        finish, _ = await s.serve(answer_of(6))
        assert len(prefills[0].prefills) + len(prefills[1].prefills) == 2
        assert (finish.served_by.prefill_worker_id, finish.served_by.num_attempts) == (second, 2)


async def test_what_fails_several_requests_is_left_alone_while_others_can_serve() -> None:
    bad, good = d("d1", failing(99, Aborted("the step failed"))), d("d2")
    async with system(bad, good) as s:
        for number in range(8):
            await s.serve(answer_of(request_id=f"request {number}"))
        assert len(bad.decodes) == breakers.NUM_REQUESTS


async def test_a_request_that_fails_everywhere_closes_no_worker_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the cause; nobody else should notice."""
    monkeypatch.setattr(recovery, "MAX_BACKOFF_S", 0.02)
    workers = [d("d1"), d("d2")]

    async def fail(worker: FakeWorker, request: Any) -> Any:
        if request.attempt.request_id == "poison":
            raise Aborted("the step failed")
        return await good_decode(worker, request)

    for worker in workers:
        worker.decode_script = fail
    async with system(*workers) as s:
        for _ in range(3):
            with pytest.raises(Unavailable):
                await s.serve(answer_of(request_id="poison"))
        assert (await s.serve(answer_of()))[1].worker_id == "d1"


async def test_kv_that_does_not_get_across_closes_the_pair_alone() -> None:
    """Both ends are well, and are used with others."""

    async def lose(worker: FakeWorker, request: Any) -> Any:
        if request.HasField("source") and request.source.worker_id == "p1":
            return worker_pb2.DecodeRunResponse(outcome=worker_pb2.OUTCOME_KV_LOST, detail="cut off")
        return await good_decode(worker, request)

    prefills, cut_off = [p("p1"), p("p2")], d("d1", lose)
    async with system(*prefills, cut_off, d("d2")) as s:
        for number in range(6):
            finish, holder = await s.serve(answer_of(request_id=f"request {number}"))
            assert (finish.served_by.prefill_worker_id, holder.worker_id) == ("p2", "d1")
        assert len(prefills[0].prefills) == breakers.NUM_REQUESTS
        cut_off.state = DRAINING
        cut_off.report()
        await s.until(lambda fleet: len(fleet.usable(decodes=True)) == 1)
        finish, holder = await s.serve(answer_of())
        assert (finish.served_by.prefill_worker_id, holder.worker_id) == ("p1", "d2")


async def test_a_worker_that_is_lost_and_found_again_in_the_same_life_has_not_died() -> None:
    """Its reports were late, or it was cut off: the request is not the cause, however often that happens."""
    only = d()
    async with system(only) as s:

        async def vanish(worker: FakeWorker, request: Any) -> Any:
            if len(worker.decodes) > recovery.MAX_DEATHS + 1:
                return await good_decode(worker, request)
            s.wires[0].cut()
            await worker.may_go_on.wait()

        only.decode_script = vanish
        finish, _ = await s.serve(answer_of())
        assert finish.served_by.num_attempts == recovery.MAX_DEATHS + 2
