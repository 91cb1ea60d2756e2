"""A server in memory, in place of `runtime.rpc.Server`: its handlers are wrapped by the product's own interceptor, so
errors and their details travel as on the wire. It serves for the process in whose context it was made."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from virtual_loop import PROCESS

from runtime.rpc import ErrorInterceptor


class MemoryServer:
    """In place of `runtime.rpc.Server`."""

    def __init__(self, **_: object) -> None:
        self.handlers: dict[str, Any] = {}
        self.running: dict[asyncio.Task[None], None] = {}
        self.serving: dict[str, bool] = {}
        """What the health service would say."""
        self._process = PROCESS.get()

    def add(self, add_to_server: Callable[[Any, Any], None], servicer: object, service_name: str) -> None:
        """As the product's."""
        add_to_server(servicer, self)
        self.serving[service_name] = False

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """As the library's; the registered ones are enough."""

    def add_registered_method_handlers(self, service_name: str, handlers: dict[str, Any]) -> None:
        """As the library's."""
        self.handlers |= {f"/{service_name}/{name}": handler for name, handler in handlers.items()}

    def set_serving(self, service_name: str, serving: bool) -> None:
        """As the product's."""
        self.serving[service_name] = serving

    async def start(self, host: str, port: int, health_port: int | None = None) -> int:
        """As the product's."""
        for method, handler in self.handlers.items():
            self.handlers[method] = await _intercepted(method, handler)
        self._process.server = self
        return port

    async def stop(self, grace_s: float) -> None:
        """As the product's."""
        self._process.server = None
        if self.running:
            await asyncio.wait(self.running, timeout=grace_s)
        for task in list(self.running):
            task.cancel()
        if self.running:
            await asyncio.wait(self.running)


class _Details:
    def __init__(self, method: str) -> None:
        self.method = method


async def _intercepted(method: str, handler: Any) -> Any:
    async def continuation(_: Any) -> Any:
        return handler

    details: Any = _Details(method)
    return await ErrorInterceptor().intercept_service(continuation, details)
