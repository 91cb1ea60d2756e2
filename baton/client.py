"""The Python client: `Client` blocks, `AsyncClient` awaits; both speak `baton.v1.Inference` and nothing else.

Owns one channel each. Errors arrive as the classes of `runtime.errors` that the server raised. Leaving a stream before
its end (break, close, cancellation) cancels the request, and its KV is freed. No torch is imported.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, Unpack

import grpc
import grpc.aio

from baton.answers import Chunk, Completion, Priority, Sampling, build_request, join, read_chunk
from protos import inference_pb2, inference_pb2_grpc
from runtime import rpc, tls
from runtime.doors import Pass, bearer_metadata, check_token
from runtime.errors import BatonError, ConfigError
from runtime.rich_status import from_status

DEFAULT_ADDRESS = "127.0.0.1:50051"


class Client:
    """Blocking client; may be used from several threads. Close it, or use it in a `with` block."""

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        timeout_s: float | None = None,
        token: str | None = None,
        tls_ca_file: str | Path | None = None,
        tls_cert_file: str | Path | None = None,
        tls_key_file: str | Path | None = None,
        tls_server_name: str | None = None,
    ) -> None:
        """Connects to a router at `address` (host:port) when first used.

        `timeout_s` bounds every call that gives no bound of its own; None: as long as it takes. `token` says which
        tenant calls. With `tls_ca_file`, PEM of the authorities that sign routers' certificates, the connection is
        encrypted; `tls_cert_file` and `tls_key_file` are the client's own certificate, for routers that ask for one;
        `tls_server_name` is the name in the router's certificate where that is not the address's. Without TLS a token
        can be read by whoever sees the connection. Raises ConfigError for files that cannot be used.
        """
        shown = _pass(token, tls_ca_file, tls_cert_file, tls_key_file, tls_server_name)
        self._timeout_s = timeout_s
        self._metadata = None if token is None else bearer_metadata(token)
        options = rpc.channel_options()
        if shown.tls is None:
            self._channel = grpc.insecure_channel(address, options=options)
        else:
            options += shown.tls.channel_options
            self._channel = grpc.secure_channel(address, shown.tls.credentials, options=options)
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connection and every call on it."""
        self._channel.close()

    def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Mapping[str, str]] | None = None,
        prompt_token_ids: Sequence[int] | None = None,
        model: str | None = None,
        session_id: str | None = None,
        append: bool = False,
        session_tokens: int | None = None,
        request_id: str | None = None,
        priority: Priority | None = None,
        timeout_s: float | None = None,
        **sampling: Unpack[Sampling],
    ) -> Generator[Chunk, None, None]:
        """Streams an answer; the last chunk has `finish`.

        Give one of `prompt` (text as it is), `messages` ([{"role": "user", "content": "..."}], laid out by the model's
        chat template) and `prompt_token_ids`. `model` must be the served one. `session_id` joins the turns of a
        conversation so that their KV is reused; with `append` the input is only what is new, and the session must have
        `session_tokens` tokens (those of its last answer's usage) if that is given. `request_id` names the request in
        logs. `priority` is "low", "normal" or "high". `timeout_s` ends the request when it is over. Further keywords
        are those of `Sampling`: temperature, top_p, top_k, min_p, presence_penalty, frequency_penalty,
        repetition_penalty, max_tokens, min_tokens, seed, stop, stop_token_ids, include_stop_str_in_output, ignore_eos,
        logprobs, top_logprobs, logit_bias.

        Raises InvalidArgument, NotFound, SessionLost (send the whole conversation), SessionBusy (another turn of it was
        running), Overloaded, Unavailable, Aborted (also: time is up) or BatonError.
        """
        fields = {"model": model, "request_id": request_id, "priority": priority}
        request = build_request(
            prompt,
            messages,
            prompt_token_ids,
            sampling,
            session_id=session_id,
            append=append or None,
            session_tokens=session_tokens,
            **fields,
        )
        return self._stream(request, self._timeout_s if timeout_s is None else timeout_s)

    def complete(self, prompt: str | None = None, **options: Any) -> Completion:
        """The whole answer at once; arguments and errors are those of `generate`."""
        return join(self.generate(prompt, **options))

    def get_model(self, model: str = "") -> inference_pb2.GetModelResponse:
        """Describes the served model; NotFound when `model` is given and is another."""
        response = self._call(self._stub.GetModel, inference_pb2.GetModelRequest(model=model))
        assert isinstance(response, inference_pb2.GetModelResponse)
        return response

    def workers(self) -> list[inference_pb2.WorkerStatus]:
        """The workers as the router sees them now."""
        return list(self._call(self._stub.ListWorkers, inference_pb2.ListWorkersRequest()).workers)

    def traces(self, request_id: str = "", limit: int = 0) -> list[inference_pb2.Trace]:
        """Traces of recent requests that the router keeps (--trace), or of one; at most `limit`, 0: all."""
        request = inference_pb2.ListTracesRequest(request_id=request_id, limit=limit)
        return list(self._call(self._stub.ListTraces, request).traces)

    def end_session(self, session_id: str) -> bool:
        """Forgets a session and frees its KV; whether anything was known of it."""
        request = inference_pb2.EndSessionRequest(session_id=session_id)
        existed: bool = self._call(self._stub.EndSession, request).existed
        return existed

    def _stream(self, request: inference_pb2.GenerateRequest, timeout_s: float | None) -> Generator[Chunk, None, None]:
        call = self._stub.Generate(request, timeout=timeout_s, metadata=self._metadata)
        try:
            for response in call:
                yield read_chunk(response)
        except grpc.RpcError as error:
            raise sync_error(error) from None
        finally:
            call.cancel()

    def _call(self, method: Any, request: Any) -> Any:
        try:
            return method(request, timeout=self._timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise sync_error(error) from None


class AsyncClient:
    """Client for asyncio. Create it inside the running event loop; use it in an `async with` block."""

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        timeout_s: float | None = None,
        token: str | None = None,
        tls_ca_file: str | Path | None = None,
        tls_cert_file: str | Path | None = None,
        tls_key_file: str | Path | None = None,
        tls_server_name: str | None = None,
    ) -> None:
        """See `Client`."""
        self._timeout_s = timeout_s
        shown = _pass(token, tls_ca_file, tls_cert_file, tls_key_file, tls_server_name)
        self._channel = rpc.create_channel(address, shown)
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends the connection and every call on it."""
        await self._channel.close()

    def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Mapping[str, str]] | None = None,
        prompt_token_ids: Sequence[int] | None = None,
        model: str | None = None,
        session_id: str | None = None,
        append: bool = False,
        session_tokens: int | None = None,
        request_id: str | None = None,
        priority: Priority | None = None,
        timeout_s: float | None = None,
        **sampling: Unpack[Sampling],
    ) -> AsyncGenerator[Chunk]:
        """Streams an answer; arguments and errors are those of `Client.generate`.

        A loop that leaves early should close the stream (`contextlib.aclosing`), which cancels the request.
        """
        fields = {"model": model, "request_id": request_id, "priority": priority}
        request = build_request(
            prompt,
            messages,
            prompt_token_ids,
            sampling,
            session_id=session_id,
            append=append or None,
            session_tokens=session_tokens,
            **fields,
        )
        return self._stream(request, self._timeout_s if timeout_s is None else timeout_s)

    async def complete(self, prompt: str | None = None, **options: Any) -> Completion:
        """The whole answer at once; arguments and errors are those of `Client.generate`."""
        async with contextlib.aclosing(self.generate(prompt, **options)) as stream:
            return join([chunk async for chunk in stream])

    async def get_model(self, model: str = "") -> inference_pb2.GetModelResponse:
        """Describes the served model; NotFound when `model` is given and is another."""
        response = await self._call(self._stub.GetModel, inference_pb2.GetModelRequest(model=model))
        assert isinstance(response, inference_pb2.GetModelResponse)
        return response

    async def workers(self) -> list[inference_pb2.WorkerStatus]:
        """The workers as the router sees them now."""
        response = await self._call(self._stub.ListWorkers, inference_pb2.ListWorkersRequest())
        return list(response.workers)

    async def traces(self, request_id: str = "", limit: int = 0) -> list[inference_pb2.Trace]:
        """See `Client.traces`."""
        request = inference_pb2.ListTracesRequest(request_id=request_id, limit=limit)
        return list((await self._call(self._stub.ListTraces, request)).traces)

    async def end_session(self, session_id: str) -> bool:
        """Forgets a session and frees its KV; whether anything was known of it."""
        response = await self._call(self._stub.EndSession, inference_pb2.EndSessionRequest(session_id=session_id))
        existed: bool = response.existed
        return existed

    async def _stream(self, request: inference_pb2.GenerateRequest, timeout_s: float | None) -> AsyncGenerator[Chunk]:
        call = self._stub.Generate(request, timeout=timeout_s)
        try:
            async for response in call:
                yield read_chunk(response)
        except grpc.aio.AioRpcError as error:
            raise rpc.error_from_call(error) from None
        finally:
            call.cancel()

    async def _call(self, method: Any, request: Any) -> Any:
        try:
            return await method(request, timeout=self._timeout_s)
        except grpc.aio.AioRpcError as error:
            raise rpc.error_from_call(error) from None


def sync_error(error: Any) -> BatonError:
    """A blocking call's error is the call itself and has the same accessors."""
    return from_status(error.code(), error.details() or "", list(error.trailing_metadata() or ()))


def _pass(
    token: str | None,
    ca_file: str | Path | None,
    cert_file: str | Path | None,
    key_file: str | Path | None,
    server_name: str | None,
) -> Pass:
    if token is not None:
        check_token(token, "token")
    if ca_file is None and (cert_file, key_file, server_name) != (None, None, None):
        raise ConfigError("tls_ca_file: is needed for TLS, got none")
    if (cert_file is None) != (key_file is None):
        raise ConfigError("tls_cert_file and tls_key_file: are needed together, got one of them")
    files = tls.TlsFiles(_path(cert_file), _path(key_file), _path(ca_file), server_name)
    return Pass(None if ca_file is None else tls.ClientTls(files), None if token is None else lambda: token)


def _path(path: str | Path | None) -> Path | None:
    return None if path is None else Path(path)
