"""Order and admission of the prefill pool.

1. QUEUED: waits for credit (its reader's blocks are reserved) and for blocks of its own.
2. PREFILLING: holds all blocks of its input; chunks of many prompts are packed into each step.
3. LEASED: computed, first token sampled; the blocks wait for their reader.
4. FINISHED, or at any time EVICTED, CANCELLED, FAILED: the blocks are given back, the prefix cache may keep them.

A prompt gets all its blocks before its first chunk or none, and only prompts with credit start. So no prompt holds
blocks while it waits for something that another waiting prompt holds.
"""

from __future__ import annotations

from engine.holdings import Holdings
from engine.planning import Plan, fill
from engine.request import Sample
from engine.scheduling import Limits, NewToken
from engine.sequence import Sequence, State


class PrefillScheduler:
    """Packs chunks of prompts."""

    def __init__(self, holdings: Holdings, limits: Limits) -> None:
        self.holdings = holdings
        self.limits = limits
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._leased: set[Sequence] = set()
        self._credited: set[Sequence] = set()

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence; it starts after `credit`."""
        self._waiting.append(sequence)

    def credit(self, sequence: Sequence) -> None:
        """The reader's destination exists: the sequence may start."""
        self._credited.add(sequence)

    def plan(self, now_s: float) -> Plan:
        """Goes on with running prompts in order, then admits waiting ones while tokens, seats and blocks last."""
        plan, limits = Plan(), self.limits
        self._running.sort(key=lambda sequence: sequence.order)
        fill(plan, self._running, limits.chunk_size, limits.max_num_batched_tokens)
        for sequence in sorted(self._waiting, key=lambda sequence: sequence.order):
            if plan.num_tokens >= limits.max_num_batched_tokens or self._num_holding >= limits.max_num_seqs:
                break
            if not self.holdings.can_ever_hold(sequence.num_tokens):
                self.end(sequence, State.FAILED, "the KV pool could not grow to what this needs")
                continue
            if sequence not in self._credited:
                continue
            # Nobody overtakes one that lacks blocks: a stream of short prompts would starve a long one.
            if not self.holdings.admit(sequence, sequence.num_tokens, sequence.num_tokens - 1):
                break
            self._waiting.remove(sequence)
            self._credited.discard(sequence)
            self._running.append(sequence)
            sequence.started_s = now_s
            sequence.move(State.PREFILLING)
            fill(plan, [sequence], limits.chunk_size, limits.max_num_batched_tokens)
        return plan

    def commit(self, plan: Plan, samples: list[Sample], now_s: float) -> list[NewToken]:
        """Counts the chunks as computed; finished prompts become LEASED."""
        new_tokens, remaining = [], iter(samples)
        for part in plan.slices:
            sequence, sample = part.sequence, next(remaining) if part.samples else None
            if not sequence.is_over:
                sequence.num_computed += part.num_tokens
                self.holdings.register_computed(sequence)
                if sample is not None:
                    self._running.remove(sequence)
                    self._leased.add(sequence)
                    sequence.first_token, sequence.first_token_s = sample, now_s
                    sequence.move(State.LEASED)
                    new_tokens.append(NewToken(sequence, sequence.num_tokens, sample))
            self.holdings.unpin(sequence)
        return new_tokens

    def abandon(self, plan: Plan, detail: str) -> None:
        """See `Scheduler.abandon`."""
        for part in plan.slices:
            self.end(part.sequence, State.FAILED, detail)
            self.holdings.unpin(part.sequence)

    def end(self, sequence: Sequence, state: State, detail: str = "") -> None:
        """Ends a sequence: FINISHED after a good release, else EVICTED, CANCELLED or FAILED."""
        if sequence.is_over:
            return
        sequence.detail = detail
        sequence.move(state)
        self._forget(sequence)
        self.holdings.free(sequence)

    def num_wanted_blocks(self) -> int:
        """See `Scheduler.num_wanted_blocks`."""
        return sum(self.holdings.num_blocks(sequence.num_tokens) for sequence in self._credited)

    @property
    def num_queued(self) -> int:
        """Sequences without blocks."""
        return len(self._waiting)

    @property
    def num_queued_tokens(self) -> int:
        """Tokens still to be computed."""
        return sum(sequence.num_pending for sequence in (*self._waiting, *self._running))

    @property
    def num_running(self) -> int:
        """Sequences being computed."""
        return len(self._running)

    @property
    def num_leased(self) -> int:
        """Sequences whose reader has not released them."""
        return len(self._leased)

    def live(self) -> list[Sequence]:
        """Every sequence that is not over."""
        return [*self._waiting, *self._running, *self._leased]

    @property
    def _num_holding(self) -> int:
        return len(self._running) + len(self._leased)

    def _forget(self, sequence: Sequence) -> None:
        for members in (self._waiting, self._running):
            if sequence in members:
                members.remove(sequence)
        self._leased.discard(sequence)
        self._credited.discard(sequence)
