"""The transfer engine of Mooncake between two processes: who is read from is proved, and a loss is noticed at once.

What every transport must do is in test_transports.py; what needs no engine is tested here without one.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transports_here import needs_mooncake

from kvstore import transport
from kvstore.device_memory import DeviceMemory
from kvstore.layout import KVLayout
from kvstore.memory import BlockMemory, PoolMemory
from kvstore.transport import mooncake
from kvstore.transport.base import Frame, Network, OwnerUnreachable, TransportError
from runtime.errors import ConfigError

LAYOUT = KVLayout(num_layers=4, block_size=16, num_kv_heads=4, head_dim=64, dtype="float32")  # 128 KiB a block
NUM_BLOCKS = 256
TRUSTED = Network(is_trusted=True)
OWNER = """
import json, sys
import numpy as np
from kvstore import transport
from kvstore.layout import KVLayout
from kvstore.memory import PoolMemory
from kvstore.transport.base import Network
memory = PoolMemory(KVLayout(4, 16, 4, 64, "float32"), 256)
memory.commit(256)
memory.planes[:] = np.arange(256, dtype=np.uint8).reshape(1, 256, 1)
opened = transport.open_all(["mooncake"], memory, Network(is_trusted=True))
print(json.dumps(opened["mooncake"].offer(memory, "nonce")), flush=True)
sys.stdin.read()
transport.close_all(opened)
"""


class Owner:
    """A process with a pool, block n full of bytes n."""

    def __init__(self) -> None:
        root = str(Path(__file__).parents[2])
        self._process = subprocess.Popen(
            [sys.executable, "-c", OWNER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": root},
        )
        assert self._process.stdout is not None
        self.offer: dict[str, str] = json.loads(self._process.stdout.readline())

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def owner() -> Iterator[Owner]:
    one = Owner()
    yield one
    one.end()


@pytest.fixture(scope="module")
def lasting_owner() -> Iterator[Owner]:
    """For tests that do it no harm."""
    one = Owner()
    yield one
    one.end()


@pytest.fixture(scope="module", params=["host", "device"])
def lasting_memory(request: pytest.FixtureRequest) -> Iterator[BlockMemory]:
    one: BlockMemory
    if request.param == "host":
        one = PoolMemory(LAYOUT, NUM_BLOCKS)
        one.commit(NUM_BLOCKS)
    else:
        one = DeviceMemory(LAYOUT, NUM_BLOCKS, torch.device("cpu"))
    yield one
    one.close()


@pytest.fixture
def memory(lasting_memory: BlockMemory) -> BlockMemory:
    """Where blocks are read to; all zeros."""
    blocks = range(NUM_BLOCKS)
    lasting_memory.write_blocks(blocks, np.zeros_like(lasting_memory.read_blocks(blocks)), blocks)
    return lasting_memory


@pytest.fixture(scope="module")
def opened(lasting_memory: BlockMemory) -> Iterator[transport.Transport]:
    transports = transport.open_all(["mooncake"], lasting_memory, TRUSTED)
    yield transports["mooncake"]
    transport.close_all(transports)


@pytest.fixture
def spare() -> Iterator[PoolMemory]:
    """Memory for transports that are opened by the test, or are not."""
    one = PoolMemory(LAYOUT, 4)
    one.commit(4)
    yield one
    one.close()


def found(memory: BlockMemory, blocks: list[int]) -> list[int]:
    """What each block is full of."""
    content = memory.read_blocks(blocks)
    assert (content == content[:1, :, :1]).all()
    return [int(number) for number in content[0, :, 0]]


@needs_mooncake
def test_scattered_blocks_of_another_process(lasting_owner: Owner, opened: Any, memory: BlockMemory) -> None:
    """No two are neighbours on both sides, which takes more transfers than are under way at once."""
    source = list(range(0, NUM_BLOCKS, 2))
    destination = list(range(NUM_BLOCKS - 1, 0, -2))
    reader = opened.connect(lasting_owner.offer, LAYOUT, "nonce")
    assert reader.receive(Frame(tuple(source)), memory, destination) == len(source) * LAYOUT.block_bytes
    assert found(memory, destination) == source
    assert found(memory, list(range(0, NUM_BLOCKS, 2))) == [0] * 128


@needs_mooncake
@pytest.mark.parametrize("when", ["between reads", "while it is read"])
def test_a_killed_owner_is_noticed_within_a_second(when: str, owner: Owner, opened: Any, memory: BlockMemory) -> None:
    reader = opened.connect(owner.offer, LAYOUT, "nonce")
    blocks, before_s = list(range(NUM_BLOCKS)), time.monotonic()
    reader.receive(Frame(tuple(blocks)), memory, blocks)
    usual_s = time.monotonic() - before_s
    if when == "between reads":
        owner.send(signal.SIGKILL)
        killed_s = time.monotonic()
    else:
        killing = threading.Timer(0.05, owner.send, (signal.SIGKILL,))
        killing.start()
    with pytest.raises(OwnerUnreachable, match="cannot be read from"):
        while True:
            before_s = time.monotonic()
            reader.receive(Frame(tuple(blocks)), memory, blocks)
    noticed_s = time.monotonic()
    # And what a read takes while others compute on the same cores.
    assert noticed_s - (killed_s if when == "between reads" else before_s) < 1 + 2 * usual_s


@needs_mooncake
def test_an_owner_that_stands_still_is_given_up_and_nothing_is_written_after(
    owner: Owner, opened: Any, memory: BlockMemory
) -> None:
    """It goes on when its reader has given up: what it still sends goes nowhere."""
    reader = opened.connect(owner.offer, LAYOUT, "nonce")
    blocks = list(range(NUM_BLOCKS))
    owner.send(signal.SIGSTOP)
    with pytest.raises(OwnerUnreachable, match="cannot be read from"):
        reader.receive(Frame(tuple(blocks)), memory, blocks)
    rubbish = np.full((LAYOUT.num_planes, NUM_BLOCKS, LAYOUT.plane_block_bytes), 0xEE, dtype=np.uint8)
    memory.write_blocks(blocks, rubbish, blocks)
    owner.send(signal.SIGCONT)
    again = opened.connect(owner.offer, LAYOUT, "nonce")
    again.receive(Frame((7,)), memory, [0])
    assert found(memory, [0, *blocks[1:]]) == [7, *[0xEE] * (NUM_BLOCKS - 1)]


@needs_mooncake
def test_another_process_at_the_same_port(lasting_owner: Owner, opened: Any, memory: BlockMemory) -> None:
    """What answers there has not made the offer, though it has memory at that address."""
    parameters = {**lasting_owner.offer, "proof": "00" * 16}
    with pytest.raises(TransportError, match="did not make the offer"):
        opened.connect(parameters, LAYOUT, "nonce")
    with pytest.raises(TransportError, match="did not make the offer"):
        opened.connect(lasting_owner.offer, LAYOUT, "another nonce")
    opened.connect(lasting_owner.offer, LAYOUT, "nonce").receive(Frame((9,)), memory, [3])
    assert found(memory, [3]) == [9]


@needs_mooncake
def test_an_engine_forgets_who_had_a_port_before(
    lasting_owner: Owner, spare: PoolMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine remembers what was at a session's address; what fails there is tried by a new one, once."""
    opened = transport.open_all(["mooncake"], spare, TRUSTED)
    one = opened["mooncake"]
    one.connect(lasting_owner.offer, LAYOUT, "nonce")
    read, engines = mooncake._Engine.read, []

    def stale_at_first(engine: Any, session: str, parts: Any) -> None:
        engines.append(engine)
        if engine is engines[0]:
            raise TransportError("connected to who is gone")
        read(engine, session, parts)

    monkeypatch.setattr(mooncake._Engine, "read", stale_at_first)
    reader = one.connect(lasting_owner.offer, LAYOUT, "nonce")
    reader.receive(Frame((9,)), spare, [3])
    assert found(spare, [3]) == [9] and len(set(map(id, engines))) == 2
    engines.clear()
    reader.close()
    transport.close_all(opened)


