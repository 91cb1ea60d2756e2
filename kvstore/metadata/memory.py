"""Records in this process's memory: for one process and for tests. Same promises as a shared store, time included."""

from __future__ import annotations

import time
from collections.abc import Callable

from kvstore.metadata.base import MetadataStore, SessionRecord, WorkerRecord, check_ttl, check_write


class Store(MetadataStore):
    """Records with the monotonic time at which they end."""

    def __init__(self, url: str, op_timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`url` and `op_timeout_s` are as other stores take them and change nothing; `clock` is in seconds."""
        self._clock = clock
        self._workers: dict[str, tuple[float, WorkerRecord]] = {}
        self._sessions: dict[bytes, tuple[float, SessionRecord]] = {}

    async def register_worker(self, record: WorkerRecord, ttl_s: float) -> None:
        """As the base says."""
        check_ttl(ttl_s)
        self._workers[record.worker_id] = (self._clock() + ttl_s, record)

    async def unregister_worker(self, worker_id: str, epoch: int) -> None:
        """As the base says."""
        if worker_id in self._workers and self._workers[worker_id][1].epoch == epoch:
            del self._workers[worker_id]

    async def list_workers(self) -> list[WorkerRecord]:
        """As the base says."""
        now = self._clock()
        self._workers = {key: entry for key, entry in self._workers.items() if entry[0] > now}
        return [record for _, (_, record) in sorted(self._workers.items())]

    async def read_session(self, key: bytes) -> SessionRecord | None:
        """As the base says."""
        ends, record = self._sessions.get(key, (0.0, None))
        if record is not None and ends <= self._clock():
            del self._sessions[key]
            return None
        return record

    async def write_session(self, record: SessionRecord, expected_fence: int, ttl_s: float) -> bool:
        """As the base says."""
        check_write(record, expected_fence, ttl_s)
        stored = await self.read_session(record.key)
        if stored != record and (stored.fence if stored else 0) != expected_fence:
            return False
        self._sessions[record.key] = (self._clock() + ttl_s, record)
        return True

    async def close(self) -> None:
        """Nothing to end."""
