"""Channels and calls in memory, with the interface of gRPC's as far as Baton uses it.

Messages are serialized. A call can break (both ends hear of it, each in its time), stall, or be lost with its process.
What becomes of whom awaits a call follows the library: a closed or cancelled call raises CancelledError in its reader,
a call on a closed channel is a UsageError. Whatever a deadline or an end of the client does reaches the handler as its
task's cancellation.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from functools import partial
from typing import Any

import grpc
import grpc.aio
from grpc._cython import cygrpc
from memory_network import KEEPALIVE_S, Lane, Network
from virtual_loop import Process

OK, UNAVAILABLE = grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE


class Channel:
    """In place of a `grpc.aio.Channel`."""

    def __init__(self, network: Network, caller: Process, address: str) -> None:
        self.network, self.caller, self.address = network, caller, address
        self.connected_to: Process | None = None
        """Who answered last."""
        self._calls: set[Call] = set()
        self._is_closed = False

    def unary_unary(self, method: str, request_serializer: Any, response_deserializer: Any, **_: Any) -> Any:
        """As the library's."""
        return partial(self._call, UnaryCall, method, request_serializer, response_deserializer)

    def unary_stream(self, method: str, request_serializer: Any, response_deserializer: Any, **_: Any) -> Any:
        """As the library's."""
        return partial(self._call, StreamCall, method, request_serializer, response_deserializer)

    def _call(
        self,
        kind: type[Call],
        method: str,
        serialize: Any,
        deserialize: Any,
        request: Any,
        timeout: float | None = None,
        metadata: Sequence[tuple[str, str]] = (),
    ) -> Call:
        if self._is_closed:
            raise cygrpc.UsageError("Channel is closed.")
        call = kind(self, method, serialize(request), deserialize, timeout, metadata)
        self._calls.add(call)
        return call

    def forget(self, call: Call) -> None:
        """A call has ended."""
        self._calls.discard(call)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """READY while whoever answered last lives."""
        is_up = self.connected_to is not None and self.connected_to.is_alive
        return grpc.ChannelConnectivity.READY if is_up else grpc.ChannelConnectivity.IDLE

    async def close(self, grace: float | None = None) -> None:
        """Cancels what runs."""
        self._is_closed = True
        for call in sorted(self._calls, key=lambda call: call.name):
            call.cancel()
        await asyncio.sleep(0)

    async def __aenter__(self) -> Channel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class Call:
    """Both ends of a call; its public methods that gRPC has too are the client's end."""

    def __init__(
        self,
        channel: Channel,
        method: str,
        request: bytes,
        deserialize: Callable[[bytes], Any],
        timeout_s: float | None,
        metadata: Sequence[tuple[str, str]],
    ) -> None:
        network = self.network = channel.network
        self.channel, self.caller, self.method, self.metadata = channel, channel.caller, method, metadata
        self.callee: Process | None = None
        """Who serves it, once it has arrived."""
        number = network.number(self.caller.name, channel.address, method)
        self.name = (self.caller.name, channel.address, method.rpartition(".")[2], number)
        self.to_server = Lane((*self.name, "to server"), channel.address, self)
        self.to_client = Lane((*self.name, "to client"), self.caller.address, self)
        self.deadline_s = None if timeout_s is None else network.loop.time() + timeout_s
        self._deserialize = deserialize
        self._messages: deque[bytes] = deque()
        self._status: grpc.aio.AioRpcError | None = None  # with code OK too
        self._is_cancelled = False
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._serving: asyncio.Task[None] | None = None
        if not self.caller.is_alive:
            self._end(UNAVAILABLE, "this process is dead")
            return
        network.calls.add(self)
        network.send(self.to_server, request, self._arrive)
        if self.deadline_s is not None:
            self._timer = network.loop.call_at(self.deadline_s, self._expire)

    # The client's end

    @property
    def is_over(self) -> bool:
        """Whether the client's end has ended."""
        return self._is_cancelled or self._status is not None

    def cancel(self) -> bool:
        """Closes the call."""
        if self.is_over:
            return False
        self._is_cancelled = True
        self._hang_up()
        return True

    def _expire(self) -> None:
        if not self.is_over:
            self._end(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
            self._hang_up()

    def _hang_up(self) -> None:
        self._client_ended()
        self.network.drop(self.to_client)
        if self.caller.is_alive and self in self.network.calls:
            self.network.send(self.to_server, None, self._closed_by_client)

    def _end(self, code: grpc.StatusCode, details: str = "", metadata: Sequence[tuple[str, Any]] = ()) -> None:
        if not self.is_over:
            if code is not OK:
                self._messages.clear()
            self._status = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*metadata), details)
            self._client_ended()

    def _client_ended(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self.channel.forget(self)
        self._wake()
        self.settle()

    def settle(self) -> None:
        """Forgets the call if both ends have ended."""
        if self.is_over and not self.to_server.items and (self._serving is None or self._serving.done()):
            self.network.calls.discard(self)

    def _take_message(self, message: bytes) -> None:
        if not self.is_over:
            self._messages.append(message)
            self._wake()

    def _take_only_message(self, message: bytes) -> None:
        self._take_message(message)
        self._end(OK)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def next_message(self) -> Any:
        """The next one; EOF after the last; raises how the call failed."""
        while True:
            if self._is_cancelled:
                raise asyncio.CancelledError
            if self._messages:
                return self._deserialize(self._messages.popleft())
            if self._status is not None:
                if self._status.code() is OK:
                    return grpc.aio.EOF
                raise self._status
            self._waiter = self.network.loop.create_future()
            try:
                await self._waiter
            except asyncio.CancelledError:
                self.cancel()
                raise

    # The server's end

    def _arrive(self, request: bytes) -> None:
        process, peer = self.network.processes.get(self.channel.address), self.channel.connected_to
        silence_s = peer.silent_until_s - self.network.loop.time() if peer is not None and peer is not process else 0.0
        if process is None or process.server is None or silence_s > 0:
            self.network.send(self.to_client, None, lambda _: self._end(UNAVAILABLE, "connection refused"))
            if silence_s > 0:
                # The connection is the one to the process that has vanished.
                self.network.hold(self.to_client, silence_s)
            return
        self.callee = self.channel.connected_to = process
        self._serving = process.spawn(self._serve(process.server.handlers[self.method], request))
        process.server.running[self._serving] = None
        self._serving.add_done_callback(self._served)
        if self.deadline_s is not None:
            timer = self.network.loop.call_at(self.deadline_s, self._serving.cancel)
            self._serving.add_done_callback(lambda _: timer.cancel())

    def _closed_by_client(self, _: None) -> None:
        if self._serving is not None:
            self._serving.cancel()
        self.settle()

    def _served(self, task: asyncio.Task[None]) -> None:
        assert self.callee is not None
        if self.callee.server is not None:
            self.callee.server.running.pop(task, None)
        if task.cancelled():
            self._answer(UNAVAILABLE, "the server has gone")
        elif task.exception() is not None:
            self.network.loop.errors.append(f"{self.method} let an exception out: {task.exception()!r}")
            self._answer(grpc.StatusCode.UNKNOWN, repr(task.exception()))
        self.settle()

    async def _serve(self, handler: Any, request: bytes) -> None:
        context = Context(self)
        try:
            parsed = handler.request_deserializer(request)
            if handler.unary_unary is not None:
                response = await handler.unary_unary(parsed, context)
                self._send(handler.response_serializer(response), self._take_only_message)
            else:
                context.serialize = handler.response_serializer
                await handler.unary_stream(parsed, context)
                self._answer(OK)
        except grpc.aio.AbortError:
            self._answer(*context.status)

    def respond(self, message: bytes) -> None:
        """Sends one of several messages to the client."""
        self._send(message, self._take_message)

    def _answer(self, code: grpc.StatusCode, details: str = "", metadata: Sequence[tuple[str, Any]] = ()) -> None:
        self._send(None, lambda _: self._end(code, details, metadata))

    def _send(self, message: bytes | None, act: Callable[[Any], None]) -> None:
        assert self.callee is not None
        if self.callee.is_alive and not self.is_over:
            self.network.send(self.to_client, message, act)

    # What goes wrong on the way

    def break_(self) -> None:
        """The connection breaks; each end hears of it by itself."""
        self.lose_server(0.0)
        self.lose_client(0.0)

    def stall(self) -> None:
        """Nothing moves any more; after a while the call breaks."""
        for lane in (self.to_server, self.to_client):
            self.network.hold(lane, KEEPALIVE_S)
        self.network.loop.call_later(KEEPALIVE_S, self.break_)

    def lose_server(self, delay_s: float) -> None:
        """The client hears that the other end has gone."""
        if not self.is_over:
            self.network.drop(self.to_client)
            self.network.send(self.to_client, None, lambda _: self._end(UNAVAILABLE, "the connection broke"))
            if delay_s:
                self.network.hold(self.to_client, delay_s)

    def lose_client(self, delay_s: float) -> None:
        """The server hears that the other end has gone."""
        if not self.caller.is_alive:
            self._end(UNAVAILABLE, "this process is dead")
        if self._serving is None:
            self.network.drop(self.to_server)
        elif not self._serving.done():
            self.network.send(self.to_server, None, self._closed_by_client)
            if delay_s:
                self.network.hold(self.to_server, delay_s)
        self.settle()


class Context:
    """What a handler sees of its call."""

    serialize: Callable[[Any], bytes]

    def __init__(self, call: Call) -> None:
        self._call = call
        self.status: tuple[grpc.StatusCode, str, Sequence[tuple[str, Any]]] = (OK, "", ())

    def invocation_metadata(self) -> Sequence[tuple[str, str]]:
        """As the library's."""
        return self._call.metadata

    def time_remaining(self) -> float | None:
        """As the library's."""
        deadline_s = self._call.deadline_s
        return None if deadline_s is None else deadline_s - self._call.network.loop.time()

    async def write(self, message: Any) -> None:
        """As the library's."""
        self._call.respond(self.serialize(message))
        await asyncio.sleep(0)

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> None:
        """As the library's."""
        self.status = (code, details, trailing_metadata)
        raise grpc.aio.AbortError


class UnaryCall(Call):
    """One answer."""

    def __await__(self) -> Generator[Any, None, Any]:
        return self.next_message().__await__()


class StreamCall(Call):
    """Answers one by one."""

    async def read(self) -> Any:
        """As the library's."""
        return await self.next_message()

    async def __aiter__(self) -> AsyncIterator[Any]:
        while (message := await self.next_message()) is not grpc.aio.EOF:
            yield message
