"""Order, admission and victims of the decode pool.

1. QUEUED: waits for a seat and for blocks of its whole input and the next token.
2. FETCHING: holds those blocks; their content comes from a prefilling worker. Or PREFILLING: computed here, in chunks.
3. DECODING: a token each step; a new block when the last is full.
4. FINISHED, or at any time EVICTED, CANCELLED, FAILED: the blocks are given back, the prefix cache may keep them.

When growth finds no block, the youngest sequence of the lowest class is evicted; the oldest one never is, so that
something always finishes. Reservations that have received nothing are bounded for each source: they are blocks lent
to a prefilling worker's queue.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.holdings import Holdings
from engine.planning import Plan, fill
from engine.request import Sample
from engine.scheduling import Limits, NewToken
from engine.sequence import FinishReason, Sequence, State


@dataclass(slots=True)
class _Fetch:
    """Where a sequence's KV comes from."""

    source: str
    num_empty_tokens: int


class DecodeScheduler:
    """Continuous batching with growth and eviction."""

    def __init__(self, holdings: Holdings, limits: Limits, max_reserved_tokens: int) -> None:
        self.holdings = holdings
        self.limits = limits
        self._max_reserved_tokens = max_reserved_tokens
        self._waiting: list[Sequence] = []
        self._prefilling: list[Sequence] = []
        self._decoding: list[Sequence] = []
        self._fetches: dict[Sequence, _Fetch] = {}
        self._starting: list[Sequence] = []

    def add(self, sequence: Sequence, source: str | None) -> None:
        """Queues a sequence whose KV comes from `source`, or is computed here when that is None. A sequence whose
        earlier output was complete already is finished at once."""
        if sequence.check_finished(self.limits.eos_token_ids, self.limits.max_model_len):
            sequence.move(State.FINISHED)
            return
        if source is not None:
            self._fetches[sequence] = _Fetch(source, sequence.num_tokens)
        self._waiting.append(sequence)

    def plan(self, now_s: float) -> Plan:
        """Grows what runs, admits what waits, then fills the step: decode rows first, prefill chunks after."""
        plan, limits = Plan(), self.limits
        ready = self._grow_running()
        self._admit(now_s)
        self._prefilling.sort(key=lambda sequence: sequence.order)
        fill(plan, ready, 1, limits.max_num_batched_tokens)
        fill(plan, self._prefilling, limits.chunk_size, limits.max_num_batched_tokens)
        return plan

    def take_fetches(self) -> list[Sequence]:
        """The sequences that became FETCHING since the last call; the caller fetches and then calls `fetched`."""
        starting, self._starting = self._starting, []
        return starting

    def commit(self, plan: Plan, samples: list[Sample], now_s: float) -> list[NewToken]:
        """Counts the slices as computed and appends the new tokens."""
        new_tokens, remaining = [], iter(samples)
        for part in plan.slices:
            sequence, sample = part.sequence, next(remaining) if part.samples else None
            if not sequence.is_over:
                sequence.num_computed += part.num_tokens
                self.holdings.register_computed(sequence)
                if sample is not None:
                    new_tokens.append(self._append(sequence, sample, now_s))
            self.holdings.unpin(sequence)
        return new_tokens

    def received(self, sequence: Sequence) -> None:
        """The first bytes of a fetch have come: its reservation is not empty any more."""
        self._fetches[sequence].num_empty_tokens = 0

    def fetched(self, sequence: Sequence, sample: Sample, now_s: float) -> NewToken:
        """The whole input's KV is here and attested; `sample` is the first token."""
        sequence.num_computed = sequence.num_tokens
        self.holdings.register_computed(sequence)
        return self._append(sequence, sample, now_s)

    def finish(self, sequence: Sequence, num_outputs: int) -> None:
        """Ends a sequence at `num_outputs` output tokens, where the router found a stop string."""
        del sequence.token_ids[len(sequence.request.prompt_token_ids) + num_outputs :]
        sequence.num_computed = min(sequence.num_computed, sequence.num_tokens)
        sequence.finish_reason, sequence.matched_token_id = FinishReason.STOP, None
        self.end(sequence, State.FINISHED)

    def end(self, sequence: Sequence, state: State, detail: str = "") -> None:
        """Moves a sequence to a terminal state and gives its blocks back once nothing touches them."""
        if sequence.is_over:
            return
        sequence.detail = detail
        sequence.move(state)
        self._forget(sequence)
        self.holdings.free(sequence)

    def abandon(self, plan: Plan, detail: str) -> None:
        """See `Scheduler.abandon`."""
        for part in plan.slices:
            self.end(part.sequence, State.FAILED, detail)
            self.holdings.unpin(part.sequence)

    def num_wanted_blocks(self) -> int:
        """See `Scheduler.num_wanted_blocks`."""
        waiting = sum(self.holdings.num_blocks(sequence.num_tokens + 1) for sequence in self._waiting)
        return waiting + 2 * self.num_running

    @property
    def num_queued(self) -> int:
        """Sequences without blocks."""
        return len(self._waiting)

    @property
    def num_queued_tokens(self) -> int:
        """Tokens still to be computed or fetched."""
        return sum(sequence.num_pending for sequence in (*self._waiting, *self._prefilling, *self._fetching()))

    @property
    def num_running(self) -> int:
        """Sequences with a seat."""
        return len(self._decoding) + len(self._prefilling) + len(self._fetching())

    def live(self) -> list[Sequence]:
        """Every sequence that is not over."""
        return [*self._waiting, *self._fetching(), *self._prefilling, *self._decoding]

    def _fetching(self) -> list[Sequence]:
        return [sequence for sequence in self._fetches if sequence.state is State.FETCHING]

    def _append(self, sequence: Sequence, sample: Sample, now_s: float) -> NewToken:
        token = NewToken(sequence, sequence.num_tokens, sample)
        sequence.token_ids.append(sample.token_id)
        if sequence.first_token is None:
            sequence.first_token, sequence.first_token_s = sample, now_s
        if sequence.state is not State.DECODING:
            self._forget(sequence)
            self._decoding.append(sequence)
            sequence.move(State.DECODING)
        if sequence.check_finished(self.limits.eos_token_ids, self.limits.max_model_len):
            self.end(sequence, State.FINISHED)
        return token

    def _grow_running(self) -> list[Sequence]:
        """Gives each decoding sequence the slot of its next token, evicting where there is none. Answers those that
        have it; the others wait for blocks of a victim whose transfer is still being stopped."""
        ready = []
        for sequence in sorted(self._decoding, key=lambda sequence: sequence.order):
            while not sequence.is_over:
                if self.holdings.grow(sequence, sequence.num_tokens):
                    ready.append(sequence)
                    break
                if self.holdings.num_departing_blocks > 0:
                    break
                self.end(self._victim(), State.EVICTED, "no KV block for the next token")
        # One grown early may have been evicted for a later one.
        return [sequence for sequence in ready if not sequence.is_over]

    def _victim(self) -> Sequence:
        """The youngest of the lowest class, never the oldest unless it is alone in a pool that could not grow;
        reservations that hold nothing yet go first."""
        fetching = self._fetching()
        holders = [*self._decoding, *self._prefilling, *fetching]
        oldest = min(holders, key=lambda sequence: sequence.order[1])
        empty = [s for s in fetching if s is not oldest and self._fetches[s].num_empty_tokens > 0]
        others = [s for s in holders if s is not oldest]
        return max(empty or others or holders, key=lambda sequence: sequence.order)

    def _admit(self, now_s: float) -> None:
        for sequence in sorted(self._waiting, key=lambda sequence: sequence.order):
            if self.num_running >= self.limits.max_num_seqs:
                return
            if not self.holdings.can_ever_hold(sequence.num_tokens + 1):
                self.end(sequence, State.FAILED, "the KV pool could not grow to what this needs")
                continue
            fetch = self._fetches.get(sequence)
            if fetch is not None and not self._may_reserve(fetch):
                continue
            # A whole input may be reused when the first token comes from elsewhere; computing it needs one token.
            max_cached = sequence.num_tokens if fetch is not None else sequence.num_tokens - 1
            # One block for each running sequence stays free, so that admission does not cause eviction at once.
            headroom = len(self._decoding)
            if not self.holdings.admit(sequence, sequence.num_tokens + 1, max_cached, headroom):
                return
            self._waiting.remove(sequence)
            sequence.started_s = now_s
            if fetch is not None:
                self._starting.append(sequence)
                sequence.move(State.FETCHING)
            else:
                self._prefilling.append(sequence)
                sequence.move(State.PREFILLING)

    def _may_reserve(self, fetch: _Fetch) -> bool:
        reserved = sum(
            other.num_empty_tokens
            for sequence, other in self._fetches.items()
            if other.source == fetch.source and sequence.state is State.FETCHING
        )
        return reserved == 0 or reserved + fetch.num_empty_tokens <= self._max_reserved_tokens

    def _forget(self, sequence: Sequence) -> None:
        for members in (self._waiting, self._prefilling, self._decoding, self._starting):
            if sequence in members:
                members.remove(sequence)
        self._fetches.pop(sequence, None)