@needs_mooncake
def test_engines_listen_on_the_ports_that_are_promised(spare: PoolMemory) -> None:
    """And nowhere else: firewalls are made after it."""
    before = _listening_ports()
    opened = transport.open_all(["mooncake"], spare, TRUSTED)
    new = _listening_ports() - before
    assert len(new) == 2 and new <= set(mooncake.PORTS)
    assert int(opened["mooncake"].offer(spare)["session"].rpartition(":")[2]) in new  # type: ignore[index]
    transport.close_all(opened)
    assert not new & _listening_ports()


def _listening_ports() -> set[int]:
    """Of this process."""
    inodes = set()
    for link in Path("/proc/self/fd").iterdir():
        try:
            target = link.readlink().name
        except FileNotFoundError:  # the folder's own
            continue
        if target.startswith("socket:["):
            inodes.add(target.removeprefix("socket:[").removesuffix("]"))
    ports = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in inodes:
                ports.add(int(words[1].rpartition(":")[2], 16))
    return ports


@needs_mooncake
def test_an_owner_that_cannot_be_reached(lasting_owner: Owner, opened: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(TransportError, match=f"127.0.0.1:{port} cannot be read from"):
        opened.connect({**lasting_owner.offer, "session": f"127.0.0.1:{port}"}, LAYOUT, "nonce")


@needs_mooncake
def test_only_the_pool_can_be_read(lasting_owner: Owner, opened: Any) -> None:
    """The page before its first plane is the owner's as well, and was not registered."""
    before = int(lasting_owner.offer["planes"].partition(",")[0]) - 64
    with pytest.raises(OwnerUnreachable, match="cannot be read from"):
        opened.connect({**lasting_owner.offer, "secret": str(before)}, LAYOUT, "nonce")


@needs_mooncake
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("planes", "1,2", "2 planes offered, the layout has 8"),
        ("planes", "1,x", "not a number in the offer"),
        ("num_blocks", "many", "not a number in the offer"),
        ("secret", "", "not a number in the offer"),
        ("layout", "other", "KV layouts differ"),
    ],
)
def test_offers_that_do_not_fit(name: str, value: str, message: str, lasting_owner: Owner, opened: Any) -> None:
    with pytest.raises(TransportError, match=message):
        opened.connect({**lasting_owner.offer, name: value}, LAYOUT, "nonce")


