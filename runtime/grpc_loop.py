"""The event loop of a process that writes to very many gRPC streams.

The gRPC library tells the loop of every operation that has ended by a byte on a socket. The loop then takes all that
have ended, but only one of the bytes: after a burst each of the others wakes it once more, for nothing. Here the rest
of the bytes goes first; never the last one, on which the library would wait. Owns no operation and loses none: a byte
is written after what it tells of can be taken.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVarTuple

from grpc._cython import cygrpc  # type: ignore[attr-defined]

Arguments = TypeVarTuple("Arguments")
MAX_BYTES = 4096
"""Read at once; what there is beyond wakes the loop again."""


class GrpcLoop(asyncio.SelectorEventLoop):
    """See the module."""

    def add_reader(self, fd: Any, callback: Callable[[*Arguments], Any], *args: *Arguments) -> None:
        """As every loop, but for the socket on which the library tells what has ended."""
        reader: Callable[..., Any] = callback
        if isinstance(fd, socket.socket) and _is_of_library(callback):
            reader = partial(_take_all, fd, callback)
        super().add_reader(fd, reader, *args)  # type: ignore[arg-type]


def _is_of_library(callback: Callable[..., Any]) -> bool:
    """Whether that takes what has ended. Should the library do so in another way some day, nothing is changed here."""
    return isinstance(callback, partial) and isinstance(
        getattr(callback.func, "__self__", None), cygrpc.PollerCompletionQueue
    )


def _take_all(told: socket.socket, callback: Callable[..., Any], *args: Any) -> None:
    num_bytes = len(told.recv(MAX_BYTES, socket.MSG_PEEK))
    if num_bytes > 1:
        told.recv(num_bytes - 1)
    callback(*args)
