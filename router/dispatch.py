"""From a validated request to a finished answer: which workers, and what happens when they fail.

1. Decode is picked first (who holds the session's KV, then the policy), then a prefill worker that fits it. Without
   one, or for a prompt shorter than `local_prefill_max_tokens`, decode prefills.
2. An attempt runs. If it fails, a new one carries the prompt and the tokens the client already has: there is one way
   to recover, whatever was lost.
3. A request whose worker died three times running without a new token fails: it is probably the cause.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

from opentelemetry.trace import Span, Status, StatusCode

from kvstore.hashing import attempt_label
from kvstore.metadata.base import SessionRecord
from protos import inference_pb2
from router.answer import Answer
from router.attempts import Attempt, AttemptFailed, Served
from router.fleet import Fleet
from router.links import Incarnation
from router.policies.base import Policy
from runtime.errors import Unavailable
from runtime.telemetry import Telemetry

LOG = logging.getLogger(__name__)
MAX_DEATHS = 3
MAX_FAILURES = 16
FIRST_BACKOFF_S = 0.02
MAX_BACKOFF_S = 1.0


class Dispatcher:
    """Serves requests over a fleet."""

    def __init__(
        self,
        fleet: Fleet,
        policy: Policy,
        telemetry: Telemetry,
        router_id: str,
        local_prefill_max_tokens: int,
        worker_wait_s: float,
    ) -> None:
        self._fleet = fleet
        self._policy = policy
        self._telemetry = telemetry
        self._router_id = router_id
        self._local_prefill_max_tokens = local_prefill_max_tokens
        self._worker_wait_s = worker_wait_s

    async def serve(
        self, answer: Answer, session: SessionRecord | None, parent: Span
    ) -> tuple[inference_pb2.Finish, Incarnation]:
        """Completes `answer`; returns how it finished and who holds its KV. Raises BatonError if it cannot be."""
        num_failures, num_evictions, avoided, dead = 0, 0, set[Incarnation](), set[Incarnation]()
        first_dispatch_s: float | None = None
        attempt_number = 0
        while True:
            attempt_number += 1
            decode, prefill = await self._choose(answer, session, avoided, is_first=attempt_number == 1)
            first_dispatch_s = first_dispatch_s or time.monotonic()
            num_before = len(answer.token_ids)
            try:
                served = await self._attempt(answer, decode, prefill, attempt_number, num_evictions, parent)
            except AttemptFailed as failure:
                if answer.matched_stop is not None:
                    # The stop string was found before the worker went: nothing is missing.
                    served = None
                else:
                    progressed = len(answer.token_ids) > num_before
                    num_failures = 0 if progressed else num_failures + 1
                    if progressed:
                        dead.clear()
                    if failure.worker_died and failure.culprit is not None:
                        # One that breaks calls, while its reports are merely late, dies once.
                        dead.add(failure.culprit)
                    num_evictions += failure.evicted
                    # Eviction is scheduling at work; anything else is for someone to look at.
                    level = logging.INFO if failure.evicted else logging.WARNING
                    LOG.log(level, "%s: attempt %d: %s", answer.request.request_id, attempt_number, failure.message)
                    if len(dead) >= MAX_DEATHS or num_failures >= MAX_FAILURES:
                        raise Unavailable(
                            f"the request failed {num_failures} times running without a new token; last: "
                            f"{failure.message}"
                        ) from failure
                    if failure.culprit is not None:
                        avoided.add(failure.culprit)
                    await asyncio.sleep(min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2**num_failures))
                    continue
            answer.finish()
            queue_ms = 1000 * (first_dispatch_s - answer.arrived_s)
            return _finish(answer, served, decode, prefill, attempt_number, queue_ms), decode

    async def _attempt(
        self,
        answer: Answer,
        decode: Incarnation,
        prefill: Incarnation | None,
        number: int,
        num_evictions: int,
        parent: Span,
    ) -> Served:
        span = self._telemetry.start_span("baton.attempt", parent=parent)
        waited_ms = round(1000 * (time.monotonic() - answer.arrived_s))
        attempt = Attempt(
            answer, decode, prefill, waited_ms, span, num_evictions=num_evictions, router_id=self._router_id
        )
        span.set_attributes(
            {
                "baton.attempt_id": attempt_label(attempt.attempt_id),
                "baton.attempt_number": number,
                "baton.decode_worker_id": decode.worker_id,
                "baton.prefill_worker_id": (prefill or decode).worker_id,
            }
        )
        try:
            return await attempt.run()
        except AttemptFailed as failure:
            span.set_status(Status(StatusCode.ERROR, failure.message))
            raise
        finally:
            span.end()

    async def _choose(
        self, answer: Answer, session: SessionRecord | None, avoided: set[Incarnation], is_first: bool
    ) -> tuple[Incarnation, Incarnation | None]:
        """Waits for workers, but at a request's first attempt: then nobody has promised it anything yet."""
        deadline_s = time.monotonic() + (0 if is_first else self._worker_wait_s)
        while True:
            changed = self._fleet.change
            # One worker that failed is better than none: what it lacked it may have now.
            everyone = self._fleet.usable(decodes=True)
            decodes = [worker for worker in everyone if worker not in avoided] or everyone
            if decodes:
                decode = self._pick_decode(decodes, session)
                return decode, self._pick_prefill(decode, answer.next_position, avoided)
            remaining_s = deadline_s - time.monotonic()
            if remaining_s <= 0:
                raise Unavailable("no decode worker is ready", retry_after_s=1.0)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(remaining_s):
                    await changed.wait()

    def _pick_decode(self, candidates: list[Incarnation], session: SessionRecord | None) -> Incarnation:
        if session is not None:
            for worker in candidates:
                if (worker.worker_id, worker.description.epoch) == (session.holder, session.epoch):
                    return worker
        # Seats are not equally many everywhere, so the least loaded worker may have none free.
        return self._policy.pick_decode([worker for worker in candidates if worker.num_free] or candidates)

    def _pick_prefill(self, decode: Incarnation, num_tokens: int, avoided: set[Incarnation]) -> Incarnation | None:
        if decode.role == inference_pb2.WORKER_ROLE_MIXED or num_tokens <= self._local_prefill_max_tokens:
            return None
        candidates = [w for w in self._fleet.usable(decodes=False) if w not in avoided and w.fits(decode)]
        return self._policy.pick_prefill(candidates) if candidates else None


