"""The server, its interceptor and channels, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from protos import inference_pb2, inference_pb2_grpc
from runtime import errors, rich_status, rpc

SERVICE = "baton.v1.Inference"

ROUND_TRIPS = [
    (errors.InvalidArgument("sampling.top_p", "must be in (0, 1], is 3"), "INVALID_ARGUMENT"),
    (errors.ContextLengthExceeded("prompt", "has 9 tokens, the limit is 8", limit=8, got=9), "INVALID_ARGUMENT"),
    (errors.NotFound("model", "gpt", "model 'gpt' is not served"), "NOT_FOUND"),
    (errors.SessionLost("s", "nothing is known of 's'"), "NOT_FOUND"),
    (errors.SessionBusy("'s' has a turn that still runs"), "ABORTED"),
    (errors.AlreadyExists("request 'a' is in flight"), "ALREADY_EXISTS"),
    (errors.Overloaded("queue full: 8 of 8", 2.5, limit=8), "RESOURCE_EXHAUSTED"),
    (errors.Unavailable("no prefill worker", 0.25), "UNAVAILABLE"),
    (errors.FailedPrecondition("layouts differ"), "FAILED_PRECONDITION"),
    (errors.Aborted("ended by the server"), "ABORTED"),
    (errors.CheckpointError("a.gguf: tensor x is truncated"), "INTERNAL"),
    (errors.ConfigError("--port: 'x'"), "INTERNAL"),
]


class Service(inference_pb2_grpc.InferenceServicer):
    """Does what the test says: raises `error`, or streams until cancelled."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.entered = asyncio.Event()
        self.cleaned = asyncio.Event()
        self.cleaning_task: asyncio.Task[Any] | None = None
        self.handler_task: asyncio.Task[Any] | None = None
        self.block_at_yield = False
        self.remaining_s: float | None = None
        self.silence_s = 0.0

    async def GetModel(self, request: Any, context: Any) -> Any:
        self.remaining_s = rpc.time_remaining_s(context)
        if self.error is not None:
            raise self.error
        if request.model == "abort":
            await context.abort(grpc.StatusCode.DATA_LOSS, "by hand")
        if request.model == "silent":
            await asyncio.sleep(self.silence_s)
        return inference_pb2.GetModelResponse(model=request.model)

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.handler_task = asyncio.current_task()
        try:
            yield inference_pb2.GenerateResponse(text="first")
            if self.error is not None:
                raise self.error
            self.entered.set()
            while self.block_at_yield:
                yield inference_pb2.GenerateResponse(text="x" * 100_000)
            await asyncio.Event().wait()
        finally:
            self.cleaning_task = asyncio.current_task()
            self.cleaned.set()


@contextlib.asynccontextmanager
async def serving(service: Service, *options: tuple[str, int]) -> AsyncIterator[tuple[rpc.Server, str]]:
    server = rpc.Server(options)
    server.add(inference_pb2_grpc.add_InferenceServicer_to_server, service, SERVICE)
    port = await server.start("127.0.0.1", 0)
    try:
        yield server, f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


@contextlib.asynccontextmanager
async def connected(service: Service) -> AsyncIterator[tuple[inference_pb2_grpc.InferenceStub, grpc.aio.Channel]]:
    async with serving(service) as (_, address), rpc.create_channel(address) as channel:
        yield inference_pb2_grpc.InferenceStub(channel), channel


