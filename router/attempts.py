"""One attempt: a prefill worker and a decode worker serve one request, or the attempt fails as a whole.

1. Prefill.Run is opened; it answers `accepted` at once. (Without a prefill worker decode computes the prompt itself.)
2. Decode.Run is opened, naming the prefill worker. Its Fetch is the credit on which prefill computes.
3. The first token comes from prefill, all tokens from decode's Attach stream; the answer takes each position once.
4. Decode.Run returns the final record. If a stop string is found, Decode.Finish asks for it.

An attempt ends by closing both calls, which frees everything on both sides. AttemptFailed says who is to blame, so that
the next attempt can go elsewhere; errors that a new attempt would meet again are raised as they are.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from protos import worker_pb2
from router.answer import Answer, TokensMissing
from router.links import Incarnation
from router.request_trace import AttemptMarks
from runtime.errors import BatonError
from runtime.rpc import error_from_call, has_details
from runtime.traces import TraceContext, inject

ACCEPT_S = 10.0
"""How long prefill may take to accept, which it does before it computes anything."""
LAST_TOKENS_S = 10.0
"""How long decode's last tokens may come after its final record."""
REPORT_S = 1.0
"""How long prefill's report may come after decode's final record, before the answer ends without it."""
VERDICT_S = 1.0
"""How long decode may take to notice that its source has gone, before the attempt is given up."""
DEADLINE_MARGIN_S = 0.5
"""How much longer workers are allowed than the client waits."""
_FINAL = frozenset({grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED})
_REFUSALS = frozenset(
    {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNAUTHENTICATED}
)


def _new_future() -> asyncio.Future[Any]:
    return asyncio.get_running_loop().create_future()


class AttemptFailed(BatonError):
    """The attempt is over, the request is not."""

    reason = "ATTEMPT_FAILED"

    def __init__(
        self, message: str, culprit: Incarnation | None, worker_died: bool = False, evicted: bool = False
    ) -> None:
        super().__init__(message)
        self.evicted = evicted
        """Whether decode gave it back for others."""
        self.culprit = culprit
        """The worker that the next attempt had better avoid."""
        self.worker_died = worker_died
        """Whether it was lost, and not merely short of something."""


@dataclass(slots=True)
class Served:
    """What is known of a finished attempt beside its tokens."""

    record: worker_pb2.DecodeRunResponse
    """Decode's final record."""
    first_token: worker_pb2.PrefillFirstToken | None
    """Prefill's report; None where decode prefilled, or if it never came."""


