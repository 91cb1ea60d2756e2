"""Just enough of HTTP/2 to send what no gRPC library would: any message, frame or header, in batches.

One socket, blocking. `exchange` sends a batch of calls and answers how many messages came back for each; what is still
open at the end is reset, so a stream of reports is one more way to leave early. Knows no header compression: what the
other side says in headers is not read, and what it sends as data is only counted, because a refusal has none.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM, END_HEADERS, ACK = 1, 4, 1
CANCEL = (8).to_bytes(4, "big")
WINDOW = 2**30
MAX_FRAME_BYTES, MAX_BATCH_BYTES = 16_384, 60_000
QUIET_S = 2.0
"""How long after the last call of a batch has ended those that are left are reset."""
POLL_S = 0.05
LIMIT_S = 20.0
"""How long a connection may be silent while something is due."""


class ConnectionEnded(Exception):
    """The other side has closed the connection, or wants it closed."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call as bytes."""

    headers: bytes
    """Its header block; see `header_block`."""
    body: bytes
    """What follows: messages, framed or not."""
    leaves: bool = False
    """Whether it is reset as soon as it is sent."""
    lingers: bool = False
    """Whether it may go on for ever, so that its end is not waited for."""


def header_block(*headers: tuple[str, str]) -> bytes:
    """Headers as literals that nobody has to remember."""
    return b"".join(b"\x00" + _text(name) + _text(value) for name, value in headers)


def call_headers(path: str, token: str | None = None, **more: str) -> bytes:
    """The header block of a gRPC call."""
    pairs = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "x")]
    pairs += [("te", "trailers"), ("content-type", "application/grpc")]
    pairs += [] if token is None else [("authorization", f"Bearer {token}")]
    return header_block(*pairs, *more.items())


def framed(message: bytes, length: int | None = None, flag: int = 0) -> bytes:
    """A message as gRPC frames it, or with another length or flag."""
    return bytes([flag]) + (len(message) if length is None else length).to_bytes(4, "big") + message


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """A frame of HTTP/2."""
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


class Connection:
    """One connection to one server."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=LIMIT_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer, self._offset = b"", 0
        self._next_stream = self._first_stream = 1
        self._send_window = 65_535
        self._received: list[int] = []
        self._left: set[int] = set()
        settings = (4).to_bytes(2, "big") + WINDOW.to_bytes(4, "big")
        update = frame(WINDOW_UPDATE, 0, 0, WINDOW.to_bytes(4, "big"))
        self._socket.sendall(PREFACE + frame(SETTINGS, 0, 0, settings) + update)

    def close(self) -> None:
        """Ends it without a goodbye."""
        self._socket.close()

    def exchange(self, calls: Sequence[Call]) -> list[int]:
        """Makes the calls, all at once; answers how many bytes of data came for each. Raises ConnectionEnded."""
        num_bytes = sum(len(call.body) for call in calls)
        assert num_bytes <= MAX_BATCH_BYTES, "a batch must fit the window"
        try:
            self._read_until(lambda _: self._send_window >= num_bytes)
            self._send_window -= num_bytes
            self._first_stream, self._received = self._next_stream, [0] * len(calls)
            self._next_stream += 2 * len(calls)
            self._left = {index for index, call in enumerate(calls) if not call.leaves}
            lingering = {index for index, call in enumerate(calls) if call.lingers}
            self._socket.sendall(b"".join(self._frames(calls)))
            self._read_until(lambda quiet_s: self._left <= lingering or quiet_s > QUIET_S)
            streams = (self._first_stream + 2 * index for index in self._left)
            self._socket.sendall(b"".join(frame(RST_STREAM, 0, stream, CANCEL) for stream in streams))
        except (OSError, EOFError) as error:
            raise ConnectionEnded(repr(error)) from error
        return self._received

    def _frames(self, calls: Sequence[Call]) -> Iterator[bytes]:
        for index, call in enumerate(calls):
            stream = self._first_stream + 2 * index
            yield frame(HEADERS, END_HEADERS, stream, call.headers)
            for start in range(0, len(call.body), MAX_FRAME_BYTES):
                yield frame(DATA, 0, stream, call.body[start : start + MAX_FRAME_BYTES])
            yield frame(DATA, END_STREAM, stream)
            if call.leaves:
                yield frame(RST_STREAM, 0, stream, CANCEL)

    def _read_until(self, is_done: Callable[[float], bool]) -> None:
        """Reads frames until `is_done`, which is told for how long no call has ended. Raises EOFError, TimeoutError."""
        started_s = ended_s = time.monotonic()
        while not is_done(time.monotonic() - ended_s):
            if time.monotonic() - started_s > LIMIT_S:
                raise TimeoutError(f"no end of a batch for {LIMIT_S} s")
            self._socket.settimeout(POLL_S)
            try:
                kind, flags, stream, payload = self._next_frame()
            except TimeoutError:
                continue
            if self._handle(kind, flags, (stream - self._first_stream) // 2, stream, payload):
                ended_s = time.monotonic()

    def _handle(self, kind: int, flags: int, index: int, stream: int, payload: bytes) -> bool:
        """Whether a call of this batch has ended with this frame."""
        if kind == DATA and payload:
            if index >= 0:
                self._received[index] += len(payload)
            self._socket.sendall(frame(WINDOW_UPDATE, 0, 0, len(payload).to_bytes(4, "big")))
        elif kind == WINDOW_UPDATE and stream == 0:
            self._send_window += int.from_bytes(payload, "big")
        elif kind in (SETTINGS, PING) and not flags & ACK:
            self._socket.sendall(frame(kind, ACK, 0, payload if kind == PING else b""))
        elif kind == GOAWAY:
            raise EOFError("the server goes away")
        has_ended = kind == RST_STREAM or (kind in (DATA, HEADERS) and bool(flags & END_STREAM))
        if not has_ended or index not in self._left:
            return False
        self._left.discard(index)
        return True

    def _next_frame(self) -> tuple[int, int, int, bytes]:
        self._fill(9)
        start = self._offset
        size = int.from_bytes(self._buffer[start : start + 3], "big")
        self._fill(9 + size)
        start = self._offset
        head, payload = self._buffer[start : start + 9], self._buffer[start + 9 : start + 9 + size]
        self._offset = start + 9 + size
        return head[3], head[4], int.from_bytes(head[5:9], "big") & 0x7FFFFFFF, payload

    def _fill(self, num_bytes: int) -> None:
        """At least so many bytes are in the buffer from the offset on."""
        while len(self._buffer) - self._offset < num_bytes:
            piece = self._socket.recv(1 << 18)
            if not piece:
                raise EOFError("closed")
            self._buffer, self._offset = self._buffer[self._offset :] + piece, 0


def _text(text: str) -> bytes:
    data = text.encode()
    if len(data) < 127:
        return bytes([len(data)]) + data
    rest, digits = len(data) - 127, []
    while rest >= 128:
        digits.append(rest % 128 + 128)
        rest //= 128
    return b"\x7f" + bytes([*digits, rest]) + data
