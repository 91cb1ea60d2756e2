"""The HTTP door: what it shows, what it refuses, and that nobody holds it up."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from unittest import mock

import pytest

from runtime import http_door
from runtime.errors import Unavailable
from runtime.http_door import HttpDoor, Page, metrics_door, showing
from runtime.metrics import Metrics, gauge

HOST = "127.0.0.1"


async def exchange(port: int, request: bytes) -> tuple[bytes, bytes]:
    """The head and the body of what is answered until the connection ends."""
    reader, writer = await asyncio.open_connection(HOST, port)
    writer.write(request)
    async with asyncio.timeout(10):
        answer = await reader.read()
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    return head, body


def broken() -> Page:
    raise RuntimeError("this page cannot be made")


@contextlib.asynccontextmanager
async def door() -> AsyncIterator[int]:
    shown = HttpDoor({"/": lambda: Page("text/html", "größe".encode()), "/broken": broken})
    yield await shown.start(HOST, 0)
    await shown.close()


async def test_pages() -> None:
    """A page, whatever stands behind a question mark; HEAD without its body."""
    async with door() as port:
        head, body = await exchange(port, b"GET /?a=b HTTP/1.1\r\nAccept: */*\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK\r\n") and body.decode() == "größe"
        assert f"Content-Length: {len(body)}".encode() in head and b"Content-Type: text/html" in head
        assert b"Cache-Control: no-store\r\n" in head and b"X-Frame-Options: DENY\r\n" in head
        assert await exchange(port, b"HEAD / HTTP/1.1\r\n\r\n") == (head, b"")


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET /../etc/passwd HTTP/1.1\r\n\r\n", 404),
        (b"POST / HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc", 405),
        (b"GET /\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\r\n\r\n", 400),
        (b"GET /" + b"x" * 40_000 + b" HTTP/1.1\r\n\r\n", 400),
        (b"GET /broken HTTP/1.1\r\n\r\n", 500),
    ],
)
async def test_refusals(request_bytes: bytes, status: int) -> None:
    async with door() as port:
        with contextlib.suppress(ConnectionResetError):  # where more was sent than was read
            head, body = await exchange(port, request_bytes)
            assert head.startswith(f"HTTP/1.1 {status} ".encode()) and b"cannot be made" not in body
        head, _ = await exchange(port, b"GET / HTTP/1.1\r\n\r\n")
        assert b" 200 " in head, "the next one is answered"


@pytest.mark.parametrize(
    ("host", "status"),
    [("127.0.0.1:80", 200), ("localhost", 200), ("[::1]:80", 200), ("127.0.0.1", 200), ("evil.example", 403),
     ("evil.example:80", 403), ("127.0.0.1.evil.example", 403), ("10.0.0.1:80", 403)],
)  # fmt: skip
async def test_a_name_of_another_site_leads_nowhere(host: str, status: int) -> None:
    """A page elsewhere can have its own name lead to this machine, and read what is answered under it."""
    async with door() as port:
        head, body = await exchange(port, f"GET / HTTP/1.1\r\nhost:{host}\r\n\r\n".encode())
        assert head.startswith(f"HTTP/1.1 {status} ".encode()) and ("größe" in body.decode()) == (status == 200)


async def test_who_says_nothing_is_left() -> None:
    with mock.patch.object(http_door, "READ_LIMIT_S", 0.05):
        async with door() as port:
            head, body = await exchange(port, b"GET / HTTP/1.1\r\n")
            assert (head, body) == (b"", b"")


async def test_no_more_than_so_many_at_once() -> None:
    """Those that wait take the places; one more is told so, and there is room again when they have left."""
    async with door() as port:
        waiting = [await asyncio.open_connection(HOST, port) for _ in range(http_door.MAX_CONNECTIONS)]
        head, _ = await exchange(port, b"GET / HTTP/1.1\r\n\r\n")
        assert b" 503 " in head
        for _, writer in waiting:
            writer.close()
            await writer.wait_closed()
        async with asyncio.timeout(5):
            while b" 200 " not in head:
                head, _ = await exchange(port, b"GET / HTTP/1.1\r\n\r\n")


async def test_metrics_while_the_block_runs() -> None:
    metrics = metrics_door(Metrics(lambda: [gauge("one", "One.").add(1)]))
    async with door() as taken:
        with pytest.raises(Unavailable, match=f"{HOST}:{taken}"):
            async with showing(metrics, HOST, taken):
                pass
    async with showing(metrics, HOST, taken):
        head, body = await exchange(taken, b"GET /metrics HTTP/1.1\r\n\r\n")
        assert b"version=0.0.4" in head and b"\none 1\n" in body
    with pytest.raises(ConnectionRefusedError):
        await exchange(taken, b"GET /metrics HTTP/1.1\r\n\r\n")
    async with showing(metrics, HOST, None):
        pass