@dataclass(slots=True)
class Attempt:
    """One try."""

    answer: Answer
    """Where tokens go; what it has already is not generated again."""
    decode: Incarnation
    """Generates."""
    prefill: Incarnation | None
    """Computes the prompt; None: decode does."""
    waited_ms: int
    """How long the request has waited for this attempt."""
    context: TraceContext | None = None
    """What workers are told of its trace; None: nobody asks them what they did."""
    num_evictions: int = 0
    """How often earlier attempts were evicted."""
    router_id: str = ""
    """Names the Attach stream that decode sends tokens on."""
    session: worker_pb2.SessionTurn | None = None
    """Whose KV is kept when the attempt has ended well."""
    max_local_tokens: int = 0
    """Without a prefill worker: the most that decode may have to compute; 0: any number."""
    lends: bool = False
    """With a prefill worker: decode lends it the KV of the input that it has."""
    attempt_id: bytes = field(default_factory=lambda: secrets.token_bytes(16))
    """Never reused."""
    marks: AttemptMarks = field(default_factory=AttemptMarks)
    """Its course."""
    _num_assigned_tokens: int = 0
    _tasks: list[asyncio.Task[Any]] = field(default_factory=list)
    _prefilling: asyncio.Task[None] | None = None
    _deciding: asyncio.Task[worker_pb2.DecodeRunResponse] | None = None
    _finishing: asyncio.Task[None] | None = None
    _giving_up: asyncio.TimerHandle | None = None
    _accepted: asyncio.Future[worker_pb2.PrefillAccepted] = field(default_factory=_new_future)
    _reported: asyncio.Event = field(default_factory=asyncio.Event)
    """Set with prefill's report, or once there will be none."""
    _verdict: asyncio.Future[worker_pb2.DecodeRunResponse] = field(default_factory=_new_future)
    """Decode's final record, or the first reason why there will be none."""

    async def run(self) -> Served:
        """Serves the request. Raises AttemptFailed, or what would fail any attempt."""
        self.marks.began_s = time.monotonic()
        # Made once: the answer grows while the workers are told, and both must be told the same.
        message = self._message()
        self._assign()
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(self.decode.tokens_to(self.attempt_id, self._on_token))
                source = None
                if self.prefill is not None:
                    stack.enter_context(self.prefill.loss_to(self._on_prefill_lost))
                    source = await self._begin_prefill(self.prefill, message)
                stack.enter_context(self.decode.loss_to(self._on_decode_lost))
                self._deciding = self._start(self._decode(message, source))
                self._deciding.add_done_callback(self._on_decided)
                if self.answer.matched_stop is not None:
                    self._finish_once()
                record = await self._verdict
                if record.outcome != worker_pb2.OUTCOME_FINISHED:
                    raise await self._failed(record)
                await self._report_of_prefill()
                return Served(record, self.marks.first_token)
        finally:
            self.decode.num_assigned -= 1
            self._prompt_is_computed()
            await self._end()

    async def _end(self) -> None:
        running = [task for task in self._tasks if not task.done()]
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)
        if self._giving_up is not None:
            self._giving_up.cancel()
        self._verdict.cancel()
        for future in (*self._tasks, self._accepted, self._verdict):
            if future.done() and not future.cancelled():
                # Looked at, or the loop reports it: the first failure was raised, the others follow from it.
                future.exception()

    def _fail(self, error: BaseException) -> None:
        """There will be no record: the first who says so is heard."""
        if not self._verdict.done():
            self._verdict.set_exception(error)

    def _start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.ensure_future(work)
        self._tasks.append(task)
        return task

    def _assign(self) -> None:
        self.decode.num_assigned += 1
        if self.prefill is not None:
            self._num_assigned_tokens = self.answer.next_position
            self.prefill.num_assigned_tokens += self._num_assigned_tokens

    def _prompt_is_computed(self) -> None:
        """Or will not be, as the attempt is over: no load for prefill any more."""
        if self.prefill is not None:
            self.prefill.num_assigned_tokens -= self._num_assigned_tokens
            self._num_assigned_tokens = 0

    async def _failed(self, record: worker_pb2.DecodeRunResponse) -> AttemptFailed:
        """What a record of anything but success means. KV that was lost is prefill's failure."""
        culprit: Incarnation | None = self.decode
        died = self.decode.lost.is_set()
        if record.outcome == worker_pb2.OUTCOME_KV_LOST and self._prefilling is None:
            culprit = None  # The session's blocks were needed for others: nobody has failed.
        elif record.outcome == worker_pb2.OUTCOME_KV_LOST and self.prefill is not None and self._prefilling is not None:
            culprit, died = self.prefill, self.prefill.lost.is_set()
            if not died:
                # Decode may hear of a death before this router does.
                await asyncio.wait([self._prefilling], timeout=VERDICT_S)
                error = self._prefilling.exception() if self._prefilling.done() else None
                died = isinstance(error, AttemptFailed) and error.worker_died
        text = f"{worker_pb2.Outcome.Name(record.outcome)}: {record.detail}"
        return AttemptFailed(text, culprit, died, evicted=record.outcome == worker_pb2.OUTCOME_EVICTED)

    def _on_token(self, token: worker_pb2.DecodedToken) -> None:
        """A token from decode: its copy of the KV is good."""
        self._add(token)
        if self.marks.handed_off_s is None:
            self.marks.handed_off_s = time.monotonic()

    def _add(self, token: worker_pb2.DecodedToken) -> None:
        try:
            self.answer.add(token)
        except TokensMissing:
            text = f"worker {self.decode.worker_id} left out a token"
            self._fail(AttemptFailed(text, self.decode, worker_died=True))
        if self.answer.matched_stop is not None:
            self._finish_once()

    def _timeout_s(self) -> float | None:
        """The client's deadline as the workers are told it, so that they stop even if this router cannot say so. A bit
        more than the client's: normally the router's own end comes first."""
        deadline_s = self.answer.deadline_s
        return None if deadline_s is None else max(0.0, deadline_s - time.monotonic()) + DEADLINE_MARGIN_S

    def _message(self) -> worker_pb2.Attempt:
        request = self.answer.request
        return worker_pb2.Attempt(
            attempt_id=self.attempt_id,
            request_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            output_token_ids=self.answer.token_ids,
            sampling=request.sampling,
            priority=request.priority,
            waited_ms=self.waited_ms,
            fingerprint=self.decode.description.model.fingerprint,
            tenant=request.tenant,
            num_evictions=self.num_evictions,
            session=self.session,
        )

    async def _begin_prefill(self, prefill: Incarnation, message: worker_pb2.Attempt) -> worker_pb2.KVSource:
        """Returns once prefill has accepted the attempt."""
        self._prefilling = self._start(self._prefill(prefill, message))
        self._prefilling.add_done_callback(self._on_prefill_ended)
        try:
            async with asyncio.timeout(ACCEPT_S):
                accepted = await self._accepted
        except TimeoutError:
            text = f"worker {prefill.worker_id} has not answered within {ACCEPT_S:g} s"
            raise AttemptFailed(text, prefill) from None
        return worker_pb2.KVSource(worker_id=prefill.worker_id, address=prefill.address, epoch=accepted.epoch)

    async def _prefill(self, prefill: Incarnation, message: worker_pb2.Attempt) -> None:
        lender = self.decode.kv_source() if self.lends else None
        request, metadata = worker_pb2.PrefillRunRequest(attempt=message, lender=lender), inject(self.context)
        self.marks.prefill_asked_s = time.monotonic()
        with calling(prefill):
            call = prefill.prefill.Run(request, metadata=metadata, timeout=self._timeout_s())
            try:
                async for event in call:
                    if event.HasField("accepted"):
                        if not self._accepted.done():
                            self._accepted.set_result(event.accepted)
                    elif event.HasField("first_token"):
                        self._prompt_is_computed()
                        self._add(event.first_token.token)
                        self.marks.first_token, self.marks.computed_s = event.first_token, time.monotonic()
                        self._reported.set()
            finally:
                call.cancel()

    async def _report_of_prefill(self) -> None:
        """Decode's record may overtake it, most easily where the answer is a single token, which both have at once. It
        says what of the prompt was cached and how long the rest took."""
        if self.prefill is not None and not self._reported.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REPORT_S):
                    await self._reported.wait()

    def _on_prefill_ended(self, prefilling: asyncio.Task[None]) -> None:
        self._reported.set()
        if prefilling.cancelled():
            return
        error = prefilling.exception()
        if error is not None:
            self._source_is_gone(error)
        elif not self._accepted.done():
            self._on_prefill_lost()

    def _on_prefill_lost(self) -> None:
        assert self.prefill is not None
        self._reported.set()
        self._source_is_gone(_lost(self.prefill))

    def _source_is_gone(self, error: BaseException) -> None:
        """Before the handoff decode notices by itself, and says which tokens it has; if not, the attempt is over."""
        if not self._accepted.done():
            self._accepted.set_exception(error)
        elif self._giving_up is None:

            def give_up() -> None:
                if self.marks.handed_off_s is None:
                    self._fail(error)

            self._giving_up = asyncio.get_running_loop().call_later(VERDICT_S, give_up)

    def _on_decode_lost(self) -> None:
        self._fail(_lost(self.decode))

    def _on_decided(self, deciding: asyncio.Task[worker_pb2.DecodeRunResponse]) -> None:
        if deciding.cancelled():
            return
        error = deciding.exception()
        if error is not None:
            self._fail(error)
        elif not self._verdict.done():
            self._verdict.set_result(deciding.result())

    def _on_finished(self, finishing: asyncio.Task[None]) -> None:
        error = None if finishing.cancelled() else finishing.exception()
        if error is not None:
            self._fail(error)

    async def _decode(
        self, message: worker_pb2.Attempt, source: worker_pb2.KVSource | None
    ) -> worker_pb2.DecodeRunResponse:
        request = worker_pb2.DecodeRunRequest(
            attempt=message,
            router_id=self.router_id,
            source=source,
            max_local_tokens=self.max_local_tokens,
            lends=self.lends,
        )
        self.marks.decode_asked_s = time.monotonic()
        with calling(self.decode):
            record = await self.decode.decode.Run(request, metadata=inject(self.context), timeout=self._timeout_s())
        assert isinstance(record, worker_pb2.DecodeRunResponse)
        self.marks.record, self.marks.decided_s = record, time.monotonic()
        if record.outcome == worker_pb2.OUTCOME_FINISHED:
            await self._all_tokens(record.num_tokens)
        return record

    async def _all_tokens(self, num_tokens: int) -> None:
        """The record may overtake the last tokens, which come on another stream; under load by as long as that stream
        has other tokens to bring. Only when it brings nothing at all are they taken for lost."""
        arrived_s = time.monotonic()
        self.answer.expect(num_tokens)
        while not self.answer.complete.is_set():
            try:
                async with asyncio.timeout(LAST_TOKENS_S):
                    await self.answer.complete.wait()
            except TimeoutError:
                if time.monotonic() - max(arrived_s, self.decode.delivered_s) >= LAST_TOKENS_S:
                    text = f"worker {self.decode.worker_id} left out its last tokens"
                    raise AttemptFailed(text, self.decode, worker_died=True) from None

    def _finish_once(self) -> None:
        """A stop string was found: asks for the record, if decode has been asked for it."""
        if self._deciding is not None and self._finishing is None:
            self._finishing = self._start(self._finish())
            self._finishing.add_done_callback(self._on_finished)

    async def _finish(self) -> None:
        request = worker_pb2.FinishRequest(attempt_id=self.attempt_id, num_output_tokens=len(self.answer.token_ids))
        with calling(self.decode):
            try:
                await self.decode.decode.Finish(request, timeout=VERDICT_S)
            except grpc.aio.AioRpcError as error:
                # It had ended by itself; the answer is complete either way.
                if error.code() is not grpc.StatusCode.NOT_FOUND:
                    raise


@contextlib.contextmanager
def calling(worker: Incarnation) -> Iterator[None]:
    """Around a call to `worker`: gives its end a meaning."""
    if worker.lost.is_set():
        # Its channel is closed, or will be in a moment.
        raise _lost(worker)
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise _failure(error, worker) from error
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        # Nobody cancelled this task: the link has given the worker up and closed the channel under its calls.
        raise _lost(worker) from None


def _lost(worker: Incarnation) -> AttemptFailed:
    return AttemptFailed(f"worker {worker.worker_id} was lost", worker, worker_died=True)


def _failure(error: grpc.aio.AioRpcError, worker: Incarnation) -> BatonError:
    """What a failed call means: an error of the request itself, or of this worker."""
    if error.code() in _FINAL:
        return error_from_call(error)
    # A worker that refuses (it drains, it does not fit) says so in our own words; one that dies says nothing.
    refused = error.code() in _REFUSALS and has_details(error)
    text = f"worker {worker.worker_id}: {error.code().name} {error.details()}"
    return AttemptFailed(text, worker, worker_died=not refused)
