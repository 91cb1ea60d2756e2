"""TLS on every connection: who has no certificate of the right authority gets no answer, and new files take effect."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from authority import Authority, Files
from cluster import PROMPT, cluster, expected
from credentials import SECRET, over_tls, write_secret
from redis_process import RedisServer

import runtime.watched
from baton import AsyncClient, Client
from kvstore.metadata import open_store
from kvstore.metadata.base import StoreUnavailable, WorkerRecord
from protos import inference_pb2, inference_pb2_grpc, worker_pb2, worker_pb2_grpc
from runtime.doors import NO_PASS, Pass
from runtime.errors import ConfigError, Unavailable
from runtime.rpc import Server, create_channel
from runtime.tls import TlsFiles

LIMIT_S = 5.0


def tls_of(files: Files) -> TlsFiles:
    return TlsFiles(files.certificate, files.key, files.authority)


def cluster_options(files: Files, **more: Any) -> dict[str, Any]:
    """Options of a worker or router that has these files inside the cluster."""
    names = ("cluster_tls_cert_file", "cluster_tls_key_file", "cluster_tls_ca_file")
    return {**dict(zip(names, (files.certificate, files.key, files.authority), strict=True)), **more}


async def code_of(address: str, shown: Pass, is_worker: bool) -> grpc.StatusCode:
    """How a call with this pass ends."""
    async with create_channel(address, shown) as channel:
        call: Any = (
            worker_pb2_grpc.WorkerStub(channel).Describe(worker_pb2.DescribeRequest(), timeout=LIMIT_S)
            if is_worker
            else inference_pb2_grpc.InferenceStub(channel).GetModel(inference_pb2.GetModelRequest(), timeout=LIMIT_S)
        )
        try:
            await call
        except grpc.aio.AioRpcError as error:
            return error.code()
    return grpc.StatusCode.OK


async def test_all_connections_are_mutual_and_two_authorities_are_not_mixed_up(
    authority: Authority, stranger: Authority, tmp_path: Path
) -> None:
    """Routers, workers and KV on the cluster's authority, clients on another; KV crosses by messages."""
    inside = Authority("cluster")
    worker, router = inside.write(tmp_path, "worker", "127.0.0.1"), inside.write(tmp_path, "router")
    public, client = authority.write(tmp_path, "public", "127.0.0.1"), authority.write(tmp_path, "client")
    other = stranger.write(tmp_path, "other", "127.0.0.1")
    foreign = TlsFiles(other.certificate, other.key, client.authority)
    async with cluster(
        worker=cluster_options(worker, kv_transports=("grpc",)),
        shown=over_tls(tls_of(client)),
        tls_cert_file=public.certificate,
        tls_key_file=public.key,
        tls_client_ca_file=client.authority,
        **cluster_options(router),
    ) as c:
        reply = await c.generate()
        assert reply.tokens == expected(PROMPT, 8) and reply.finish.served_by.transport == "grpc"
        workers = [each.address for each in (*c.prefills, *c.decodes)]
        for address in workers:
            assert await code_of(address, over_tls(tls_of(router)), True) is grpc.StatusCode.OK
        refused = [
            (c.router.address, NO_PASS),
            (c.router.address, over_tls(TlsFiles(ca_file=client.authority))),
            (c.router.address, over_tls(foreign)),
            (c.router.address, over_tls(tls_of(router))),
            *((address, NO_PASS) for address in workers),
            *((address, over_tls(TlsFiles(ca_file=router.authority))) for address in workers),
            *((address, over_tls(TlsFiles(client.certificate, client.key, router.authority))) for address in workers),
            *((address, over_tls(tls_of(other))) for address in workers),
        ]
        for address, shown in refused:
            assert await code_of(address, shown, address in workers) is grpc.StatusCode.UNAVAILABLE
        await c.balanced()


