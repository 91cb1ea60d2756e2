"""Which sessions a draining worker names, in which order, and what it holds for them meanwhile."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from unittest import mock

import pytest
from pools import BLOCK_SIZE, make_holdings, make_limits, make_request

from decode_svc.scheduler import DecodeScheduler
from engine import session_handoff
from engine.holdings import Holdings
from engine.request import Priority, Sample, SessionTurn
from engine.sequence import DECODE_MOVES, Sequence, State
from engine.session_handoff import SessionHandoff
from kvstore.leases import LeaseTable

EPOCH = 7
LEASE_S = 5.0


class Worker:
    """A worker's accounts."""

    def __init__(self, num_blocks: int = 16, hands_off: bool = True) -> None:
        self.holdings = make_holdings(num_blocks)
        self.leases = LeaseTable(EPOCH, LEASE_S)
        self.num_returned = 0
        self.handoff = SessionHandoff(self.holdings, self.leases, "model", hands_off, self.note_return)

    def note_return(self) -> None:
        """Somebody may wait for the blocks that are cache again."""
        assert self.holdings.num_accounted == self.holdings.pool.num_used
        self.num_returned += 1

    def keep(self, key: bytes, tokens: range, fence: int = 1, tenant: str = "") -> None:
        """A turn ends well."""
        request = make_request(tokens, priority=Priority.HIGH, tenant=tenant, session=SessionTurn(key, fence, 60.0))
        sequence = Sequence(request, DECODE_MOVES, 0.0)
        assert self.holdings.admit(sequence, len(tokens), len(tokens) - 1)
        sequence.move(State.PREFILLING)
        sequence.num_computed = len(tokens)
        self.holdings.register_computed(sequence)
        sequence.move(State.FINISHED)
        self.holdings.free(sequence)

    def next(self) -> tuple[bytes, int]:
        """Session and tokens of the next one; nothing and 0 for none."""
        named = self.handoff.next(time.monotonic())
        self.last = named.attempt
        return named.attempt.session.session_key, named.keep_tokens

    def release(self, is_read: bool = True) -> None:
        """The reader of the last one has it all."""
        lease = self.leases.find(self.last.attempt_id, EPOCH)
        if is_read:
            self.leases.claim(lease)
            lease.num_sent_blocks = len(lease.block_table)
        assert self.leases.release(lease, lease.num_tokens) == is_read

    def check(self) -> None:
        self.holdings.pool.check(self.holdings.references())


def audit(holdings: Holdings) -> tuple[int, int]:
    return holdings.pool.num_used, holdings.num_accounted


def test_the_last_used_comes_first_and_each_comes_once() -> None:
    worker = Worker()
    for number, key in enumerate((b"a", b"b", b"c")):
        worker.keep(key, range(100 * number, 100 * number + 9), tenant="t")
    assert [worker.next() for _ in range(4)] == [(b"c", 8), (b"b", 8), (b"a", 8), (b"", 0)]
    assert audit(worker.holdings) == (6, 6) and len(worker.leases) == 3
    for lease in worker.leases:
        worker.leases.break_(lease)
    assert audit(worker.holdings) == (0, 0) and worker.holdings.pool.num_cached == 6
    assert worker.num_returned == 3
    worker.check()


def test_what_another_worker_is_told_is_the_session() -> None:
    worker = Worker()
    worker.keep(b"a", range(9), fence=4, tenant="t")
    worker.next()
    told = worker.last
    assert tuple(told.prompt_token_ids) == tuple(range(9)) and told.tenant == "t" and told.fingerprint == "model"
    assert (told.session.fence, told.priority) == (4, Priority.HIGH)
    assert 59_000 < told.session.ttl_ms <= 60_000 and len(told.attempt_id) == 16


def test_a_session_that_has_gone_on_is_named_again() -> None:
    worker = Worker()
    worker.keep(b"a", range(9))
    assert worker.next() == (b"a", 8)
    worker.keep(b"a", range(17), fence=2)
    assert [worker.next(), worker.next()] == [(b"a", 16), (b"", 0)]


def test_only_what_is_still_cached_is_lent() -> None:
    worker = Worker(num_blocks=6)
    worker.keep(b"a", range(9))
    worker.keep(b"b", range(100, 113))
    others = worker.holdings.pool.allocate(2)
    assert [worker.next(), worker.next()] == [(b"b", 12), (b"a", 4)]
    worker.holdings.pool.release(others)
    worker.check()


