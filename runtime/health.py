"""The standard health service, grpc.health.v1: "" is the process, every other name a service's readiness.

Owns what is reported, not when: `runtime.rpc.Server` and the roles decide. Written here on the library's messages,
because its own asynchronous servicer forgets all watchers of a service as soon as one of them leaves.
Invariants: each watcher gets the present state at once and every later state, though it may skip states that lasted
less than it took to send one; after `shut_down` nothing is SERVING again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from grpc_health.v1 import health_pb2, health_pb2_grpc

from runtime.errors import NotFound

_Status = health_pb2.HealthCheckResponse


class HealthService(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # the library has no types
    """Check and Watch over a dictionary of states."""

    def __init__(self) -> None:
        self._states: dict[str, int] = {"": _Status.SERVING}
        self._changed = asyncio.Event()
        self._shut_down = False

    def set_serving(self, service: str, serving: bool) -> None:
        """States whether `service` can take work. After `shut_down` only False has an effect."""
        self._states[service] = _Status.SERVING if serving and not self._shut_down else _Status.NOT_SERVING
        self._changed.set()
        self._changed = asyncio.Event()

    def shut_down(self) -> None:
        """Turns every service, the process included, to NOT_SERVING for good."""
        self._shut_down = True
        for service in list(self._states):
            self.set_serving(service, False)

    async def Check(self, request: Any, context: Any) -> Any:
        """The present state; NOT_FOUND for a service nobody registered."""
        if request.service not in self._states:
            raise NotFound("service", request.service, f"service {request.service!r} is not served here")
        return _Status(status=self._states[request.service])

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:
        """The present state, then each change; an unknown service is SERVICE_UNKNOWN until someone registers it."""
        last: int | None = None
        while True:
            changed = self._changed
            state = self._states.get(request.service, _Status.SERVICE_UNKNOWN)
            if state != last:
                yield _Status(status=state)
                last = state
            await changed.wait()