async def failure(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        if isinstance(call, grpc.aio.UnaryStreamCall):
            async for _ in call:
                pass
        else:
            await call
    return caught.value


@pytest.mark.parametrize("streaming", [False, True], ids=["unary", "streaming"])
@pytest.mark.parametrize(("error", "code"), ROUND_TRIPS, ids=[type(error).__name__ for error, _ in ROUND_TRIPS])
async def test_every_error_comes_back_as_its_class(error: errors.BatonError, code: str, streaming: bool) -> None:
    service = Service()
    service.error = error
    async with connected(service) as (stub, _):
        call = stub.Generate(inference_pb2.GenerateRequest()) if streaming else stub.GetModel(_model_request(""))
        raised = await failure(call)
    assert raised.code().name == code
    back = rpc.error_from_call(raised)
    assert type(back) is type(error)
    assert str(back) == str(error)
    assert back.metadata == {**error.metadata, "code": code}
    if isinstance(error, errors.InvalidArgument):
        assert isinstance(back, errors.InvalidArgument)
        assert (back.field, back.description) == (error.field, error.description)
    if isinstance(error, errors.Overloaded | errors.Unavailable):
        assert isinstance(back, errors.Overloaded | errors.Unavailable)
        assert back.retry_after_s == error.retry_after_s


async def test_the_wire_carries_google_rpc_details() -> None:
    service = Service()
    service.error = errors.Overloaded("queue full", 2.5)
    async with connected(service) as (stub, _):
        raised = await failure(stub.GetModel(_model_request("")))
    trailer = dict(raised.trailing_metadata())
    assert trailer["grpc-retry-pushback-ms"] == "2500"
    status = status_pb2.Status.FromString(trailer["grpc-status-details-bin"])
    info, delay = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    assert status.details[0].Unpack(info)
    assert (info.domain, info.reason) == ("baton", "OVERLOADED")
    assert status.details[1].Unpack(delay)
    assert delay.retry_delay.ToMilliseconds() == 2500


@pytest.mark.parametrize("streaming", [False, True], ids=["unary", "streaming"])
async def test_an_unexpected_exception_is_logged_and_not_shown(
    streaming: bool, caplog: pytest.LogCaptureFixture
) -> None:
    service = Service()
    service.error = ZeroDivisionError("secret detail")
    async with connected(service) as (stub, _):
        with caplog.at_level(logging.ERROR, "runtime.rpc"):
            call = stub.Generate(inference_pb2.GenerateRequest()) if streaming else stub.GetModel(_model_request(""))
            raised = await failure(call)
    assert raised.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in raised.details() + str(raised.trailing_metadata())
    assert "ZeroDivisionError: secret detail" in caplog.text


async def test_an_abort_of_the_handler_itself_passes() -> None:
    async with connected(Service()) as (stub, _):
        raised = await failure(stub.GetModel(_model_request("abort")))
    assert (raised.code(), raised.details()) == (grpc.StatusCode.DATA_LOSS, "by hand")


@pytest.mark.parametrize(
    "data",
    [b"\xff\xff\xff\xff", b"\x0a\x02\xc3\x28", b"\x0a\x7fshort"],
    ids=["garbage", "broken UTF-8", "truncated"],
)
@pytest.mark.parametrize("method", ["GetModel", "Generate"])
async def test_a_request_that_does_not_parse_is_an_invalid_argument(data: bytes, method: str) -> None:
    async with connected(Service()) as (stub, channel):
        if method == "GetModel":
            raised = await failure(channel.unary_unary(f"/{SERVICE}/{method}")(data))
        else:
            raised = await failure(channel.unary_stream(f"/{SERVICE}/{method}")(data))
        assert raised.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert isinstance(rpc.error_from_call(raised), errors.InvalidArgument)
        assert (await stub.GetModel(_model_request("still here"))).model == "still here"


async def test_a_message_over_the_limit_is_refused_and_the_server_lives() -> None:
    async with serving(Service()) as (_, address):
        limit = ("grpc.max_send_message_length", -1)
        async with rpc.create_channel(address, options=[limit]) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            raised = await failure(stub.GetModel(_model_request("x" * (rpc.MAX_MESSAGE_BYTES + 1))))
            assert raised.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert isinstance(rpc.error_from_call(raised), errors.InvalidArgument)
            assert (await stub.GetModel(_model_request("small"))).model == "small"


async def test_an_error_text_of_any_length_still_arrives() -> None:
    service = Service()
    long = "\u6f22" * 50_000
    service.error = errors.InvalidArgument(long, long, **{f"key{i}": long for i in range(50)})
    async with connected(service) as (stub, _):
        raised = await failure(stub.GetModel(_model_request("")))
    assert raised.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert raised.details().endswith("\u6f22...")
    assert isinstance(rpc.error_from_call(raised), errors.InvalidArgument)


async def test_an_unknown_method_is_unimplemented() -> None:
    async with connected(Service()) as (_, channel):
        raised = await failure(channel.unary_unary(f"/{SERVICE}/Nothing")(b""))
    assert raised.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_details_tell_a_servers_error_from_the_librarys() -> None:
    service = Service()
    service.error = errors.Unavailable("draining")
    async with connected(service) as (stub, channel):
        assert rpc.has_details(await failure(stub.GetModel(_model_request(""))))
        assert not rpc.has_details(await failure(channel.unary_unary(f"/{SERVICE}/Nothing")(b"")))


@pytest.mark.parametrize("block_at_yield", [False, True], ids=["waiting", "writing"])
async def test_cancelling_a_stream_cleans_up_at_once_in_the_handlers_task(block_at_yield: bool) -> None:
    service = Service()
    service.block_at_yield = block_at_yield
    async with connected(service) as (stub, _):
        call = stub.Generate(inference_pb2.GenerateRequest())
        assert (await call.read()).text == "first"
        await service.entered.wait()
        call.cancel()
        await asyncio.wait_for(service.cleaned.wait(), 2)
    assert service.cleaning_task is service.handler_task


async def test_a_client_that_vanishes_cleans_up() -> None:
    service = Service()
    async with serving(service) as (_, address):
        channel = rpc.create_channel(address)
        call = inference_pb2_grpc.InferenceStub(channel).Generate(inference_pb2.GenerateRequest())
        await call.read()
        await channel.close()
        await asyncio.wait_for(service.cleaned.wait(), 2)


async def test_a_deadline_reaches_the_handler_and_ends_it() -> None:
    service = Service()
    async with connected(service) as (stub, _):
        await stub.GetModel(_model_request(""))
        assert service.remaining_s is None
        await stub.GetModel(_model_request(""), timeout=30)
        assert service.remaining_s is not None and 25 < service.remaining_s < 31
        raised = await failure(stub.Generate(inference_pb2.GenerateRequest(), timeout=0.2))
        assert raised.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await asyncio.wait_for(service.cleaned.wait(), 2)


async def test_keepalive_survives_a_silent_call() -> None:
    """Pings at the shortest time that clients may choose, with hardly a strike forgiven."""
    service = Service()
    service.silence_s = 9.0
    unforgiving = ("grpc.http2.max_ping_strikes", 1)
    async with (
        serving(service, unforgiving) as (_, address),
        rpc.create_channel(address, keepalive_time_s=2.0) as channel,
    ):
        stub = inference_pb2_grpc.InferenceStub(channel)
        assert (await stub.GetModel(_model_request("silent"))).model == "silent"


async def test_a_peer_that_is_slow_to_greet_is_reached() -> None:
    """A busy host, or a far one: the first bytes from it take longer than a connection on loopback ever should."""

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
        writer.close()

    async def greet_late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(1.0)
        host, _, port = address.rpartition(":")
        upstream_reader, upstream_writer = await asyncio.open_connection(host, int(port))
        await asyncio.gather(relay(reader, upstream_writer), relay(upstream_reader, writer))

    async with serving(Service()) as (_, address), await asyncio.start_server(greet_late, "127.0.0.1", 0) as proxy:
        port = proxy.sockets[0].getsockname()[1]
        async with rpc.create_channel(f"127.0.0.1:{port}") as channel:
            answer = await inference_pb2_grpc.InferenceStub(channel).GetModel(_model_request("late"), timeout=20)
        assert answer.model == "late"


async def test_a_taken_port_is_an_error() -> None:
    async with serving(Service()) as (_, address):
        with pytest.raises(errors.Unavailable, match="cannot listen on 127"):
            await rpc.Server().start("127.0.0.1", int(address.rpartition(":")[2]))


async def test_health_tells_process_and_service_apart_and_stop_turns_both_off() -> None:
    async with serving(Service()) as (server, address), rpc.create_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        assert await _health(stub, "") == "SERVING"
        assert await _health(stub, SERVICE) == "NOT_SERVING"
        server.set_serving(SERVICE, True)
        assert await _health(stub, SERVICE) == "SERVING"
        raised = await failure(stub.Check(health_pb2.HealthCheckRequest(service="other")))
        assert raised.code() is grpc.StatusCode.NOT_FOUND
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        assert _name(await watch.read()) == "SERVING"
        stopping = asyncio.create_task(server.stop(0.5))
        assert _name(await watch.read()) == "NOT_SERVING"
        await stopping


async def test_every_health_watcher_hears_every_change_also_after_one_left() -> None:
    async with serving(Service()) as (server, address), rpc.create_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        leaving, staying = (stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE)) for _ in range(2))
        unknown = stub.Watch(health_pb2.HealthCheckRequest(service="later"))
        assert _name(await leaving.read()) == _name(await staying.read()) == "NOT_SERVING"
        assert _name(await unknown.read()) == "SERVICE_UNKNOWN"
        leaving.cancel()
        server.set_serving(SERVICE, True)
        server.set_serving("later", True)
        assert _name(await asyncio.wait_for(staying.read(), 2)) == "SERVING"
        assert _name(await asyncio.wait_for(unknown.read(), 2)) == "SERVING"


