"""Order and admission of the prefill pool.

1. QUEUED: waits for credit (its reader's blocks are reserved) and for blocks of its own.
2. FETCHING, where the reader lends KV that is not cached here: holds all blocks of its input, the first are copied.
   PREFILLING: holds all blocks of its input; chunks of many prompts are packed into each step.
3. LEASED: computed, first token sampled; the blocks wait for their reader.
4. FINISHED, or at any time EVICTED, CANCELLED, FAILED: the blocks are given back, the prefix cache may keep them.

A prompt gets all its blocks before its first chunk or none, and only prompts with credit start. So no prompt holds
blocks while it waits for something that another waiting prompt holds.

The prompts of a step share it as `engine.planning.fill_shared` says: a higher class goes first between chunks, and
steps that it is in are kept short.

A prompt that lacks a seat or blocks takes them back from those of a lower class of which no chunk was computed yet:
they wait again and lose nothing. What has begun keeps them until it is read: it is what its reader is reading, and to
give it away would cost both pools the attempt. What is LEASED belongs to its reader, within the lease's time to live.
"""

from __future__ import annotations

from engine.holdings import Holdings
from engine.planning import Plan, fill_shared
from engine.ranking import RankedQueue
from engine.request import Sample
from engine.scheduling import Limits, NewToken
from engine.sequence import Sequence, State
from engine.step_time import StepTimes
from engine.totals import Totals


class PrefillScheduler:
    """Packs chunks of prompts."""

    def __init__(self, holdings: Holdings, limits: Limits) -> None:
        self.holdings = holdings
        self.limits = limits
        self.step_times: StepTimes | None = StepTimes()
        self.totals = Totals()
        self._uncredited: set[Sequence] = set()
        self._lent: dict[Sequence, int] = {}  # tokens whose KV the reader lends; of those that wait
        self._waiting = RankedQueue(limits.ageing_s)
        self._running = RankedQueue(limits.ageing_s)
        self._leased: set[Sequence] = set()
        self._fetching: set[Sequence] = set()
        self._starting: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence; it starts after `credit`."""
        self._uncredited.add(sequence)

    def credit(self, sequence: Sequence, lent_tokens: int = 0) -> None:
        """The reader's destination exists: the sequence may start. The KV of `lent_tokens` may be had from it."""
        if sequence in self._uncredited:
            self._uncredited.remove(sequence)
            self._waiting.add(sequence)
            if lent_tokens:
                self._lent[sequence] = lent_tokens

    def plan(self, now_s: float) -> Plan:
        """Admits what has credit, seat and blocks, then shares the step."""
        self._admit(now_s)
        plan, limits = Plan(), self.limits
        overdue_since_s = now_s - limits.max_queue_latency_ms / 1000
        fill_shared(
            plan, list(self._running), limits.chunk_size, limits.max_num_tokens, overdue_since_s, self.step_times
        )
        return plan

    def _admit(self, now_s: float) -> None:
        for sequence in self._waiting.snapshot(self.limits.max_num_seqs):
            if not self.holdings.can_ever_hold(sequence.num_tokens):
                self.end(sequence, State.FAILED, "the KV pool could not grow to what this needs")
                continue
            # Nobody overtakes one that lacks blocks: a stream of short prompts would starve a long one.
            while not self._seat(sequence):
                if not self._take_back_for(sequence):
                    return
            self._waiting.discard(sequence)
            sequence.started_s = now_s
            if self._lent.pop(sequence, 0) > sequence.num_cached:
                self._fetching.add(sequence)
                self._starting.append(sequence)
                sequence.move(State.FETCHING)
            else:
                self._running.add(sequence)
                sequence.move(State.PREFILLING)

    def take_fetches(self) -> list[Sequence]:
        """The sequences that became FETCHING since the last call; the caller fetches and then calls `fetched`."""
        starting, self._starting = self._starting, []
        return starting

    def fetched(self, sequence: Sequence, num_tokens: int) -> None:
        """The KV of so many leading tokens is here and attested; 0: nothing came, and all of it is computed."""
        self._fetching.remove(sequence)
        if num_tokens:
            sequence.num_computed = sequence.num_cached = num_tokens
            self.holdings.register_computed(sequence)
        self._running.add(sequence)
        sequence.move(State.PREFILLING)

    def _seat(self, sequence: Sequence) -> bool:
        """Gives a sequence all blocks of its input, or nothing."""
        has_seat = self.num_running + len(self._leased) < self.limits.max_num_seqs
        return has_seat and self.holdings.admit(sequence, sequence.num_tokens, sequence.num_tokens - 1)

    def _take_back_for(self, sequence: Sequence) -> bool:
        """Lets the last by rank of a lower class wait again, if all of which nothing was computed make room; answers
        whether one did."""
        rank, priority = self._running.rank(sequence), sequence.request.priority
        idle = [
            holder
            for holder in self._running
            if holder.request.priority < priority
            and self._running.rank(holder) > rank
            and holder.num_computed == holder.num_cached
            and holder.num_pins == 0
        ]
        if not idle:
            return False
        prospect = self.holdings.prospect(sequence, sequence.num_tokens - 1, without=idle)
        if not prospect.has_room_for(self.holdings.num_blocks(sequence.num_tokens)):
            return False
        last = idle[-1]
        self._running.discard(last)
        self.holdings.take_back(last)
        last.move(State.QUEUED)
        self._waiting.add(last)
        return True

    def commit(self, plan: Plan, samples: list[Sample], now_s: float) -> list[NewToken]:
        """Counts the chunks as computed; finished prompts become LEASED."""
        new_tokens, remaining = [], iter(samples)
        for part in plan.slices:
            sequence, sample = part.sequence, next(remaining) if part.samples else None
            if not sequence.is_over:
                sequence.num_computed += part.num_tokens
                self.holdings.register_computed(sequence)
                if sample is not None:
                    self._running.discard(sequence)
                    self._leased.add(sequence)
                    sequence.first_token, sequence.first_token_s = sample, now_s
                    sequence.move(State.LEASED)
                    self.totals.num_prompt_tokens += sequence.num_tokens
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
        self.totals.endings[state] += 1
        self._forget(sequence)
        self.holdings.free(sequence)

    def num_wanted_blocks(self) -> int:
        """See `Scheduler.num_wanted_blocks`."""
        wanted, most = 0, self.holdings.max_blocks
        for sequence in self._waiting:
            wanted += self.holdings.num_blocks(sequence.num_tokens)
            if wanted >= most:
                break
        return wanted

    @property
    def num_queued(self) -> int:
        """Sequences without blocks."""
        return len(self._uncredited) + len(self._waiting)

    @property
    def num_queued_tokens(self) -> int:
        """Tokens still to be computed."""
        pending = (*self._uncredited, *self._waiting, *self._fetching, *self._running)
        return sum(sequence.num_pending for sequence in pending)

    @property
    def num_running(self) -> int:
        """Sequences being computed, or about to be as soon as what was lent has come."""
        return len(self._running) + len(self._fetching)

    @property
    def num_leased(self) -> int:
        """Sequences whose reader has not released them."""
        return len(self._leased)

    def live(self) -> list[Sequence]:
        """Every sequence that is not over."""
        return [*self._uncredited, *self._waiting, *self._fetching, *self._running, *self._leased]

    def _forget(self, sequence: Sequence) -> None:
        self._waiting.discard(sequence)
        self._running.discard(sequence)
        self._leased.discard(sequence)
        self._uncredited.discard(sequence)
        self._fetching.discard(sequence)
        self._lent.pop(sequence, None)
        if sequence in self._starting:
            self._starting.remove(sequence)
