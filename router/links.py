"""A router's connection to one address, and the incarnations of workers that answer there.

1. Connect, Describe: a new incarnation. Its Attach stream (where it decodes) and its Watch stream are opened.
2. Reports keep it alive; tokens go to the sinks of its attempts.
3. A broken stream or too long a silence: the incarnation is lost, for good. Everyone who waits on it is told; the
   link connects again, with backoff, and meets the next incarnation.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc
import grpc.aio

from protos import inference_pb2, worker_pb2, worker_pb2_grpc
from runtime.doors import NO_PASS, Pass
from runtime.errors import Unauthenticated
from runtime.rpc import create_channel, error_from_call

LOG = logging.getLogger(__name__)
DESCRIBE_TIMEOUT_S = 5.0
MIN_BACKOFF_S = 0.1
MAX_BACKOFF_S = 0.5
"""A worker that is started again waits so long to be found; trying costs next to nothing."""
REFUSED_BACKOFF_S = 2.0
"""For workers of another model, which will hardly become one of ours."""
TokenSink = Callable[[worker_pb2.DecodedToken], None]


class Incarnation:
    """One life of one worker, as this router sees it."""

    def __init__(self, address: str, channel: grpc.aio.Channel, description: worker_pb2.DescribeResponse) -> None:
        self.address = address
        """host:port."""
        self.description = description
        """What does not change while it lives."""
        self.prefill = worker_pb2_grpc.PrefillStub(channel)
        """Calls to a prefill worker."""
        self.decode = worker_pb2_grpc.DecodeStub(channel)
        """Calls to a decode or mixed worker."""
        self.worker = worker_pb2_grpc.WorkerStub(channel)
        """Calls that every worker answers."""
        self.state: inference_pb2.WorkerState = inference_pb2.WORKER_STATE_UNSPECIFIED
        """As last reported."""
        self.load = inference_pb2.WorkerLoad()
        """As last reported."""
        self.reported_s = time.monotonic()
        """When that was."""
        self.delivered_s = 0.0
        """When its token stream last brought anything; monotonic clock."""
        self.is_unbalanced = False
        """Whether a report of it said that blocks are held which nobody accounts for."""
        self.is_proved = False
        """Whether a probe has crossed it; requests go to proved workers only."""
        self.attached = asyncio.Event()
        """Set when its tokens have a way here, or it gives none."""
        self.lost = asyncio.Event()
        """Set once, when nothing more is to be expected from this life."""
        self.num_assigned = 0
        """Attempts of this router that run here."""
        self.num_assigned_tokens = 0
        """Prompt tokens of those that have not been computed yet."""
        self._num_assigned_at_report = 0
        self._sinks: dict[bytes, TokenSink] = {}
        self._on_loss: set[Callable[[], None]] = set()

    @property
    def worker_id(self) -> str:
        """The worker's name."""
        return self.description.worker_id

    @property
    def role(self) -> inference_pb2.WorkerRole:
        """Its part."""
        return self.description.role

    @property
    def decodes(self) -> bool:
        """Whether it generates tokens."""
        return self.role != inference_pb2.WORKER_ROLE_PREFILL

    @property
    def num_free(self) -> int:
        """Seats that nobody holds: by its last report, which counts other routers' requests too, and what this router
        has begun and ended here since."""
        reported = self.load.num_queued + self.load.num_running - self._num_assigned_at_report
        return max(0, self.description.num_seats - self.num_assigned - max(0, reported))

    @property
    def is_serving(self) -> bool:
        """Whether it takes attempts."""
        return self.state == inference_pb2.WORKER_STATE_SERVING and not self.lost.is_set()

    def fits(self, other: Incarnation) -> bool:
        """Whether KV of one can be read by the other."""
        mine, theirs = self.description, other.description
        return mine.layout == theirs.layout and mine.model.fingerprint == theirs.model.fingerprint

    def kv_source(self) -> worker_pb2.KVSource:
        """Where its KV is, as other workers are told."""
        return worker_pb2.KVSource(worker_id=self.worker_id, address=self.address, epoch=self.description.epoch)

    def lose(self) -> None:
        """Nothing more comes from this life; everyone who waits on it is told."""
        self.state = inference_pb2.WORKER_STATE_LOST
        self.lost.set()
        for callback in list(self._on_loss):
            callback()

    @contextlib.contextmanager
    def loss_to(self, callback: Callable[[], None]) -> Iterator[None]:
        """While open, `callback` is called when the worker is lost."""
        self._on_loss.add(callback)
        try:
            yield
        finally:
            self._on_loss.discard(callback)

    @contextlib.contextmanager
    def tokens_to(self, attempt_id: bytes, sink: TokenSink) -> Iterator[None]:
        """While open, the attempt's tokens go to `sink`."""
        self._sinks[attempt_id] = sink
        try:
            yield
        finally:
            del self._sinks[attempt_id]

    def deliver(self, message: worker_pb2.AttachResponse) -> None:
        """Hands the tokens of a step to their sinks; those of attempts that have ended are dropped."""
        self.delivered_s = time.monotonic()
        for entry in message.attempts:
            sink = self._sinks.get(entry.attempt_id)
            if sink is not None:
                for token in entry.tokens:
                    sink(token)

    def note_report(self, report: worker_pb2.WatchResponse) -> None:
        """Takes over a load report."""
        self.state, self.load, self.reported_s = report.state, report.load, time.monotonic()
        self._num_assigned_at_report = self.num_assigned
        self.is_unbalanced |= report.load.pool.used != report.load.pool.accounted