async def test_a_server_of_another_name_or_authority_is_not_told_the_token(
    authority: Authority, stranger: Authority, tmp_path: Path
) -> None:
    """A caller refuses the server before it says anything, the name being checked or overridden."""
    heard: list[Any] = []

    class Listener(inference_pb2_grpc.InferenceServicer):
        async def GetModel(self, request: Any, context: Any) -> inference_pb2.GetModelResponse:
            heard.append(context.invocation_metadata())
            return inference_pb2.GetModelResponse(model="m")

    wrong_name = authority.write(tmp_path, "elsewhere.example")
    untrusted = stranger.write(tmp_path, "untrusted", "127.0.0.1")
    for files, name, is_believed in (
        (wrong_name, None, False),
        (untrusted, None, False),
        (wrong_name, "elsewhere.example", True),
    ):
        server = Server(files=TlsFiles(files.certificate, files.key))
        server.add(inference_pb2_grpc.add_InferenceServicer_to_server, Listener(), "baton.v1.Inference")
        address = f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
        shown = {"token": "a-token", "tls_ca_file": wrong_name.authority, "tls_server_name": name}
        try:
            async with AsyncClient(address, timeout_s=LIMIT_S, **shown) as asynchronous:
                if is_believed:
                    assert (await asynchronous.get_model()).model == "m"
                else:
                    with pytest.raises(Unavailable):
                        await asynchronous.get_model()
            with Client(address, timeout_s=LIMIT_S, **shown) as blocking:
                asked = asyncio.to_thread(blocking.get_model)
                if is_believed:
                    assert (await asked).model == "m"
                else:
                    with pytest.raises(Unavailable):
                        await asked
        finally:
            await server.stop(0)
        assert bool(heard) is is_believed
    assert len(heard) == 2 and all(("authorization", "Bearer a-token") in tuple(each) for each in heard)


