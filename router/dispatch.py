"""From a validated request to a finished answer: which workers, and what happens when they fail.

1. Decode is picked first, then a prefill worker that fits it, both by the policy. Without one, or where no more is new
   than `local_prefill_max_tokens` (`local_turn_max_tokens` at the worker that holds the session's KV), decode prefills.
   Who computes what is new at that worker may also be chosen by what it costs (`router.placement`).
   Who failed this request, or several others running, is left out where somebody else can do it.
2. An attempt runs. If it fails, a new one carries the prompt and the tokens the client already has: there is one way
   to recover, whatever was lost. It goes to the prefill worker that has computed the prompt, unless others could
   compute it again sooner than that one comes to it.
3. Attempts are bounded (`router.recovery`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from dataclasses import dataclass

from kvstore.hashing import attempt_label
from protos import inference_pb2
from router.answer import Answer
from router.attempts import Attempt, AttemptFailed, Served
from router.breakers import Breakers
from router.fleet import Fleet
from router.links import Incarnation
from router.placement import Measured, Placement
from router.policies.base import Policy, Wanted
from router.recovery import Recovery
from router.request_trace import RequestTrace, TracedAttempt
from router.sessions import Turn
from runtime.errors import Unavailable

LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Choice:
    """Who serves an attempt."""

    decode: Incarnation
    """Generates."""
    prefill: Incarnation | None
    """Computes the prompt; None: decode does."""
    num_held: int = 0
    """Leading tokens whose KV decode should have from earlier turns of the session."""
    why: str = ""
    """Why these, for the trace."""
    max_local_tokens: int = 0
    """With `num_held`: the most that decode may have to compute all the same, or prefill had better do it; 0: any."""
    lends: bool = False
    """Whether prefill takes from decode what that holds."""

    @property
    def placement(self) -> Placement:
        """Where what is new is computed."""
        if self.prefill is None:
            return Placement.LOCAL
        return Placement.LENT if self.lends else Placement.PREFILL


class Dispatcher:
    """Serves requests over a fleet."""

    def __init__(
        self,
        fleet: Fleet,
        policy: Policy,
        router_id: str,
        local_prefill_max_tokens: int,
        local_turn_max_tokens: int,
        worker_wait_s: float,
        turn_placement: str = "fixed",
    ) -> None:
        """`turn_placement` as in RouterConfig."""
        self.num_placed: Counter[Placement] = Counter()
        """Attempts by where what was new was to be computed."""
        self._fleet = fleet
        self._policy = policy
        self._policy_name = type(policy).__module__.rpartition(".")[2]
        self._router_id = router_id
        self._local_prefill_max_tokens = local_prefill_max_tokens
        self._local_turn_max_tokens = local_turn_max_tokens
        self._worker_wait_s = worker_wait_s
        self._lends = turn_placement == "lent"
        self._measured = Measured() if turn_placement == "measured" else None
        self.breakers = Breakers()
        """Who is left alone for a while."""
        self.num_attempts = 0
        """Attempts so far."""
        self.recoveries: Counter[str] = Counter()
        """Attempts that failed and were followed by another, by cause; see `cause_of`."""

    async def serve(
        self, answer: Answer, turn: Turn | None, trace: RequestTrace
    ) -> tuple[inference_pb2.Finish, Incarnation]:
        """Completes `answer`; returns how it finished and who holds its KV. Raises BatonError if it cannot be. Notes in
        `trace` what was tried."""
        recovery = Recovery()
        first_dispatch_s: float | None = None
        attempt_number = 0
        while True:
            attempt_number += 1
            choice = await self._choose(answer, turn, recovery, is_first=attempt_number == 1)
            first_dispatch_s = first_dispatch_s or time.monotonic()
            num_before, num_input_tokens = len(answer.token_ids), answer.next_position
            self.num_attempts += 1
            answer.worker_ids = ((choice.prefill or choice.decode).worker_id, choice.decode.worker_id)
            try:
                served = await self._attempt(answer, choice, turn, recovery.num_evictions, trace)
            except AttemptFailed as failure:
                self._note_failure(answer, failure, choice)
                if answer.matched_stop is not None:
                    # The stop string was found before the worker went: nothing is missing.
                    served = None
                else:
                    # Want of blocks is scheduling at work; anything else is for someone to look at.
                    level = logging.INFO if failure.evicted or failure.culprit is None else logging.WARNING
                    LOG.log(level, "%s: attempt %d: %s", answer.request.request_id, attempt_number, failure.message)
                    progressed = len(answer.token_ids) > num_before
                    recovery.note_failure(failure, choice.prefill, num_input_tokens, progressed)
                    self.recoveries[cause_of(failure, choice)] += 1
                    await asyncio.sleep(recovery.backoff_s)
                    continue
            else:
                for circuit in _circuits(choice):
                    self.breakers.note_success(*circuit)
            answer.finish()
            queue_ms = 1000 * (first_dispatch_s - answer.arrived_s)
            return _finish(answer, served, choice, attempt_number, queue_ms), choice.decode

    async def _attempt(
        self, answer: Answer, choice: Choice, turn: Turn | None, num_evictions: int, trace: RequestTrace
    ) -> Served:
        self.num_placed[choice.placement] += 1
        attempt = Attempt(
            answer,
            choice.decode,
            choice.prefill,
            round(1000 * (time.monotonic() - answer.arrived_s)),
            trace.attempt_context(),
            num_evictions=num_evictions,
            router_id=self._router_id,
            session=None if turn is None else turn.to_proto(),
            max_local_tokens=choice.max_local_tokens,
            lends=choice.lends,
        )
        num_before, num_input_tokens, failed = len(answer.token_ids), answer.next_position, None
        try:
            return await attempt.run()
        except AttemptFailed as failure:
            failed = failure
            raise
        finally:
            num_new_tokens = len(answer.token_ids) - num_before
            trace.attempts.append(
                TracedAttempt(
                    attempt.context,
                    attempt_label(attempt.attempt_id),
                    choice.decode,
                    choice.prefill,
                    choice.why,
                    choice.placement.value,
                    choice.num_held,
                    num_input_tokens,
                    num_new_tokens,
                    answer.last_token_s if num_new_tokens else None,
                    attempt.marks,
                    time.monotonic(),
                    "" if failed is None else failed.message,
                    failed is not None and failed.evicted,
                    failed is not None and failed.culprit is not None and not failed.evicted,
                )
            )

    def _note_failure(self, answer: Answer, failure: AttemptFailed, choice: Choice) -> None:
        """KV that did not get across, from a worker that is there, says something of that pair only."""
        if failure.culprit is None or failure.evicted:
            return
        is_between = failure.culprit is choice.prefill and not failure.worker_died
        circuit = (failure.culprit, choice.decode) if is_between else (failure.culprit,)
        self.breakers.note_failure(answer.request.request_id, *circuit)

    async def _choose(self, answer: Answer, turn: Turn | None, recovery: Recovery, is_first: bool) -> Choice:
        """Waits for workers, but at a request's first attempt: then nobody has promised it anything yet."""
        deadline_s = time.monotonic() + (0 if is_first else self._worker_wait_s)
        while True:
            changed = self._fleet.change
            # One worker that failed is better than none: what it lacked it may have now.
            everyone = self._fleet.usable(decodes=True)
            decodes = [worker for worker in everyone if worker not in recovery.avoided] or everyone
            decodes = [worker for worker in decodes if not self.breakers.is_open(worker)] or decodes
            if decodes:
                # After a failure nothing is presumed of what a worker holds: it may be what failed.
                choice = self._pick(decodes, answer, turn, recovery, expects_kv=is_first)
                for circuit in _circuits(choice):
                    self.breakers.note_use(*circuit)
                return choice
            remaining_s = deadline_s - time.monotonic()
            if remaining_s <= 0:
                raise Unavailable("no decode worker is ready", retry_after_s=1.0)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(remaining_s):
                    await changed.wait()

    def _pick(
        self,
        decodes: list[Incarnation],
        answer: Answer,
        turn: Turn | None,
        recovery: Recovery,
        expects_kv: bool,
    ) -> Choice:
        token_ids = (*answer.request.prompt_token_ids, *answer.token_ids)
        holder = None if turn is None else next((w for w in decodes if turn.is_held_by(w)), None)
        wanted = Wanted(token_ids, b"" if turn is None else turn.key, holder)
        # Seats are not equally many everywhere, so the least loaded worker may have none free.
        decode = self._policy.pick_decode([worker for worker in decodes if worker.num_free] or decodes, wanted)
        num_held = turn.num_held(token_ids) if turn is not None and expects_kv and decode is holder else 0
        limit = max(self._local_prefill_max_tokens, self._local_turn_max_tokens if num_held else 0)
        prefills = [
            worker
            for worker in self._fleet.usable(decodes=False)
            if worker not in recovery.avoided
            and worker.fits(decode)
            and not (self.breakers.is_open(worker) or self.breakers.is_open(worker, decode))
        ]
        why = "decode holds the session" if decode is holder else f"decode of {len(decodes)} by {self._policy_name}"
        if decode.role == inference_pb2.WORKER_ROLE_MIXED or not prefills:
            is_mixed = decode.role == inference_pb2.WORKER_ROLE_MIXED
            return Choice(decode, None, num_held, f"{why}; it is {'mixed' if is_mixed else 'without a prefill worker'}")
        (prefill, reason), num_new = self._pick_prefill(prefills, wanted, recovery), len(token_ids) - num_held
        placement = self._measured.choose(decode, prefill, num_new, num_held) if self._measured and num_held else None
        if placement is None:
            elsewhere = Placement.LENT if self._lends and num_held else Placement.PREFILL
            placement = elsewhere if num_new > limit else Placement.LOCAL
        if placement is not Placement.LOCAL:
            is_lent = placement is Placement.LENT
            why = f"{why}; {reason}{'; decode lends it what it holds' if is_lent else ''}"
            return Choice(decode, prefill, num_held, why, lends=is_lent)
        # One block more: a whole input that is held is never reused to its last token.
        most = max(limit, num_new) + decode.description.block_size
        why = f"{why}; it computes {num_new} new tokens itself"
        return Choice(decode, None, num_held, why, most if num_held else 0)

    def _pick_prefill(self, prefills: list[Incarnation], wanted: Wanted, recovery: Recovery) -> tuple[Incarnation, str]:
        """The one that has computed this before, unless others could do so sooner than that one comes to it; and why
        that one."""
        picked, keeper = self._policy.pick_prefill(prefills, wanted), recovery.keeper
        if keeper in prefills and _num_ahead(keeper) <= _num_ahead(picked) + recovery.num_kept_tokens:
            return keeper, "prefill has computed it before"
        return picked, f"prefill of {len(prefills)} by {self._policy_name}"


