"""Tokens, secrets and files of tenants, for tests."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from cluster import Cluster
from google.protobuf.message import Message

from protos import inference_pb2_grpc
from router.tenants import hash_token
from runtime.doors import Pass
from runtime.rpc import create_channel
from runtime.tls import ClientTls, TlsFiles

SECRET = "the-secret-of-this-cluster-0123456789"
TOKENS = {name: f"token-of-{name}-0123456789" for name in ("acme", "bolt", "boss")}


def write_secret(folder: Path, *lines: str) -> Path:
    """A file with the cluster's secret."""
    path = folder / "secret"
    path.write_text("\n".join(lines or (SECRET,)) + "\n")
    return path


def write_tenants(folder: Path, **tables: str) -> Path:
    """A file in which acme, bolt and the operator boss have their tokens; `tables` adds lines to theirs."""
    path = folder / "tenants.toml"
    lines = {"boss": "operator = true", **tables}
    path.write_text(
        "".join(
            f'[{name}]\ntoken_sha256 = ["{hash_token(token)}"]\n{lines.get(name, "")}\n'
            for name, token in TOKENS.items()
        )
    )
    return path


def bearing(token: str) -> Pass:
    """Shows a token and nothing else."""
    return Pass(bearer=lambda: token)


def over_tls(files: TlsFiles, token: str | None = None) -> Pass:
    """Connects by TLS, with a token or without."""
    return Pass(ClientTls(files), None if token is None else lambda: token)


@contextlib.asynccontextmanager
async def client_of(c: Cluster, name: str) -> AsyncIterator[Any]:
    """A tenant's stub."""
    async with create_channel(c.router.address, bearing(TOKENS[name])) as channel:
        yield inference_pb2_grpc.InferenceStub(channel)


def methods(*files: Any) -> dict[str, type[Message]]:
    """Every method of the services in these generated modules, by its path, with the class of its request."""
    from google.protobuf import message_factory

    found = {}
    for each in files:
        for service in each.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                found[f"/{service.full_name}/{method.name}"] = message_factory.GetMessageClass(method.input_type)
    return found
