"""The reader's side of a handoff: fetch an attempt's KV from its owner, and believe it only when attested.

1. Describe the owner once for each incarnation; agree on a transport; connect it.
2. Fetch: the call is the credit. Blocks are copied into reserved ones as they arrive; silence ends it.
3. Release: the owner's answer attests epoch, token count and checksum, and brings the first token, if it has sampled
   one.

Whatever goes wrong is KVLost, which names the check that failed; the bytes copied are worthless then. The owner is
told, so that it can free its blocks. Owns channels and transport connections to owners, no blocks.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from engine.rates import Rate
from engine.request import Sample
from engine.wire import token_from_proto
from kvstore import transport as transports
from kvstore.hashing import attempt_label
from kvstore.layout import KVLayout, differences
from kvstore.memory import BlockMemory
from kvstore.transport.base import Frame, OwnerUnreachable, Reader, Transport, TransportError, add_to_checksum
from protos import worker_pb2, worker_pb2_grpc
from runtime.doors import NO_PASS, Pass
from runtime.errors import BatonError
from runtime.rpc import create_channel

LOG = logging.getLogger(__name__)
CONTROL_TIMEOUT_S = 3.0
SILENCE_S = 3.0
"""An owner that says nothing for so long is not there any more; it says something every second."""


_CHECKS = {
    grpc.StatusCode.FAILED_PRECONDITION: worker_pb2.KV_CHECK_LAYOUT,
    grpc.StatusCode.NOT_FOUND: worker_pb2.KV_CHECK_LEASE,
    grpc.StatusCode.ABORTED: worker_pb2.KV_CHECK_LEASE,
    grpc.StatusCode.ALREADY_EXISTS: worker_pb2.KV_CHECK_LEASE,
    grpc.StatusCode.INVALID_ARGUMENT: worker_pb2.KV_CHECK_COUNT,
}
"""What an owner's refusal means; every other status says that it was not reached."""


class KVLost(BatonError):
    """The KV of an attempt could not be had; the attempt is over, a new one may succeed."""

    reason = "KV_LOST"

    def __init__(self, message: str, check: worker_pb2.KVCheck) -> None:
        super().__init__(message, check=check_name(check))
        self.check = check
        """Which check failed."""


