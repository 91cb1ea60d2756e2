"""Blocks by shared memory: the reader maps the owner's pool file and copies from it; no bytes in messages.

That both are on one host is proved and not inferred from names: the offer carries a keyed hash of the reader's nonce
under the secret in the file's header, so a reader that can compute it reads the very file the owner writes.
Offer: `path` of the pool file, `layout` as the owner's fingerprint, `proof` in hex.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from hmac import compare_digest
from pathlib import Path

from kvstore.layout import KVLayout
from kvstore.memory import BlockMemory, PoolFileError, SharedPool
from kvstore.transport import base
from kvstore.transport.base import Frame, TransportError, check_block_ids, check_offer, proof_of


class Reader(base.Reader):
    """Reads one owner's pool file."""

    passes_through_host = False

    def __init__(self, pool: SharedPool) -> None:
        super().__init__(pool.layout)
        self._pool: SharedPool | None = pool

    def receive(self, frame: Frame, memory: BlockMemory, dest_block_ids: Sequence[int]) -> int:
        """As the base says; the owner's ids are checked against the blocks that its file has now."""
        pool = self._pool
        if pool is None:
            raise TransportError("this reader is closed")
        self.check(frame, memory, dest_block_ids, num_data_bytes=0)
        check_block_ids(frame.block_ids, pool.num_blocks, "source")
        memory.write_blocks(dest_block_ids, pool.planes, frame.block_ids)
        return len(dest_block_ids) * self.layout.block_bytes

    def close(self) -> None:
        """As the base says; the mapping goes when a copy in progress ends."""
        self._pool = None


class Transport(base.Transport):
    """Same host, one copy."""

    name = "shm"
    rank = 10

    def offer(self, memory: BlockMemory, nonce: str = "") -> dict[str, str] | None:
        """As the base says; None for memory without a file."""
        if memory.shared_path is None:
            return None
        return {
            "path": str(memory.shared_path),
            "layout": memory.layout.fingerprint,
            "proof": proof_of(memory.secret, nonce),
        }

    def serve(self, memory: BlockMemory, block_ids: Sequence[int]) -> Iterator[Frame]:
        """One frame that names the blocks."""
        check_block_ids(block_ids, memory.num_blocks, "source")
        if block_ids:
            yield Frame(tuple(block_ids))

    def connect(self, offer_parameters: Mapping[str, str], layout: KVLayout, nonce: str = "") -> Reader:
        """Maps the file. Raises TransportError if it is not there, does not fit `layout`, or fails the proof."""
        check_offer(offer_parameters, ("path", "layout", "proof"), layout)
        path, proof = offer_parameters["path"], offer_parameters["proof"]
        try:
            pool = SharedPool(Path(path), layout)
        except PoolFileError as error:
            raise TransportError(f"shm: {error.message}") from error
        if not compare_digest(proof_of(pool.secret, nonce).encode(), proof.encode()):
            raise TransportError(f"shm: {path} here is not the file that the owner wrote")
        return Reader(pool)
