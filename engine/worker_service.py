"""What every worker serves, whatever its role: `Worker` (describe, watch, drain, sessions, profile) and `KVTransfer`
(fetch, release).

1. A lease is opened by the role when it accepts an attempt.
2. Fetch claims it: credit. Blocks go out as they become ready; a fetch that ends early breaks the lease.
3. Release ends it; its answer attests that it was unbroken, or does not.

Watch and Fetch say something at least every second: who hears nothing for longer may go. While a step stands still
Watch and Describe fail, so that routers leave although everything here still answers.
Owns no scheduling: the role gives its load and is told to drain.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import grpc.aio

from engine.profiling import Profiler
from engine.request import Sample
from engine.session_handoff import SessionHandoff
from engine.step_stalls import StepClock
from engine.wire import check_attempt_id, check_session_key, token_to_proto
from kvstore import transport as transports
from kvstore.hashing import attempt_label, unpack_token_ids
from kvstore.layout import KVLayout, differences
from kvstore.leases import Lease, LeaseState, LeaseTable
from kvstore.memory import BlockMemory
from kvstore.sessions import SessionTable
from kvstore.transport.base import Frame, Transport, add_to_checksum
from protos import inference_pb2, worker_pb2, worker_pb2_grpc
from runtime.errors import Aborted, FailedPrecondition, InvalidArgument, Unavailable
from runtime.metrics import Family

LOG = logging.getLogger(__name__)
Context = grpc.aio.ServicerContext
WATCH_MAX_INTERVAL_S = 1.0
WATCH_MIN_INTERVAL_S = 0.05
FETCH_MAX_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True)
class Identity:
    """What a worker says of itself in Describe; constant for one incarnation."""

    worker_id: str
    """Its name."""
    epoch: int
    """Its incarnation."""
    role: inference_pb2.WorkerRole
    """Its part."""
    model: inference_pb2.GetModelResponse
    """What it serves."""
    layout: KVLayout
    """How its KV is laid out."""
    num_seats: int
    """Sequences that may hold KV at once."""


class Role(Protocol):
    """The part of a worker that differs between the pools."""

    def load(self) -> inference_pb2.WorkerLoad:
        """The load now."""
        ...

    def live_attempts(self) -> int:
        """Attempts that have not ended."""
        ...

    def families(self) -> Iterable[Family]:
        """What this pool alone shows at a scrape."""
        ...

    def evict_all(self, detail: str) -> int:
        """Gives every attempt back to its router; answers how many."""
        ...


class WorkerService(worker_pb2_grpc.WorkerServicer, worker_pb2_grpc.KVTransferServicer):
    """The two services, and the leases they hand out."""

    def __init__(
        self,
        identity: Identity,
        memory: BlockMemory,
        opened: Mapping[str, Transport],
        leases: LeaseTable,
        sessions: SessionTable,
        handoff: SessionHandoff,
        role: Role,
        on_drain: Callable[[], None],
        step_clock: StepClock,
        check_role_change: Callable[[inference_pb2.WorkerRole], object],
        profiler: Profiler,
    ) -> None:
        """`check_role_change` raises BatonError for a role that this process cannot take."""
        self.identity = identity
        self.leases = leases
        self._sessions = sessions
        self._handoff = handoff
        self.is_draining = False
        """Whether new attempts are refused."""
        self.next_role: asyncio.Future[inference_pb2.WorkerRole] = asyncio.get_running_loop().create_future()
        """Done when the worker is empty and is to start again in that role."""
        self._memory = memory
        self._transports = opened
        self._role = role
        self._on_drain = on_drain
        self._is_ending = False
        self._num_watchers = 0  # routers, who alone can take sessions
        self._check_role_change = check_role_change
        self._profiler = profiler
        self._step_clock = step_clock
        self._step_clock.on_change = self.note_change
        self._changed = asyncio.Event()
        self._emptied = asyncio.Event()

    # Worker

    async def Describe(
        self, request: worker_pb2.DescribeRequest, context: Context[object, object]
    ) -> worker_pb2.DescribeResponse:
        """What does not change while this incarnation lives."""
        self._check_steps()
        identity = self.identity
        offers = transports.offers(self._transports, self._memory, request.nonce)
        return worker_pb2.DescribeResponse(
            worker_id=identity.worker_id,
            epoch=identity.epoch,
            role=identity.role,
            model=identity.model,
            layout=identity.layout.fingerprint,
            block_size=identity.layout.block_size,
            block_bytes=identity.layout.block_bytes,
            transports=[worker_pb2.TransportOffer(name=name, parameters=p) for name, p in offers],
            num_seats=identity.num_seats,
        )

    async def Watch(
        self, request: worker_pb2.WatchRequest, context: Context[object, object]
    ) -> AsyncIterator[worker_pb2.WatchResponse]:
        """Load reports: at once, on change (rate-limited), and as a sign of life."""
        self._num_watchers += 1
        try:
            while not self._is_ending:
                changed = self._changed
                self._check_steps()
                state = inference_pb2.WORKER_STATE_DRAINING if self.is_draining else inference_pb2.WORKER_STATE_SERVING
                yield worker_pb2.WatchResponse(state=state, epoch=self.identity.epoch, load=self._role.load())
                # The pause is the rate limit; changes during it are in the next report.
                await asyncio.sleep(WATCH_MIN_INTERVAL_S)
                await _wait(changed, WATCH_MAX_INTERVAL_S - WATCH_MIN_INTERVAL_S)
        finally:
            self._num_watchers -= 1

    @property
    def is_stalled(self) -> bool:
        """Whether a step stands still."""
        return self._step_clock.is_stalled

    def _check_steps(self) -> None:
        if self.is_stalled:
            raise Unavailable(f"a step of worker {self.identity.worker_id} stands still")

    async def Drain(
        self, request: worker_pb2.DrainRequest, context: Context[object, object]
    ) -> worker_pb2.DrainResponse:
        """Refuses new attempts and waits for those that run; then takes another role, if it was told one."""
        if request.next_role:
            self._check_role_change(request.next_role)
        num_evicted = await self.drain(request.timeout_ms / 1000 if request.timeout_ms else None)
        if request.next_role and not self.next_role.done():
            self.next_role.set_result(request.next_role)
        return worker_pb2.DrainResponse(num_evicted=num_evicted)

    async def FindSession(
        self, request: worker_pb2.FindSessionRequest, context: Context[object, object]
    ) -> worker_pb2.FindSessionResponse:
        """What is remembered of a session after its last turn that ended here."""
        kept = self._sessions.find(check_session_key(request.session_key))
        if kept is None:
            return worker_pb2.FindSessionResponse()
        return worker_pb2.FindSessionResponse(fence=kept.fence, token_ids=unpack_token_ids(kept.token_ids))

    async def ForgetSession(
        self, request: worker_pb2.ForgetSessionRequest, context: Context[object, object]
    ) -> worker_pb2.ForgetSessionResponse:
        """Frees a session's blocks, but those that somebody uses now or another session has too."""
        existed = self._sessions.forget(check_session_key(request.session_key))
        self.note_change()
        return worker_pb2.ForgetSessionResponse(existed=existed)

    async def HandOffSession(
        self, request: worker_pb2.HandOffSessionRequest, context: Context[object, object]
    ) -> worker_pb2.HandOffSessionResponse:
        """The next session that another worker may keep, leased here; none while there is nothing to hand off."""
        if not self.is_draining:
            raise FailedPrecondition(f"worker {self.identity.worker_id} does not drain: it keeps its sessions")
        if request.given_up_attempt_id:
            self._handoff.give_up(request.given_up_attempt_id)
        response = self._handoff.next(time.monotonic())
        if response.HasField("attempt"):
            self.note_change()
        return response

    async def Profile(
        self, request: worker_pb2.ProfileRequest, context: Context[object, object]
    ) -> worker_pb2.ProfileResponse:
        """Steps that run from now on, by what they have to do and how long they take."""
        self._check_steps()
        response = await self._profiler.profile(request)
        response.worker_id, response.role = self.identity.worker_id, self.identity.role
        return response

    async def drain(self, timeout_s: float | None) -> int:
        """Drains; gives running attempts back after `timeout_s` (None: never). Sessions are handed off meanwhile, and
        as long as somebody takes them until that time. Answers how many attempts it gave back."""
        ends_s = None if timeout_s is None else time.monotonic() + timeout_s
        self.is_draining = True
        self._on_drain()
        self.note_change()
        num_evicted = 0
        if self._role.live_attempts():
            await _wait(self._emptied, timeout_s)
        if self._role.live_attempts():
            num_evicted = self._role.evict_all("the worker drains")
            await _wait(self._emptied, WATCH_MAX_INTERVAL_S)
        if self._num_watchers:
            await self._handoff.finish(ends_s)
        return num_evicted

    def end_streams(self) -> None:
        """The worker ends: reports end first, in good order."""
        self._is_ending = True
        self.note_change()

    def note_change(self) -> None:
        """Load or state may have changed: watchers get a report soon."""
        self._changed.set()
        self._changed = asyncio.Event()
        if self._role.live_attempts() == 0:
            self._emptied.set()
        else:
            self._emptied.clear()

    # KVTransfer

    async def Fetch(
        self, request: worker_pb2.FetchRequest, context: Context[object, object]
    ) -> AsyncIterator[worker_pb2.FetchResponse]:
        """Sends an attempt's blocks as they become ready, and ends after the last one. While there is nothing to send
        an empty message now and then says that the owner is there."""
        lease = self._claim(request)
        transport, block_size = self._transports[request.transport], self.identity.layout.block_size
        lease.num_sent_blocks = request.have_tokens // block_size
        try:
            while lease.state is LeaseState.OPEN:
                lease.changed.clear()
                ready = lease.block_table[lease.num_sent_blocks : lease.num_ready_blocks(block_size)]
                frames = transport.serve(self._memory, ready)
                while (frame := await asyncio.to_thread(_next, frames)) is not None:
                    lease.checksum = add_to_checksum(frame, lease.checksum)
                    first_block = lease.num_sent_blocks
                    lease.num_sent_blocks += len(frame.block_ids)
                    yield worker_pb2.FetchResponse(first_block=first_block, block_ids=frame.block_ids, data=frame.data)
                    self.leases.touch(lease, time.monotonic())
                if lease.is_complete and lease.num_sent_blocks == len(lease.block_table):
                    return
                if not await _wait(lease.changed, FETCH_MAX_INTERVAL_S):
                    yield worker_pb2.FetchResponse(first_block=lease.num_sent_blocks)
            raise Aborted(f"attempt_id: the lease of {attempt_label(lease.attempt_id)} was broken")
        finally:
            if not (lease.is_complete and lease.num_sent_blocks == len(lease.block_table)):
                self.leases.break_(lease)

    def _claim(self, request: worker_pb2.FetchRequest) -> Lease:
        check_attempt_id(request.attempt_id)
        lease = self.leases.find(request.attempt_id, request.epoch)
        layout = self.identity.layout
        if request.layout != layout.fingerprint:
            text = differences(request.layout, layout.fingerprint)
            raise FailedPrecondition(f"layout: this worker's is {layout.fingerprint}, got {request.layout}; {text}")
        if request.transport not in self._transports:
            known = ", ".join(self._transports)
            raise FailedPrecondition(f"transport: this worker offers {known}, got {request.transport}")
        if request.have_tokens % layout.block_size or request.have_tokens > lease.num_tokens:
            raise InvalidArgument(
                "have_tokens",
                f"must be whole blocks of {layout.block_size} within {lease.num_tokens}, got {request.have_tokens}",
            )
        most_lent = min(request.have_tokens, lease.num_tokens - 1)
        if request.lent_tokens % layout.block_size or request.lent_tokens > most_lent:
            text = f"must be whole blocks of {layout.block_size} within {most_lent}, got {request.lent_tokens}"
            raise InvalidArgument("lent_tokens", text)
        self.leases.claim(lease, request.lent_tokens)
        return lease

    async def Release(
        self, request: worker_pb2.ReleaseRequest, context: Context[object, object]
    ) -> worker_pb2.ReleaseResponse:
        """Ends a lease; attests it when the reader has everything and it was never broken."""
        check_attempt_id(request.attempt_id)
        lease = self.leases.find(request.attempt_id, request.epoch)
        intact = self.leases.release(lease, request.num_tokens)
        response = worker_pb2.ReleaseResponse(
            intact=intact, epoch=self.leases.epoch, num_tokens=lease.num_tokens, checksum=lease.checksum
        )
        if intact and isinstance(lease.result, Sample):
            response.first_token.CopyFrom(token_to_proto(lease.num_tokens, lease.result))
        return response

    async def expire_leases(self) -> None:
        """Breaks leases whose reader is silent; runs until cancelled."""
        while True:
            await asyncio.sleep(WATCH_MAX_INTERVAL_S)
            for lease in self.leases.expired(time.monotonic()):
                LOG.warning("the lease of %s expired unread", attempt_label(lease.attempt_id))
                self.leases.expire(lease)


async def _wait(event: asyncio.Event, timeout_s: float | None) -> bool:
    """Whether the event was set within the time."""
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    return True


def _next(frames: Iterator[Frame]) -> Frame | None:
    return next(frames, None)
