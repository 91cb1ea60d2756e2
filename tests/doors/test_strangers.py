"""A whole `baton serve`, as it comes plus tenants: no port answers a stranger, and no secret is to be seen anywhere."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from cluster import PROMPT, expected
from credentials import SECRET, TOKENS, methods, write_tenants
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from served import Served, descendants

from baton import Client, cli
from protos import inference_pb2, worker_pb2
from runtime.doors import bearer_metadata
from runtime.errors import Unauthenticated

LIMIT_S = 5.0


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Everything that can be logged is logged, traces included."""
    folder = tmp_path_factory.mktemp("served")
    flags = ("--log-level=debug", "--trace-exporter=console", "--num-kv-blocks=256", "--drain-timeout-s=1")
    served = Served(folder, f"--tenants-file={write_tenants(folder)}", *flags, model="tracer")
    yield served
    served.close()


def secret_of(serving: Served) -> str:
    return Path(serving.flag("decode-0", "cluster-secret-file")).read_text().strip()


@pytest.fixture(scope="module")
def ports(serving: Served) -> dict[str, tuple[Any, ...]]:
    """Every gRPC port, with the generated modules of its services."""
    with Client(serving.address, token=TOKENS["boss"]) as client:
        workers = [worker.address for worker in client.workers()]
    assert len(workers) == 2
    return {serving.address: (inference_pb2,), **dict.fromkeys(workers, (worker_pb2,))}


@pytest.mark.parametrize("shown", ["nothing", "nonsense", "a prefix", "a tenant's", "no scheme"])
def test_no_method_of_any_port_answers_without_its_credential(
    shown: str, serving: Served, ports: dict[str, tuple[Any, ...]]
) -> None:
    right = secret_of(serving)
    for address, files in ports.items():
        is_router = address == serving.address
        metadata = {
            "nothing": (),
            "nonsense": bearer_metadata("nonsense"),
            "a prefix": bearer_metadata((TOKENS["acme"] if is_router else right)[:-1]),
            "a tenant's": bearer_metadata(right if is_router else TOKENS["boss"]),
            "no scheme": (("authorization", TOKENS["acme"] if is_router else right),),
        }[shown]
        with grpc.insecure_channel(address) as channel:
            for path, cls in methods(*files).items():
                with pytest.raises(grpc.RpcError) as raised:
                    list(channel.unary_stream(path)(cls().SerializeToString(), metadata=metadata, timeout=LIMIT_S))
                error: Any = raised.value
                assert error.code() is grpc.StatusCode.UNAUTHENTICATED, (address, path)
                assert right not in str(error) and not any(token in str(error) for token in TOKENS.values())
            reflecting = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
                iter([reflection_pb2.ServerReflectionRequest(list_services="")]), metadata=metadata, timeout=LIMIT_S
            )
            with pytest.raises(grpc.RpcError) as raised:
                next(reflecting)
            assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED
            health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=LIMIT_S)
            assert health.status == health_pb2.HealthCheckResponse.SERVING


def test_redis_answers_nobody_either(serving: Served) -> None:
    url = serving.flag("router-0", "redis-url")
    host, _, port = re.fullmatch(r"redis://(.*)/0", url)[1].rpartition(":")
    for command in (
        b"PING",
        b"KEYS *",
        b"HGETALL baton:{workers}:records",
        b"CONFIG GET requirepass",
        b"AUTH nonsense",
    ):
        with socket.create_connection((host, int(port)), timeout=LIMIT_S) as connection:
            connection.sendall(command + b"\r\n")
            assert connection.recv(1000).startswith((b"-NOAUTH", b"-WRONGPASS"))


def test_no_secret_is_in_any_process_list_log_or_trace(serving: Served, capsys: pytest.CaptureFixture[str]) -> None:
    """After requests that are served, refused and traced; the files with secrets are their owner's alone."""
    with Client(serving.address, token=TOKENS["acme"]) as client:
        answer = client.complete(
            prompt_token_ids=PROMPT, session_id="s", max_tokens=8, temperature=0.0, ignore_eos=True
        )
        assert [token.token_id for token in answer.tokens] == expected(PROMPT, 8)
    with Client(serving.address, token="a-wrong-token") as client, pytest.raises(Unauthenticated):
        client.get_model()
    serving.wait_for_output('"baton.v1.Inference/Generate"', 3 * LIMIT_S)
    path = Path(serving.flag("decode-0", "cluster-secret-file"))
    assert path.stat().st_mode & 0o077 == 0 and path.parent.stat().st_mode & 0o077 == 0
    hidden = [secret_of(serving), *TOKENS.values(), "a-wrong-token"]
    pids = [serving.process.pid, *descendants(serving.process.pid)]
    assert len(pids) >= 6
    lists = [Path(f"/proc/{pid}/{name}").read_bytes() for pid in pids for name in ("cmdline", "environ")]
    written = serving.errors() + serving.output()
    for secret in hidden:
        assert not any(secret.encode() in each for each in lists)
        assert secret not in written


def test_the_command_calls_with_a_token_from_a_file(
    serving: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "token"
    path.write_text(TOKENS["boss"] + "\n")
    assert cli.run(["workers", f"--address={serving.address}"]) == 1
    assert "credential is needed" in capsys.readouterr().err
    assert cli.run(["workers", f"--address={serving.address}", f"--token-file={path}"]) == 0
    assert "decode-0" in capsys.readouterr().out
    path.write_text(TOKENS["acme"] + "\n")
    assert cli.run(["workers", f"--address={serving.address}", f"--token-file={path}"]) == 1
    assert "acme is no operator" in capsys.readouterr().err
    arguments = ["generate", "hello", f"--address={serving.address}", f"--token-file={path}", "--max-tokens=2"]
    assert cli.run(arguments) == 0


def test_a_drawn_token_is_shown_once_and_its_line_opens_the_door(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["token", "acme"]) == 0
    drawn = capsys.readouterr()
    token = drawn.out.strip()
    assert len(token) > 40 and token not in drawn.err
    path = tmp_path / "tenants.toml"
    path.write_text(drawn.err)
    from router.tenants import Tenants

    assert Tenants(path, takes_certificates=False).admits(bearer_metadata(token))
    assert cli.run(["token", "baton.probe"]) == 2
    assert SECRET not in capsys.readouterr().err