def test_a_session_without_a_block_or_that_was_ended_is_passed_over() -> None:
    worker = Worker()
    worker.keep(b"a", range(BLOCK_SIZE - 1))
    worker.keep(b"b", range(100, 109))
    worker.keep(b"c", range(200, 209))
    assert worker.next() == (b"c", 8)
    worker.holdings.sessions.forget(b"b")
    assert worker.next() == (b"", 0)


def test_lent_blocks_are_not_given_to_others_and_a_broken_lease_frees_them() -> None:
    worker = Worker(num_blocks=2)
    worker.keep(b"a", range(8))
    assert worker.next() == (b"a", 8)
    assert worker.holdings.pool.num_available == 0
    worker.handoff.give_up(worker.last.attempt_id)
    worker.handoff.give_up(worker.last.attempt_id)
    assert worker.holdings.pool.num_available == 2
    assert worker.next() == (b"", 0), "who could not have it once is not asked again"


def test_a_lease_that_nobody_reads_expires() -> None:
    worker = Worker()
    worker.keep(b"a", range(9))
    worker.next()
    assert not worker.leases.expired(time.monotonic() + LEASE_S - 0.1)
    (lease,) = worker.leases.expired(time.monotonic() + LEASE_S)
    worker.leases.break_(lease)
    assert audit(worker.holdings) == (0, 0)


async def test_a_drain_waits_until_all_was_read() -> None:
    worker = Worker()
    worker.keep(b"a", range(9))
    worker.keep(b"b", range(100, 109))
    worker.next()
    finishing = asyncio.create_task(worker.handoff.finish(None))
    await asyncio.sleep(0)
    worker.release()
    worker.next()
    await asyncio.sleep(0)
    assert not finishing.done()
    worker.release()
    async with asyncio.timeout(1.0):
        await finishing
    worker.check()


@pytest.mark.parametrize("hands_off", [True, False])
async def test_a_drain_that_nobody_helps_with_ends(hands_off: bool) -> None:
    worker = Worker(hands_off=hands_off)
    worker.keep(b"a", range(9))
    with mock.patch.object(session_handoff, "PATIENCE_S", 0.01 if hands_off else 60.0):
        async with asyncio.timeout(1.0):
            await worker.handoff.finish(None)
    assert hands_off or worker.next() == (b"", 0)


async def test_a_drain_ends_at_its_time() -> None:
    worker = Worker()
    worker.keep(b"a", range(9))
    worker.next()
    async with asyncio.timeout(1.0):
        await worker.handoff.finish(time.monotonic() + 0.01)
    assert len(worker.leases) == 1


# The worker that keeps one


def keeping(scheduler: DecodeScheduler, tokens: range, keep_tokens: int) -> Sequence:
    """An attempt that keeps a session's KV, just added."""
    request = make_request(tokens, priority=Priority.HIGH, session=SessionTurn(b"a", 3, 60.0))
    sequence = Sequence(replace(request, keep_tokens=keep_tokens), DECODE_MOVES, 0.0)
    scheduler.add(sequence, "draining")
    return sequence


def test_what_has_come_is_kept_for_the_session_and_nothing_else_is_held() -> None:
    holdings = make_holdings(8)
    scheduler = DecodeScheduler(holdings, make_limits(), 64)
    sequence = keeping(scheduler, range(11), 8)
    assert not scheduler.plan(0.0).slices and scheduler.take_fetches() == [sequence]
    assert sequence.state is State.FETCHING
    scheduler.kept(sequence)
    kept = holdings.sessions.find(b"a")
    assert sequence.state is State.FINISHED and kept is not None
    assert (kept.fence, len(kept.block_hashes), holdings.pool.num_used, holdings.pool.num_cached) == (3, 2, 0, 2)
    probe = Sequence(make_request(range(11)), DECODE_MOVES, 0.0)
    assert len(holdings.cached_prefix(probe, 11)) == 2


def test_nobody_gives_way_to_a_session_that_moves() -> None:
    """Not even a lower class; and it does not stand in the way of what comes behind it."""
    holdings = make_holdings(4)
    scheduler = DecodeScheduler(holdings, make_limits(), 64)
    prompts = (range(6), 2), (range(100, 101), 1)
    running = [
        Sequence(make_request(tokens, priority=Priority.LOW, max_tokens=most), DECODE_MOVES, 0.0)
        for tokens, most in prompts
    ]
    scheduler.add(running[0], None)
    plan = scheduler.plan(0.0)
    scheduler.commit(plan, [Sample(5)], 0.0)
    moving = keeping(scheduler, range(200, 211), 8)
    scheduler.add(running[1], None)
    scheduler.plan(1.0)
    assert moving.state is State.EVICTED
    assert [sequence.state for sequence in running] == [State.DECODING, State.PREFILLING]