CAUSES = ("evicted", "died", "kv_gone", "kv_lost", "refused")


def cause_of(failure: AttemptFailed, choice: Choice) -> str:
    """Why an attempt failed, one of CAUSES: decode gave it back, a worker died, a session's blocks were given away,
    KV did not get across, or a worker did not do what it was asked."""
    if failure.evicted:
        return "evicted"
    if failure.worker_died:
        return "died"
    if failure.culprit is None:
        return "kv_gone"
    return "kv_lost" if failure.culprit is choice.prefill else "refused"


def _circuits(choice: Choice) -> list[tuple[Incarnation, ...]]:
    decode, prefill = choice.decode, choice.prefill
    return [(decode,)] if prefill is None else [(decode,), (prefill,), (prefill, decode)]


def _num_ahead(prefill: Incarnation) -> int:
    """Tokens that it computes before those of a newcomer."""
    return max(prefill.load.num_queued_tokens, prefill.num_assigned_tokens)


def _finish(
    answer: Answer, served: Served | None, choice: Choice, num_attempts: int, queue_ms: float
) -> inference_pb2.Finish:
    """The last message's record."""
    now_s = time.monotonic()
    finish = inference_pb2.Finish(seed=answer.request.seed)
    first = served.first_token if served is not None else None
    finish.usage.prompt_tokens = len(answer.request.prompt_token_ids)
    finish.usage.completion_tokens = len(answer.token_ids)
    timing, by = finish.timing, finish.served_by
    timing.router_queue_ms = queue_ms
    timing.total_ms = 1000 * (now_s - answer.arrived_s)
    timing.time_to_first_token_ms = 1000 * ((answer.first_token_s or now_s) - answer.arrived_s)
    timing.inter_token_latency_ms = answer.inter_token_latency_ms
    by.decode_worker_id = choice.decode.worker_id
    by.prefill_worker_id = (choice.prefill or choice.decode).worker_id
    by.num_attempts = num_attempts
    if first is not None:
        # Tokens that an earlier attempt had generated are part of this attempt's input, not of the prompt.
        finish.usage.cached_tokens = min(first.cached_tokens, finish.usage.prompt_tokens)
        timing.prefill_queue_ms, timing.prefill_ms = first.queue_ms, first.prefill_ms
    if served is not None:
        record = served.record
        by.transport, by.kv_bytes = record.transport, record.kv_bytes
        timing.transfer_ms = record.transfer_ms
        finish.usage.drafted_tokens, finish.usage.accepted_tokens = record.num_drafts, record.num_accepted_drafts
        if choice.prefill is None:
            finish.usage.cached_tokens = min(record.cached_tokens, finish.usage.prompt_tokens)
            timing.prefill_queue_ms, timing.prefill_ms = record.queue_ms, record.prefill_ms
    if answer.matched_stop is not None:
        finish.reason, finish.matched_stop = inference_pb2.FINISH_REASON_STOP, answer.matched_stop
    elif served is not None:
        finish.reason = served.record.finish_reason
        if served.record.HasField("matched_token_id"):
            finish.matched_token_id = served.record.matched_token_id
    return finish
