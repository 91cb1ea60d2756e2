"""The checker finds what it is for: each test breaks one thing in the product, and some run must tell."""

from __future__ import annotations

import pytest
from every_order import Follower, every_order
from injected_faults import TIGHT, Setting, late_jobs, single_faults
from playing import Play
from whole_system import Ask, Size, Violation

import engine.kv_reader
import engine.worker_service
from engine.holdings import Holdings
from engine.sequence import Sequence
from prefill_svc.service import PrefillService
from protos import worker_pb2
from router.answer import Answer
from router.attempts import Attempt

ONE_PAIR = Setting("one and one", size=Size(num_prefill=1, num_decode=1))


def test_a_token_that_is_taken_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    add = Answer.add

    def without_looking(answer: Answer, token: worker_pb2.DecodedToken) -> None:
        # Prefill and decode both report the first token. With worse than wrong probes no worker would be used at all.
        if not answer.request.request_id.startswith("probe"):
            token.position = answer.next_position
        add(answer, token)

    monkeypatch.setattr(Answer, "add", without_looking)
    with pytest.raises(Violation, match="the client got"):
        ONE_PAIR.play().run()


def test_last_tokens_that_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async def at_once(attempt: Attempt, num_tokens: int) -> None:
        """The record is taken for the end of the tokens."""

    monkeypatch.setattr(Attempt, "_all_tokens", at_once)
    asks, size = [Ask()], Size(num_prefill=0, num_decode=1)

    def play(follower: Follower) -> Play:
        return Play(asks, follower, size=size)

    with pytest.raises(Violation, match="the answer ended with"):
        every_order(play, 100)


def test_a_lease_that_is_not_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrefillService, "_on_end", lambda *_: None)
    assert "1 leases" in _first_violation("the client goes", "prefill-0 gives all back")


def test_blocks_that_are_not_freed_after_their_last_pin(monkeypatch: pytest.MonkeyPatch) -> None:
    def unpin(holdings: Holdings, sequence: Sequence) -> None:
        sequence.num_pins -= 1

    monkeypatch.setattr(Holdings, "unpin", unpin)
    assert "blocks used" in _first_violation("the client goes")


def test_blocks_that_are_freed_while_a_thread_still_writes_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def free(holdings: Holdings, sequence: Sequence) -> None:
        if sequence in holdings._holders:
            holdings._holders.remove(sequence)
            holdings.pool.release(sequence.block_table)
            sequence.block_table = []

    monkeypatch.setattr(Holdings, "free", free)
    with pytest.raises(Violation, match="the client got"):
        for fault in late_jobs(TIGHT, step=4):
            TIGHT.play(fault).run()


def test_a_prompt_that_counts_as_load_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Attempt, "_prompt_is_computed", lambda _: None)
    with pytest.raises(Violation, match="assigned to prefill-0"):
        ONE_PAIR.play().run()


def test_kv_that_is_believed_without_a_checksum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.kv_reader, "add_to_checksum", lambda *_: 0)
    monkeypatch.setattr(engine.worker_service, "add_to_checksum", lambda *_: 0)
    assert "the client got" in _first_violation("a bit of KV flips")


def _first_violation(*names: str) -> str:
    """What the first run with one of these faults says that does not pass."""
    try:
        for fault in single_faults(ONE_PAIR):
            if fault.name in names:
                ONE_PAIR.play(fault).run()
    except Violation as violation:
        return str(violation)
    raise AssertionError(f"nothing was found with {names}")