@needs_mooncake
@pytest.mark.parametrize("block_id", [-1, NUM_BLOCKS, 2**40])
def test_source_outside_the_pool(block_id: int, lasting_owner: Owner, opened: Any, memory: BlockMemory) -> None:
    reader = opened.connect(lasting_owner.offer, LAYOUT, "nonce")
    with pytest.raises(TransportError, match=f"source block {block_id} is outside the pool of {NUM_BLOCKS}"):
        reader.receive(Frame((1, block_id)), memory, [0, 1])
    assert found(memory, [0, 1]) == [0, 0]


def refused(memory: BlockMemory, network: Network) -> str:
    with pytest.raises(ConfigError) as caught:
        transport.open_all(["mooncake"], memory, network)
    return caught.value.message


def test_not_without_a_trusted_network(spare: PoolMemory) -> None:
    assert "ports 15000 to 15999" in (message := refused(spare, Network())) and "--trusted-transfer-network" in message


def test_not_for_memory_that_the_engine_cannot_read(spare: PoolMemory) -> None:
    spare.device_kind = "cuda"
    assert "reads memory of cpu and npu devices, got cuda" in refused(spare, TRUSTED)


def test_not_by_ipv6(spare: PoolMemory) -> None:
    assert "needs an IPv4 address or a name, got [::1]" in refused(spare, Network("[::1]", is_trusted=True))


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        (ModuleNotFoundError("No module named 'mooncake'"), r"pip install 'baton-llm\[mooncake\]'"),
        (ImportError("libibverbs.so.1: cannot open shared object file"), "libibverbs.so.1: .*Debian: libibverbs1"),
    ],
)
def test_what_is_missing_is_named(
    missing: ImportError, message: str, spare: PoolMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Missing:
        def find_spec(self, name: str, *_: object) -> None:
            if name.partition(".")[0] == "mooncake":
                raise missing

    for name in [name for name in sys.modules if name.partition(".")[0] == "mooncake"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Missing(), *sys.meta_path])
    monkeypatch.setattr(os, "environ", dict(os.environ))
    with pytest.raises(ConfigError, match=message):
        transport.open_all(["mooncake"], spare, TRUSTED)


def test_nothing_is_offered_before_it_is_open(spare: PoolMemory) -> None:
    assert transport.offers({"mooncake": transport.load("mooncake")}, spare) == []
