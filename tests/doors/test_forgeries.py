"""Forged, replayed, stale, oversized and truncated: each is refused, costs nothing, and hurts no honest attempt."""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from cluster import LIMIT_S, PROMPT, cluster, collect, expected, held, request_of
from credentials import SECRET, bearing, write_secret
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.request import Request
from engine.wire import request_from_attempt
from kvstore.hashing import attempt_label
from protos import inference_pb2, worker_pb2, worker_pb2_grpc
from runtime.errors import BatonError, FailedPrecondition, InvalidArgument
from runtime.rpc import MAX_MESSAGE_BYTES, create_channel

Code = grpc.StatusCode


async def code_of(call: Any) -> grpc.StatusCode:
    """How a call ends."""
    try:
        async with asyncio.timeout(LIMIT_S):
            await (call.read() if isinstance(call, grpc.aio.UnaryStreamCall) else call)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return Code.OK


async def test_whoever_guesses_and_replays_gets_nothing_and_hurts_nobody(tmp_path: Path) -> None:
    """With the cluster's secret, everything but the id: beside an attempt that runs, and after it has ended."""
    path = write_secret(tmp_path)
    async with cluster(worker={"cluster_secret_file": path}, cluster_secret_file=path) as c:
        owner, seen = c.prefills[0], list[bytes]()
        leases, layout, epoch = owner.parts.leases, owner.parts.identity.layout.fingerprint, owner.parts.identity.epoch
        async with create_channel(owner.address, bearing(SECRET)) as channel:
            kv = worker_pb2_grpc.KVTransferStub(channel)

            def fetch(attempt_id: bytes, at: int = epoch) -> Any:
                fields = {"attempt_id": attempt_id, "epoch": at, "transport": "grpc", "layout": layout}
                return kv.Fetch(worker_pb2.FetchRequest(**fields))

            def release(attempt_id: bytes, at: int = epoch) -> Any:
                return kv.Release(worker_pb2.ReleaseRequest(attempt_id=attempt_id, epoch=at, num_tokens=len(PROMPT)))

            with held(owner):
                honest = asyncio.ensure_future(c.generate())
                async with asyncio.timeout(LIMIT_S):
                    while not [lease for lease in leases if lease.claimed]:
                        await c.router.fleet.change.wait()
                (lease,) = leases
                seen.append(lease.attempt_id)
                near = bytes([seen[0][0] ^ 1]) + seen[0][1:]
                for guess in (near, bytes(16), secrets.token_bytes(16)):
                    assert await code_of(fetch(guess)) is await code_of(release(guess)) is Code.NOT_FOUND
                for wrong in (b"", seen[0][:15], seen[0] + b"x", b"x" * 10_000):
                    assert await code_of(fetch(wrong)) is await code_of(release(wrong)) is Code.INVALID_ARGUMENT
                for stale in (0, epoch - 1, epoch + 1, 2**64 - 1):
                    call = fetch(seen[0], at=stale)
                    assert await code_of(call) is await code_of(release(seen[0], at=stale)) is Code.FAILED_PRECONDITION
                assert await code_of(fetch(seen[0])) is Code.ALREADY_EXISTS
                assert len(leases) == 1
            assert (await honest).tokens == expected(PROMPT, 8)
            assert await code_of(fetch(seen[0])) is await code_of(release(seen[0])) is Code.NOT_FOUND
        await c.balanced()


async def test_a_message_of_any_size_or_cut_anywhere_leaves_a_worker_as_it_was(tmp_path: Path) -> None:
    path = write_secret(tmp_path)
    limit = ("grpc.max_send_message_length", -1)
    async with cluster(worker={"cluster_secret_file": path}, cluster_secret_file=path) as c:
        whole = worker_pb2.DecodeRunRequest(
            attempt=worker_pb2.Attempt(attempt_id=bytes(16), prompt_token_ids=PROMPT, fingerprint="tracer"),
            router_id="nobody",
        ).SerializeToString()
        for worker, method in ((c.prefills[0], "Prefill/Run"), (c.decodes[0], "Decode/Run")):
            async with create_channel(worker.address, bearing(SECRET), options=[limit]) as channel:
                run = channel.unary_unary(f"/baton.v1.{method}")
                cut = {await code_of(run(whole[:end])) for end in range(len(whole))}
                assert cut <= {Code.INVALID_ARGUMENT, Code.FAILED_PRECONDITION}
                assert await code_of(run(bytes(MAX_MESSAGE_BYTES + 1))) is Code.RESOURCE_EXHAUSTED
                assert await code_of(run(whole + b"\x0a\xff\xff\xff\xff\x0f")) is Code.INVALID_ARGUMENT
            async with create_channel(worker.address, options=[limit]) as channel:
                stranger = channel.unary_unary(f"/baton.v1.{method}")
                assert await code_of(stranger(whole)) is Code.UNAUTHENTICATED
                assert await code_of(stranger(bytes(MAX_MESSAGE_BYTES))) is Code.UNAUTHENTICATED
        assert (await c.generate()).tokens == expected(PROMPT, 8)
        await c.balanced()


