"""Sessions at one router, over stores and workers that say what the test wants: order, the right record, the end."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
from fake_workers import DECODE, LIMIT_S, FakeWorker, fleet_over

import router.sessions
from kvstore.hashing import session_key, unpack_token_ids
from kvstore.metadata.base import SessionRecord, StoreUnavailable
from kvstore.metadata.memory import Store
from router.links import Incarnation
from router.session_holders import SessionHolders, record_at
from router.sessions import Sessions
from runtime.errors import SessionBusy, SessionLost

BLOCK = 16
KEY = session_key("", "s")


class FlakyStore(Store):
    """A store that is away while `is_away`."""

    def __init__(self) -> None:
        super().__init__("memory://", 1.0)
        self.is_away = False
        self.num_calls = 0
        self.written = asyncio.Event()

    def _look(self) -> None:
        self.num_calls += 1
        if self.is_away:
            self.failed_s = router.sessions.time.monotonic()
            raise StoreUnavailable("away")

    async def read_session(self, key: bytes) -> SessionRecord | None:
        self._look()
        return await super().read_session(key)

    async def write_session(self, record: SessionRecord, expected_fence: int, ttl_s: float) -> bool:
        self._look()
        is_written = await super().write_session(record, expected_fence, ttl_s)
        if is_written:
            self.written.set()
        return is_written

    def flush(self) -> None:
        """Forgets everything."""
        self._sessions.clear()


class Holders(SessionHolders):
    """Workers that remember `kept`."""

    def __init__(self) -> None:
        self.kept: SessionRecord | None = None
        self.gone: set[str] = set()
        """Holders that take no requests."""
        self.num_asked = 0
        self.forgotten: list[bytes] = []

    def is_served(self, record: SessionRecord) -> bool:
        return record.holder not in self.gone

    async def find(self, tenant: str, key: bytes) -> list[SessionRecord]:
        self.num_asked += 1
        return [] if self.kept is None else [self.kept]

    async def forget(self, key: bytes) -> bool:
        self.forgotten.append(key)
        existed, self.kept = self.kept is not None, None
        return existed


@pytest.fixture
async def holder() -> Any:
    async with fleet_over(FakeWorker(DECODE, "holder")) as seen:
        await seen.until(lambda fleet: fleet.is_ready)
        yield seen.named("holder")


@pytest.fixture
def store() -> FlakyStore:
    return FlakyStore()


def sessions_over(store: Store | None, holders: Holders | None = None) -> Sessions:
    return Sessions(store, holders or Holders(), 60)


async def take_turn(sessions: Sessions, tokens: list[int], holder: Incarnation, **append: Any) -> list[int]:
    """A turn that ends well; answers what was before it."""
    async with sessions.turn("", "s", **append) as turn:
        assert turn is not None
        before = list(turn.previous_token_ids())
        await sessions.finish(turn, before + tokens if turn.is_append else tokens, holder)
    return before


async def append(sessions: Sessions, tokens: list[int], holder: Incarnation, num_tokens: int | None = None) -> Any:
    return await take_turn(sessions, tokens, holder, is_append=True, num_tokens=num_tokens)


async def test_a_record_says_what_the_holder_keeps(store: FlakyStore, holder: Incarnation) -> None:
    tokens = list(range(2 * BLOCK + 5))
    await take_turn(sessions_over(store), tokens, holder)
    record = await store.read_session(KEY)
    assert record is not None
    assert (record.holder, record.epoch) == ("holder", holder.description.epoch)
    assert list(unpack_token_ids(record.token_ids)) == tokens
    assert (record.num_tokens, record.fence) == (2 * BLOCK, 1) and record.tail_hash
    assert await store.read_session(session_key("tenant", "s")) is None


async def test_the_last_token_is_not_kept_its_kv_was_never_computed(holder: Incarnation) -> None:
    assert record_at(holder, "", KEY, range(2 * BLOCK), 1).num_tokens == BLOCK
    assert record_at(holder, "", KEY, range(2 * BLOCK + 1), 1).num_tokens == 2 * BLOCK


async def test_turns_go_on_from_one_another_whichever_router_has_them(store: FlakyStore, holder: Incarnation) -> None:
    one, other = sessions_over(store), sessions_over(store)
    assert await take_turn(one, [1, 2], holder) == []
    assert await append(other, [3], holder) == [1, 2]
    assert await append(one, [4], holder, num_tokens=3) == [1, 2, 3]
    assert await append(other, [5], holder) == [1, 2, 3, 4]


async def test_a_request_without_a_session_is_no_turn(store: FlakyStore) -> None:
    async with sessions_over(store).turn("", "") as turn:
        assert turn is None
    assert store.num_calls == 0


# Losses


async def test_an_unknown_session_is_lost_and_counted(store: FlakyStore, holder: Incarnation) -> None:
    sessions = sessions_over(store)
    with pytest.raises(SessionLost, match="nothing is known of 's'"):
        await append(sessions, [1], holder)
    assert sessions.num_lost == 1


async def test_a_session_of_another_length_than_the_client_knows_is_lost(
    store: FlakyStore, holder: Incarnation
) -> None:
    sessions = sessions_over(store)
    await take_turn(sessions, [1, 2], holder)
    with pytest.raises(SessionLost, match="session_tokens: session 's' has 2, got 3"):
        await append(sessions, [1], holder, num_tokens=3)
    assert await append(sessions, [3], holder, num_tokens=2) == [1, 2]


@pytest.mark.parametrize("loss", ["flushed", "away", "none"])
async def test_without_the_store_memory_serves(loss: str, store: FlakyStore, holder: Incarnation) -> None:
    sessions = sessions_over(None if loss == "none" else store)
    await take_turn(sessions, [1, 2], holder)
    if loss == "flushed":
        store.flush()
    store.is_away = loss == "away"
    assert await append(sessions, [3], holder) == [1, 2]


async def test_without_store_and_memory_the_workers_are_asked(store: FlakyStore, holder: Incarnation) -> None:
    holders = Holders()
    holders.kept = record_at(holder, "", KEY, [1, 2], 5)
    sessions = sessions_over(store, holders)
    assert await append(sessions, [3], holder) == [1, 2]
    record = await store.read_session(KEY)
    assert record is not None and record.fence == 6


async def test_memory_that_another_router_has_gone_beyond_is_not_used(store: FlakyStore, holder: Incarnation) -> None:
    """The worker that had the later turn says so."""
    holders = Holders()
    behind, ahead = sessions_over(store, holders), sessions_over(store, holders)
    await take_turn(behind, [1], holder)
    await append(ahead, [2], holder)
    store.flush()
    holders.kept = record_at(holder, "", KEY, [1, 2], 2)
    assert await append(behind, [3], holder) == [1, 2]


async def test_a_store_that_was_away_may_lack_a_turn(store: FlakyStore, holder: Incarnation) -> None:
    """What one router could not write, another must not pass over just because an older record is there."""
    holders = Holders()
    one, other = sessions_over(store, holders), sessions_over(store, holders)
    await take_turn(one, [1], holder)
    store.is_away = True
    await append(one, [2], holder)
    holders.kept = record_at(holder, "", KEY, [1, 2], 2)
    store.is_away = False
    with mock.patch.object(router.sessions, "AWAY_S", 0.0):
        assert await append(other, [3], holder) == [1, 2]
    num_asked = holders.num_asked
    store.failed_s -= router.sessions.SETTLE_S
    assert await append(other, [4], holder) == [1, 2, 3]
    assert holders.num_asked == num_asked, "the store is believed again"


@pytest.mark.parametrize(
    ("tokens", "fence", "holder_is"),
    [([1, 2], 1, "elsewhere"), ([1, 2, 3], 2, "elsewhere"), ([9, 9], 1, "holder"), ([1], 0, "holder")],
    ids=["the same", "a later turn", "another conversation", "an earlier turn"],
)
async def test_where_the_holder_does_not_serve_workers_are_asked_who_has_the_session(
    tokens: list[int], fence: int, holder_is: str, store: FlakyStore, holder: Incarnation
) -> None:
    holders = Holders()
    sessions = sessions_over(store, holders)
    await take_turn(sessions, [1, 2], holder)
    async with sessions.turn("", "s") as turn:
        assert turn is not None and turn.is_held_by(holder) and holders.num_asked == 1, "at the first turn alone"
    holders.gone.add("holder")
    holders.kept = replace(record_at(holder, "", KEY, tokens, fence), holder="elsewhere")
    async with sessions.turn("", "s") as turn:
        assert turn is not None and turn.previous is not None and turn.previous.holder == holder_is
        assert list(turn.previous_token_ids()) == (tokens if holder_is == "elsewhere" else [1, 2])
        assert turn.fence == max(fence, 1) + 1


async def test_nobody_is_asked_for_a_session_that_was_ended(store: FlakyStore, holder: Incarnation) -> None:
    holders = Holders()
    sessions = sessions_over(store, holders)
    await take_turn(sessions, [1, 2], holder)
    await sessions.end("", "s")
    holders.gone.add("holder")
    async with sessions.turn("", "s") as turn:
        assert turn is not None and turn.previous is None and holders.num_asked == 1


async def test_what_the_store_could_not_take_it_gets_once_it_is_back(store: FlakyStore, holder: Incarnation) -> None:
    sessions = sessions_over(store)
    await take_turn(sessions, [1], holder)
    store.is_away = True
    await append(sessions, [2], holder)
    await saved(sessions, store)
    record = await store.read_session(KEY)
    assert record is not None and unpack_token_ids(record.token_ids) == (1, 2)


async def saved(sessions: Sessions, store: FlakyStore) -> None:
    """The store is back, and has got what it lacked."""
    store.is_away = False
    store.written.clear()
    with mock.patch.object(router.sessions, "AWAY_S", 0.0):
        task = asyncio.create_task(sessions.run())
        async with asyncio.timeout(LIMIT_S):
            await store.written.wait()
        task.cancel()
        await asyncio.wait([task])


async def test_a_store_that_failed_is_left_alone_for_a_moment(store: FlakyStore, holder: Incarnation) -> None:
    store.is_away = True
    sessions = sessions_over(store)
    for number in range(5):
        await take_turn(sessions, [number], holder)
    assert store.num_calls == 1


# Order


async def test_a_turn_waits_for_the_one_before_it(store: FlakyStore, holder: Incarnation) -> None:
    sessions = sessions_over(store)
    await take_turn(sessions, [1], holder)
    async with sessions.turn("", "s", True) as first:
        second = asyncio.create_task(append(sessions, [3], holder))
        await asyncio.sleep(0)
        with pytest.raises(SessionBusy, match="one that waits"):
            await append(sessions, [4], holder)
        assert first is not None and not second.done()
        await sessions.finish(first, [1, 2], holder)
    async with asyncio.timeout(LIMIT_S):
        assert await second == [1, 2]


async def test_a_turn_that_fails_lets_the_next_one_go_on_from_the_one_before(
    store: FlakyStore, holder: Incarnation
) -> None:
    sessions = sessions_over(store)
    await take_turn(sessions, [1], holder)
    with pytest.raises(ZeroDivisionError):
        async with sessions.turn("", "s", True):
            raise ZeroDivisionError
    assert await append(sessions, [2], holder) == [1]


async def test_waiting_has_an_end(store: FlakyStore, holder: Incarnation) -> None:
    sessions = sessions_over(store)
    with mock.patch.object(router.sessions, "TURN_WAIT_S", 0.01):
        async with sessions.turn("", "s"):
            with pytest.raises(SessionBusy, match=r"still runs after 0\.01 s"):
                await take_turn(sessions, [1], holder)
    assert await take_turn(sessions, [1], holder) == []


async def test_sessions_do_not_wait_for_one_another(store: FlakyStore, holder: Incarnation) -> None:
    sessions = sessions_over(store)
    async with sessions.turn("", "other"), sessions.turn("tenant", "s"):
        assert await take_turn(sessions, [1], holder) == []


async def test_of_two_routers_turns_at_once_the_second_to_end_fails(store: FlakyStore, holder: Incarnation) -> None:
    one, other = sessions_over(store), sessions_over(store)
    await take_turn(one, [1], holder)
    async with one.turn("", "s", True) as mine, other.turn("", "s", True) as theirs:
        assert mine is not None and theirs is not None
        await other.finish(theirs, [1, 3], holder)
        with pytest.raises(SessionBusy, match="another router appended"):
            await one.finish(mine, [1, 2], holder)
    assert await append(one, [4], holder) == [1, 3]


async def test_a_whole_conversation_answered_at_the_same_time_is_only_not_remembered(
    store: FlakyStore, holder: Incarnation
) -> None:
    one, other = sessions_over(store), sessions_over(store)
    async with one.turn("", "s") as mine, other.turn("", "s") as theirs:
        assert mine is not None and theirs is not None
        await other.finish(theirs, [3], holder)
        await one.finish(mine, [2], holder)
    assert await append(one, [4], holder) == [3]


async def test_a_flush_while_a_turn_runs_is_no_conflict(store: FlakyStore, holder: Incarnation) -> None:
    sessions = sessions_over(store)
    await take_turn(sessions, [1], holder)
    async with sessions.turn("", "s", True) as turn:
        assert turn is not None
        store.flush()
        await sessions.finish(turn, [1, 2], holder)
    record = await store.read_session(KEY)
    assert record is not None and record.fence == 2


# The end


async def test_a_session_that_ended_is_known_to_nobody(store: FlakyStore, holder: Incarnation) -> None:
    holders = Holders()
    one, other = sessions_over(store, holders), sessions_over(store, holders)
    await take_turn(one, [1], holder)
    await append(other, [2], holder)
    assert await one.end("", "s") and holders.forgotten == [KEY]
    assert not await one.end("", "s") and not await other.end("", "s")
    for sessions in (one, other):
        with pytest.raises(SessionLost, match="was ended"):
            await append(sessions, [3], holder)
    assert await take_turn(other, [7], holder) == []
    assert await append(one, [8], holder) == [7]


async def test_ending_what_only_a_worker_knows(holder: Incarnation) -> None:
    holders = Holders()
    holders.kept = record_at(holder, "", KEY, [1], 1)
    assert await sessions_over(None, holders).end("", "s")


@pytest.mark.parametrize("where", ["here", "elsewhere"])
async def test_a_turn_that_runs_does_not_bring_an_ended_session_back(
    where: str, store: FlakyStore, holder: Incarnation
) -> None:
    holders = Holders()
    one, other = sessions_over(store, holders), sessions_over(store, holders)
    await take_turn(one, [1], holder)
    async with one.turn("", "s", True) as turn:
        assert turn is not None
        assert await (one if where == "here" else other).end("", "s")
        holders.kept = record_at(holder, "", KEY, [1, 2], turn.fence)
        await one.finish(turn, [1, 2], holder)
    assert holders.kept is None, "its worker had kept the turn"
    with pytest.raises(SessionLost):
        await append(other, [3], holder)


async def test_the_first_turn_of_a_session_that_is_ended_meanwhile_is_forgotten(holder: Incarnation) -> None:
    holders = Holders()
    sessions = sessions_over(None, holders)
    async with sessions.turn("", "s") as turn:
        assert turn is not None
        assert not await sessions.end("", "s")
        holders.kept = record_at(holder, "", KEY, [1], 1)
        await sessions.finish(turn, [1], holder)
    assert not await sessions.end("", "s")


async def test_a_session_ended_while_the_store_is_away_stays_ended(store: FlakyStore, holder: Incarnation) -> None:
    one, other = sessions_over(store), sessions_over(store)
    await take_turn(one, [1], holder)
    store.is_away = True
    assert await one.end("", "s")
    await saved(one, store)
    with mock.patch.object(router.sessions, "AWAY_S", 0.0), pytest.raises(SessionLost):
        await append(other, [2], holder)
