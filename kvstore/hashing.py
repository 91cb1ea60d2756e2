"""Names of KV content: chained block hashes and session keys.

A block's hash names the tokens of the block and of everything before it, for one tenant, model and KV layout. It is
the same in every process and on every host: nothing is seeded at random, numbers are little-endian, fields are framed
by their length so that no two inputs run together. Hashes name content; who holds it is the pool's business. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

HASH_BYTES = 16
"""Size of block hashes and session keys."""

_ROOT = b"baton.kv.root"
_BLOCK = b"baton.kv.block"
_SESSION = b"baton.session"
_LABEL = b"baton.label"


class PrefixHasher:
    """Hashes blocks of tokens for one model and one KV layout."""

    __slots__ = ("_block_bytes", "_block_size", "_layout", "_model")

    def __init__(self, model: str, layout: str, block_size: int) -> None:
        """`model` and `layout` are fingerprints; `block_size` is in tokens. Raises ValueError if it is not positive."""
        if block_size < 1:
            raise ValueError(f"block_size: must be at least 1, got {block_size}")
        self._model = model.encode()
        self._layout = layout.encode()
        self._block_size = block_size
        self._block_bytes = 4 * block_size

    @property
    def block_size(self) -> int:
        """Tokens a block."""
        return self._block_size

    def root(self, tenant: str) -> bytes:
        """The parent of a tenant's first blocks, 16 bytes. Tenants never share blocks."""
        return _digest(_ROOT, tenant.encode(), self._model, self._layout)

    def extend(self, parent: bytes, token_ids: Sequence[int]) -> bytes:
        """The hash of the block with these tokens after `parent`, 16 bytes.

        `token_ids` are exactly `block_size` ids, each an unsigned 32-bit number; anything else is a ValueError.
        """
        if len(token_ids) != self._block_size:
            raise ValueError(f"token_ids: a block is {self._block_size} tokens, got {len(token_ids)}")
        return _digest(_BLOCK, parent, pack_token_ids(token_ids))

    def chain(self, tenant: str, token_ids: Sequence[int]) -> list[bytes]:
        """The hashes of all whole blocks of `token_ids`, first to last; a partial last block has none."""
        packed = pack_token_ids(token_ids)
        parent = self.root(tenant)
        hashes: list[bytes] = []
        for start in range(0, len(packed) - self._block_bytes + 1, self._block_bytes):
            parent = _digest(_BLOCK, parent, packed[start : start + self._block_bytes])
            hashes.append(parent)
        return hashes


def session_key(tenant: str, session_id: str) -> bytes:
    """The name under which a session is stored, 16 bytes; the client's own id is not readable from it."""
    return _digest(_SESSION, tenant.encode(), session_id.encode())


def attempt_label(attempt_id: bytes) -> str:
    """What logs, traces and error texts call an attempt: knowing its id is a right, so the id itself is not told."""
    return _digest(_LABEL, attempt_id).hex()[:12]


def pack_token_ids(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian unsigned 32-bit numbers, 4 bytes each. Raises ValueError for an id out of range."""
    try:
        return np.asarray(token_ids, dtype="<u4").tobytes()
    except OverflowError as error:
        raise ValueError("token_ids: every id must be between 0 and 4294967295") from error


def unpack_token_ids(packed: bytes) -> tuple[int, ...]:
    """The reverse of `pack_token_ids`. Raises ValueError if the length is not a multiple of 4."""
    if len(packed) % 4:
        raise ValueError(f"packed token ids: {len(packed)} bytes is not a multiple of 4")
    return tuple(np.frombuffer(packed, dtype="<u4").tolist())


def _digest(purpose: bytes, *fields: bytes) -> bytes:
    state = blake2b(digest_size=HASH_BYTES, person=purpose)
    for field in fields:
        state.update(len(field).to_bytes(8, "little"))
        state.update(field)
    return state.digest()