async def test_tokens_go_to_the_router_that_asked_although_another_takes_its_name(tmp_path: Path) -> None:
    """A router's stream has a name that nobody can guess; its public name is not it."""
    async with cluster() as c:
        worker = c.decodes[0]
        async with create_channel(worker.address) as channel:
            attach = worker_pb2_grpc.DecodeStub(channel).Attach(worker_pb2.AttachRequest(router_id="router-0"))
            await attach.read()
            assert (await collect(c.stub.Generate(request_of(20)))).tokens == expected(PROMPT, 20)
            call = asyncio.ensure_future(attach.read())
            await asyncio.wait([call], timeout=0.05)
            assert not call.done(), "another's token came"
            attach.cancel()
            await asyncio.wait([call])


def test_attempts_have_labels_that_do_not_tell_their_ids() -> None:
    ids = [secrets.token_bytes(16) for _ in range(100)]
    labels = [attempt_label(each) for each in ids]
    assert len(set(labels)) == 100
    assert not any(label in each.hex() for label, each in zip(labels, ids, strict=True))


VALID = worker_pb2.Attempt(
    attempt_id=bytes(16),
    prompt_token_ids=[1, 2, 3],
    fingerprint="fp",
    sampling=inference_pb2.SamplingParams(top_p=1, repetition_penalty=1, max_tokens=4),
)


@settings(deadline=None)
@given(data=st.binary(max_size=80), keeps=st.booleans())
def test_any_bytes_are_an_attempt_that_can_be_served_or_refused(data: bytes, keeps: bool) -> None:
    """Alone, and merged into one that is right, so that each field gets its turn."""
    attempt = worker_pb2.Attempt()
    if keeps:
        attempt.CopyFrom(VALID)
    try:
        attempt.MergeFromString(data)
    except Exception as error:
        assert type(error).__name__ == "DecodeError"
        return
    try:
        request = request_from_attempt(attempt, "fp", 100, 20)
    except (InvalidArgument, FailedPrecondition):
        return
    assert isinstance(request, Request) and len(request.attempt_id) == 16
    assert 1 <= request.num_input_tokens <= 20
    assert all(0 <= each < 100 for each in (*request.prompt_token_ids, *request.output_token_ids))


@settings(deadline=None)
@given(
    attempt=st.builds(
        worker_pb2.Attempt,
        attempt_id=st.sampled_from([bytes(16), b"", bytes(17)]),
        prompt_token_ids=st.lists(st.integers(0, 2**32 - 1), max_size=25),
        output_token_ids=st.lists(st.integers(0, 99), max_size=25),
        priority=st.integers(-(2**31), 2**31 - 1),
        waited_ms=st.integers(0, 2**32 - 1),
        num_evictions=st.integers(0, 2**32 - 1),
        fingerprint=st.sampled_from(["fp", ""]),
        tenant=st.text(max_size=5),
        sampling=st.builds(
            inference_pb2.SamplingParams,
            temperature=st.floats(width=32),
            top_p=st.floats(width=32),
            top_k=st.integers(-(2**31), 2**31 - 1),
            min_p=st.floats(width=32),
            presence_penalty=st.floats(width=32),
            repetition_penalty=st.floats(width=32),
            max_tokens=st.integers(0, 2**32 - 1),
            min_tokens=st.integers(0, 2**32 - 1),
            seed=st.integers(0, 2**64 - 1),
            logit_bias=st.dictionaries(st.integers(0, 2**32 - 1), st.floats(width=32), max_size=2),
        ),
    )
)
def test_any_values_are_an_attempt_that_can_be_served_or_refused(attempt: worker_pb2.Attempt) -> None:
    try:
        request_from_attempt(attempt, "fp", 100, 20)
    except BatonError as error:
        assert isinstance(error, (InvalidArgument, FailedPrecondition)), error
