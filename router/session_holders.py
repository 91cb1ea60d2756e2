"""Asking the workers about a session: what they remember of it, and that they forget it.

Workers hold the truth about KV and the last copy of a session's tokens. Who does not answer in time is passed over.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

import grpc.aio

from kvstore.hashing import PrefixHasher, pack_token_ids
from kvstore.metadata.base import SessionRecord
from protos import worker_pb2
from router.fleet import Fleet
from router.links import Incarnation

LOG = logging.getLogger(__name__)
ASK_TIMEOUT_S = 1.0


class SessionHolders:
    """The workers of a fleet."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def is_served(self, record: SessionRecord) -> bool:
        """Whether the holder of a record takes requests."""
        return any(
            (worker.worker_id, worker.description.epoch) == (record.holder, record.epoch)
            for worker in self._fleet.usable(decodes=True)
        )

    async def find(self, tenant: str, key: bytes) -> list[SessionRecord]:
        """What workers that generate remember, those that take requests first."""
        request = worker_pb2.FindSessionRequest(session_key=key)
        workers = [worker for worker in self._living() if worker.decodes]
        answers = await _ask(workers, lambda worker: worker.worker.FindSession(request, timeout=ASK_TIMEOUT_S))
        answers.sort(key=lambda each: not each[0].is_serving)
        return [
            record_at(worker, tenant, key, answer.token_ids, answer.fence) for worker, answer in answers if answer.fence
        ]

    async def forget(self, key: bytes) -> bool:
        """Frees what is kept of a session everywhere; answers whether anything was."""
        request = worker_pb2.ForgetSessionRequest(session_key=key)
        answers = await _ask(self._living(), lambda worker: worker.worker.ForgetSession(request, timeout=ASK_TIMEOUT_S))
        return any(answer.existed for _, answer in answers)

    def _living(self) -> list[Incarnation]:
        return [worker for worker in self._fleet.incarnations() if not worker.lost.is_set()]


async def _ask(
    workers: Iterable[Incarnation], call: Callable[[Incarnation], Awaitable[Any]]
) -> list[tuple[Incarnation, Any]]:
    """The answers of those that gave one."""

    async def ask(worker: Incarnation) -> tuple[Incarnation, Any] | None:
        try:
            return worker, await call(worker)
        except grpc.aio.AioRpcError as error:
            LOG.debug("worker %s was asked about a session: %s", worker.worker_id, error.details())
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # Nobody cancelled this task: the link has given the worker up and closed the channel under its calls.
        return None

    return [answer for answer in await asyncio.gather(*map(ask, workers)) if answer is not None]


def record_at(holder: Incarnation, tenant: str, key: bytes, token_ids: Sequence[int], fence: int) -> SessionRecord:
    """The record of a session whose last turn ended at `holder`."""
    description = holder.description
    # The last token was sampled, its KV never computed.
    num_tokens = max(0, len(token_ids) - 1) // description.block_size * description.block_size
    hasher = PrefixHasher(description.model.fingerprint, description.layout, description.block_size)
    hashes = hasher.chain(tenant, token_ids[:num_tokens])
    return SessionRecord(
        key=key,
        token_ids=pack_token_ids(token_ids),
        holder=holder.worker_id,
        epoch=description.epoch,
        num_tokens=num_tokens,
        tail_hash=hashes[-1] if hashes else b"",
        block_ids=(),
        fence=fence,
    )
