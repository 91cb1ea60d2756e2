"""How KV blocks get from their owner to a reader: the interface of a transport.

A transport moves bytes by block table and nothing more: leases, attestation and who may read are the worker service's.
A worker opens each of its transports once. The owner offers (`offer`, in its description) and serves; the reader
connects once for each owner and receives frame after frame. What a peer says is checked before a byte is touched: ids
against the pool, data against the layout; a violation is `TransportError`, and the reader's blocks are then worthless.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from kvstore.layout import KVLayout
from kvstore.memory import BlockMemory
from runtime.errors import BatonError


class TransportError(BatonError):
    """Blocks could not be moved: the peer is gone, cannot be reached this way, or sent what does not fit."""

    reason = "TRANSPORT"


class OwnerUnreachable(TransportError):
    """The owner is gone, or its memory cannot be read from here."""


@dataclass(frozen=True, slots=True)
class Network:
    """What a transport with sockets of its own may do."""

    host: str = "127.0.0.1"
    """Name or address under which other workers reach this one."""
    is_trusted: bool = False
    """Whether everything that can connect to this worker may read and write its KV."""


@dataclass(frozen=True, slots=True)
class Frame:
    """Some blocks on their way; one FetchResponse."""

    block_ids: tuple[int, ...]
    """The owner's block ids."""
    data: bytes = b""
    """Their content plane by plane (layer 0 K, layer 0 V, ...), within a plane in the order of `block_ids`; empty
    where the reader gets the bytes itself."""


class Reader(ABC):
    """The reader's half of one connection to one owner."""

    def __init__(self, layout: KVLayout) -> None:
        self.layout = layout
        """Layout of both pools."""

    @property
    @abstractmethod
    def passes_through_host(self) -> bool:
        """Whether bytes pass through messages, so that a checksum is due."""

    @abstractmethod
    def receive(self, frame: Frame, memory: BlockMemory, dest_block_ids: Sequence[int]) -> int:
        """Copies the frame's blocks into `dest_block_ids` of `memory`, one for one; answers the bytes copied.

        Blocking, and long for large frames: call it from a thread. Raises TransportError, before any byte is written,
        if the frame, the ids or the pool do not fit; and later if the owner cannot be read from. When it returns or
        raises nothing writes to the blocks any more.
        """

    @abstractmethod
    def close(self) -> None:
        """Lets go of the owner's memory. A later `receive` raises TransportError."""

    def check(self, frame: Frame, memory: BlockMemory, dest_block_ids: Sequence[int], num_data_bytes: int) -> None:
        """Raises TransportError unless the frame carries `num_data_bytes` and fits the pool and `dest_block_ids`."""
        if memory.layout.fingerprint != self.layout.fingerprint:
            raise TransportError(f"KV layouts differ: {memory.layout.fingerprint} and {self.layout.fingerprint}")
        if len(frame.block_ids) != len(dest_block_ids):
            raise TransportError(f"a frame of {len(frame.block_ids)} blocks for {len(dest_block_ids)}")
        if len(frame.data) != num_data_bytes:
            raise TransportError(f"a frame with {len(frame.data)} bytes of data instead of {num_data_bytes}")
        check_block_ids(dest_block_ids, memory.num_blocks, "destination")


class Transport(ABC):
    """One way to move blocks. A file of this package holds one, as class `Transport`."""

    name: str
    """The file's name, as in a TransportOffer."""
    rank: int
    """Place in the order of preference; the lowest that both sides can use is taken."""
    asks_owner = False
    """Whether `connect` waits for the owner, so that it belongs into a thread."""

    def open(self, memory: BlockMemory, network: Network) -> None:  # noqa: B027 - most need nothing
        """Takes what this needs for as long as the worker lives. Raises ConfigError if it cannot be had."""

    def close(self) -> None:  # noqa: B027 - most need nothing
        """Gives it back; nobody reads `memory` through this any more."""

    @abstractmethod
    def offer(self, memory: BlockMemory, nonce: str = "") -> dict[str, str] | None:
        """What a reader needs to know, for a TransportOffer; None if this memory cannot be served this way.

        `nonce` is the reader's, from DescribeRequest: what is proved is proved to that reader.
        """

    @abstractmethod
    def serve(self, memory: BlockMemory, block_ids: Sequence[int]) -> Iterator[Frame]:
        """The frames that carry these blocks, in order and without gaps; none for no blocks.

        The caller holds references to the blocks until the last frame is taken. Raises TransportError for an id
        outside the pool.
        """

    @abstractmethod
    def connect(self, offer_parameters: Mapping[str, str], layout: KVLayout, nonce: str = "") -> Reader:
        """Opens an owner's offer, made for `nonce`. Raises TransportError if it cannot be used."""


def check_block_ids(block_ids: Sequence[int], num_blocks: int, whose: str) -> None:
    """Raises TransportError unless every id is one of a pool of `num_blocks`."""
    if block_ids and not 0 <= min(block_ids) <= max(block_ids) < num_blocks:
        wrong = next(block_id for block_id in block_ids if not 0 <= block_id < num_blocks)
        raise TransportError(f"{whose} block {wrong} is outside the pool of {num_blocks} blocks")


def check_offer(offer_parameters: Mapping[str, str], names: Sequence[str], layout: KVLayout) -> None:
    """Raises TransportError unless an offer has all of `names` and, as `layout`, the fingerprint of this one."""
    missing = [name for name in names if name not in offer_parameters]
    if missing:
        raise TransportError(f"the offer lacks {', '.join(missing)}")
    if offer_parameters["layout"] != layout.fingerprint:
        raise TransportError(f"KV layouts differ: {offer_parameters['layout']} there, {layout.fingerprint} here")


def proof_of(secret: bytes, nonce: str) -> str:
    """What only who can read a pool's secret can say to a reader's nonce, in hex."""
    return blake2b(nonce.encode(), key=secret, digest_size=16, person=b"baton.shm").hexdigest()


def add_to_checksum(frame: Frame, checksum: int = 0) -> int:
    """CRC-32 over the data of frames in order: start with 0, pass each frame; both sides must come to the same."""
    return zlib.crc32(frame.data, checksum)