async def test_certificates_that_change_are_used_from_the_next_connection_on(
    authority: Authority, stranger: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An old connection goes on; a pair that is broken half-way changes nothing."""
    monkeypatch.setattr(runtime.watched, "LOOK_INTERVAL_S", 0.0)
    files, newer = authority.write(tmp_path, "first", "127.0.0.1"), stranger.write(tmp_path, "newer", "127.0.0.1")

    class Answers(inference_pb2_grpc.InferenceServicer):
        async def GetModel(self, request: Any, context: Any) -> inference_pb2.GetModelResponse:
            return inference_pb2.GetModelResponse()

    async def believes(trusted: Path) -> bool:
        return await code_of(address, over_tls(TlsFiles(ca_file=trusted)), False) is grpc.StatusCode.OK

    server = Server(files=TlsFiles(files.certificate, files.key))
    server.add(inference_pb2_grpc.add_InferenceServicer_to_server, Answers(), "baton.v1.Inference")
    address = f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
    try:
        async with create_channel(address, over_tls(TlsFiles(ca_file=files.authority))) as channel:
            stub: Any = inference_pb2_grpc.InferenceStub(channel)
            await stub.GetModel(inference_pb2.GetModelRequest(), timeout=LIMIT_S)
            for unfit in (b"not a key", files.key.read_bytes()[:100], newer.key.read_bytes()):
                files.key.write_bytes(unfit)
                assert await believes(files.authority)
            files.certificate.write_bytes(newer.certificate.read_bytes())
            assert await believes(newer.authority)
            assert not await believes(files.authority)
            await stub.GetModel(inference_pb2.GetModelRequest(), timeout=LIMIT_S)
    finally:
        await server.stop(0)


async def test_a_secret_is_changed_while_all_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both accepted, then the new one alone; nobody is told that the old one was right once."""
    monkeypatch.setattr(runtime.watched, "LOOK_INTERVAL_S", 0.0)
    path = write_secret(tmp_path)
    async with cluster(worker={"cluster_secret_file": path}, cluster_secret_file=path) as c:
        address = c.decodes[0].address

        async def opens(secret: str) -> bool:
            code = await code_of(address, Pass(bearer=lambda: secret), True)
            assert code in (grpc.StatusCode.OK, grpc.StatusCode.UNAUTHENTICATED)
            return code is grpc.StatusCode.OK

        newer = "another-secret-0123456789"
        assert (await opens(SECRET), await opens(newer)) == (True, False)
        write_secret(tmp_path, newer, SECRET)
        assert (await opens(SECRET), await opens(newer)) == (True, True)
        write_secret(tmp_path, "# short", "short")
        assert (await opens(SECRET), await opens(newer)) == (True, True)
        write_secret(tmp_path, newer)
        assert (await opens(SECRET), await opens(newer)) == (False, True)
        assert (await c.generate()).tokens == expected(PROMPT, 8)
        await c.balanced()


async def test_a_router_with_another_secret_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    for folder, text in ((right, SECRET), (wrong, "some-other-secret-0123456789")):
        folder.mkdir()
        write_secret(folder, text)
    workers = {"cluster_secret_file": right / "secret"}
    with caplog.at_level(logging.ERROR, "router.links"), contextlib.suppress(TimeoutError):
        async with asyncio.timeout(1.5), cluster(worker=workers, cluster_secret_file=wrong / "secret"):
            raise AssertionError("a router with a wrong secret has proved workers")
    kept_out = [
        record.getMessage() for record in caplog.records if "takes no calls of this router" in record.getMessage()
    ]
    assert len(kept_out) == 2 and not any(SECRET in text or "some-other" in text for text in kept_out)


# Redis


@contextlib.asynccontextmanager
async def encrypted(redis: RedisServer, files: Files) -> AsyncIterator[int]:
    """A port where the server is reached by TLS, from callers with a certificate; the bundled server has no TLS."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=files.authority)
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(files.certificate, files.key)

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", redis.port)
        await asyncio.gather(relay(reader, inner_writer), relay(inner_reader, writer), return_exceptions=True)

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def test_redis_over_tls_and_with_a_password(authority: Authority, stranger: Authority, tmp_path: Path) -> None:
    redis, password = RedisServer(password=SECRET), write_secret(tmp_path)
    files, other = authority.write(tmp_path, "redis", "127.0.0.1"), stranger.write(tmp_path, "other")
    record = WorkerRecord("w", "decode", "127.0.0.1:1", 1)
    redis.start()
    try:
        async with encrypted(redis, files) as port:
            base = f"rediss://127.0.0.1:{port}/0?ssl_certfile={files.certificate}&ssl_keyfile={files.key}"
            store = open_store(f"{base}&ssl_ca_certs={files.authority}", 2.0, password)
            await store.register_worker(record, 10)
            assert await store.list_workers() == [record]
            await store.close()
            (tmp_path / "wrong").write_text("a-wrong-password-0123456789")
            for url, password_file in (
                (f"{base}&ssl_ca_certs={files.authority}", None),
                (f"{base}&ssl_ca_certs={files.authority}", tmp_path / "wrong"),
                (f"{base}&ssl_ca_certs={other.authority}", password),
                (f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={files.authority}", password),
                (f"redis://127.0.0.1:{port}/0", password),
            ):
                refused = open_store(url, 0.5, password_file)
                with pytest.raises(StoreUnavailable) as raised:
                    await refused.list_workers()
                assert SECRET not in str(raised.value) and "a-wrong-password" not in str(raised.value)
                await refused.close()
    finally:
        redis.kill()


async def test_files_that_do_not_fit_are_refused_at_the_start(
    authority: Authority, stranger: Authority, tmp_path: Path
) -> None:
    one, two = authority.write(tmp_path, "one", "127.0.0.1"), stranger.write(tmp_path, "two", "127.0.0.1")
    for files in (
        TlsFiles(one.certificate, two.key),
        TlsFiles(one.key, one.key),
        TlsFiles(one.certificate, one.certificate),
        TlsFiles(one.certificate, one.key, one.key),
    ):
        with pytest.raises(ConfigError, match="TLS: "):
            await Server(files=files).start("127.0.0.1", 0)
        if files.ca_file is not None:
            with pytest.raises(ConfigError, match="TLS: "):
                over_tls(files)


def test_files_that_cannot_be_used_are_named_and_not_quoted(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("hunter2")
    for make in (
        lambda: open_store("redis://h", 1.0, tmp_path / "none"),
        lambda: over_tls(TlsFiles(ca_file=tmp_path / "none")),
    ):
        with pytest.raises(ConfigError, match="none: cannot be read"):
            make()
    from runtime.doors import Secret

    with pytest.raises(ConfigError, match="at least 16 characters") as raised:
        Secret(path)
    assert "hunter2" not in str(raised.value)