class WorkerLink:
    """Keeps one address connected."""

    def __init__(
        self,
        address: str,
        router_id: str,
        silence_s: float,
        accepts: Callable[[worker_pb2.DescribeResponse], bool],
        on_change: Callable[[], None],
        shown: Pass = NO_PASS,
    ) -> None:
        """`accepts` refuses workers of another model; `on_change` is told when workers come, go or report; `shown` is
        what workers ask of callers."""
        self.address = address
        self.current: Incarnation | None = None
        """The incarnation that answers there now; a lost one stays until the next."""
        self.totals: Counter[tuple[inference_pb2.WorkerRole, str]] = Counter()
        """Lives that ended, as "drained" or "died", and those of which some report was "unbalanced", by role."""
        self._router_id = router_id
        self._silence_s = silence_s
        self._accepts = accepts
        self._on_change = on_change
        self._shown = shown
        self._was_kept_out = False

    async def run(self) -> None:
        """Connects again and again until cancelled."""
        backoff_s = MIN_BACKOFF_S
        while True:
            channel, previous, text = create_channel(self.address, self._shown), self.current, "it ended its streams"
            limit_s, was_drained = MAX_BACKOFF_S, False
            try:
                if not await self._live(channel):
                    limit_s = REFUSED_BACKOFF_S
            except (grpc.aio.AioRpcError, TimeoutError) as error:
                text = error.details() or "" if isinstance(error, grpc.aio.AioRpcError) else "silent for too long"
                self._note_failure(error)
            finally:
                if self.current is not None:
                    was_drained = self._count_end(self.current)
                    self.current.lose()
                    self._on_change()
                await channel.close()
            if self.current is not None and self.current is not previous:
                if was_drained:
                    LOG.info("worker %s at %s was drained and has ended", self.current.worker_id, self.address)
                else:
                    LOG.warning("worker %s at %s is lost: %s", self.current.worker_id, self.address, text)
                backoff_s = MIN_BACKOFF_S
            await asyncio.sleep(backoff_s * random.uniform(0.75, 1.25))  # routers come one after another
            backoff_s = min(2 * backoff_s, limit_s)

    def _count_end(self, incarnation: Incarnation) -> bool:
        """Whether its end is one that was wanted."""
        if incarnation.lost.is_set():
            return False
        is_draining = incarnation.state == inference_pb2.WORKER_STATE_DRAINING
        self.totals[incarnation.role, "drained" if is_draining else "died"] += 1
        return is_draining

    def _note_failure(self, error: grpc.aio.AioRpcError | TimeoutError) -> None:
        """A worker that is not there yet is nothing to speak of; one that keeps this router out is."""
        is_kept_out = isinstance(error, grpc.aio.AioRpcError) and isinstance(error_from_call(error), Unauthenticated)
        if is_kept_out and not self._was_kept_out:
            LOG.error(
                "the worker at %s takes no calls of this router: is --cluster-secret-file the same?", self.address
            )
        self._was_kept_out = is_kept_out

    async def _live(self, channel: grpc.aio.Channel) -> bool:
        """One incarnation, from Describe until a stream ends. Whether it was one that this router can use."""
        worker = worker_pb2_grpc.WorkerStub(channel)
        description = await worker.Describe(worker_pb2.DescribeRequest(), timeout=DESCRIBE_TIMEOUT_S)
        if not self._accepts(description):
            return False
        incarnation = Incarnation(self.address, channel, description)
        tasks = [asyncio.create_task(self._watch(worker, incarnation))]
        attached = asyncio.create_task(incarnation.attached.wait())
        if incarnation.decodes:
            tasks.append(asyncio.create_task(self._attach(incarnation)))
        else:
            incarnation.attached.set()
        try:
            await asyncio.wait([attached, *tasks], return_when=asyncio.FIRST_COMPLETED, timeout=DESCRIBE_TIMEOUT_S)
            if incarnation.attached.is_set():
                self.current = incarnation
                # Its first report may have come before its token stream stood.
                self._on_change()
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            failures = await _end([attached, *tasks])
        if failures:
            raise failures[0]
        return True

    async def _watch(self, worker: worker_pb2_grpc.WorkerStub, incarnation: Incarnation) -> None:
        """Reads reports until the stream ends or is silent."""
        call = worker.Watch(worker_pb2.WatchRequest())
        try:
            while True:
                async with asyncio.timeout(self._silence_s):
                    report = await call.read()
                if report is grpc.aio.EOF or report.epoch != incarnation.description.epoch:
                    return
                was_unbalanced = incarnation.is_unbalanced
                incarnation.note_report(report)
                if incarnation.is_unbalanced and not was_unbalanced:
                    self.totals[incarnation.role, "unbalanced"] += 1
                self._on_change()
        finally:
            call.cancel()

    async def _attach(self, incarnation: Incarnation) -> None:
        """Reads tokens until the stream ends."""
        call = incarnation.decode.Attach(worker_pb2.AttachRequest(router_id=self._router_id))
        try:
            while True:
                message = await call.read()
                if message is grpc.aio.EOF:
                    return
                incarnation.attached.set()
                incarnation.deliver(message)
        finally:
            call.cancel()


async def _end(tasks: Sequence[asyncio.Task[Any]]) -> list[BaseException]:
    """Cancels those that still run; answers what the others failed with."""
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    errors = [task.exception() for task in tasks if not task.cancelled()]
    return [error for error in errors if error is not None]
