"""A small HTTP server for looking at a process: fixed paths, GET and HEAD, one answer a connection.

Owns sockets and the little of HTTP/1.1 that scrapers and browsers need. Does not own what is shown: a page is a
function that makes it from what the process holds at that moment, in the same event loop. Invariants: nothing that a
caller sends changes anything; a request has READ_LIMIT_S and MAX_HEAD_BYTES, and no more than MAX_CONNECTIONS are
answered at once; a door on loopback answers no browser that was led here under another site's name.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass

from runtime.doors import is_loopback
from runtime.errors import Unavailable
from runtime.metrics import CONTENT_TYPE, Metrics
from runtime.rpc import format_address

LOG = logging.getLogger(__name__)
READ_LIMIT_S = 5.0
MAX_HEAD_BYTES = 16 * 1024
MAX_CONNECTIONS = 32
REASONS = {
    200: "OK",
    400: "Bad Request",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    500: "Internal Server Error",
    503: "Service Unavailable",
}


@dataclass(frozen=True, slots=True)
class Page:
    """An answer."""

    content_type: str
    """As the header says it."""
    body: bytes
    """What is sent."""
    status: int = 200
    """HTTP status."""


class HttpDoor:
    """Serves pages by path."""

    def __init__(self, pages: Mapping[str, Callable[[], Page]]) -> None:
        self._pages = dict(pages)
        self._answering: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._is_on_loopback = False

    @property
    def paths(self) -> list[str]:
        """What there is."""
        return list(self._pages)

    async def start(self, host: str, port: int) -> int:
        """Listens on `host`:`port` (0: any free one) and returns the port. Unavailable when it cannot be had."""
        try:
            self._server = await asyncio.start_server(self._accept, host, port, limit=MAX_HEAD_BYTES)
        except OSError as error:
            address = format_address(host, port)
            raise Unavailable(f"cannot listen on {address}: is the port in use? ({error.strerror})") from None
        self._is_on_loopback = is_loopback(host)
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    async def close(self) -> None:
        """Listens no more; answers under way are cut off."""
        if self._server is not None:
            self._server.close()
        for task in self._answering:
            task.cancel()
        if self._answering:
            await asyncio.wait(self._answering)
        if self._server is not None:
            await self._server.wait_closed()  # in newer Pythons that waits for its connections as well

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Not a coroutine: then the tasks would be the library's, and nobody could end them."""
        task = asyncio.get_running_loop().create_task(self._answer(reader, writer))
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Whoever leaves early misses nothing but its own answer.
        with contextlib.suppress(ConnectionError, TimeoutError):
            try:
                async with asyncio.timeout(READ_LIMIT_S):
                    method, page = await self._page_for(reader)
                    writer.write(_head(page))
                    writer.write(b"" if method == "HEAD" else page.body)
                    await writer.drain()
            finally:
                writer.close()

    async def _page_for(self, reader: asyncio.StreamReader) -> tuple[str, Page]:
        is_full = len(self._answering) > MAX_CONNECTIONS
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            first, *headers = head.decode("ascii").split("\r\n")
            method, target, _ = first.split(" ")
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, UnicodeDecodeError, ValueError):
            return "", _plain(400)
        if is_full:
            return method, _plain(503)
        make = self._pages.get(target.partition("?")[0])
        if self._is_on_loopback and not _names_loopback(headers):
            return method, _plain(403)
        if method not in ("GET", "HEAD"):
            return method, _plain(405)
        if make is None:
            return method, _plain(404)
        try:
            return method, make()
        except Exception:
            LOG.exception("%s could not be shown", target.partition("?")[0])
            return method, _plain(500)


def _names_loopback(headers: list[str]) -> bool:
    """Whether the caller asked for this machine: a page of another site whose name leads here would name that site."""
    for header in headers:
        key, _, value = header.partition(":")
        if key.lower() == "host":
            host = value.strip().rpartition(":")[0] if re.search(r":\d+$", value) else value.strip()
            return is_loopback(host.strip("[]"))
    return True  # no browser


def _plain(status: int) -> Page:
    return Page("text/plain; charset=utf-8", f"{status} {REASONS[status]}\n".encode(), status)


def _head(page: Page) -> bytes:
    """Nothing is kept by browsers, run from elsewhere or shown inside other pages."""
    lines = (
        f"HTTP/1.1 {page.status} {REASONS[page.status]}",
        f"Content-Type: {page.content_type}",
        f"Content-Length: {len(page.body)}",
        "Cache-Control: no-store",
        "X-Content-Type-Options: nosniff",
        "X-Frame-Options: DENY",
        "Connection: close",
    )
    return ("\r\n".join(lines) + "\r\n\r\n").encode("ascii")


def metrics_door(metrics: Metrics) -> HttpDoor:
    """A door that shows metrics alone."""
    return HttpDoor({"/metrics": lambda: Page(CONTENT_TYPE, metrics.text().encode())})


@contextlib.asynccontextmanager
async def showing(door: HttpDoor, host: str, port: int | None) -> AsyncIterator[None]:
    """A door that is open while the block runs; without a port nothing."""
    if port is None:
        yield
        return
    bound = await door.start(host, port)
    LOG.info("%s at http://%s", " ".join(door.paths), format_address(host, bound))
    try:
        yield
    finally:
        await door.close()
