"""Tenants: told apart by token or certificate, never seeing each other's KV, sessions, names or load."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from authority import Authority, Files
from cluster import PROMPT, Cluster, cluster, collect, expected, held, request_of
from credentials import TOKENS, client_of, over_tls, write_tenants
from failures import details_of, failure
from google.rpc import error_details_pb2
from hypothesis import given, settings
from hypothesis import strategies as st

import runtime.watched
from kvstore.hashing import PrefixHasher, session_key
from protos import inference_pb2, inference_pb2_grpc
from router.tenants import ANYONE, Tenants, hash_token
from runtime.doors import NO_PASS, Pass
from runtime.errors import ConfigError
from runtime.rpc import create_channel
from runtime.tls import TlsFiles

LONG = PROMPT * 3
BLOCK = 16
CACHED = (len(LONG) - 1) // BLOCK * BLOCK
"""The longest prefix of LONG that can be reused: at least one token is computed."""


def refusal(error: grpc.aio.AioRpcError) -> tuple[str, dict[str, str]]:
    """Reason and metadata of an error that was raised on purpose."""
    (info,) = details_of(error, error_details_pb2.ErrorInfo)
    return info.reason, dict(info.metadata)


async def test_the_same_prompt_of_another_tenant_is_computed_again_and_ones_own_is_not(tmp_path: Path) -> None:
    async with (
        cluster(tenants_file=write_tenants(tmp_path)) as c,
        client_of(c, "acme") as acme,
        client_of(c, "bolt") as bolt,
    ):
        cached = []
        for stub in (acme, bolt, acme, bolt):
            reply = await collect(stub.Generate(request_of(prompt=LONG)))
            assert reply.tokens == expected(LONG, 8)
            cached.append(reply.finish.usage.cached_tokens)
        assert cached == [0, 0, CACHED, CACHED]
        await c.balanced()


async def test_a_client_cannot_choose_its_tenant(tmp_path: Path) -> None:
    """Neither by metadata of any name, nor by two tokens, nor by a word in its session."""
    async with cluster(tenants_file=write_tenants(tmp_path)) as c, client_of(c, "acme") as acme:
        await collect(acme.Generate(request_of(prompt=LONG)))
        async with create_channel(c.router.address) as channel:
            stub: Any = inference_pb2_grpc.InferenceStub(channel)
            token = ("authorization", f"Bearer {TOKENS['bolt']}")
            forged = [("tenant", "acme"), ("baton-tenant", "acme"), ("x-tenant", "acme")]
            reply = await collect(stub.Generate(request_of(prompt=LONG, session_id="acme"), metadata=[token, *forged]))
            assert reply.finish.usage.cached_tokens == 0
            other = ("authorization", f"Bearer {TOKENS['acme']}")
            for metadata in (
                [token, other],
                [("authorization", TOKENS["acme"])],
                [("authorization", f"bearer {TOKENS['acme']}")],
                [("authorization", f"Bearer {hash_token(TOKENS['acme'])}")],
                [("authorization", f"Bearer {TOKENS['acme'][:-1]}")],
                [("authorization", "Bearer ")],
                [("authorization-bin", TOKENS["acme"].encode())],
                [],
            ):
                error = await failure(stub.Generate(request_of(), metadata=metadata))
                assert error.code() is grpc.StatusCode.UNAUTHENTICATED
                assert refusal(error) == ("UNAUTHENTICATED", {})
                assert not any(token in str(error) for token in TOKENS.values())
        await c.balanced()


async def test_sessions_names_and_workers_are_a_tenants_own(tmp_path: Path) -> None:
    async with (
        cluster(tenants_file=write_tenants(tmp_path), redis_url="memory://") as c,
        client_of(c, "acme") as acme,
        client_of(c, "bolt") as bolt,
        client_of(c, "boss") as boss,
    ):
        turn = request_of(prompt=LONG, session_id="one", request_id="same")
        with held(c.decodes[0]):
            calls = [asyncio.ensure_future(collect(stub.Generate(turn))) for stub in (acme, bolt)]
            await c.until_running()
            error = await failure(acme.Generate(request_of(prompt=LONG, session_id="two", request_id="same")))
            assert error.code() is grpc.StatusCode.ALREADY_EXISTS
        assert all(reply.tokens == expected(LONG, 8) for reply in await asyncio.gather(*calls))
        ending = inference_pb2.EndSessionRequest(session_id="one")
        assert [(await stub.EndSession(ending)).existed for stub in (boss, bolt, bolt, acme)] == [
            False,
            True,
            False,
            True,
        ]
        assert (await acme.GetModel(inference_pb2.GetModelRequest())).model == "tracer"
        error = await failure(acme.ListWorkers(inference_pb2.ListWorkersRequest()))
        assert (error.code(), refusal(error)[0]) == (grpc.StatusCode.PERMISSION_DENIED, "PERMISSION_DENIED")
        assert len((await boss.ListWorkers(inference_pb2.ListWorkersRequest())).workers) == 2
        error = await failure(acme.ListTraces(inference_pb2.ListTracesRequest()))
        assert error.code() is grpc.StatusCode.PERMISSION_DENIED
        assert not (await boss.ListTraces(inference_pb2.ListTracesRequest())).traces
        await c.balanced()


@settings(deadline=None)
@given(st.lists(st.tuples(st.text(max_size=4), st.text(max_size=4)), min_size=2, max_size=2, unique=True))
def test_no_two_tenants_collide(pairs: list[tuple[str, str]]) -> None:
    """Also where one's name is the beginning of another's and the session has the rest."""
    (tenant, session), (other, other_session) = pairs
    assert session_key(tenant, session) != session_key(other, other_session)
    hasher = PrefixHasher("m", "l", 1)
    assert (hasher.root(tenant) == hasher.root(other)) == (tenant == other)
    assert (hasher.chain(tenant, [1]) == hasher.chain(other, [1])) == (tenant == other)


# Limits


async def test_a_tenant_at_its_limits_waits_or_is_refused_and_is_in_nobodys_way(tmp_path: Path) -> None:
    """One running, one waiting, the third refused by name of the limit; another tenant's goes past them."""
    path = write_tenants(tmp_path, acme="max_num_running = 1\nmax_num_queued = 1")
    async with cluster(tenants_file=path) as c, client_of(c, "acme") as acme, client_of(c, "bolt") as bolt:
        with held(c.decodes[0]):
            running = asyncio.ensure_future(collect(acme.Generate(request_of())))
            await c.until_running()
            two = [asyncio.ensure_future(collect(acme.Generate(request_of(prompt=LONG)))) for _ in range(2)]
            refused, (waiting,) = await asyncio.wait(two, return_when=asyncio.FIRST_COMPLETED, timeout=5)
            error = refused.pop().exception()
            assert isinstance(error, grpc.aio.AioRpcError) and error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            reason, metadata = refusal(error)
            assert (reason, metadata["tenant"], metadata["max_num_queued"]) == ("OVERLOADED", "acme", "1")
            assert "tenant acme: 1 requests wait, its max_num_queued and max_num_running is 1" in error.details()
            passing = asyncio.ensure_future(collect(bolt.Generate(request_of(prompt=LONG))))
            async with asyncio.timeout(5):
                while sum(worker.num_assigned for worker in c.router.fleet.incarnations()) < 2:
                    await c.router.fleet.change.wait()
            assert not waiting.done()
        for call, prompt in ((running, PROMPT), (waiting, LONG), (passing, LONG)):
            assert (await call).tokens == expected(prompt, 8)
        await c.balanced()


