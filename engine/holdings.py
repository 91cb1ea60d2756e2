"""Which sequence holds which blocks: the one place where block tables are made, extended and given back.

Owns the use of the block pool and of the prefix cache on behalf of sequences, and of workers that are lent cached
blocks to read; owns no tensors and decides no order. Invariant: every live sequence and every loan holds exactly one
reference on each block of its table, and nothing else holds any, so `pool.num_used` equals the number of different
blocks in those tables. Blocks of a sequence that is over are freed
once nothing touches them any more (`num_pins` is 0).

A sequence that is swapped out has its KV in blocks of host memory, accounted here as well, and none of the pool.
`swap_out`, and `admit` of one that comes back, only order copies (`swaps`): they are made before the next step, and
`copied` is told before the next plan. Until then the blocks of both sides stay, pinned. One that comes back shares what
the prefix cache has of it, and is copied from there on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from engine.sequence import Sequence, State
from kvstore.blocks import BlockPool, OutOfBlocks
from kvstore.hashing import PrefixHasher
from kvstore.sessions import SessionTable
from kvstore.swap import SwapCopy

LEARNING = 1 / 64
"""Weight of the last finished sequence in what is usual."""


@dataclass(frozen=True, slots=True)
class Prospect:
    """A pool as one that waits for it sees it."""

    num_shared: int
    """Leading blocks of its input that others hold, so that it need not take them."""
    num_held: int
    """Blocks that others hold, these among them."""
    num_available: int
    """Blocks that it could take."""

    def has_room_for(self, num_blocks: int) -> bool:
        """Whether a table of so many blocks could be had."""
        return num_blocks - self.num_shared <= self.num_available


@dataclass(frozen=True, slots=True, eq=False)
class Loan:
    """Cached blocks that stay as they are while somebody reads them."""

    block_table: list[int]
    """In order; one reference is held on each."""


@dataclass(frozen=True, slots=True, eq=False)
class Swap:
    """A sequence's KV, about to be copied."""

    sequence: Sequence
    """Whose."""
    copy: SwapCopy
    """From where to where."""


