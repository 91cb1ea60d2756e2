"""Blocks by the transfer engine of Mooncake: the reader reads the owner's memory, over TCP or from NPU to NPU.

The engine asks nobody who they are: whoever reaches its ports may read and write what is registered with it, so nothing
starts unless the worker was told that its network is trusted. A reader first reads the pool's secret from where the
offer says it lies: it then reads the memory of the worker that made the offer, whoever had its port before.
Invariant: each block run is a transfer of its own, and `receive` ends when the last of them has, well or badly. The
engine's own wait for several ends with the first that fails, while others still write; and it spins.
Offer: `session` (host:port of the engine), `layout`, `planes` and `secret` (addresses), `num_blocks`, `proof` in hex.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hmac import compare_digest
from typing import Any

from kvstore.layout import KVLayout
from kvstore.memory import SECRET_BYTES, BlockMemory
from kvstore.planes import neighbours
from kvstore.transport import base
from kvstore.transport.base import (
    Frame,
    Network,
    OwnerUnreachable,
    TransportError,
    check_block_ids,
    check_offer,
    proof_of,
)
from runtime.errors import ConfigError

PROTOCOLS = {"cpu": "tcp", "npu": "ascend"}
"""How the engine reads a device's memory, by the device."""
PORTS = range(15_000, 16_000)
"""Where engines listen, on every address of their host: two ports each."""
FRAME_BYTES = 64 * 2**20
"""Data a frame stands for at most, unless one block is more: a reader that was cancelled ends with its frame."""
NUM_AT_ONCE = 16
"""Connections to an owner, and transfers that are under way. None waits for a connection: the engine would let it wait
a second for a new one when an owner dies, and for each connection to be given up when one stands still."""
NO_PROGRESS_S = 2
"""A connection on which nothing moves for so long is given up."""
_SETTINGS = {
    "MC_MIN_RPC_PORT": str(PORTS.start),
    "MC_MAX_RPC_PORT": str(PORTS.stop - 1),
    "MC_TCP_ENABLE_CONNECTION_POOL": "1",
    "MC_TCP_LANES_PER_PEER": str(NUM_AT_ONCE),
    "MC_TCP_SLICE_SIZE": str(2**20),
    "MC_TCP_PROGRESS_TIMEOUT_SEC": str(NO_PROGRESS_S),
    "MC_TCP_STATUS_TIMEOUT_SEC": str(NO_PROGRESS_S),
    "MC_HANDSHAKE_CONNECT_TIMEOUT": "1",
    "MC_LOG_LEVEL": "ERROR",
}
"""The engine takes settings from nowhere else than the environment of its process, most of them when it is imported."""
_POLL_S = 100e-6
_NOT_STARTED = (0, -1, 2**64 - 1)
_ENDED_WELL, _FAILED = 1, -1

Part = tuple[int, int, int]
"""Address here, address at the owner, bytes."""


class Reader(base.Reader):
    """Reads one owner's memory."""

    passes_through_host = False

    def __init__(self, layout: KVLayout, engine: _Engine, session: str, planes: Sequence[int], num_blocks: int) -> None:
        super().__init__(layout)
        self._engine: _Engine | None = engine
        self._session = session
        self._planes = planes
        self._num_blocks = num_blocks
        self._receiving = threading.Lock()

    def receive(self, frame: Frame, memory: BlockMemory, dest_block_ids: Sequence[int]) -> int:
        """As the base says; `memory` is the pool that the transport was opened for."""
        engine = self._engine
        if engine is None:
            raise TransportError("this reader is closed")
        self.check(frame, memory, dest_block_ids, num_data_bytes=0)
        check_block_ids(frame.block_ids, self._num_blocks, "source")
        size, planes = self.layout.plane_block_bytes, list(zip(memory.plane_addresses(), self._planes, strict=True))
        parts = (
            (here + to * size, there + first * size, length * size)
            for first, to, length in neighbours(frame.block_ids, dest_block_ids)
            for here, there in planes
        )
        with self._receiving:
            engine.read(self._session, parts)
        return len(dest_block_ids) * self.layout.block_bytes

    def close(self) -> None:
        """As the base says; the connection stays for other readers of the same process."""
        self._engine = None


