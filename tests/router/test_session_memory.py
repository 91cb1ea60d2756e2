"""The router's own copy of sessions: bounded, ageing, and it knows what the store lacks."""

from __future__ import annotations

from kvstore.metadata.base import SessionRecord
from router.session_memory import SessionMemory

TTL_S = 60.0


def record(key: bytes, num_tokens: int = 1, fence: int = 1) -> SessionRecord:
    return SessionRecord(key, bytes(4 * num_tokens), "d0", 1, 0, b"", (), fence)


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_the_last_record_counts() -> None:
    memory = SessionMemory(TTL_S)
    memory.put(record(b"a"), is_saved=False)
    memory.put(record(b"a", fence=2), is_saved=True)
    assert memory.get(b"a") == record(b"a", fence=2) and len(memory) == 1
    assert memory.unsaved() == [] and memory.get(b"b") is None


def test_what_the_store_lacks_is_known_until_it_is_saved() -> None:
    memory = SessionMemory(TTL_S)
    memory.put(record(b"a"), is_saved=False)
    memory.put(record(b"b"), is_saved=False)
    assert memory.unsaved() == [record(b"a"), record(b"b")]
    memory.put(record(b"a"), is_saved=True)
    assert memory.unsaved() == [record(b"b")]


def test_records_run_out_and_every_turn_begins_their_time_anew() -> None:
    clock = Clock()
    memory = SessionMemory(TTL_S, clock=clock)
    memory.put(record(b"a"), is_saved=False)
    memory.put(record(b"b"), is_saved=False)
    clock.now_s += TTL_S / 2
    memory.put(record(b"a", fence=2), is_saved=False)
    clock.now_s += TTL_S / 2
    assert memory.get(b"b") is None and memory.get(b"a") == record(b"a", fence=2)
    assert memory.unsaved() == [record(b"a", fence=2)]


def test_tokens_are_bounded_and_what_was_put_first_goes() -> None:
    memory = SessionMemory(TTL_S, max_bytes=40)
    memory.put(record(b"a", 4), is_saved=False)
    memory.put(record(b"b", 5), is_saved=True)
    memory.put(record(b"a", 4, fence=2), is_saved=False)
    memory.put(record(b"c", 2), is_saved=False)
    assert memory.get(b"b") is None
    assert [each.key for each in memory.unsaved()] == [b"a", b"c"]