async def test_reflection_lists_the_services() -> None:
    async with serving(Service()) as (_, address), rpc.create_channel(address) as channel:
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        await call.done_writing()
        names = {service.name for service in (await call.read()).list_services_response.service}
    assert names == {SERVICE, rpc.HEALTH_SERVICE, rpc.REFLECTION_SERVICE}


async def test_stop_lets_running_calls_finish_within_the_grace() -> None:
    service = Service()
    service.silence_s = 0.3
    async with serving(service) as (server, address), rpc.create_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        call = stub.GetModel(_model_request("silent"))
        await stub.GetModel(_model_request(""))
        await server.stop(5)
        assert (await call).model == "silent"


@pytest.mark.parametrize(
    ("code", "cls"),
    [
        (grpc.StatusCode.UNAVAILABLE, errors.Unavailable),
        (grpc.StatusCode.DEADLINE_EXCEEDED, errors.Aborted),
        (grpc.StatusCode.CANCELLED, errors.Aborted),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, errors.InvalidArgument),
        (grpc.StatusCode.UNKNOWN, errors.BatonError),
    ],
)
def test_a_status_of_the_library_gets_the_nearest_class(code: grpc.StatusCode, cls: type) -> None:
    error = rich_status.from_status(code, "text", [("grpc-status-details-bin", b"\xffgarbage")])
    assert type(error) is cls
    assert error.metadata["code"] == code.name


