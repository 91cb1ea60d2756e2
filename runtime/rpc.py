"""gRPC as every process uses it: one server, one kind of channel, one interceptor.

Owns connection options, health, reflection and the translation of errors into rich status (`runtime.rich_status` is
the table). Does not own services: a role adds its servicers, whose methods are coroutines or async generators, raise
the classes of `runtime.errors`, and never see a message that did not parse, or a caller whom the door keeps out.
Invariants: when a call ends for whatever reason, its handler has been cancelled and its `finally` blocks have run in
the handler's own task; a traceback goes to the log and never to the caller.
Life of a server: add services; start (listens); set_serving as work can be taken; stop (health first, then grace).
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from runtime import tls
from runtime.doors import NO_PASS, BearerChannel, Door, Pass
from runtime.errors import BatonError, InvalidArgument, Unauthenticated, Unavailable
from runtime.health import HealthService
from runtime.rich_status import DETAILS_KEY, from_status, to_status

LOG = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 32 * 1024 * 1024
"""Largest message taken or sent: a prompt of millions of token ids, far above the 1-4 MiB pieces that KV moves in."""

SERVER_OPTIONS: tuple[tuple[str, int | str], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # The library drops calls at random beyond 1,000 that no handler has taken yet, as CANCELLED without a word. A
    # service has its own limits and says so; the library's are set out of reach.
    ("grpc.server.max_pending_requests", 50_000),
    ("grpc.server.max_pending_requests_hard_limit", 100_000),
    # A second process on the same port would get half of the connections; it must fail to start instead.
    ("grpc.so_reuseport", 0),
    # The name has no "recv", unlike the constant in the library's headers; wrong names are ignored without a word.
    # Clients may ping a silent call every 2 s, with a margin; the library's limit of 5 min would cut long prefills off.
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_ping_strikes", 3),
    # Finds callers that vanished without closing, so that their KV is freed.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
)

REFLECTION_SERVICE = "grpc.reflection.v1alpha.ServerReflection"
HEALTH_SERVICE = "grpc.health.v1.Health"
OPEN_METHODS = frozenset({f"/{HEALTH_SERVICE}/Check", f"/{HEALTH_SERVICE}/Watch"})
"""Answered without a credential, because probes have none; they say who serves and nothing else."""

Handler = Callable[[Any, Any], Any]


class Server:
    """A gRPC server with health, reflection and rich errors. Create it inside the running event loop."""

    def __init__(
        self,
        options: Sequence[tuple[str, int | str]] = (),
        *,
        door: Door | None = None,
        files: tls.TlsFiles = tls.NO_TLS,
    ) -> None:
        """`options` are channel arguments that replace those of SERVER_OPTIONS or join them; `door` decides who may
        call (None: anyone), `files` are those of TLS."""
        self.grpc: grpc.aio.Server = _new_server(door, options)
        self._files = files
        self._health = HealthService()
        self._probed: grpc.aio.Server | None = None
        self._service_names: list[str] = []
        self.ends_with_process = False
        """Set when `stop` is the last thing that this process does: it then leaves the calls to the process's end."""
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)

    def add(self, add_to_server: Callable[[Any, grpc.aio.Server], None], servicer: object, service_name: str) -> None:
        """Adds a service by its generated `add_XServicer_to_server`; its health starts as NOT_SERVING.

        `service_name` is the full name, for example "baton.v1.Inference".
        """
        add_to_server(servicer, self.grpc)
        self._service_names.append(service_name)
        self._health.set_serving(service_name, False)

    def set_serving(self, service_name: str, serving: bool) -> None:
        """States in the health service whether `service_name` can take work."""
        self._health.set_serving(service_name, serving)

    async def start(self, host: str, port: int, health_port: int | None = None) -> int:
        """Listens on `host`:`port` (0: any free one) and returns the port. Unavailable when it cannot be had.

        `health_port` gets the health service and nothing else, without TLS: probes of Kubernetes know no certificates.
        """
        names = [*self._service_names, HEALTH_SERVICE, REFLECTION_SERVICE]
        reflection.enable_server_reflection(names, self.grpc)
        bound = _listen(self.grpc, format_address(host, port), tls.server_credentials(self._files))
        if health_port is not None:
            self._probed = _new_server(None, ())
            health_pb2_grpc.add_HealthServicer_to_server(self._health, self._probed)
            _listen(self._probed, format_address(host, health_port), None)
            await self._probed.start()
        await self.grpc.start()
        return bound

    async def stop(self, grace_s: float) -> None:
        """Reports NOT_SERVING, refuses new calls, gives those running `grace_s` seconds, then cancels them.

        With `ends_with_process` it only waits for what was answered last to be on its way. The library ends calls that
        reach a server while it stops as CANCELLED, as if their callers had given up; a connection that breaks because
        its process ends is UNAVAILABLE, which callers try again.
        """
        self._health.shut_down()
        if self.ends_with_process:
            await asyncio.sleep(grace_s)
        else:
            await self.grpc.stop(grace_s)
            if self._probed is not None:
                await self._probed.stop(0)