@dataclass(frozen=True, slots=True)
class Source:
    """Who owns an attempt's KV."""

    worker_id: str
    """Its name."""
    address: str
    """host:port."""
    epoch: int
    """The incarnation that accepted the attempt."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """KV that arrived and was attested."""

    first_token: Sample | None
    """Sampled by the owner; None where there was nothing to sample."""
    num_bytes: int
    """Bytes copied."""
    transport: str
    """How."""
    duration_s: float
    """From the call to the attestation."""


@dataclass(slots=True)
class _Peer:
    """A connection to one incarnation. A retired one is closed by its last user."""

    channel: grpc.aio.Channel
    stub: worker_pb2_grpc.KVTransferStub
    reader: Reader
    transport: str
    num_users: int = 0
    is_retired: bool = False

    async def close_if_unused(self) -> None:
        if self.is_retired and self.num_users == 0:
            self.reader.close()
            await self.channel.close()


class KVReader:
    """Fetches KV for one worker."""

    def __init__(
        self, memory: BlockMemory, layout: KVLayout, opened: Mapping[str, Transport], shown: Pass = NO_PASS
    ) -> None:
        """`opened` are this worker's transports, `shown` is what owners ask of callers."""
        self._memory = memory
        self._layout = layout
        self._transports = opened
        self._shown = shown
        self.ready_rate = Rate()
        """Bytes a second of fetches for which nothing had to be computed."""
        self._peers: dict[tuple[str, int], asyncio.Task[_Peer]] = {}
        self._farewells: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Lets go of all owners."""
        for farewell in self._farewells:
            farewell.cancel()
        if self._farewells:
            await asyncio.wait(self._farewells)
        for task in self._peers.values():
            if not task.done():
                task.cancel()
                await asyncio.wait([task])
        for key in list(self._peers):
            await self._retire(key)

    async def fetch(
        self,
        source: Source,
        attempt_id: bytes,
        block_table: Sequence[int],
        have_tokens: int,
        num_tokens: int,
        on_bytes: Callable[[], None],
        lent_tokens: int = 0,
        has_first_token: bool = True,
    ) -> Fetched:
        """Copies the KV of `num_tokens` positions into `block_table`, of which the first `have_tokens` (whole blocks)
        are there already and the first `lent_tokens` may be read from here meanwhile. Without `has_first_token` the
        owner has the KV ready and samples nothing. Raises KVLost. When it returns or raises nothing writes to the
        blocks any more."""
        started_s = time.monotonic()
        try:
            peer = await self._peer(source)
        except (grpc.aio.AioRpcError, TransportError, KVLost) as error:
            text = f"{source.worker_id} at {source.address} cannot be read from: {_text(error)}"
            raise KVLost(text, _check(error)) from error
        peer.num_users += 1
        try:
            table = block_table[: self._layout.num_blocks(num_tokens)]
            request = worker_pb2.FetchRequest(
                attempt_id=attempt_id,
                epoch=source.epoch,
                have_tokens=have_tokens,
                transport=peer.transport,
                layout=self._layout.fingerprint,
                lent_tokens=lent_tokens,
            )
            num_bytes, checksum = await self._copy(peer, request, table, on_bytes)
            first_token = await self._release(peer, source, attempt_id, num_tokens, checksum, has_first_token)
        except (grpc.aio.AioRpcError, TransportError, KVLost) as error:
            if isinstance(error, grpc.aio.AioRpcError) and error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                await self._retire((source.address, source.epoch))
            self._give_up(peer, source, attempt_id)
            raise KVLost(f"{source.worker_id}: {_text(error)}", _check(error)) from error
        except asyncio.CancelledError:
            self._give_up(peer, source, attempt_id)
            raise
        finally:
            peer.num_users -= 1
            await peer.close_if_unused()
        duration_s = time.monotonic() - started_s
        if num_bytes and not has_first_token:
            self.ready_rate.observe(num_bytes, duration_s)
        return Fetched(first_token, num_bytes, peer.transport, duration_s)

    async def _copy(
        self, peer: _Peer, request: worker_pb2.FetchRequest, block_table: Sequence[int], on_bytes: Callable[[], None]
    ) -> tuple[int, int]:
        """Bytes copied, and their checksum if they passed through messages."""
        next_block, num_bytes, checksum = request.have_tokens // self._layout.block_size, 0, 0
        call = peer.stub.Fetch(request)
        messages = aiter(call)
        try:
            while (response := await _next(messages)) is not None:
                if response.first_block != next_block or next_block + len(response.block_ids) > len(block_table):
                    text = f"blocks from {response.first_block} came where {next_block} was expected"
                    raise KVLost(text, worker_pb2.KV_CHECK_BLOCKS)
                if not response.block_ids:
                    continue
                frame = Frame(tuple(response.block_ids), response.data)
                num_bytes += await self._receive(peer, frame, block_table[next_block:][: len(frame.block_ids)])
                if peer.reader.passes_through_host:
                    checksum = add_to_checksum(frame, checksum)
                next_block += len(frame.block_ids)
                on_bytes()
        finally:
            call.cancel()
        if next_block != len(block_table):
            raise KVLost(f"{next_block} of {len(block_table)} blocks came", worker_pb2.KV_CHECK_BLOCKS)
        return num_bytes, checksum

    async def _receive(self, peer: _Peer, frame: Frame, destination: Sequence[int]) -> int:
        copy = asyncio.ensure_future(asyncio.to_thread(peer.reader.receive, frame, self._memory, destination))
        try:
            return await asyncio.shield(copy)
        except asyncio.CancelledError:
            # A thread cannot be stopped: the blocks may not be freed before it has written its last byte.
            await asyncio.wait([copy])
            raise

    async def _release(
        self,
        peer: _Peer,
        source: Source,
        attempt_id: bytes,
        num_tokens: int,
        checksum: int,
        has_first_token: bool,
    ) -> Sample | None:
        """Asks for the attestation; raises KVLost if it is not one."""
        answer = await peer.stub.Release(
            worker_pb2.ReleaseRequest(attempt_id=attempt_id, epoch=source.epoch, num_tokens=num_tokens),
            timeout=CONTROL_TIMEOUT_S,
        )
        checks = (
            ("intact", answer.intact, True, worker_pb2.KV_CHECK_LEASE),
            ("epoch", answer.epoch, source.epoch, worker_pb2.KV_CHECK_EPOCH),
            ("tokens", answer.num_tokens, num_tokens, worker_pb2.KV_CHECK_COUNT),
            ("checksum", answer.checksum, checksum, worker_pb2.KV_CHECK_CHECKSUM),
            ("first token", answer.HasField("first_token"), has_first_token, worker_pb2.KV_CHECK_COUNT),
            ("its position", answer.first_token.position, num_tokens * has_first_token, worker_pb2.KV_CHECK_COUNT),
        )
        for name, got, expected, check in checks:
            if got != expected:
                raise KVLost(f"not attested: {name} is {got}, expected {expected}", check)
        return token_from_proto(answer.first_token) if has_first_token else None

    def _give_up(self, peer: _Peer, source: Source, attempt_id: bytes) -> None:
        """Tells the owner, which would keep what it has sent until the lease expires. Nobody waits for it to hear."""
        peer.num_users += 1
        farewell = asyncio.create_task(self._say_farewell(peer, source, attempt_id))
        self._farewells.add(farewell)
        farewell.add_done_callback(self._farewells.discard)

    async def _say_farewell(self, peer: _Peer, source: Source, attempt_id: bytes) -> None:
        """Frees the owner's lease. If that fails the owner's own end of the attempt frees it."""
        try:
            await peer.stub.Release(
                worker_pb2.ReleaseRequest(attempt_id=attempt_id, epoch=source.epoch), timeout=CONTROL_TIMEOUT_S
            )
        except grpc.aio.AioRpcError as error:
            LOG.debug("release of %s at %s: %s", attempt_label(attempt_id), source.worker_id, error.details())
        finally:
            peer.num_users -= 1
            await peer.close_if_unused()

    async def _peer(self, source: Source) -> _Peer:
        """The connection to an incarnation; attempts that come at once share one task."""
        key = (source.address, source.epoch)
        for other in [k for k in self._peers if k[0] == source.address and k[1] != source.epoch]:
            await self._retire(other)
        if key not in self._peers:
            await self._retire_dead()
        task = self._peers.get(key)
        if task is None:
            task = self._peers[key] = asyncio.ensure_future(self._connect(source))
        try:
            return await asyncio.shield(task)
        except (grpc.aio.AioRpcError, TransportError, KVLost):
            if self._peers.get(key) is task:
                del self._peers[key]
            raise

    async def _connect(self, source: Source) -> _Peer:
        channel = create_channel(source.address, self._shown)
        try:
            nonce = secrets.token_hex(16)
            described = await worker_pb2_grpc.WorkerStub(channel).Describe(
                worker_pb2.DescribeRequest(nonce=nonce), timeout=CONTROL_TIMEOUT_S
            )
            if described.epoch != source.epoch:
                text = f"epoch {described.epoch} answers at {source.address}, not {source.epoch}"
                raise KVLost(text, worker_pb2.KV_CHECK_EPOCH)
            if described.layout != self._layout.fingerprint:
                text = f"KV layouts differ, {differences(described.layout, self._layout.fingerprint)}"
                raise KVLost(text, worker_pb2.KV_CHECK_LAYOUT)
            offers = [(offer.name, dict(offer.parameters)) for offer in described.transports]
            try:
                arguments = self._transports, offers, self._layout, nonce
                if any(transport.asks_owner for transport in self._transports.values()):
                    transport, reader = await asyncio.to_thread(transports.choose, *arguments)
                else:
                    transport, reader = transports.choose(*arguments)
            except TransportError as error:
                raise KVLost(error.message, worker_pb2.KV_CHECK_LAYOUT) from error
        except BaseException:
            await channel.close()
            raise
        LOG.info("KV from %s comes by %s", source.worker_id, transport.name)
        return _Peer(channel, worker_pb2_grpc.KVTransferStub(channel), reader, transport.name)

    async def _retire_dead(self) -> None:
        """Lets go of owners that have hung up: a mapped pool keeps the memory of a process that is long gone."""
        for key, task in list(self._peers.items()):
            if task.done() and not task.cancelled() and task.exception() is None:
                state = task.result().channel.get_state(try_to_connect=False)
                if state is not grpc.ChannelConnectivity.READY:
                    await self._retire(key)

    async def _retire(self, key: tuple[str, int]) -> None:
        """No new fetch uses this connection; its last user closes it. One that is still being made is left alone:
        those who wait for it would take its end for their own."""
        task = self._peers.get(key)
        if task is None or not task.done():
            return
        del self._peers[key]
        if not task.cancelled() and task.exception() is None:
            task.result().is_retired = True
            await task.result().close_if_unused()


async def _next(messages: AsyncIterator[Any]) -> Any:
    """The next message of a fetch; None after the last."""
    try:
        async with asyncio.timeout(SILENCE_S):
            return await anext(messages, None)
    except TimeoutError:
        text = f"the owner has said nothing for {SILENCE_S:g} s"
        raise KVLost(text, worker_pb2.KV_CHECK_SIGN_OF_LIFE) from None


def check_name(check: worker_pb2.KVCheck) -> str:
    """A check as texts and counters call it."""
    return worker_pb2.KVCheck.Name(check).removeprefix("KV_CHECK_").lower()


def _check(error: grpc.aio.AioRpcError | TransportError | KVLost) -> worker_pb2.KVCheck:
    """What failed, by the error that came of it."""
    if isinstance(error, KVLost):
        return error.check
    if isinstance(error, TransportError):
        is_gone = isinstance(error, OwnerUnreachable)
        return worker_pb2.KV_CHECK_REACHABLE if is_gone else worker_pb2.KV_CHECK_BLOCKS
    if error.code() is grpc.StatusCode.FAILED_PRECONDITION and (error.details() or "").startswith("epoch"):
        return worker_pb2.KV_CHECK_EPOCH
    return _CHECKS.get(error.code(), worker_pb2.KV_CHECK_REACHABLE)


def _text(error: grpc.aio.AioRpcError | TransportError | KVLost) -> str:
    return f"{error.code().name} {error.details()}" if isinstance(error, grpc.aio.AioRpcError) else error.message
