"""The loop reads what the library has written to wake it, all but the byte that the library waits for."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from protos import inference_pb2, inference_pb2_grpc
from runtime import grpc_loop, rpc

NUM_CALLS = 64


class Models(inference_pb2_grpc.InferenceServicer):
    """Answers when all have asked, so that many answers end at once."""

    def __init__(self) -> None:
        self._num_asked = 0
        self._all_asked = asyncio.Event()

    async def GetModel(self, request: Any, context: Any) -> Any:
        self._num_asked += 1
        if self._num_asked == NUM_CALLS:
            self._all_asked.set()
        await self._all_asked.wait()
        return inference_pb2.GetModelResponse(model=request.model)


async def ask_all() -> list[str]:
    """Many calls at once, of a server in the same loop."""
    server = rpc.Server()
    server.add(inference_pb2_grpc.add_InferenceServicer_to_server, Models(), "baton.v1.Inference")
    port = await server.start("127.0.0.1", 0)
    try:
        async with asyncio.timeout(20), rpc.create_channel(f"127.0.0.1:{port}") as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            calls = [stub.GetModel(inference_pb2.GetModelRequest(model=str(number))) for number in range(NUM_CALLS)]
            return [response.model for response in await asyncio.gather(*calls)]
    finally:
        await server.stop(0)


def test_the_library_is_recognised_and_no_end_of_a_call_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    num_taken, take_all = 0, grpc_loop._take_all

    def taking(*args: Any) -> None:
        nonlocal num_taken
        num_taken += 1
        take_all(*args)

    monkeypatch.setattr(grpc_loop, "_take_all", taking)
    with asyncio.Runner(loop_factory=grpc_loop.GrpcLoop) as runner:
        assert runner.run(ask_all()) == list(map(str, range(NUM_CALLS)))
    assert num_taken > 0, "the library tells in another way what has ended: this loop does nothing any more"


@pytest.mark.parametrize("num_bytes", [1, 2, 300])
def test_one_byte_is_left_for_the_library(num_bytes: int) -> None:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    left: list[bytes] = []
    with ours, theirs:
        theirs.sendall(b"1" * num_bytes)
        grpc_loop._take_all(ours, lambda: left.append(ours.recv(num_bytes)))
    assert left == [b"1"]


def test_other_readers_are_left_alone() -> None:
    """Also one that is called in the same way."""

    async def read(wrap: Callable[[Any], Any]) -> bytes:
        loop, came = asyncio.get_running_loop(), asyncio.Event()
        ours, theirs = socket.socketpair()
        with ours, theirs:
            loop.add_reader(ours, wrap(came.set))
            theirs.sendall(b"12")
            await asyncio.wait_for(came.wait(), 5)
            loop.remove_reader(ours)
            return ours.recv(9)

    with asyncio.Runner(loop_factory=grpc_loop.GrpcLoop) as runner:
        assert runner.run(read(partial)) == runner.run(read(lambda callback: callback)) == b"12"
