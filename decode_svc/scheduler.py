"""Order, admission and victims of the decode pool.

1. QUEUED: waits for a seat and for blocks of its whole input and the next token.
2. FETCHING: holds those blocks; their content comes from a prefilling worker. Or PREFILLING: computed here, in chunks.
3. DECODING: a token each step; a new block when the last is full.
4. FINISHED, or at any time EVICTED, CANCELLED, FAILED: the blocks are given back, the prefix cache may keep them.

A sequence is admitted when the blocks that it and all that run will hold, at any moment until their expected ends,
fit the pool as large as it may get (`engine.lengths`, `decode_svc.outlook`); where nothing runs, when its input and
the next token fit. When growth finds no block all the same, the sequence that ranks last is displaced; the oldest one
never is, so that something always finishes. A sequence that outranks others of a lower class pauses them (the batch is
the first `max_batch_size` by rank), and displaces them where it lacks a seat or blocks. Who is displaced waits by rank
for seat and blocks again, its KV in host memory where that has room (`Holdings.swap_out`); else it is evicted.
Reservations that have received nothing are bounded for each source, the largest apart, so that a long prompt keeps no
short ones out: they are blocks lent to a prefilling worker's queue. What comes only to keep a session's KV
(`Request.keep_tokens`) ends with its fetch, and at once where there is no room: it makes nobody give way.

With `target_step_ms` steps are kept short by what is let in, never by pausing what runs: one sequence a plan is
admitted, while the step with it is predicted to stay within the target (`engine.step_time`); one may always run. Chunks
of prompts computed here are cut likewise, but to no less than a block a step: prompts of n blocks together take n steps
at most, and no step exceeds the target by more than that block, where the running sequences alone keep within it.

With a drafter steps without prompts compute guesses of tokens as well, which may come true: `decode_svc.speculation`.

Static batching (`is_static`) is the baseline that continuous batching is measured against: no admission while a batch
runs, no token before all of it is there, no place given twice, nobody preempted for a place in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import partial
from itertools import islice

from decode_svc.outlook import Forecast, Outlook
from decode_svc.speculation import Speculation
from decode_svc.victims import EVICTED, Victims
from engine.drafters import Drafter
from engine.holdings import Holdings
from engine.lengths import OutputLengths
from engine.planning import Plan, fill, fill_shared
from engine.ranking import RankedQueue, by_class_when_served
from engine.request import Sample
from engine.scheduling import Limits, NewToken
from engine.sequence import FinishReason, Sequence, State
from engine.step_time import StepTimes
from engine.totals import Totals

MAX_PASSED_OVER = 64
"""Sequences whose source has enough reservations that admission looks past in one plan."""


class DecodeScheduler:
    """Continuous batching with growth and eviction."""

    def __init__(
        self,
        holdings: Holdings,
        limits: Limits,
        max_reserved_tokens: int,
        lengths: OutputLengths | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        self.holdings = holdings
        self.limits = limits
        self._has_target = limits.target_step_ms is not None and not limits.is_static
        self.totals = Totals()
        self._lengths = lengths or OutputLengths(limits.output_length_quantile, least_tokens=holdings.block_size)
        times = StepTimes()
        self.step_times = times if self._has_target or drafter is not None else None
        self._outlook = Outlook(holdings, limits, self._lengths, times if self._has_target else None)
        self._victims = Victims(holdings, limits, self._outlook)
        self.speculation = None if drafter is None else Speculation(drafter, holdings, limits, self._lengths, times)
        """Decides on drafts; None without a drafter."""
        self._forecast: Forecast | None = None  # of what holds blocks now; made when something waits for them
        self._refusal: tuple[Sequence, int, int] | None = None  # for whom blocks were short, and when nothing changed
        self._max_reserved_tokens = max_reserved_tokens
        self._waiting = RankedQueue(limits.ageing_s)
        self._prefilling = RankedQueue(limits.ageing_s)
        self._decoding = RankedQueue(limits.ageing_s)
        self._fetching: dict[Sequence, int] = {}  # tokens reserved for a source that has sent nothing yet
        self._sources: dict[Sequence, str] = {}  # of those that wait and those that fetch
        self._reserved_tokens: Counter[str] = Counter()  # by source: the sum over its fetches
        self._starting: list[Sequence] = []
        self._batch_size = limits.batch_size
        self._num_places_given = 0  # static batching only: in the batch being filled; all of them once it runs

    def add(self, sequence: Sequence, source: str | None) -> None:
        """Queues a sequence whose KV comes from `source`, or is computed here when that is None. A sequence whose
        earlier output was complete already is finished at once."""
        if sequence.check_finished(self.limits.eos_token_ids, self.limits.max_model_len):
            sequence.move(State.FINISHED)
            self.totals.endings[State.FINISHED] += 1
            return
        if source is not None:
            self._sources[sequence] = source
        self._waiting.add(sequence)

    def plan(self, now_s: float) -> Plan:
        """Grows what runs, admits what waits, then fills the step: decode rows first, prefill chunks after."""
        plan, limits = Plan(), self.limits
        self._forecast = None
        self._choose_batch(now_s)
        ready = self._grow_running(now_s)
        if limits.is_static:
            ready = self._close_batch(ready, now_s)
        else:
            self._admit(now_s)
        # One that was ready may have been displaced since, for growth or for a higher class.
        fill(plan, [sequence for sequence in ready if sequence in self._decoding], 1, limits.max_num_tokens)
        overdue_since_s = now_s - limits.max_queue_latency_ms / 1000
        prompts = list(self._prefilling)
        if self.speculation is not None and not prompts:
            self.speculation.add_to(plan)
        budget = self._outlook.max_tokens(plan, prompts[0]) if prompts else 0
        fill_shared(plan, prompts, limits.chunk_size, budget, overdue_since_s, self.step_times)
        return plan

    def take_fetches(self) -> list[Sequence]:
        """The sequences that became FETCHING since the last call; the caller fetches and then calls `fetched`."""
        starting, self._starting = self._starting, []
        return starting

    def commit(self, plan: Plan, samples: list[Sample], now_s: float) -> list[NewToken]:
        """Counts the slices as computed and appends the new tokens, drafts that came true among them."""
        new_tokens, remaining = [], iter(samples)
        for part in plan.slices:
            sequence, sample = part.sequence, next(remaining) if part.samples else None
            after_drafts = list(islice(remaining, len(part.drafts)))
            if not sequence.is_over:
                sequence.num_computed += part.num_tokens
                self.holdings.register_computed(sequence)
                if sample is not None:
                    new_tokens.append(self._append(sequence, sample, now_s))
                if self.speculation is not None and after_drafts:
                    append = partial(self._append, now_s=now_s)
                    new_tokens += self.speculation.accept(sequence, part.drafts, after_drafts, append)
            self.holdings.unpin(sequence)
        self.totals.num_generated_tokens += len(new_tokens)
        return new_tokens

    def received(self, sequence: Sequence) -> None:
        """The first bytes of a fetch have come: its reservation is not empty any more."""
        self._reserved_tokens[self._sources[sequence]] -= self._fetching[sequence]
        self._fetching[sequence] = 0

    def fetched(self, sequence: Sequence, sample: Sample, now_s: float) -> NewToken:
        """The whole input's KV is here and attested; `sample` is the first token."""
        sequence.num_computed = sequence.num_tokens
        self.holdings.register_computed(sequence)
        self.totals.num_generated_tokens += 1
        return self._append(sequence, sample, now_s)

    def kept(self, sequence: Sequence) -> None:
        """The KV that a session is to keep here has come and is attested: nothing is left to do."""
        sequence.num_computed = max(sequence.num_cached, sequence.request.keep_tokens)
        self.holdings.register_computed(sequence)
        self.end(sequence, State.FINISHED)

    def finish(self, sequence: Sequence, num_outputs: int) -> None:
        """Ends a sequence at `num_outputs` output tokens, where the router found a stop string."""
        del sequence.token_ids[len(sequence.request.prompt_token_ids) + num_outputs :]
        sequence.num_computed = min(sequence.num_computed, sequence.num_tokens)
        sequence.finish_reason, sequence.matched_token_id = FinishReason.STOP, None
        self._lengths.record(num_outputs)
        self.end(sequence, State.FINISHED)

    def end(self, sequence: Sequence, state: State, detail: str = "") -> None:
        """Moves a sequence to a terminal state and gives its blocks back once nothing touches them."""
        if sequence.is_over:
            return
        sequence.detail = detail
        sequence.move(state)
        self.totals.endings[state] += 1
        self._forget(sequence)
        self.holdings.free(sequence)

    def abandon(self, plan: Plan, detail: str) -> None:
        """See `Scheduler.abandon`."""
        for part in plan.slices:
            self.end(part.sequence, State.FAILED, detail)
            self.holdings.unpin(part.sequence)

    def num_wanted_blocks(self) -> int:
        """See `Scheduler.num_wanted_blocks`."""
        # The first that waits may take the seat of another.
        num_seats = max(1, self.limits.max_num_seqs - self.num_running)
        waiting = self._waiting.snapshot(num_seats)
        return self.num_running + sum(self.holdings.num_blocks(sequence.num_tokens + 1) for sequence in waiting)

    @property
    def num_queued(self) -> int:
        """Sequences without blocks."""
        return len(self._waiting)

    @property
    def num_queued_tokens(self) -> int:
        """Tokens still to be computed or fetched."""
        return sum(sequence.num_pending for sequence in (*self._waiting, *self._prefilling, *self._fetching))

    @property
    def num_running(self) -> int:
        """Sequences with a seat."""
        return len(self._decoding) + len(self._prefilling) + len(self._fetching)

    def live(self) -> list[Sequence]:
        """Every sequence that is not over."""
        return [*self._waiting, *self._fetching, *self._prefilling, *self._decoding]

    def _append(self, sequence: Sequence, sample: Sample, now_s: float) -> NewToken:
        token = NewToken(sequence, sequence.num_tokens, sample)
        sequence.token_ids.append(sample.token_id)
        if sequence.first_token is None:
            sequence.first_token, sequence.first_token_s = sample, now_s
        if sequence not in self._decoding:
            if sequence.state is State.PREFILLING:
                self.totals.num_prompt_tokens += token.position
            self._forget(sequence)
            self._decoding.add(sequence)
            sequence.move(State.DECODING)
        if sequence.check_finished(self.limits.eos_token_ids, self.limits.max_model_len):
            self._lengths.record(sequence.num_outputs)
            self.end(sequence, State.FINISHED)
        return token

    def _choose_batch(self, now_s: float) -> None:
        """Lets the first `max_batch_size` decode; those that rank behind pause, with their KV. Equals go in the order
        in which they came: one that waits never takes the place of one that runs."""
        chosen: Iterable[Sequence] = self._decoding
        if len(self._decoding) > self._batch_size:
            in_order = by_class_when_served(self._decoding, now_s, self.limits.ageing_s)
            chosen = islice(in_order, self._batch_size)
        chosen = set(chosen)
        for sequence in self._decoding:
            if sequence not in chosen:
                self._pause(sequence, now_s)
            elif sequence.state is not State.DECODING:
                sequence.move(State.DECODING)
                sequence.note_pause(False, now_s)

    def _pause(self, sequence: Sequence, now_s: float) -> None:
        if sequence.state is not State.PAUSED:
            sequence.move(State.PAUSED)
            sequence.note_pause(True, now_s)
            self.totals.num_pauses += 1

    def _close_batch(self, ready: list[Sequence], now_s: float) -> list[Sequence]:
        """Static batching: a batch is filled from what waits once the one before has ended to its last member. It is
        closed by its first step, which waits until all its members have arrived."""
        if self.num_running == 0:
            self._num_places_given = 0
        if self._has_seat():
            self._admit(now_s)
        if self._fetching or self._prefilling:
            return []
        if self._decoding:
            self._num_places_given = self._batch_size
        return ready

    def _grow_running(self, now_s: float) -> list[Sequence]:
        """Gives each sequence of the batch the slot of its next token, displacing where there is none. Answers those
        that have it; the others wait for blocks of a victim that is still being copied, or its transfer stopped."""
        ready = []
        for sequence in [each for each in self._decoding if each.state is State.DECODING]:
            while sequence in self._decoding:
                if self.holdings.grow(sequence, sequence.num_tokens):
                    ready.append(sequence)
                    break
                if self.holdings.num_departing_blocks > 0:
                    break
                self._displace(self._victims.for_growth(self._holders()), "blocks", now_s)
        return ready

    def _displace(self, victim: Sequence, cause: str, now_s: float) -> None:
        """Takes blocks and seat of one: its KV waits in host memory where there is room for it, else it is evicted."""
        self._forecast = None
        if self.num_running == 1 or not self.holdings.can_swap_out(victim):
            self.totals.evictions[cause] += 1
            self.end(victim, State.EVICTED, EVICTED[cause])
            return
        self.totals.swaps[cause] += 1
        victim.num_displaced += cause == "class"
        self.holdings.swap_out(victim)
        self._forget(victim)
        self._waiting.add(victim)
        self._pause(victim, now_s)

    def _return(self, sequence: Sequence, now_s: float) -> None:
        """One that was swapped out has a seat and blocks again."""
        if sequence.first_token is None:
            sequence.move(State.PREFILLING)
            sequence.note_pause(False, now_s)
            self._prefilling.add(sequence)
        else:
            self._decoding.add(sequence)  # and goes on when it is in the batch

    def _holders(self) -> list[Sequence]:
        return [*self._decoding, *self._prefilling, *self._fetching]

    def _admit(self, now_s: float) -> None:
        num_passed_over, full_sources = 0, set[str | None]()
        waiting = self._waiting.snapshot(self.limits.max_num_seqs + MAX_PASSED_OVER)
        for sequence in by_class_when_served(waiting, now_s, self.limits.ageing_s):
            if num_passed_over >= MAX_PASSED_OVER or sequence.num_pins > 0:  # it is still being copied
                return
            if not self.holdings.can_ever_hold(sequence.num_tokens + 1):
                self.end(sequence, State.FAILED, "the KV pool could not grow to what this needs")
                continue
            source = self._sources.get(sequence)
            if source in full_sources or not self._may_reserve(source, sequence.num_tokens):
                # Nor may shorter ones of its source overtake it: a stream of them would keep it out.
                full_sources.add(source)
                num_passed_over += 1
                continue
            has_place = False
            while not self._seat(sequence, source, has_place):
                if sequence.request.keep_tokens:
                    self.end(sequence, State.EVICTED, "there is no room to keep a session")
                    break
                if not self._preempt_for(sequence, source, now_s):
                    return
                has_place = True
            if sequence.is_over:
                continue
            self._waiting.discard(sequence)
            self._num_places_given += 1
            sequence.started_s = sequence.started_s or now_s
            if sequence.state is State.PAUSED:
                self._return(sequence, now_s)
            elif source is not None:
                self._fetching[sequence] = sequence.num_tokens
                self._reserved_tokens[source] += sequence.num_tokens
                self._starting.append(sequence)
                sequence.move(State.FETCHING)
            else:
                self._prefilling.add(sequence)
                sequence.move(State.PREFILLING)
            if self._has_target:
                return  # the next is judged by steps that hold this one

    def _seat(self, sequence: Sequence, source: str | None, has_place: bool) -> bool:
        """Gives a sequence a seat and its blocks, or nothing. One that `has_place` makes no step longer: another has
        left it to it."""
        if not self._has_seat():
            return False
        num_tokens, max_cached = sequence.num_tokens + 1, sequence.max_cached(is_fetched=source is not None)
        prospect = self.holdings.prospect(sequence, max_cached)
        if not prospect.has_room_for(self.holdings.num_blocks(num_tokens)):
            return False
        refusal = sequence, self.holdings.num_given_back, self.holdings.max_blocks
        if refusal == self._refusal:
            return False  # nobody has ended since: all hold as much as then, or more
        if self._forecast is None:
            self._forecast = self._outlook.forecast(self._holders())
        if not has_place and not self._outlook.is_step_within_target(sequence, self._forecast):
            return False
        if not self._outlook.has_blocks_for(sequence, prospect, self._forecast):
            self._refusal = refusal
            return False
        is_admitted = self.holdings.admit(sequence, num_tokens, max_cached)
        assert is_admitted, "its blocks are available"
        self._forecast.add(self._outlook.future(sequence))
        return True

    def _has_seat(self) -> bool:
        if self.limits.is_static:
            return self._num_places_given < self._batch_size
        return self.num_running < self.limits.max_num_seqs

    def _preempt_for(self, sequence: Sequence, source: str | None, now_s: float) -> bool:
        """Displaces one of a lower class, if that makes room; answers whether room is there to be tried again."""
        if self.limits.is_static or (self._has_seat() and self.holdings.num_departing_blocks > 0):
            return False  # some blocks come back by themselves: they may be enough
        max_cached = sequence.max_cached(is_fetched=source is not None)
        victim = self._victims.for_newcomer(self._holders(), sequence, max_cached, now_s)
        if victim is None:
            return False
        self._displace(victim, "class", now_s)
        return victim.num_pins == 0  # what is under a transfer or a copy comes back later

    def _may_reserve(self, source: str | None, num_tokens: int) -> bool:
        if source is None or (reserved := self._reserved_tokens[source] + num_tokens) <= self._max_reserved_tokens:
            return True
        others = (each for fetching, each in self._fetching.items() if self._sources[fetching] == source)
        return reserved - max(num_tokens, *others, 0) <= self._max_reserved_tokens

    def _forget(self, sequence: Sequence) -> None:
        if self.speculation is not None:
            self.speculation.forget(sequence)
        for queue in (self._waiting, self._prefilling, self._decoding):
            queue.discard(sequence)
        if sequence in self._starting:
            self._starting.remove(sequence)
        source = self._sources.pop(sequence, None)
        if source is not None:
            self._reserved_tokens[source] -= self._fetching.pop(sequence, 0)
            if not self._reserved_tokens[source]:
                del self._reserved_tokens[source]