# Certificates


async def test_a_certificate_stands_for_its_tenant_and_a_token_beside_it_for_another(
    authority: Authority, tmp_path: Path
) -> None:
    path = write_tenants(
        tmp_path,
        acme='certificate_names = ["acme.example", "shared.example"]',
        bolt='certificate_names = ["bolt.example"]',
    )
    public = authority.write(tmp_path, "public", "127.0.0.1")
    files = {
        "acme": authority.write(tmp_path, "acme.example"),
        "bolt": authority.write(tmp_path, "any", "bolt.example"),
        "nobody": authority.write(tmp_path, "nobody.example"),
        "both": authority.write(tmp_path, "both", "acme.example", "bolt.example"),
    }

    def shown(name: str, token: str | None = None) -> Pass:
        each: Files = files[name]
        return over_tls(TlsFiles(each.certificate, each.key, each.authority), token)

    async with cluster(
        tenants_file=path,
        tls_cert_file=public.certificate,
        tls_key_file=public.key,
        tls_client_ca_file=public.authority,
    ) as c:
        assert await _cached(c, shown("acme")) == 0
        assert await _cached(c, shown("bolt")) == 0
        assert await _cached(c, shown("acme")) == CACHED
        assert await _cached(c, shown("nobody", TOKENS["acme"])) == CACHED
        assert await _cached(c, shown("acme", TOKENS["boss"])) == 0
        for name, token in (("nobody", None), ("both", None), ("acme", "a-wrong-token")):
            assert await _cached(c, shown(name, token)) is grpc.StatusCode.UNAUTHENTICATED
        assert await _cached(c, NO_PASS) is grpc.StatusCode.UNAVAILABLE
        await c.balanced()