class Transport(base.Transport):
    """Any host of a network that keeps all others out."""

    name = "mooncake"
    rank = 50
    asks_owner = True

    def __init__(self) -> None:
        self._serving: _Engine | None = None
        self._reading: _Engine | None = None  # the same, until it is found to remember an owner that is gone
        self._met: set[str] = set()  # sessions that `_reading` remembers
        self._secret = (ctypes.c_char * SECRET_BYTES)()
        self._landing = (ctypes.c_char * SECRET_BYTES)()
        self._connecting = threading.Lock()
        self._start_engine: Callable[[], _Engine] | None = None

    def open(self, memory: BlockMemory, network: Network) -> None:
        """As the base says: starts an engine and registers the pool. Raises ConfigError without the package, or where
        nobody said that the network is trusted."""
        if not network.is_trusted:
            raise ConfigError(
                f"--kv-transports: mooncake asks nobody who they are, so whoever reaches ports {PORTS.start} to "
                f"{PORTS.stop - 1} of this host can read and write KV; where the network lets only workers, say "
                "--trusted-transfer-network"
            )
        if ":" in network.host:
            raise ConfigError(f"--kv-transports: mooncake needs an IPv4 address or a name, got {network.host}")
        protocol = PROTOCOLS.get(memory.device_kind)
        if protocol is None:
            kinds = " and ".join(PROTOCOLS)
            raise ConfigError(f"--kv-transports: mooncake reads memory of {kinds} devices, got {memory.device_kind}")
        self._secret.raw = memory.secret
        plane_bytes = memory.ceiling * memory.layout.plane_block_bytes
        regions = [(address, plane_bytes) for address in memory.plane_addresses()]
        regions += [(ctypes.addressof(each), SECRET_BYTES) for each in (self._secret, self._landing)]
        self._start_engine = functools.partial(_Engine, network.host, protocol, regions)
        try:
            self._serving = self._reading = self._start_engine()
        except TransportError as error:
            raise ConfigError(f"--kv-transports: {error.message}") from error

    def close(self) -> None:
        """As the base says."""
        self._serving = self._reading = self._start_engine = None

    def offer(self, memory: BlockMemory, nonce: str = "") -> dict[str, str] | None:
        """As the base says; None before `open`."""
        if self._serving is None:
            return None
        return {
            "session": self._serving.session,
            "layout": memory.layout.fingerprint,
            "planes": ",".join(map(str, memory.plane_addresses())),
            "num_blocks": str(memory.ceiling),
            "secret": str(ctypes.addressof(self._secret)),
            "proof": proof_of(memory.secret, nonce),
        }

    def serve(self, memory: BlockMemory, block_ids: Sequence[int]) -> Iterator[Frame]:
        """Frames that name the blocks."""
        check_block_ids(block_ids, memory.num_blocks, "source")
        num_each = max(1, FRAME_BYTES // memory.layout.block_bytes)
        for start in range(0, len(block_ids), num_each):
            yield Frame(tuple(block_ids[start : start + num_each]))

    def connect(self, offer_parameters: Mapping[str, str], layout: KVLayout, nonce: str = "") -> Reader:
        """Reads the owner's secret. Raises TransportError if it cannot be reached, or if that is not the secret."""
        check_offer(offer_parameters, ("session", "layout", "planes", "num_blocks", "secret", "proof"), layout)
        session, proof = offer_parameters["session"], offer_parameters["proof"]
        try:
            planes = [int(address) for address in offer_parameters["planes"].split(",")]
            num_blocks, secret = int(offer_parameters["num_blocks"]), int(offer_parameters["secret"])
        except ValueError as error:
            raise TransportError(f"mooncake: not a number in the offer: {error}") from error
        if len(planes) != layout.num_planes:
            raise TransportError(f"mooncake: {len(planes)} planes offered, the layout has {layout.num_planes}")
        with self._connecting:
            if self._reading is None or self._start_engine is None:
                raise TransportError("mooncake: not open here")
            try:
                self._check_owner(self._reading, session, secret, proof, nonce)
            except TransportError:
                if session not in self._met:
                    raise
                # Another process had this port, and an engine never asks again who has it.
                self._reading = self._start_engine()
                self._met.clear()
                self._check_owner(self._reading, session, secret, proof, nonce)
            self._met.add(session)
            return Reader(layout, self._reading, session, planes, num_blocks)

    def _check_owner(self, engine: _Engine, session: str, secret: int, proof: str, nonce: str) -> None:
        engine.read(session, [(ctypes.addressof(self._landing), secret, SECRET_BYTES)])
        if not compare_digest(proof_of(self._landing.raw, nonce).encode(), proof.encode()):
            raise TransportError(f"mooncake: who answers at {session} did not make the offer")


class _Engine:
    """Sockets and threads, for as long as somebody holds this; `regions` (address, bytes) are there for all to read."""

    def __init__(self, host: str, protocol: str, regions: Sequence[tuple[int, int]]) -> None:
        """Raises ConfigError without the package, TransportError if the engine does not start."""
        engine_class = import_engine()
        if protocol == "tcp":
            os.environ["MC_FORCE_TCP"] = "1"  # else it takes RDMA where there is any
        self._engine = engine_class()
        code = self._engine.initialize(host, "P2PHANDSHAKE", protocol, "")
        if code:
            ports = f"two free ports from {PORTS.start} to {PORTS.stop - 1}"
            raise TransportError(f"mooncake: the engine does not start at {host} (code {code}); it needs {ports}")
        self.session = f"{host}:{self._engine.get_rpc_port()}"
        """Where others reach it."""
        addresses, sizes = [address for address, _ in regions], [num_bytes for _, num_bytes in regions]
        if regions and self._engine.batch_register_memory(addresses, sizes):
            raise TransportError(f"mooncake: the engine does not take {sum(sizes)} bytes of KV pool")

    def read(self, session: str, parts: Iterable[Part]) -> None:
        """Reads all of them. When it returns or raises nothing is under way. Raises OwnerUnreachable."""
        under_way: deque[int] = deque()
        is_good = True
        for here, there, num_bytes in parts:
            if len(under_way) == NUM_AT_ONCE:
                is_good = self._ends_well(under_way.popleft())
                if not is_good:
                    break
            transfer = self._engine.batch_transfer_async_read(session, [here], [there], [num_bytes])
            if transfer in _NOT_STARTED:
                is_good = False
                break
            under_way.append(transfer)
        for transfer in under_way:
            is_good = self._ends_well(transfer) and is_good
        if not is_good:
            raise OwnerUnreachable(f"mooncake: {session} cannot be read from")

    def _ends_well(self, transfer: int) -> bool:
        """Waits for it; the engine ends each whose connection breaks or on which nothing moves."""
        while (status := self._engine.transfer_check_status(transfer)) not in (_ENDED_WELL, _FAILED):
            time.sleep(_POLL_S)
        return bool(status == _ENDED_WELL)


def import_engine() -> Any:
    """The engine's class, with our settings. Raises ConfigError, which says what is missing."""
    os.environ.update(_SETTINGS)
    try:
        from mooncake.engine import TransferEngine
    except ModuleNotFoundError as error:
        text = "the package of mooncake is not installed: pip install 'baton-llm[mooncake]', on NPUs [mooncake-npu]"
        raise ConfigError(f"--kv-transports: {text}") from error
    except ImportError as error:
        text = f"mooncake lacks a library of the system: {error} (Debian: libibverbs1 libnuma1 libcurl4)"
        raise ConfigError(f"--kv-transports: {text}") from error
    return TransferEngine
