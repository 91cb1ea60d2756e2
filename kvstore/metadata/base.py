"""What is known about workers and sessions across processes: the interface of a metadata store.

Everything stored is a hint with a time to live: workers are told to be somewhere, sessions to be held by someone; who
asks a worker learns the truth. Losing the store loses reuse, never a request: every failure is `StoreUnavailable`,
within `op_timeout_s`, and callers go on without. Sessions are written by compare-and-set on a fence, so that of two
writers that read the same record one loses.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

from runtime.errors import BatonError

OP_TIMEOUT_S = 0.5
"""Default bound on one operation."""


class StoreUnavailable(BatonError):
    """The metadata store did not answer in time or at all. Go on without it."""

    reason = "STORE_UNAVAILABLE"


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """Where a worker says it is."""

    worker_id: str
    """The worker's id."""
    role: str
    """"prefill", "decode" or "mixed"."""
    address: str
    """Where it listens, host:port."""
    epoch: int
    """Its incarnation, unsigned 64 bit."""


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """What is remembered of a session after a turn."""

    key: bytes
    """From kvstore.hashing.session_key."""
    token_ids: bytes
    """The conversation so far, packed by kvstore.hashing.pack_token_ids."""
    holder: str
    """Id of the worker that keeps its KV."""
    epoch: int
    """That worker's incarnation, unsigned 64 bit."""
    num_tokens: int
    """Leading tokens whose KV the holder keeps."""
    tail_hash: bytes
    """Hash of the last whole block among them; empty if there is none."""
    block_ids: tuple[int, ...]
    """Where the holder kept them; a hint, its own lookup decides."""
    fence: int
    """Number of this version, from 1; unsigned 64 bit. A later version has a greater one."""


class MetadataStore(ABC):
    """Worker and session records. A file of this package holds one implementation, as class `Store(url, op_timeout_s)`.

    Every method may raise StoreUnavailable, and may then have taken effect; all may be repeated.
    """

    failed_s: float = -math.inf
    """When an operation last failed, monotonic clock."""

    @abstractmethod
    async def register_worker(self, record: WorkerRecord, ttl_s: float) -> None:
        """Lists a worker for `ttl_s`; repeat it well before that. Replaces what its id stood for."""

    @abstractmethod
    async def unregister_worker(self, worker_id: str, epoch: int) -> None:
        """Takes a worker off the list, unless another incarnation has registered since."""

    @abstractmethod
    async def list_workers(self) -> list[WorkerRecord]:
        """The workers whose time has not run out, by id."""

    @abstractmethod
    async def read_session(self, key: bytes) -> SessionRecord | None:
        """What is known of a session; None if nothing, or nothing readable."""

    @abstractmethod
    async def write_session(self, record: SessionRecord, expected_fence: int, ttl_s: float) -> bool:
        """Stores `record` if the stored fence is `expected_fence` (0: nothing is stored); answers whether it stands.

        Repeating a write that took effect answers True as long as nobody wrote since. Raises ValueError unless
        `record.fence` is greater than `expected_fence`.
        """

    @abstractmethod
    async def close(self) -> None:
        """Ends connections; never fails because the store is away."""


def check_write(record: SessionRecord, expected_fence: int, ttl_s: float) -> None:
    """Raises ValueError for a write that could never be right."""
    if not 0 <= expected_fence < record.fence < 2**64:
        raise ValueError(f"fence: must be greater than the expected {expected_fence}, got {record.fence}")
    check_ttl(ttl_s)


def check_ttl(ttl_s: float) -> None:
    """Raises ValueError unless a record can live that long; nothing is stored for ever."""
    if not 0.001 <= ttl_s <= 366 * 86400:
        raise ValueError(f"ttl_s: must be between 0.001 and {366 * 86400}, got {ttl_s}")
