"""The token streams: one for each router, one message a step for all of its attempts.

Tokens wait here between a commit and the moment gRPC takes the next message; what comes meanwhile joins the message,
so a slow router gets fewer, larger ones and memory is bounded by the tokens of its running attempts.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator

from protos import worker_pb2


class _Outbox:
    def __init__(self) -> None:
        self.pending: defaultdict[bytes, list[worker_pb2.DecodedToken]] = defaultdict(list)
        self.changed = asyncio.Event()
        self.is_over = False


class TokenStreams:
    """Outboxes by router."""

    def __init__(self) -> None:
        self._outboxes: dict[str, _Outbox] = {}

    def end(self) -> None:
        """Ends all streams, after what is in them."""
        for outbox in self._outboxes.values():
            outbox.is_over = True
            outbox.changed.set()

    def is_attached(self, router_id: str) -> bool:
        """Whether tokens for this router have somewhere to go."""
        return router_id in self._outboxes

    def push(self, router_id: str, attempt_id: bytes, token: worker_pb2.DecodedToken) -> None:
        """Queues a token. Without a stream it is dropped: the router ends its attempts when it loses the stream."""
        outbox = self._outboxes.get(router_id)
        if outbox is not None:
            outbox.pending[attempt_id].append(token)
            outbox.changed.set()

    async def stream(self, router_id: str) -> AsyncGenerator[worker_pb2.AttachResponse]:
        """A router's messages, until it goes or attaches again. The first one is empty: the stream stands."""
        previous = self._outboxes.get(router_id)
        if previous is not None:
            previous.is_over = True
            previous.changed.set()
        outbox = self._outboxes[router_id] = _Outbox()
        try:
            yield worker_pb2.AttachResponse()
            while not outbox.is_over or outbox.pending:
                await outbox.changed.wait()
                outbox.changed.clear()
                pending, outbox.pending = outbox.pending, defaultdict(list)
                if pending:
                    yield worker_pb2.AttachResponse(
                        attempts=[
                            worker_pb2.AttemptTokens(attempt_id=attempt_id, tokens=tokens)
                            for attempt_id, tokens in pending.items()
                        ]
                    )
        finally:
            if self._outboxes.get(router_id) is outbox:
                del self._outboxes[router_id]
