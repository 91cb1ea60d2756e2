"""Blocks as bytes in the messages of `KVTransfer.Fetch`: works everywhere.

Owns how blocks are packed into frames and unpacked; the call itself is the worker service's, and so is the checksum
(`add_to_checksum`), because these bytes pass through the host and the network. The offer has no parameters: the layout
is compared by the services.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from kvstore.layout import KVLayout
from kvstore.memory import BlockMemory
from kvstore.transport import base
from kvstore.transport.base import Frame, TransportError, check_block_ids

FRAME_BYTES = 2 * 2**20
"""Data a frame carries at most, unless one block is larger; well under the message limit, large enough to stream."""
MAX_BLOCK_BYTES = 31 * 2**20
"""A larger block does not fit a message (runtime.rpc.MAX_MESSAGE_BYTES): choose a smaller block size."""


class Reader(base.Reader):
    """Unpacks one owner's frames."""

    passes_through_host = True

    def __init__(self, layout: KVLayout) -> None:
        super().__init__(layout)
        self._closed = False

    def receive(self, frame: Frame, memory: BlockMemory, dest_block_ids: Sequence[int]) -> int:
        """As the base says."""
        if self._closed:
            raise TransportError("this reader is closed")
        num_blocks = len(frame.block_ids)
        num_bytes = num_blocks * self.layout.block_bytes
        self.check(frame, memory, dest_block_ids, num_data_bytes=num_bytes)
        shape = (self.layout.num_planes, num_blocks, self.layout.plane_block_bytes)
        source = np.frombuffer(frame.data, dtype=np.uint8).reshape(shape)
        memory.write_blocks(dest_block_ids, source, range(num_blocks))
        return num_bytes

    def close(self) -> None:
        """As the base says."""
        self._closed = True


class Transport(base.Transport):
    """Any host, through the calls that exist anyway."""

    name = "grpc"
    rank = 100

    def offer(self, memory: BlockMemory, nonce: str = "") -> dict[str, str] | None:
        """Nothing to say; None if one block is more than a message may hold."""
        return {} if memory.layout.block_bytes <= MAX_BLOCK_BYTES else None

    def serve(self, memory: BlockMemory, block_ids: Sequence[int]) -> Iterator[Frame]:
        """Frames of whole blocks, FRAME_BYTES at most each. A frame is packed when it is asked for."""
        check_block_ids(block_ids, memory.num_blocks, "source")
        num_each = max(1, FRAME_BYTES // memory.layout.block_bytes)
        for start in range(0, len(block_ids), num_each):
            ids = tuple(block_ids[start : start + num_each])
            yield Frame(ids, memory.read_blocks(ids).tobytes())

    def connect(self, offer_parameters: Mapping[str, str], layout: KVLayout, nonce: str = "") -> Reader:
        """Nothing to open."""
        return Reader(layout)
