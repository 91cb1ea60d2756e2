"""Leases: an owner's promise to keep an attempt's blocks until its reader has them, and the attestation that it did.

A lease is open from the moment an attempt is accepted. One reader may claim it; that claim is the credit on which the
owner starts to compute. Blocks become readable in order; after the last one the reader releases the lease, and the
answer to that says whether it was unbroken until then. What is ready already, and only to be read, is lent: such a
lease is complete from the start. Invariants: a lease is marked broken *before* its blocks are
freed, and a broken lease never becomes intact, so what a late reader copied from reused blocks is never attested.
Owns no blocks: it names them; whoever opened the lease frees them when it ends. No torch.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum

from kvstore.hashing import attempt_label
from runtime.errors import AlreadyExists, FailedPrecondition, NotFound


class LeaseState(Enum):
    """How far a lease is."""

    OPEN = "open"
    """Blocks are being computed or read."""
    RELEASED = "released"
    """The reader was told that its copy is good."""
    BROKEN = "broken"
    """Given up by either side; whatever was read is worthless."""


@dataclass(slots=True, eq=False)
class Lease:
    """The KV of one attempt on its way to one reader."""

    attempt_id: bytes
    """16 random bytes; knowing them is the right to read."""
    num_tokens: int
    """Tokens whose KV the reader will get."""
    on_credit: Callable[[], None]
    """Called once, when the reader's claim arrives."""
    on_end: Callable[[], None]
    """Called once, when the state is no longer OPEN."""
    block_table: list[int] = field(default_factory=list)
    """The owner's blocks in order; empty until it has them."""
    num_ready_tokens: int = 0
    """Leading tokens whose KV is computed."""
    is_complete: bool = False
    """Whether everything the reader needs exists."""
    result: object = None
    """What the owner adds to its attestation: the first token; None for KV that is lent."""
    claimed: bool = False
    """A reader has come. It is the only one ever."""
    lent_tokens: int = 0
    """Leading tokens whose KV the reader lends the owner; known from its claim on."""
    num_sent_blocks: int = 0
    """Leading blocks that the reader has or was sent."""
    checksum: int = 0
    """CRC-32 over the bytes sent, for transports that send bytes."""
    state: LeaseState = LeaseState.OPEN
    """Changed by `LeaseTable` alone."""
    expires_s: float | None = None
    """Monotonic time at which a complete but unread lease is broken; None while it is still being filled."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set at every change, for the one fetch that waits."""

    def num_ready_blocks(self, block_size: int) -> int:
        """Leading blocks that may be read: whole ones while tokens are missing, then all."""
        if self.is_complete:
            return len(self.block_table)
        return self.num_ready_tokens // block_size


class LeaseTable:
    """The open leases of one worker, in one incarnation. One event loop owns it."""

    def __init__(self, epoch: int, ttl_s: float) -> None:
        self.epoch = epoch
        self.num_opened = 0
        """Leases so far."""
        self.endings: Counter[LeaseState] = Counter()
        """Of these, those that ended, by how."""
        self.num_expired = 0
        """Of those that were broken, those whose reader was silent for too long."""
        self._ttl_s = ttl_s
        self._leases: dict[bytes, Lease] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[Lease]:
        return iter(list(self._leases.values()))

    def open(
        self, attempt_id: bytes, num_tokens: int, on_credit: Callable[[], None], on_end: Callable[[], None]
    ) -> Lease:
        """Opens a lease. Raises AlreadyExists for an attempt that has one."""
        if attempt_id in self._leases:
            raise AlreadyExists(f"attempt_id: {attempt_label(attempt_id)} is being served already")
        lease = self._leases[attempt_id] = Lease(attempt_id, num_tokens, on_credit, on_end)
        self.num_opened += 1
        return lease

    def lend(
        self,
        attempt_id: bytes,
        block_table: list[int],
        num_tokens: int,
        on_end: Callable[[], None],
        now_s: float | None = None,
    ) -> Lease:
        """Opens a lease on KV that is ready. It expires like any other from `now_s` on, or once its reader was heard.
        Raises AlreadyExists for an attempt that has a lease."""
        lease = self.open(attempt_id, num_tokens, _expect_nothing, on_end)
        lease.block_table, lease.num_ready_tokens, lease.is_complete = block_table, num_tokens, True
        if now_s is not None:
            self.touch(lease, now_s)
        return lease

    def find(self, attempt_id: bytes, epoch: int) -> Lease:
        """The open lease of an attempt. Raises NotFound, or FailedPrecondition if `epoch` is another incarnation."""
        if epoch != self.epoch:
            raise FailedPrecondition(f"epoch: this worker's is {self.epoch}, got {epoch}", epoch=self.epoch)
        lease = self._leases.get(attempt_id)
        if lease is None:
            label = attempt_label(attempt_id)
            raise NotFound("attempt", label, f"attempt_id: {label} has no lease here")
        return lease

    def claim(self, lease: Lease, lent_tokens: int = 0) -> None:
        """A reader takes the lease: credit. Raises AlreadyExists for a second reader."""
        if lease.claimed:
            raise AlreadyExists(f"attempt_id: {attempt_label(lease.attempt_id)} was fetched already")
        lease.claimed, lease.lent_tokens = True, lent_tokens
        lease.on_credit()

    def progress(self, lease: Lease, block_table: list[int], num_ready_tokens: int) -> None:
        """The owner has computed more."""
        lease.block_table, lease.num_ready_tokens = block_table, num_ready_tokens
        lease.changed.set()

    def complete(self, lease: Lease, result: object, now_s: float) -> None:
        """Everything is computed; from now on the reader must show signs of life."""
        lease.result, lease.num_ready_tokens, lease.is_complete = result, lease.num_tokens, True
        self.touch(lease, now_s)
        lease.changed.set()

    def touch(self, lease: Lease, now_s: float) -> None:
        """The reader has shown a sign of life."""
        if lease.is_complete:
            lease.expires_s = now_s + self._ttl_s

    def release(self, lease: Lease, num_tokens: int) -> bool:
        """Ends a lease for its reader, which holds `num_tokens`; answers whether its copy is attested as good.

        It is when the lease was never broken, everything had been computed and sent, and the counts agree.
        """
        intact = (
            lease.state is LeaseState.OPEN
            and lease.claimed
            and lease.is_complete
            and lease.num_sent_blocks == len(lease.block_table)
            and num_tokens == lease.num_tokens
        )
        self._end(lease, LeaseState.RELEASED if intact else LeaseState.BROKEN)
        return intact

    def break_(self, lease: Lease) -> None:
        """Ends a lease for its owner, before it frees the blocks. Repeating it does nothing."""
        if lease.state is LeaseState.OPEN:
            self._end(lease, LeaseState.BROKEN)

    def expire(self, lease: Lease) -> None:
        """Ends a lease whose reader has been silent for too long."""
        self.num_expired += lease.state is LeaseState.OPEN
        self.break_(lease)

    def expired(self, now_s: float) -> list[Lease]:
        """Complete leases whose reader has been silent for too long."""
        return [lease for lease in self if lease.expires_s is not None and lease.expires_s <= now_s]

    def _end(self, lease: Lease, state: LeaseState) -> None:
        lease.state = state
        self.endings[state] += 1
        self._leases.pop(lease.attempt_id, None)
        lease.changed.set()
        lease.on_end()


def _expect_nothing() -> None:
    """A reader's claim on KV that is ready starts no work."""