def _new_server(door: Door | None, options: Sequence[tuple[str, int | str]]) -> grpc.aio.Server:
    return grpc.aio.server(interceptors=[ErrorInterceptor(door)], options=_merged(SERVER_OPTIONS, options))


def _listen(server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None) -> int:
    try:
        if credentials is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise Unavailable(f"cannot listen on {address}: is the port in use? ({error})") from None


def create_channel(
    address: str,
    shown: Pass = NO_PASS,
    *,
    keepalive_time_s: float = 5.0,
    keepalive_timeout_s: float = 5.0,
    options: Sequence[tuple[str, int | str]] = (),
) -> grpc.aio.Channel:
    """A channel to `address` (host:port) with a connection of its own, on which every call shows the pass `shown`.

    A peer that stops answering breaks the calls on it after at most `keepalive_time_s + keepalive_timeout_s`; the
    time must be at least the 2 s that servers allow. `options` replace or join the channel arguments.
    """
    defaults = channel_options(keepalive_time_s, keepalive_timeout_s)
    if shown.tls is None:
        channel = grpc.aio.insecure_channel(address, options=_merged(defaults, options))
    else:
        merged = _merged([*defaults, *shown.tls.channel_options], options)
        channel = grpc.aio.secure_channel(address, shown.tls.credentials, options=merged)
    return channel if shown.bearer is None else BearerChannel(channel, shown.bearer)


