"""Leases: what is attested, and that nothing else ever is."""

from __future__ import annotations

import itertools

import pytest

from kvstore.leases import Lease, LeaseState, LeaseTable
from runtime.errors import AlreadyExists, FailedPrecondition, NotFound

ID, EPOCH, TTL_S = b"a" * 16, 7, 10.0


class Table:
    """A table with one lease of 9 tokens in 3 blocks, and what its callbacks were told."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.table = LeaseTable(EPOCH, TTL_S)
        self.lease: Lease = self.table.open(
            ID, 9, lambda: self.calls.append("credit"), lambda: self.calls.append("end")
        )

    def fill(self, now_s: float = 100.0) -> None:
        self.table.progress(self.lease, [5, 6, 7], 4)
        self.table.complete(self.lease, "token", now_s)


@pytest.mark.parametrize("claimed, complete, sent, counted", list(itertools.product([True, False], repeat=4)))
def test_intact_only_when_claimed_complete_sent_and_counted(claimed, complete, sent, counted):
    t = Table()
    if claimed:
        t.table.claim(t.lease)
    t.table.progress(t.lease, [5, 6, 7], 8)
    if complete:
        t.table.complete(t.lease, "token", 100.0)
    t.lease.num_sent_blocks = 3 if sent else 2
    intact = t.table.release(t.lease, 9 if counted else 8)
    assert intact == (claimed and complete and sent and counted)
    assert t.lease.state is (LeaseState.RELEASED if intact else LeaseState.BROKEN)
    assert t.calls.count("end") == 1 and len(t.table) == 0
    with pytest.raises(NotFound):
        t.table.find(ID, EPOCH)


def test_broken_never_becomes_intact():
    t = Table()
    t.table.claim(t.lease)
    t.fill()
    t.lease.num_sent_blocks = 3
    t.table.break_(t.lease)
    assert t.table.release(t.lease, 9) is False
    assert t.lease.state is LeaseState.BROKEN


def test_released_is_not_broken_afterwards():
    t = Table()
    t.table.claim(t.lease)
    t.fill()
    t.lease.num_sent_blocks = 3
    assert t.table.release(t.lease, 9)
    t.table.break_(t.lease)
    assert t.lease.state is LeaseState.RELEASED
    assert t.calls == ["credit", "end"]


def test_second_claim_is_refused_and_gives_no_credit():
    t = Table()
    t.table.claim(t.lease)
    with pytest.raises(AlreadyExists):
        t.table.claim(t.lease)
    assert t.calls == ["credit"]


def test_one_lease_an_attempt():
    t = Table()
    with pytest.raises(AlreadyExists):
        t.table.open(ID, 9, lambda: None, lambda: None)
    assert t.table.find(ID, EPOCH) is t.lease


def test_another_epoch_is_refused_before_the_attempt_is_looked_for():
    t = Table()
    with pytest.raises(FailedPrecondition, match="7, got 8"):
        t.table.find(b"unknown" + b"-" * 9, 8)


def test_readable_blocks_are_whole_until_the_end():
    t = Table()
    assert t.lease.num_ready_blocks(4) == 0
    for num_tokens, num_blocks in ((3, 0), (4, 1), (8, 2)):
        t.table.progress(t.lease, [5, 6, 7], num_tokens)
        assert t.lease.num_ready_blocks(4) == num_blocks
    t.table.complete(t.lease, "token", 0.0)
    assert t.lease.num_ready_blocks(4) == 3


def test_expires_when_complete_and_silent():
    t = Table()
    t.table.touch(t.lease, 0.0)
    assert t.table.expired(1e9) == [], "a lease that is still being filled does not expire"
    t.fill(now_s=100.0)
    assert t.table.expired(109.9) == []
    t.table.touch(t.lease, 105.0)
    assert t.table.expired(110.0) == [], "a sign of life starts the time again"
    assert t.table.expired(115.0) == [t.lease]
    for _ in range(2):
        t.table.expire(t.lease)
    assert t.table.expired(1e9) == []
    assert (t.table.num_opened, t.table.num_expired, t.table.endings) == (1, 1, {LeaseState.BROKEN: 1})