def test_a_reason_of_another_domain_is_not_taken_for_ours() -> None:
    status = status_pb2.Status(code=5, message="text")
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason="ABORTED", domain="elsewhere"))
    error = rich_status.from_status(
        grpc.StatusCode.NOT_FOUND, "text", [("grpc-status-details-bin", status.SerializeToString())]
    )
    assert type(error) is errors.BatonError


@pytest.mark.parametrize(("host", "expected"), [("127.0.0.1", "127.0.0.1:5"), ("::1", "[::1]:5")])
def test_addresses_of_both_families(host: str, expected: str) -> None:
    assert rpc.format_address(host, 5) == expected


def _model_request(model: str) -> inference_pb2.GetModelRequest:
    return inference_pb2.GetModelRequest(model=model)


async def _health(stub: Any, service: str) -> str:
    return _name(await stub.Check(health_pb2.HealthCheckRequest(service=service)))


def _name(response: Any) -> str:
    name: str = health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)
    return name


async def test_a_burst_of_calls_reaches_the_handlers_whole() -> None:
    """By itself the library cancels calls at random, without a word, beyond 1,000 that no handler has taken yet."""
    async with connected(Service()) as (stub, _):

        async def outcome() -> str:
            try:
                await stub.GetModel(inference_pb2.GetModelRequest())
            except grpc.aio.AioRpcError as error:
                return error.code().name
            return "OK"

        await outcome()
        outcomes = await asyncio.gather(*(outcome() for _ in range(3_000)))
        assert set(outcomes) == {"OK"}