def channel_options(keepalive_time_s: float = 5.0, keepalive_timeout_s: float = 5.0) -> list[tuple[str, int | str]]:
    """Channel arguments of every client, also of synchronous ones."""
    return [
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.keepalive_time_ms", round(keepalive_time_s * 1000)),
        ("grpc.keepalive_timeout_ms", round(keepalive_timeout_s * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.initial_reconnect_backoff_ms", 100),
        # Despite its name the time that one attempt to connect gets: a busy host may not greet for a while. One that
        # refuses is tried again after the backoffs around it.
        ("grpc.min_reconnect_backoff_ms", 5_000),
        ("grpc.max_reconnect_backoff_ms", 2_000),
        # Addresses are of this deployment; a web proxy named in the environment cannot reach them.
        ("grpc.enable_http_proxy", 0),
    ]


def end_process(code: int) -> NoReturn:
    """Ends this process at once, and its connections with it."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _merged(
    defaults: Sequence[tuple[str, int | str]], options: Sequence[tuple[str, int | str]]
) -> list[tuple[str, int | str]]:
    """Each argument once: of two the library takes the first."""
    return list({**dict(defaults), **dict(options)}.items())


def error_from_call(error: grpc.aio.AioRpcError) -> BatonError:
    """The error that the far side raised, as its class again; see `runtime.rich_status.from_status`."""
    return from_status(error.code(), error.details() or "", list(error.trailing_metadata() or ()))


def has_details(error: grpc.aio.AioRpcError) -> bool:
    """Whether the far side raised the error on purpose; the library's own errors carry no details."""
    return any(key == DETAILS_KEY for key, _ in error.trailing_metadata() or ())


def time_remaining_s(context: grpc.aio.ServicerContext[Any, Any]) -> float | None:
    """Seconds until the caller's deadline, at least 0, coarse by some percent on the wire; None without a deadline."""
    remaining = context.time_remaining()
    return None if remaining is None else max(0.0, remaining)


def format_address(host: str, port: int) -> str:
    """host:port, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def wait_for_shutdown_signal() -> signal.Signals:
    """Returns the first SIGTERM or SIGINT; a second one then has its usual effect of ending the process."""
    loop = asyncio.get_running_loop()
    received: asyncio.Future[signal.Signals] = loop.create_future()

    def record(number: signal.Signals) -> None:
        if not received.done():
            received.set_result(number)

    numbers = (signal.SIGTERM, signal.SIGINT)
    for number in numbers:
        loop.add_signal_handler(number, record, number)
    try:
        return await received
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


class _Unparsed:
    """Stands for a request that did not parse, on its way from the deserializer to the handler."""


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Wraps every handler: keeps strangers out, refuses what does not parse, closes generators, turns exceptions into
    status."""

    def __init__(self, door: Door | None = None) -> None:
        self._door = door

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """The handler of a call, wrapped; None for an unknown method, which gRPC answers with UNIMPLEMENTED."""
        method = handler_call_details.method
        door = None if method in OPEN_METHODS else self._door
        if door is not None and not door.admits(handler_call_details.invocation_metadata):
            return grpc.stream_stream_rpc_method_handler(_refuse)
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return None
        deserialize = _forgiving(handler.request_deserializer)
        if handler.unary_unary is not None:
            return grpc.unary_unary_rpc_method_handler(
                _unary(handler.unary_unary, method), deserialize, handler.response_serializer
            )
        if handler.unary_stream is not None:
            return grpc.unary_stream_rpc_method_handler(
                _streaming(handler.unary_stream, method), deserialize, handler.response_serializer
            )
        if handler.stream_unary is not None:
            return grpc.stream_unary_rpc_method_handler(
                _unary(handler.stream_unary, method), deserialize, handler.response_serializer
            )
        return grpc.stream_stream_rpc_method_handler(
            _streaming(handler.stream_stream, method), deserialize, handler.response_serializer
        )


async def _refuse(_: Any, context: Any) -> None:
    """Reads nothing of what a stranger sends, whatever the method would take."""
    code, message, trailing_metadata = to_status(Unauthenticated("a credential is needed here, and was not shown"))
    await context.abort(code, message, trailing_metadata)


def _forgiving(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def parse(data: bytes) -> Any:
        try:
            return deserialize(data)
        except (DecodeError, UnicodeDecodeError):
            return _Unparsed()

    return parse


def _parsed(request: Any) -> Any:
    """The request, or a stream of requests that raises at the first broken one."""
    if isinstance(request, _Unparsed):
        raise InvalidArgument("message", "the request is not a message of this method; are all strings UTF-8?")
    return _parsed_each(request) if isinstance(request, AsyncIterator) else request


async def _parsed_each(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        yield _parsed(request)


def _unary(handler: Handler, method: str) -> Handler:
    async def handle(request: Any, context: Any) -> Any:
        try:
            return await handler(_parsed(request), context)
        except Exception as error:
            await _abort(error, context, method)

    return handle


def _streaming(handler: Handler, method: str) -> Handler:
    """A coroutine that writes what the handler yields.

    The library leaves a cancelled generator to the garbage collector, which runs its `finally` late and in another
    task; here the task that iterates also closes.
    """

    async def handle(request: Any, context: Any) -> None:
        try:
            answer = handler(_parsed(request), context)
            if inspect.isawaitable(answer):
                await answer
                return
            async with contextlib.aclosing(answer):
                async for message in answer:
                    await context.write(message)
        except Exception as error:
            await _abort(error, context, method)

    return handle


async def _abort(error: Exception, context: Any, method: str) -> None:
    """Ends the call with the status of `error`. Errors of the library itself (an abort, a closed call) pass."""
    if isinstance(error, grpc.aio.BaseError):
        raise error
    if not isinstance(error, BatonError):
        LOG.error("%s failed", method, exc_info=error)
        error = BatonError("the server failed at this request; its log says why")
    code, message, trailing_metadata = to_status(error)
    if code is grpc.StatusCode.INTERNAL:
        LOG.error("%s: %s", method, message)
    await context.abort(code, message, trailing_metadata)
