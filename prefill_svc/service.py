"""The gRPC service of a prefilling worker.

1. Run queues the attempt, opens its lease and answers `accepted`.
2. The reader's Fetch claims the lease: the scheduler may start it. What the reader lends is fetched from it first, as
   far as it is not cached here; if that fails it is computed.
3. Each computed chunk makes whole blocks readable; the last one samples the first token, which Run reports.
4. The reader releases the lease; Run reports `finished`, and the blocks stay behind as prefix cache.

If the call is closed, the step fails or the lease breaks, the lease is broken first and the blocks are freed after,
once no fetch writes to them any more.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass

import grpc.aio

from engine.attempt import Attempt
from engine.handoffs import Handoffs
from engine.kv_reader import Fetched, KVLost, KVReader, Source, check_name
from engine.planning import Plan
from engine.scheduling import NewToken
from engine.sequence import PREFILL_MOVES, Sequence, State
from engine.step_loop import StepLoop
from engine.timeline import CHUNK, CREDIT
from engine.wire import pool_status, request_from_attempt, token_to_proto
from engine.worker_parts import WorkerParts
from engine.worker_service import WorkerService
from kvstore.leases import Lease, LeaseState
from prefill_svc.scheduler import PrefillScheduler
from protos import inference_pb2, worker_pb2, worker_pb2_grpc
from runtime.errors import Aborted, Unavailable
from runtime.metrics import Family
from runtime.rpc import Server

LOG = logging.getLogger(__name__)
Context = grpc.aio.ServicerContext


@dataclass(slots=True)
class _Job:
    attempt: Attempt
    lease: Lease
    lender: Source | None
    fetching: asyncio.Task[None] | None = None
    fetched: Fetched | None = None


class PrefillService(worker_pb2_grpc.PrefillServicer):
    """Prefill.Run over a scheduler."""

    def __init__(self, parts: WorkerParts) -> None:
        self.scheduler = PrefillScheduler(parts.holdings, parts.limits)
        self._parts = parts
        self._leases = parts.leases
        self._reader = KVReader(parts.memory, parts.identity.layout, parts.transports, parts.cluster.calling)
        self._fetches: set[asyncio.Task[None]] = set()
        self._handoffs = Handoffs(parts.config.usable_transports)  # of what decode workers lend
        self._jobs: dict[Sequence, _Job] = {}
        self._step_loop: StepLoop
        self._worker: WorkerService

    def start(self, server: Server, step_loop: StepLoop, worker: WorkerService) -> str:
        """See `engine.worker.RoleService`."""
        self._step_loop, self._worker = step_loop, worker
        server.add(worker_pb2_grpc.add_PrefillServicer_to_server, self, "baton.v1.Prefill")
        return "baton.v1.Prefill"

    def end_streams(self) -> None:
        """There are none."""

    async def close(self) -> None:
        """Stops fetches and lets go of lenders."""
        for task in self._fetches:
            task.cancel()
        if self._fetches:
            await asyncio.wait(self._fetches)
        await self._reader.close()

    async def Run(
        self, request: worker_pb2.PrefillRunRequest, context: Context[object, object]
    ) -> AsyncIterator[worker_pb2.PrefillRunResponse]:
        """One attempt, from acceptance to release."""
        if self._worker.is_draining:
            raise Unavailable(f"worker {self._parts.identity.worker_id} is draining")
        job = self._accept(request, context)
        attempt, lease, sequence = job.attempt, job.lease, job.attempt.sequence
        try:
            yield worker_pb2.PrefillRunResponse(accepted=self._accepted(sequence))
            # A reader that gives up early ends the work: nobody will read what is still to be computed.
            await attempt.wait_for(lambda s: s.state is State.LEASED or lease.state is not LeaseState.OPEN)
            self._raise_if_ended(sequence)
            if sequence.state is State.LEASED:
                yield worker_pb2.PrefillRunResponse(first_token=self._first_token(attempt))
                await attempt.wait_for(lambda _: lease.state is not LeaseState.OPEN)
                self._raise_if_ended(sequence)
            intact = lease.state is LeaseState.RELEASED
            self.scheduler.end(sequence, State.FINISHED if intact else State.CANCELLED, "the reader gave up")
            yield worker_pb2.PrefillRunResponse(finished=worker_pb2.PrefillFinished(intact=intact))
        finally:
            self.scheduler.end(sequence, State.CANCELLED, "the router closed the call")
            del self._jobs[sequence]
            self._worker.note_change()
            self._step_loop.wake()

    def _accept(self, request: worker_pb2.PrefillRunRequest, context: Context[object, object]) -> _Job:
        model, limits = self._parts.identity.model, self._parts.limits
        accepted = request_from_attempt(request.attempt, model.fingerprint, model.vocab_size, limits.max_model_len)
        attempt = Attempt(accepted, PREFILL_MOVES, context, self._on_end)
        sequence = attempt.sequence
        lease = self._leases.open(
            accepted.attempt_id, sequence.num_tokens, lambda: self._on_credit(attempt), attempt.changed.set
        )
        lender = None
        if request.HasField("lender"):
            lender = Source(request.lender.worker_id, request.lender.address, request.lender.epoch)
        job = self._jobs[sequence] = _Job(attempt, lease, lender)
        self.scheduler.add(sequence)
        self._worker.note_change()
        return job

    def _on_credit(self, attempt: Attempt) -> None:
        attempt.note(CREDIT)
        job = self._jobs[attempt.sequence]
        self.scheduler.credit(attempt.sequence, 0 if job.lender is None else job.lease.lent_tokens)
        self._step_loop.wake()

    def _on_end(self, attempt: Attempt) -> None:
        """The lease is broken before the move's caller frees a block; a fetch's pin keeps them until it has stopped."""
        job = self._jobs[attempt.sequence]
        self._leases.break_(job.lease)
        if job.fetching is not None and job.fetching is not asyncio.current_task():
            job.fetching.cancel()

    async def _fetch(self, job: _Job, lender: Source) -> None:
        """Takes what the reader lends. Whatever comes of it, the prompt is computed from there on."""
        sequence, num_tokens = job.attempt.sequence, job.lease.lent_tokens
        sequence.num_pins += 1
        try:
            job.fetched = fetched = await self._reader.fetch(
                lender,
                sequence.request.attempt_id,
                sequence.block_table,
                sequence.num_cached,
                num_tokens,
                lambda: None,
                has_first_token=False,
            )
            self._handoffs.note(fetched.transport, fetched.num_bytes, fetched.duration_s)
        except KVLost as error:
            num_tokens = 0
            self._handoffs.lost[check_name(error.check)] += 1
            LOG.info("what was lent is computed: %s", error.message)
        except Exception:
            # A bug on this side: without an end the attempt would wait for ever, holding its blocks.
            num_tokens = 0
            self._handoffs.lost[check_name(worker_pb2.KV_CHECK_READER)] += 1
            LOG.exception("a fetch from %s failed", lender.worker_id)
        finally:
            self._parts.holdings.unpin(sequence)
            self._worker.note_change()
            self._step_loop.wake()
        # Only here: a fetch that was cancelled has brought nothing.
        if not sequence.is_over:
            self.scheduler.fetched(sequence, num_tokens)

    def _raise_if_ended(self, sequence: Sequence) -> None:
        if sequence.state is State.EVICTED:
            raise Unavailable(f"the attempt was given back: {sequence.detail}")
        if sequence.is_over:
            raise Aborted(f"the attempt ended: {sequence.detail or sequence.state.value}")

    def _accepted(self, sequence: Sequence) -> worker_pb2.PrefillAccepted:
        cached = self._parts.holdings.cached_prefix(sequence, sequence.num_tokens - 1)
        return worker_pb2.PrefillAccepted(
            epoch=self._leases.epoch, cached_tokens=len(cached) * self._parts.holdings.block_size
        )

    def _first_token(self, attempt: Attempt) -> worker_pb2.PrefillFirstToken:
        sequence, fetched = attempt.sequence, self._jobs[attempt.sequence].fetched
        assert sequence.first_token is not None
        return worker_pb2.PrefillFirstToken(
            token=token_to_proto(sequence.num_tokens, sequence.first_token),
            cached_tokens=sequence.num_cached,
            queue_ms=attempt.queue_ms,
            prefill_ms=1000 * (sequence.first_token_s - sequence.started_s),
            timeline=attempt.timeline(),
            lent_bytes=0 if fetched is None else fetched.num_bytes,
        )

    # Steps

    def planned(self, plan: Plan) -> None:
        """A cached prefix is readable before anything is computed. Starts the fetches of what is lent."""
        self._report_progress(plan)
        for sequence in self.scheduler.take_fetches():
            job = self._jobs[sequence]
            assert job.lender is not None
            job.fetching = asyncio.create_task(self._fetch(job, job.lender))
            self._fetches.add(job.fetching)
            job.fetching.add_done_callback(self._fetches.discard)

    def committed(self, plan: Plan, new_tokens: list[NewToken]) -> None:
        """More blocks are readable; finished prompts are complete."""
        for part in plan.slices:
            if (job := self._jobs.get(part.sequence)) is not None:
                job.attempt.note(CHUNK, part.num_tokens)
        self._report_progress(plan)
        for token in new_tokens:
            lease = self._jobs[token.sequence].lease
            self._leases.complete(lease, token.sample, token.sequence.first_token_s)
        self._worker.note_change()

    def _report_progress(self, plan: Plan) -> None:
        for part in plan.slices:
            job = self._jobs.get(part.sequence)
            if job is not None and not part.sequence.is_over:
                self._leases.progress(job.lease, part.sequence.block_table, part.sequence.num_computed)

    # Load

    def load(self) -> inference_pb2.WorkerLoad:
        """See `engine.worker_service.Role`."""
        scheduler, (step_s, tokens_per_s) = self.scheduler, self._step_loop.prompt_times.fit()
        return inference_pb2.WorkerLoad(
            num_queued=scheduler.num_queued,
            num_running=scheduler.num_running,
            num_queued_tokens=scheduler.num_queued_tokens,
            num_leases=len(self._leases),
            pool=pool_status(self._parts.holdings),
            num_handoffs_lost=self._handoffs.lost.total(),
            handoffs_lost=self._handoffs.lost,
            prompt_tokens_per_s=tokens_per_s,
            prompt_step_ms=1000 * step_s,
            fetch_bytes_per_s=self._reader.ready_rate.per_s,
        )

    def families(self) -> Iterable[Family]:
        """See `engine.worker_service.Role`."""
        return self._handoffs.families()

    def live_attempts(self) -> int:
        """See `engine.worker_service.Role`."""
        return len(self._jobs)

    def evict_all(self, detail: str) -> int:
        """See `engine.worker_service.Role`."""
        live = self.scheduler.live()
        for sequence in live:
            self.scheduler.end(sequence, State.EVICTED, detail)
        self.scheduler.totals.evictions["drain"] += len(live)
        return len(live)
