"""What the router remembers of sessions, in the metadata store: who holds the KV of the last turn.

A record is a hint: it sends the next turn to the worker whose prefix cache probably has the turns before it. Losing it,
or the whole store, costs reuse and nothing else.
"""

from __future__ import annotations

import logging

from kvstore.hashing import PrefixHasher, pack_token_ids, session_key
from kvstore.metadata.base import MetadataStore, SessionRecord, StoreUnavailable
from router.links import Incarnation

LOG = logging.getLogger(__name__)


class Sessions:
    """Session records of all tenants."""

    def __init__(self, store: MetadataStore | None, ttl_s: float) -> None:
        self._store = store
        self._ttl_s = ttl_s

    async def read(self, tenant: str, session_id: str) -> SessionRecord | None:
        """The record of a session; None if there is none or the store is away."""
        if self._store is None or not session_id:
            return None
        try:
            return await self._store.read_session(session_key(tenant, session_id))
        except StoreUnavailable:
            return None

    async def write(
        self, tenant: str, session_id: str, previous: SessionRecord | None, token_ids: list[int], holder: Incarnation
    ) -> None:
        """Remembers a finished turn, unless another turn was remembered meanwhile."""
        if self._store is None or not session_id:
            return
        description = holder.description
        # The last token was sampled, its KV never computed.
        num_tokens = (len(token_ids) - 1) // description.block_size * description.block_size
        hasher = PrefixHasher(description.model.fingerprint, description.layout, description.block_size)
        hashes = hasher.chain(tenant, token_ids[:num_tokens])
        fence = 0 if previous is None else previous.fence
        record = SessionRecord(
            key=session_key(tenant, session_id),
            token_ids=pack_token_ids(token_ids),
            holder=holder.worker_id,
            epoch=description.epoch,
            num_tokens=num_tokens,
            tail_hash=hashes[-1] if hashes else b"",
            block_ids=(),
            fence=fence + 1,
        )
        try:
            if not await self._store.write_session(record, fence, self._ttl_s):
                LOG.info("request of session: another turn was written first; its record stays")
        except StoreUnavailable as error:
            LOG.debug("session not written: %s", error.message)

    async def end(self, tenant: str, session_id: str) -> bool:
        """Forgets a session; answers whether anything was known."""
        if self._store is None:
            return False
        try:
            return await self._store.delete_session(session_key(tenant, session_id))
        except StoreUnavailable:
            return False
