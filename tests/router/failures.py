"""What a client learns from a call that failed."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest
from cluster import LIMIT_S
from google.rpc import status_pb2


def details_of(error: grpc.aio.AioRpcError, *wanted: Any) -> list[Any]:
    """The google.rpc details of a status, by type; None for those that are missing."""
    trailer = dict(error.trailing_metadata() or ())
    status = status_pb2.Status.FromString(trailer["grpc-status-details-bin"])
    assert (status.code, status.message) == (error.code().value[0], error.details())
    found = []
    for cls in wanted:
        message = cls()
        found.append(message if any(detail.Unpack(message) for detail in status.details) else None)
    return found


async def failure(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async with asyncio.timeout(LIMIT_S):
            if isinstance(call, grpc.aio.UnaryStreamCall):
                async for _ in call:
                    pass
            else:
                await call
    return caught.value
