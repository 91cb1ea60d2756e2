"""The gRPC service of a decoding worker.

1. Run queues the attempt. When it is admitted, its KV is fetched from the prefilling worker, or computed here.
2. A fetch that was attested brings the first token; each step brings one more. Tokens go out on the router's Attach.
3. The attempt ends at an end-of-sequence or stop id, at its length, or where the router says Finish; Run returns the
   final record. Closing Run cancels.

A fetch pins the blocks it writes to, and those that it lends to its source: whatever ends the attempt, they are freed
only when the last byte was written and the loan is over. An attempt that only keeps a session's KV ends with its fetch.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, replace

import grpc.aio

from decode_svc.attach import TokenStreams
from decode_svc.draft_totals import DraftTotals
from decode_svc.scheduler import DecodeScheduler
from engine.attempt import Attempt
from engine.handoffs import Handoffs
from engine.kv_reader import Fetched, KVLost, KVReader, Source, check_name
from engine.planning import Plan
from engine.request import Request
from engine.scheduling import NewToken
from engine.sequence import DECODE_MOVES, Sequence, State
from engine.step_loop import StepLoop
from engine.timeline import CHUNK, FIRST_BYTES
from engine.wire import (
    check_attempt_id,
    finish_reason_to_proto,
    pool_status,
    request_from_attempt,
    token_to_proto,
)
from engine.worker_parts import WorkerParts
from engine.worker_service import WorkerService
from kvstore.hashing import attempt_label
from kvstore.leases import Lease
from protos import inference_pb2, worker_pb2, worker_pb2_grpc
from runtime.errors import Aborted, AlreadyExists, FailedPrecondition, InvalidArgument, NotFound, Unavailable
from runtime.metrics import Family, counter
from runtime.rpc import Server

LOG = logging.getLogger(__name__)
Context = grpc.aio.ServicerContext


@dataclass(slots=True)
class _Job:
    attempt: Attempt
    router_id: str
    source: Source | None
    lends: bool = False
    fetching: asyncio.Task[None] | None = None
    fetched: Fetched | None = None
    has_bytes: bool = False
    failed_check: worker_pb2.KVCheck = worker_pb2.KV_CHECK_UNSPECIFIED


class DecodeService(worker_pb2_grpc.DecodeServicer):
    """Decode over a scheduler and a KV reader."""

    def __init__(self, parts: WorkerParts) -> None:
        config = parts.config
        max_reserved = config.max_reserved_tokens or 2 * config.max_num_tokens
        self.scheduler = DecodeScheduler(parts.holdings, parts.limits, max_reserved, drafter=parts.drafter)
        speculation = self.scheduler.speculation
        self._draft_totals = DraftTotals() if speculation is None else speculation.totals
        self._parts = parts
        self._reader = KVReader(parts.memory, parts.identity.layout, parts.transports, parts.cluster.calling)
        self._streams = TokenStreams()
        self._jobs: dict[Sequence, _Job] = {}
        self._by_attempt: dict[bytes, Sequence] = {}
        self._fetches: set[asyncio.Task[None]] = set()
        self._handoffs = Handoffs(config.usable_transports)
        self._step_loop: StepLoop
        self._worker: WorkerService

    def start(self, server: Server, step_loop: StepLoop, worker: WorkerService) -> str:
        """See `engine.worker.RoleService`."""
        self._step_loop, self._worker = step_loop, worker
        server.add(worker_pb2_grpc.add_DecodeServicer_to_server, self, "baton.v1.Decode")
        return "baton.v1.Decode"

    def end_streams(self) -> None:
        """See `engine.worker.RoleService`."""
        self._streams.end()

    async def close(self) -> None:
        """Stops fetches and lets go of their owners."""
        for task in self._fetches:
            task.cancel()
        if self._fetches:
            await asyncio.wait(self._fetches)
        await self._reader.close()

    # Calls

    async def Run(
        self, request: worker_pb2.DecodeRunRequest, context: Context[object, object]
    ) -> worker_pb2.DecodeRunResponse:
        """One attempt, from acceptance to its final record."""
        if self._worker.is_draining:
            raise Unavailable(f"worker {self._parts.identity.worker_id} is draining")
        job = self._accept(request, context)
        sequence = job.attempt.sequence
        try:
            await job.attempt.wait_for(lambda _: False)
            return self._final_record(job)
        finally:
            self.scheduler.end(sequence, State.CANCELLED, "the router closed the call")
            del self._jobs[sequence], self._by_attempt[sequence.request.attempt_id]
            self._worker.note_change()
            self._step_loop.wake()

    def _accept(self, request: worker_pb2.DecodeRunRequest, context: Context[object, object]) -> _Job:
        identity, limits = self._parts.identity, self._parts.limits
        model = identity.model
        accepted = request_from_attempt(request.attempt, model.fingerprint, model.vocab_size, limits.max_model_len)
        if request.keep_tokens:
            accepted = self._to_keep(accepted, request)
        if accepted.attempt_id in self._by_attempt:
            raise AlreadyExists(f"attempt_id: {attempt_label(accepted.attempt_id)} is being served already")
        if not self._streams.is_attached(request.router_id):
            raise FailedPrecondition(f"router_id: {request.router_id!r} has no Attach stream here")
        source = None
        if request.HasField("source"):
            if identity.role == inference_pb2.WORKER_ROLE_MIXED and not accepted.keep_tokens:
                raise FailedPrecondition("source: a mixed worker prefills itself")
            source = Source(request.source.worker_id, request.source.address, request.source.epoch)
        attempt = Attempt(accepted, DECODE_MOVES, context, self._on_end)
        sequence = attempt.sequence
        job = self._jobs[sequence] = _Job(attempt, request.router_id, source, request.lends)
        self._by_attempt[accepted.attempt_id] = sequence
        self.scheduler.add(sequence, None if source is None else source.worker_id)
        if source is None and request.max_local_tokens:
            self._check_kept(job, request.max_local_tokens)
        self._worker.note_change()
        self._step_loop.wake()
        return job

    def _to_keep(self, accepted: Request, request: worker_pb2.DecodeRunRequest) -> Request:
        """The request of an attempt that only keeps a session's KV."""
        num_tokens, block_size = request.keep_tokens, self._parts.holdings.block_size
        if accepted.session is None or not request.HasField("source"):
            raise InvalidArgument("keep_tokens", f"needs a session and a source, got {num_tokens} without")
        if num_tokens % block_size or num_tokens > len(accepted.prompt_token_ids):
            most = len(accepted.prompt_token_ids)
            raise InvalidArgument(
                "keep_tokens", f"must be whole blocks of {block_size} within {most}, got {num_tokens}"
            )
        return replace(accepted, keep_tokens=num_tokens)

    def _check_kept(self, job: _Job, max_local_tokens: int) -> None:
        """Ends an attempt for which more than the router expected would have to be computed here."""
        sequence, holdings = job.attempt.sequence, self._parts.holdings
        num_kept = len(holdings.cached_prefix(sequence, sequence.num_tokens - 1)) * holdings.block_size
        if sequence.num_tokens - num_kept > max_local_tokens:
            text = f"of {sequence.num_tokens} tokens of the session {num_kept} are still kept here"
            self._lose(job, text, worker_pb2.KV_CHECK_KEPT)

    def _final_record(self, job: _Job) -> worker_pb2.DecodeRunResponse:
        attempt, sequence, fetched = job.attempt, job.attempt.sequence, job.fetched
        if sequence.state is State.FAILED and not job.failed_check:
            raise Aborted(f"the attempt failed: {sequence.detail}")
        outcomes = {
            State.FINISHED: worker_pb2.OUTCOME_FINISHED,
            State.EVICTED: worker_pb2.OUTCOME_EVICTED,
            State.FAILED: worker_pb2.OUTCOME_KV_LOST,
        }
        prefill_s = 0.0 if job.source or not sequence.first_token_s else sequence.first_token_s - sequence.started_s
        return worker_pb2.DecodeRunResponse(
            outcome=outcomes[sequence.state],
            finish_reason=finish_reason_to_proto(sequence.finish_reason),
            matched_token_id=sequence.matched_token_id,
            num_tokens=sequence.num_tokens,
            cached_tokens=sequence.num_cached,
            kv_bytes=0 if fetched is None else fetched.num_bytes,
            transport="" if fetched is None else fetched.transport,
            queue_ms=attempt.queue_ms,
            transfer_ms=0 if fetched is None else 1000 * fetched.duration_s,
            prefill_ms=1000 * prefill_s,
            detail=sequence.detail,
            timeline=attempt.timeline(),
            failed_check=job.failed_check,
            num_drafts=sequence.num_drafts,
            num_accepted_drafts=sequence.num_accepted_drafts,
            num_draft_steps=sequence.num_draft_steps,
            drafting_ms=1000 * sequence.drafting_s,
        )

    async def Attach(
        self, request: worker_pb2.AttachRequest, context: Context[object, object]
    ) -> AsyncIterator[worker_pb2.AttachResponse]:
        """A router's token stream."""
        if not request.router_id:
            raise InvalidArgument("router_id", "must not be empty")
        async with contextlib.aclosing(self._streams.stream(request.router_id)) as stream:
            async for message in stream:
                yield message

    async def Finish(
        self, request: worker_pb2.FinishRequest, context: Context[object, object]
    ) -> worker_pb2.FinishResponse:
        """Ends an attempt where the router found a stop string."""
        check_attempt_id(request.attempt_id)
        sequence = self._by_attempt.get(request.attempt_id)
        if sequence is None:
            raise NotFound("attempt", attempt_label(request.attempt_id), "attempt_id: no such attempt runs here")
        if not sequence.is_over:
            # The first token may have reached the router from prefill, before its KV has reached this worker.
            is_ahead = sequence.state in (State.QUEUED, State.FETCHING)
            if request.num_output_tokens > sequence.num_outputs and not is_ahead:
                raise InvalidArgument(
                    "num_output_tokens",
                    f"the attempt has {sequence.num_outputs} output tokens, got {request.num_output_tokens}",
                )
            self.scheduler.finish(sequence, request.num_output_tokens)
        return worker_pb2.FinishResponse()

    # Fetches

    async def _fetch(self, job: _Job, source: Source) -> None:
        sequence, keep_tokens = job.attempt.sequence, job.attempt.sequence.request.keep_tokens
        sequence.num_pins += 1
        lent: Lease | None = None
        try:
            lent = self._lend(sequence) if job.lends else None
            fetched = await self._reader.fetch(
                source,
                sequence.request.attempt_id,
                sequence.block_table,
                min(sequence.num_cached, keep_tokens or sequence.num_cached),
                keep_tokens or sequence.num_tokens,
                lambda: self._received(job),
                lent_tokens=0 if lent is None else lent.num_tokens,
                has_first_token=not keep_tokens,
            )
            self._handoffs.note(fetched.transport, fetched.num_bytes, fetched.duration_s)
            if not sequence.is_over:
                job.fetched = fetched
                self._take(sequence, fetched)
        except KVLost as error:
            self._lose(job, error.message, error.check)
        except Exception as error:
            # A bug on this side: without an end the attempt would wait for ever, holding its blocks.
            LOG.exception("a fetch from %s failed", source.worker_id)
            self._lose(job, f"the fetch failed here: {error}", worker_pb2.KV_CHECK_READER)
        finally:
            if lent is not None:
                self._parts.leases.break_(lent)
            self._parts.holdings.unpin(sequence)
            self._worker.note_change()
            self._step_loop.wake()

    def _received(self, job: _Job) -> None:
        """Some of the KV is here."""
        if job.has_bytes:
            return
        job.has_bytes = True
        job.attempt.note(FIRST_BYTES)
        self.scheduler.received(job.attempt.sequence)
        self._step_loop.wake()  # others of its source may come in now, whether or not a step runs

    def _lend(self, sequence: Sequence) -> Lease | None:
        """Leases what is cached here of the input to its source, but for the last token, which is to be computed."""
        block_size = self._parts.holdings.block_size
        num_blocks = min(sequence.num_cached, sequence.num_tokens - 1) // block_size
        if not num_blocks:
            return None
        # No end of the loan frees anything: the sequence holds the blocks.
        return self._parts.leases.lend(
            sequence.request.attempt_id, sequence.block_table[:num_blocks], num_blocks * block_size, lambda: None
        )

    def _take(self, sequence: Sequence, fetched: Fetched) -> None:
        """What has come is good."""
        if fetched.first_token is None:
            self.scheduler.kept(sequence)
        else:
            self._send([self.scheduler.fetched(sequence, fetched.first_token, time.monotonic())])

    def _lose(self, job: _Job, detail: str, check: worker_pb2.KVCheck) -> None:
        self._handoffs.lost[check_name(check)] += 1
        if not job.attempt.sequence.is_over:
            job.failed_check = check
            self.scheduler.end(job.attempt.sequence, State.FAILED, detail)

    def _on_end(self, attempt: Attempt) -> None:
        """Whatever ends an attempt ends its fetch; the fetch's pin keeps the blocks until it has stopped."""
        fetching = self._jobs[attempt.sequence].fetching
        if fetching is not None and fetching is not asyncio.current_task():
            fetching.cancel()

    # Steps

    def planned(self, plan: Plan) -> None:
        """Starts the fetches of those just admitted."""
        for sequence in self.scheduler.take_fetches():
            job = self._jobs[sequence]
            assert job.source is not None
            job.fetching = asyncio.create_task(self._fetch(job, job.source))
            self._fetches.add(job.fetching)
            job.fetching.add_done_callback(self._fetches.discard)

    def committed(self, plan: Plan, new_tokens: list[NewToken]) -> None:
        """Sends the tokens of a step."""
        self._draft_totals.committed(plan)
        if plan.num_tokens > len(plan.slices):  # chunks of prompts are in it
            for part in plan.slices:
                if part.num_tokens > 1 and (job := self._jobs.get(part.sequence)) is not None:
                    job.attempt.note(CHUNK, part.num_tokens)
        self._send(new_tokens)
        self._worker.note_change()

    def _send(self, new_tokens: list[NewToken]) -> None:
        for token in new_tokens:
            job = self._jobs.get(token.sequence)
            if job is not None:
                message = token_to_proto(token.position, token.sample)
                self._streams.push(job.router_id, token.sequence.request.attempt_id, message)

    # Load

    def load(self) -> inference_pb2.WorkerLoad:
        """See `engine.worker_service.Role`."""
        scheduler, (num_drafts, num_accepted) = self.scheduler, self._num_drafts()
        step_s, tokens_per_s = self._step_loop.prompt_times.fit()
        return inference_pb2.WorkerLoad(
            num_queued=scheduler.num_queued,
            num_running=scheduler.num_running,
            num_queued_tokens=scheduler.num_queued_tokens,
            num_leases=len(self._parts.leases),
            pool=pool_status(self._parts.holdings),
            num_handoffs_lost=self._handoffs.lost.total(),
            handoffs_lost=self._handoffs.lost,
            prompt_tokens_per_s=tokens_per_s,
            prompt_step_ms=1000 * step_s,
            fetch_bytes_per_s=self._reader.ready_rate.per_s,
            num_drafts=num_drafts,
            num_accepted_drafts=num_accepted,
        )

    def families(self) -> Iterable[Family]:
        """See `engine.worker_service.Role`."""
        yield from self._handoffs.families()
        num_drafts, num_accepted = self._num_drafts()
        yield counter("baton_drafts_total", "Tokens guessed and checked.").add(num_drafts)
        yield counter("baton_accepted_drafts_total", "Of these, those that came true.").add(num_accepted)
        yield from self._draft_totals.families()

    def _num_drafts(self) -> tuple[int, int]:
        speculation = self.scheduler.speculation
        return (0, 0) if speculation is None else (speculation.num_drafts, speculation.num_accepted)

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