async def _cached(c: Cluster, shown: Pass) -> int | grpc.StatusCode:
    """Tokens of LONG that were reused for whoever shows this, or how the call ended."""
    async with create_channel(c.router.address, shown) as channel:
        try:
            reply = await collect(inference_pb2_grpc.InferenceStub(channel).Generate(request_of(prompt=LONG)))
        except grpc.aio.AioRpcError as error:
            return error.code()
    return reply.finish.usage.cached_tokens


# The file


BAD = {
    "not toml": "acme = [",
    "tokens to names": '"token-of-acme-0123456789" = "acme"',
    "a token for a hash": '[acme]\ntoken_sha256 = ["token-of-acme-0123456789"]',
    "a token for a list": '[acme]\ntoken_sha256 = "token-of-acme-0123456789"',
    "a token for a key": '[acme]\ntoken = "token-of-acme-0123456789"',
    "nobody": "[acme]",
    "empty": "",
    "reserved": '["baton.probe"]\ncertificate_names = ["a"]',
    "no name": '[""]\ncertificate_names = ["a"]',
    "long name": f'[{"a" * 65}]\ncertificate_names = ["a"]',
    "two of one certificate": '[a]\ncertificate_names = ["n"]\n[b]\ncertificate_names = ["n"]',
    "no runners": '[a]\ncertificate_names = ["n"]\nmax_num_running = 0',
    "negative": '[a]\ncertificate_names = ["n"]\nmax_num_queued = -1',
    "a number of words": '[a]\ncertificate_names = ["n"]\nmax_num_queued = true',
    "an operator in words": '[a]\ncertificate_names = ["n"]\noperator = "yes"',
}


@pytest.mark.parametrize("name", BAD)
def test_a_file_that_cannot_be_used_is_refused_and_not_quoted(name: str, tmp_path: Path) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text(BAD[name])
    with pytest.raises(ConfigError, match=r"tenants\.toml") as raised:
        Tenants(path, takes_certificates=False)
    assert "token-of-acme" not in str(raised.value)


def test_a_token_is_taken_back_while_all_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime.watched, "LOOK_INTERVAL_S", 0.0)
    path = write_tenants(tmp_path)
    tenants = Tenants(path, takes_certificates=False)

    def known() -> list[bool]:
        return [tenants.admits([("authorization", f"Bearer {token}")]) for token in TOKENS.values()]

    assert known() == [True, True, True]
    path.write_text(f'[bolt]\ntoken_sha256 = ["{hash_token(TOKENS["bolt"])}"]\n')
    assert known() == [False, True, False]
    path.write_text("broken = ")
    assert known() == [False, True, False]


def test_without_a_file_everybody_is_one_tenant() -> None:
    tenants = Tenants(None, takes_certificates=False)
    context: Any = None
    assert tenants.admits([]) and tenants.of(context) is tenants.operator(context) is ANYONE
