"""Asks workers for profiles. Owns the calls, and where a profile lies on this process's clock.

Where a device counts, a profile is three: of times alone, since counting makes steps longer, then of the same load with
its units counted, then with its memory counted.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import grpc.aio

from protos import worker_pb2, worker_pb2_grpc
from runtime import rpc
from runtime.devices import device_kind
from runtime.doors import Pass
from runtime.errors import ConfigError

COUNTING_DEVICES = ("npu",)
MAX_COUNTED_STEPS = 8
"""Counting leaves much to be analysed."""
ANSWER_MARGIN_S = 330.0
"""Beyond the time for steps: for measuring peaks, and for the analysis of counts."""


@dataclass(frozen=True, slots=True)
class Profile:
    """What a worker answered about a load."""

    load: str
    """What it was: "prefill 512", "decode 32"; empty: whatever there was."""
    response: worker_pb2.ProfileResponse
    """The answer."""
    began_s: float
    """When its steps began to be recorded, by this process's clock."""
    units: worker_pb2.ProfileResponse | None = None
    """A further one with the device's units counted; None: it does not count."""
    memory: worker_pb2.ProfileResponse | None = None
    """A further one with the device's memory counted."""


class WorkerCalls:
    """One worker, as it is profiled. Use it in an `async with` block."""

    def __init__(self, address: str, shown: Pass) -> None:
        self._address = address
        self._channel = rpc.create_channel(address, shown)
        self._stub = worker_pb2_grpc.WorkerStub(self._channel)

    async def __aenter__(self) -> WorkerCalls:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    async def measure(self) -> worker_pb2.ProfileResponse:
        """Who it is and what its device can do; no step runs there meanwhile."""
        return await self._ask(worker_pb2.ProfileRequest(measure_peaks=True))

    async def profile(self, load: str, num_steps: int, max_wait_s: float) -> Profile:
        """Of steps that run from now on."""
        request = worker_pb2.ProfileRequest(num_steps=num_steps, max_wait_ms=max(1, round(1000 * max_wait_s)))
        response = await self._ask(request)
        began_s = time.monotonic() - response.age_ms / 1000
        if device_kind(response.device) not in COUNTING_DEVICES or not response.steps:
            return Profile(load, response, began_s)
        request.num_steps = min(num_steps, MAX_COUNTED_STEPS)
        request.device_counted = worker_pb2.DEVICE_COUNTED_UNITS
        units = await self._ask(request)
        request.device_counted = worker_pb2.DEVICE_COUNTED_MEMORY
        return Profile(load, response, began_s, units, await self._ask(request))

    async def _ask(self, request: worker_pb2.ProfileRequest) -> worker_pb2.ProfileResponse:
        timeout_s = request.max_wait_ms / 1000 + ANSWER_MARGIN_S
        try:
            answer: worker_pb2.ProfileResponse = await self._stub.Profile(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                text = f"--address: {self._address} is no worker; `baton workers` shows their addresses"
                raise ConfigError(text) from None
            raise rpc.error_from_call(error) from None
        return answer
