"""What options of doors must go together, what is passed on to whom, and files that are read again."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from authority import Authority
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton import Client
from baton.options import ServeConfig
from baton.topology import choose_ports, plan_topology
from engine.config import WorkerConfig
from protos import inference_pb2, inference_pb2_grpc
from router.config import RouterConfig
from runtime import config as configuration
from runtime.doors import Secret, is_loopback
from runtime.errors import ConfigError
from runtime.rpc import Server
from runtime.tls import TlsFiles
from runtime.watched import LOOK_INTERVAL_S, Watched

A, B, C = Path("/a"), Path("/b"), Path("/c")
CLIENT_TLS = {"tls_cert_file": A, "tls_key_file": B}
CLUSTER_TLS = {"cluster_tls_cert_file": A, "cluster_tls_key_file": B, "cluster_tls_ca_file": C}


@pytest.mark.parametrize(
    ("cls", "doors"),
    [
        (RouterConfig, [{"tenants_file": A}, {**CLIENT_TLS, "tls_client_ca_file": C}]),
        (ServeConfig, [{"tenants_file": A}, {**CLIENT_TLS, "tls_client_ca_file": C}]),
        (WorkerConfig, [{"cluster_secret_file": A}, CLUSTER_TLS]),
    ],
)
def test_what_asks_for_nothing_listens_on_loopback_alone(cls: Any, doors: list[dict[str, Path]]) -> None:
    for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost"):
        assert is_loopback(host) and cls(model="m", host=host).host == host
    for host in ("0.0.0.0", "::", "10.0.0.1", "some.host"):
        with pytest.raises(ConfigError, match=r"--host: .*nothing is asked of callers"):
            cls(model="m", host=host)
        for door in [*doors, {"allow_anonymous": True}]:
            assert cls(model="m", host=host, **door).host == host
    if cls is not WorkerConfig:
        with pytest.raises(ConfigError, match="--host"):
            cls(model="m", host="0.0.0.0", **CLIENT_TLS)  # encrypted, and still anyone may call


@pytest.mark.parametrize("cls", [RouterConfig, WorkerConfig, ServeConfig])
def test_a_password_on_a_command_line_is_refused_and_not_repeated(cls: Any) -> None:
    """The environment may hold one, but not that of `baton serve`, which hands URLs on by command lines."""
    model = ["m"] if cls is ServeConfig else ["--model=m"]

    def load(argv: list[str], env: dict[str, str]) -> Any:
        return configuration.load(cls, [*argv, *model], prog="p", description="d", env=env)

    for url in ("redis://:hunter2@h:1/0", "rediss://user:hunter2@h:1/0"):
        with pytest.raises(ConfigError, match=r"--redis-url: .*put it into a file") as raised:
            load([f"--redis-url={url}"], {})
        assert "hunter2" not in str(raised.value)
        if cls is ServeConfig:
            with pytest.raises(ConfigError, match="--redis-url"):
                load([], {"BATON_REDIS_URL": url})
        else:
            assert load([], {"BATON_REDIS_URL": url}).redis_url == url
    files = ["--redis-url=rediss://user@h:1/0?ssl_ca_certs=/ca", "--redis-password-file=/a"]
    assert load(files, {}).redis_password_file == A


@pytest.mark.parametrize(
    ("cls", "options", "flag"),
    [
        (RouterConfig, {"tls_cert_file": A}, "--tls-key-file"),
        (RouterConfig, {"tls_key_file": A}, "--tls-cert-file"),
        (RouterConfig, {"tls_client_ca_file": A}, "--tls-cert-file"),
        (RouterConfig, {"cluster_tls_cert_file": A}, "--cluster-tls-key-file"),
        (WorkerConfig, {"cluster_tls_ca_file": A}, "--cluster-tls-cert-file"),
        (WorkerConfig, {"cluster_tls_cert_file": A, "cluster_tls_key_file": B}, "--cluster-tls-ca-file"),
        (WorkerConfig, {"cluster_tls_server_name": "n"}, "--cluster-tls-server-name"),
        (ServeConfig, {"tls_cert_file": A}, "--tls-key-file"),
        (ServeConfig, {"redis_password_file": A}, "--redis-password-file"),
    ],
)
def test_half_of_what_is_needed_is_refused(cls: Any, options: dict[str, Any], flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        cls(model="m", **options)


def test_serve_tells_each_process_what_it_needs_and_no_secret() -> None:
    served = ServeConfig(
        "tracer",
        host="0.0.0.0",
        num_mixed=1,
        tenants_file=A,
        tls_cert_file=A,
        tls_key_file=B,
        tls_client_ca_file=C,
        allow_anonymous=True,
        cluster_secret_file=B,
        redis_url="redis://h:1/0",
        redis_password_file=C,
    )
    for spec in plan_topology(served, "redis://h:1/0", [0], range(101, 200), "run").processes:
        cls: Any = RouterConfig if spec.name.startswith("router") else WorkerConfig
        loaded = configuration.load(cls, spec.argv[4:], prog="p", description="d", env={})
        assert (loaded.cluster_secret_file, loaded.redis_password_file) == (B, C)
        if cls is RouterConfig:
            given = (loaded.tenants_file, loaded.tls_cert_file, loaded.tls_key_file, loaded.tls_client_ca_file)
            assert given == (A, A, B, C) and loaded.allow_anonymous


@pytest.mark.parametrize(
    "options",
    [
        {"token": ""},
        {"token": "two words"},
        {"token": "caf\u00e9"},
        {"token": "line\n"},
        {"tls_cert_file": "c", "tls_key_file": "k"},
        {"tls_ca_file": "a", "tls_cert_file": "c"},
        {"tls_ca_file": "/no/such/file"},
        {"tls_server_name": "n"},
    ],
)
def test_a_client_refuses_what_it_cannot_use(options: dict[str, str]) -> None:
    with pytest.raises(ConfigError) as raised:
        Client("127.0.0.1:1", **options)
    assert not options.get("token") or options["token"] not in str(raised.value)


# Files


@dataclass
class Clock:
    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_file_is_read_again_when_it_changed_and_not_before_it_is_time(tmp_path: Path) -> None:
    path, clock, reads = tmp_path / "f", Clock(), list[bytes]()

    def parse(contents: list[bytes]) -> bytes:
        reads.append(contents[0])
        if contents[0] == b"bad":
            raise ConfigError("cannot be used")
        return contents[0]

    path.write_bytes(b"1")
    watched = Watched([path], parse, clock)
    steps: list[tuple[bytes | None, float, bytes]] = [
        (b"22", 0.0, b"1"),
        (None, LOOK_INTERVAL_S, b"22"),
        (None, LOOK_INTERVAL_S, b"22"),
        (b"bad", LOOK_INTERVAL_S, b"22"),
        (b"4444", LOOK_INTERVAL_S, b"4444"),
    ]
    for content, passed_s, expected in steps:
        if content is not None:
            path.write_bytes(content)
        clock.now_s += passed_s
        assert watched.value == expected
    assert reads == [b"1", b"22", b"bad", b"4444"]
    path.unlink()
    clock.now_s += LOOK_INTERVAL_S
    assert watched.value == b"4444"


def test_a_link_that_is_moved_to_another_file_is_followed(tmp_path: Path) -> None:
    """So a mounted secret changes: no file is written, a link is renamed."""
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "secret").write_text(f"the-{name}-secret-0123456789")
        os.utime(tmp_path / name / "secret", ns=(1, 1))
    link, clock = tmp_path / "data", Clock()
    link.symlink_to(tmp_path / "old")
    watched = Watched([link / "secret"], lambda contents: contents[0], clock)
    assert b"old" in watched.value
    (tmp_path / "next").symlink_to(tmp_path / "new")
    (tmp_path / "next").rename(link)
    clock.now_s += LOOK_INTERVAL_S
    assert b"new" in watched.value


@pytest.mark.parametrize(
    "content",
    [b"", b"\n# only a remark\n", b"short", b"\xff" * 20, b"has a space in its middle", b"long-enough-0123456\nx"],
)
def test_a_secret_that_is_none_is_refused_and_not_repeated(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="file: a ") as raised:
        Secret(path)
    words = content.decode("ascii", "ignore").split()
    assert not any(word in str(raised.value) for word in words if len(word) > 6)


# Health


async def test_probes_without_tls_reach_health_and_nothing_else(authority: Authority, tmp_path: Path) -> None:
    files = authority.write(tmp_path, "server", "127.0.0.1")
    server = Server(files=TlsFiles(files.certificate, files.key, files.authority))
    service = "baton.v1.Inference"
    server.add(inference_pb2_grpc.add_InferenceServicer_to_server, inference_pb2_grpc.InferenceServicer(), service)
    (health_port,) = choose_ports(1)
    await server.start("127.0.0.1", 0, health_port)
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{health_port}") as channel:
            health: Any = health_pb2_grpc.HealthStub(channel)
            request = health_pb2.HealthCheckRequest(service=service)
            assert (await health.Check(request)).status == health_pb2.HealthCheckResponse.NOT_SERVING
            server.set_serving(service, True)
            assert (await health.Check(request)).status == health_pb2.HealthCheckResponse.SERVING
            stub: Any = inference_pb2_grpc.InferenceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await stub.GetModel(inference_pb2.GetModelRequest())
            assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED
    finally:
        await server.stop(0)
