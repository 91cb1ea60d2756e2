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
import secrets
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
from opentelemetry.trace import Span

from protos import worker_pb2
from router.answer import Answer, TokensMissing
from router.links import Incarnation
from runtime.errors import BatonError
from runtime.rpc import error_from_call, has_details
from runtime.telemetry import inject

VERDICT_S = 1.0
"""How long decode may take to notice that its source has gone, before the attempt is given up."""
_FINAL = frozenset({grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED})
_REFUSALS = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.FAILED_PRECONDITION})


class AttemptFailed(BatonError):
    """The attempt is over, the request is not."""

    reason = "ATTEMPT_FAILED"

    def __init__(self, message: str, culprit: Incarnation | None, worker_died: bool = False) -> None:
        super().__init__(message)
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
    """Prefill's report; None where decode prefilled."""


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
    span: Span
    """Parent of the workers' spans."""
    tenant: str = ""
    """Whose cached prefixes may be used."""
    router_id: str = ""
    """Names the Attach stream that decode sends tokens on."""
    attempt_id: bytes = field(default_factory=lambda: secrets.token_bytes(16))
    """Never reused."""
    _first_token: worker_pb2.PrefillFirstToken | None = None
    _handed_off: bool = False
    _gap: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> Served:
        """Serves the request. Raises AttemptFailed, or what would fail any attempt."""
        num_tokens = self.answer.next_position
        tasks: list[asyncio.Task[Any]] = []
        self.decode.num_assigned += 1
        if self.prefill is not None:
            self.prefill.num_assigned_tokens += num_tokens
        try:
            with self.decode.tokens_to(self.attempt_id, self._on_token):
                watched = []
                source = None
                if self.prefill is not None:
                    accepted: asyncio.Future[worker_pb2.PrefillAccepted] = asyncio.Future()
                    prefilling = _start(tasks, self._prefill(self.prefill, accepted))
                    source = await self._accepted(self.prefill, accepted, prefilling)
                    watched.append(_start(tasks, self._watch_source(self.prefill, prefilling)))
                deciding = _start(tasks, self._decode(source))
                watched += [_start(tasks, self._finish_when_stopped()), _start(tasks, self._watch_decode())]
                return Served(await self._verdict(deciding, watched), self._first_token)
        finally:
            self.decode.num_assigned -= 1
            if self.prefill is not None:
                self.prefill.num_assigned_tokens -= num_tokens
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)

    async def _verdict(
        self, deciding: asyncio.Task[worker_pb2.DecodeRunResponse], watched: list[asyncio.Task[None]]
    ) -> worker_pb2.DecodeRunResponse:
        """Decode's final record, or the first reason why there will be none."""
        pending: set[asyncio.Task[Any]] = {deciding, *watched}
        while not deciding.done():
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            if not deciding.done():
                for task in done:
                    task.result()
        record = deciding.result()
        if record.outcome == worker_pb2.OUTCOME_FINISHED:
            return record
        culprit = self.prefill if record.outcome == worker_pb2.OUTCOME_KV_LOST else self.decode
        died = culprit is not None and culprit.lost.is_set()
        raise AttemptFailed(f"{worker_pb2.Outcome.Name(record.outcome)}: {record.detail}", culprit, worker_died=died)

    def _on_token(self, token: worker_pb2.DecodedToken) -> None:
        """A token from decode: its copy of the KV is good."""
        self._handed_off = True
        self._add(token)

    def _add(self, token: worker_pb2.DecodedToken) -> None:
        try:
            self.answer.add(token)
        except TokensMissing:
            self._gap.set()

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
            tenant=self.tenant,
        )

    async def _prefill(self, prefill: Incarnation, accepted: asyncio.Future[worker_pb2.PrefillAccepted]) -> None:
        call = prefill.prefill.Run(worker_pb2.PrefillRunRequest(attempt=self._message()), metadata=inject(self.span))
        try:
            async for event in call:
                if event.HasField("accepted"):
                    accepted.set_result(event.accepted)
                elif event.HasField("first_token"):
                    self._first_token = event.first_token
                    self._add(event.first_token.token)
        except grpc.aio.AioRpcError as error:
            raise _failure(error, prefill) from error
        finally:
            call.cancel()

    async def _accepted(
        self,
        prefill: Incarnation,
        accepted: asyncio.Future[worker_pb2.PrefillAccepted],
        prefilling: asyncio.Task[None],
    ) -> worker_pb2.KVSource:
        lost = asyncio.ensure_future(prefill.lost.wait())
        try:
            events: list[asyncio.Future[Any]] = [accepted, prefilling, lost]
            await asyncio.wait(events, return_when=asyncio.FIRST_COMPLETED)
        finally:
            lost.cancel()
        if accepted.done():
            return worker_pb2.KVSource(
                worker_id=prefill.worker_id, address=prefill.address, epoch=accepted.result().epoch
            )
        if prefilling.done():
            prefilling.result()
        raise AttemptFailed(f"worker {prefill.worker_id} was lost", prefill, worker_died=True)

    async def _watch_source(self, prefill: Incarnation, prefilling: asyncio.Task[None]) -> None:
        """Fails if the prefill worker goes before the handoff and decode does not notice by itself."""
        lost = asyncio.ensure_future(prefill.lost.wait())
        try:
            await asyncio.wait([prefilling, lost], return_when=asyncio.FIRST_COMPLETED)
        finally:
            lost.cancel()
        if not prefilling.done() or prefilling.exception() is not None:
            await asyncio.sleep(VERDICT_S)
            if not self._handed_off:
                raise AttemptFailed(f"worker {prefill.worker_id} was lost", prefill, worker_died=True)

    async def _watch_decode(self) -> None:
        """Fails if the decode worker goes, or if its tokens have a gap."""
        lost = asyncio.ensure_future(self.decode.lost.wait())
        gap = asyncio.ensure_future(self._gap.wait())
        try:
            await asyncio.wait([lost, gap], return_when=asyncio.FIRST_COMPLETED)
        finally:
            lost.cancel()
            gap.cancel()
        what = "was lost" if self.decode.lost.is_set() else "left out a token"
        raise AttemptFailed(f"worker {self.decode.worker_id} {what}", self.decode, worker_died=True)

    async def _decode(self, source: worker_pb2.KVSource | None) -> worker_pb2.DecodeRunResponse:
        request = worker_pb2.DecodeRunRequest(attempt=self._message(), router_id=self.router_id, source=source)
        try:
            record = await self.decode.decode.Run(request, metadata=inject(self.span))
        except grpc.aio.AioRpcError as error:
            raise _failure(error, self.decode) from error
        assert isinstance(record, worker_pb2.DecodeRunResponse)
        if record.outcome == worker_pb2.OUTCOME_FINISHED and self.answer.matched_stop is None:
            await self._all_tokens(record.num_tokens)
        return record

    async def _all_tokens(self, num_tokens: int) -> None:
        """The record may overtake the last tokens, which come on another stream."""
        while self.answer.next_position < num_tokens and self.answer.matched_stop is None:
            self.answer.progressed.clear()
            await self.answer.progressed.wait()

    async def _finish_when_stopped(self) -> None:
        await self.answer.stopped.wait()
        request = worker_pb2.FinishRequest(attempt_id=self.attempt_id, num_output_tokens=len(self.answer.token_ids))
        try:
            await self.decode.decode.Finish(request, timeout=VERDICT_S)
        except grpc.aio.AioRpcError as error:
            # It had ended by itself; the answer is complete either way.
            if error.code() is not grpc.StatusCode.NOT_FOUND:
                raise _failure(error, self.decode) from error


def _start(tasks: list[asyncio.Task[Any]], work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    task = asyncio.ensure_future(work)
    tasks.append(task)
    return task


def _failure(error: grpc.aio.AioRpcError, worker: Incarnation) -> BatonError:
    """What a failed call means: an error of the request itself, or of this worker."""
    if error.code() in _FINAL:
        return error_from_call(error)
    # A worker that refuses (it drains, it does not fit) says so in our own words; one that dies says nothing.
    refused = error.code() in _REFUSALS and has_details(error)
    text = f"worker {worker.worker_id}: {error.code().name} {error.details()}"
    return AttemptFailed(text, worker, worker_died=not refused)