class Holdings:
    """Block tables of the sequences of one worker."""

    def __init__(self, pool: BlockPool, hasher: PrefixHasher, block_size: int, num_host_blocks: int = 0) -> None:
        self.pool = pool
        self.host_pool = BlockPool(num_host_blocks)
        """Blocks of host memory for the KV of those that are swapped out."""
        self.swaps: list[Swap] = []
        """Copies that are to be made before the next step."""
        self.sessions = SessionTable(pool)
        """The sessions whose turns ended here."""
        self.block_size = block_size
        self.max_blocks = pool.ceiling
        """Blocks the pool can have; lowered for a while when the system turns out to have no memory for the rest."""
        self.num_given_back = 0
        """Tables given back so far."""
        self.num_wanted_tokens = 0
        """Tokens of the inputs that were admitted."""
        self.num_reused_tokens = 0
        """Of these, those whose KV was in the prefix cache."""
        self.num_wanted_session_tokens = 0
        """Tokens of the inputs that were turns of sessions."""
        self.num_reused_session_tokens = 0
        """Of these, those whose KV was in the prefix cache."""
        self.usual_blocks = 0.0
        """Blocks that sequences which finished have held, on average over the last ones; 0 before any has."""
        self._hasher = hasher
        self._holders: set[Sequence] = set()
        self._loans: set[Loan] = set()

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` positions need."""
        return -(-num_tokens // self.block_size)

    def can_ever_hold(self, num_tokens: int) -> bool:
        """Whether a table of `num_tokens` positions fits when nothing else is held."""
        return self.num_blocks(num_tokens) <= self.max_blocks

    def cached_prefix(self, sequence: Sequence, max_tokens: int) -> list[int]:
        """The leading whole blocks of the input, within `max_tokens`, that the prefix cache has; takes nothing."""
        if not sequence.block_hashes:
            # Once for each sequence: one that waits is looked at again at every step.
            sequence.block_hashes = self._hasher.chain(sequence.request.tenant, sequence.token_ids)
        return self.pool.match(sequence.block_hashes[: max_tokens // self.block_size])

    def admit(self, sequence: Sequence, num_tokens: int, max_cached_tokens: int) -> bool:
        """Gives a sequence all blocks for `num_tokens` positions, reusing a cached prefix of at most
        `max_cached_tokens`, or nothing. Answers whether it did. To one that was swapped out its KV is copied back."""
        assert not sequence.block_table, "a sequence is admitted once"
        cached = self.cached_prefix(sequence, max_cached_tokens)
        num_new = self.num_blocks(num_tokens) - len(cached)
        num_revived = sum(1 for block in cached if self.pool.ref_count(block) == 0)
        if num_new + num_revived > self.pool.num_available:
            return False
        self.pool.share(cached)
        sequence.block_table = [*cached, *self.pool.allocate(num_new)]
        sequence.num_registered = len(cached)
        sequence.num_borrowed = len(cached) - num_revived
        num_cached = len(cached) * self.block_size
        if sequence.host_table is None:
            sequence.num_cached = sequence.num_computed = num_cached
            self._holders.add(sequence)
            self._note_reuse(sequence)
        else:
            sequence.num_computed = max(sequence.num_computed, num_cached)
            here, there = slice(len(cached), len(sequence.host_table)), sequence.host_table[len(cached) :]
            self._order(sequence, SwapCopy(sequence.block_table[here], there, "in"))
        return True

    def can_swap_out(self, sequence: Sequence) -> bool:
        """Whether host memory has room for its KV, which is whole and nothing touches."""
        num_free, is_whole = self.host_pool.num_free, sequence.num_pins == 0 and sequence.state is not State.FETCHING
        return num_free > 0 and is_whole and self.num_blocks(sequence.num_computed) <= num_free

    def swap_out(self, sequence: Sequence) -> None:
        """Orders that a sequence's KV is copied to host memory; once it is, its blocks are given back."""
        here = sequence.block_table[: self.num_blocks(sequence.num_computed)]
        sequence.host_table = self.host_pool.allocate(len(here))
        self._order(sequence, SwapCopy(here, sequence.host_table, "out"))

    def _order(self, sequence: Sequence, copy: SwapCopy) -> None:
        sequence.num_pins += 1
        self.swaps.append(Swap(sequence, copy))

    def copied(self) -> None:
        """All copies that were ordered are made."""
        swaps, self.swaps = self.swaps, []
        for sequence, copy in ((swap.sequence, swap.copy) for swap in swaps):
            self.unpin(sequence)
            if sequence.is_over:
                continue
            if copy.direction == "out":
                self.num_given_back += 1
                self.pool.release(sequence.block_table)
                sequence.block_table, sequence.num_registered = [], 0
            else:
                self._free_host(sequence)
                self.register_computed(sequence)

    def _free_host(self, sequence: Sequence) -> None:
        self.host_pool.release(sequence.host_table or ())
        sequence.host_table = None

    def _note_reuse(self, sequence: Sequence) -> None:
        self.num_wanted_tokens += sequence.num_tokens
        self.num_reused_tokens += sequence.num_cached
        if sequence.request.session is not None:
            self.num_wanted_session_tokens += sequence.num_tokens
            self.num_reused_session_tokens += sequence.num_cached

    def prospect(self, sequence: Sequence, max_cached_tokens: int, without: Collection[Sequence] = ()) -> Prospect:
        """What `admit` would find now; with `without`, once those and the sequences that are over have let go."""
        cached = self.cached_prefix(sequence, max_cached_tokens)
        if not without:
            num_shared = sum(1 for block in cached if self.pool.ref_count(block) > 0)
            return Prospect(num_shared, self.pool.num_used, self.pool.num_available)
        held = {
            block
            for holder in self._holders
            if not holder.is_over and holder not in without
            for block in holder.block_table
        }
        held.update(block for loan in self._loans for block in loan.block_table)
        num_shared = sum(1 for block in cached if block in held)
        return Prospect(num_shared, len(held), self.pool.num_total - len(held))

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Extends a table to `num_tokens` positions; answers whether there were blocks for it."""
        num_new = self.num_blocks(num_tokens) - len(sequence.block_table)
        if num_new <= 0:
            return True
        try:
            sequence.block_table.extend(self.pool.allocate(num_new))
        except OutOfBlocks:
            return False
        return True

    def shrink(self, sequence: Sequence, num_tokens: int) -> None:
        """Gives back what a table has beyond `num_tokens` positions; nothing of it may be registered."""
        kept = self.num_blocks(num_tokens)
        assert sequence.num_registered <= kept, "computed blocks are not given back"
        self.pool.release(sequence.block_table[kept:])
        del sequence.block_table[kept:]

    def register_computed(self, sequence: Sequence) -> None:
        """Makes the whole blocks computed since the last call reusable by others. Only ever called with KV that was
        computed here or attested by its owner."""
        hashes = sequence.block_hashes
        for index in range(sequence.num_registered, sequence.num_computed // self.block_size):
            if index == len(hashes):
                parent = hashes[-1] if hashes else self._hasher.root(sequence.request.tenant)
                begin = index * self.block_size
                hashes.append(self._hasher.extend(parent, sequence.token_ids[begin : begin + self.block_size]))
            self.pool.register(sequence.block_table[index], hashes[index])
            sequence.num_registered = index + 1

    def unpin(self, sequence: Sequence) -> None:
        """A step or transfer is done with the blocks."""
        assert sequence.num_pins > 0, "unpinned more often than pinned"
        sequence.num_pins -= 1
        if sequence.is_over:
            self.free(sequence)

    def free(self, sequence: Sequence) -> None:
        """Gives the blocks back, at once or when the last pin goes. Repeating it does nothing."""
        if sequence.num_pins == 0 and sequence in self._holders:
            self._holders.remove(sequence)
            self.num_given_back += 1
            level = 0
            if sequence.state is State.FINISHED:
                weight = LEARNING if self.usual_blocks else 1.0
                num_blocks = self.num_blocks(sequence.num_tokens) if sequence.host_table else len(sequence.block_table)
                self.usual_blocks += weight * (num_blocks - self.usual_blocks)
                level = self._keep_session(sequence)
            self._free_host(sequence)
            self.pool.release(sequence.block_table, level)
            sequence.block_table = []

    def _keep_session(self, sequence: Sequence) -> int:
        """Remembers the session of a turn that has ended well; answers what its blocks are worth as cache."""
        turn = sequence.request.session
        if turn is None:
            return 0
        hashes = sequence.block_hashes[: sequence.num_computed // self.block_size]
        request, level = sequence.request, int(sequence.request.priority)
        self.sessions.keep(turn.key, turn.fence, sequence.token_ids, hashes, turn.ttl_s, request.tenant, level)
        return level

    def lend(self, block_hashes: tuple[bytes, ...]) -> Loan:
        """The leading blocks of these that are cached; `end_loan` gives them back."""
        loan = Loan(self.pool.match(block_hashes))
        self.pool.share(loan.block_table)
        self._loans.add(loan)
        return loan

    def end_loan(self, loan: Loan) -> None:
        """Gives lent blocks back; they are cached as before."""
        self._loans.remove(loan)
        self.pool.release(loan.block_table)

    def take_back(self, sequence: Sequence) -> None:
        """Undoes `admit` for a sequence of which nothing was computed since, and which nothing touches."""
        assert sequence.num_pins == 0 and sequence.num_computed == sequence.num_cached, "it has begun"
        self.free(sequence)
        sequence.num_computed = sequence.num_cached = sequence.num_registered = sequence.num_borrowed = 0

    def check(self) -> None:
        """Audits the pool and the host's. Raises PoolCorrupted."""
        self.pool.check(self.references())
        self.host_pool.check(Counter(block for holder in self._holders for block in holder.host_table or ()))

    def references(self) -> Counter[int]:
        """Block id -> references that the live tables account for."""
        return Counter(self._all_blocks())

    @property
    def num_departing_blocks(self) -> int:
        """Blocks of sequences that are over, or being swapped out, still touched by a step, transfer or copy: they come
        back by themselves."""
        leaving = {swap.sequence for swap in self.swaps if swap.copy.direction == "out"}
        return sum(len(holder.block_table) for holder in self._holders if holder.is_over or holder in leaving)

    @property
    def num_accounted(self) -> int:
        """Different blocks in the live tables; equal to `pool.num_used` unless blocks leak."""
        return len(set(self._all_blocks()))

    def _all_blocks(self) -> Iterator[int]:
        for holder in self._holders:
            yield from holder.block_table
        for loan in self._loans:
            yield from loan.block_table