def _finish(
    answer: Answer,
    served: Served | None,
    decode: Incarnation,
    prefill: Incarnation | None,
    num_attempts: int,
    queue_ms: float,
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
    by.decode_worker_id = decode.worker_id
    by.prefill_worker_id = (prefill or decode).worker_id
    by.num_attempts = num_attempts
    if first is not None:
        # Tokens that an earlier attempt had generated are part of this attempt's input, not of the prompt.
        finish.usage.cached_tokens = min(first.cached_tokens, finish.usage.prompt_tokens)
        timing.prefill_queue_ms, timing.prefill_ms = first.queue_ms, first.prefill_ms
    if served is not None:
        record = served.record
        by.transport, by.kv_bytes = record.transport, record.kv_bytes
        timing.transfer_ms = record.transfer_ms
        if prefill is None:
            finish.usage.cached_tokens = min(record.cached_tokens, finish.usage.prompt_tokens)
            timing.prefill_queue_ms, timing.prefill_ms = record.queue_ms, record.prefill_ms
    if answer.matched_stop is not None:
        finish.reason, finish.matched_stop = inference_pb2.FINISH_REASON_STOP, answer.matched_stop
    elif served is not None:
        finish.reason = served.record.finish_reason
        if served.record.HasField("matched_token_id"):
            finish.matched_token_id = served.record.matched_token_id
    return finish
