"""Each transport moves the right bytes and refuses everything else; shared memory also between two processes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from transports_here import TRANSPORTS

from kvstore import transport
from kvstore.layout import KVLayout
from kvstore.memory import PoolMemory
from kvstore.transport import base
from kvstore.transport import grpc as grpc_transport
from kvstore.transport.base import Frame, Network, TransportError, add_to_checksum
from runtime.errors import ConfigError
from runtime.rpc import MAX_MESSAGE_BYTES

LAYOUT = KVLayout(num_layers=2, block_size=4, num_kv_heads=2, head_dim=8, dtype="float32")
NAMES = transport.available()
QUIET = ("shm", "grpc")
"""Those without sockets of their own, which need not be opened."""
Connect = Callable[[str], base.Reader]


def filled_pool(directory: Path) -> PoolMemory:
    memory = PoolMemory.create(LAYOUT, 16, 12, epoch=1, directory=directory)
    memory.planes[:, :12] = np.random.default_rng(1).integers(0, 256, (4, 12, 256), dtype=np.uint8)
    return memory


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[PoolMemory]:
    """A pool that a test may change."""
    memory = filled_pool(tmp_path)
    yield memory
    memory.close()


@pytest.fixture
def reader_memory() -> Iterator[PoolMemory]:
    memory = PoolMemory.create(LAYOUT, 10, 8, epoch=2, directory=None)
    yield memory
    memory.close()


@pytest.fixture(scope="module")
def lasting_owner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PoolMemory]:
    """The pool that `connect` connects to."""
    memory = filled_pool(tmp_path_factory.mktemp("owner"))
    yield memory
    memory.close()


@pytest.fixture(scope="module")
def connect(lasting_owner: PoolMemory) -> Iterator[Connect]:
    opened: dict[str, base.Transport] = {}

    def connect(name: str) -> base.Reader:
        if name not in opened:
            opened.update(transport.open_all([name], lasting_owner, Network(is_trusted=True)))
        parameters = opened[name].offer(lasting_owner, "nonce")
        assert parameters is not None
        return opened[name].connect(parameters, LAYOUT, "nonce")

    yield connect
    transport.close_all(opened)


def loaded(*names: str) -> dict[str, base.Transport]:
    return {name: transport.load(name) for name in names}


def one_frame(name: str, owner: PoolMemory, block_ids: list[int]) -> Frame:
    frames = list(transport.load(name).serve(owner, block_ids))
    assert len(frames) == 1
    return frames[0]


def test_the_files_are_the_transports() -> None:
    folder = Path(transport.__file__).parent
    stems = {path.stem for path in folder.glob("*.py")} - {"__init__", "base"}
    assert set(NAMES) == stems and {"shm", "grpc", "mooncake"} <= stems
    ranks = set()
    for name in NAMES:
        one = transport.load(name)
        assert isinstance(one, base.Transport) and one.name == name
        ranks.add(one.rank)
    assert len(ranks) == len(NAMES), "two transports of one rank: the choice would depend on the order of files"


def test_unknown_transport() -> None:
    with pytest.raises(ConfigError, match=r"'pigeon' does not exist; available: .*grpc.*shm"):
        transport.load("pigeon")


@pytest.mark.parametrize("name", TRANSPORTS)
def test_round_trip(name: str, lasting_owner: PoolMemory, reader_memory: PoolMemory, connect: Connect) -> None:
    source_ids, dest_ids = [3, 4, 5, 11, 0], [7, 6, 0, 1, 2]
    reader = connect(name)
    before = reader_memory.planes.copy()
    num_done = num_bytes = 0
    for frame in transport.load(name).serve(lasting_owner, source_ids):
        assert frame.block_ids == tuple(source_ids[num_done : num_done + len(frame.block_ids)])
        wanted = dest_ids[num_done : num_done + len(frame.block_ids)]
        num_bytes += reader.receive(frame, reader_memory, wanted)
        num_done += len(frame.block_ids)
    assert num_bytes == 5 * LAYOUT.block_bytes and num_done == 5
    before[:, dest_ids] = lasting_owner.planes[:, source_ids]
    assert (reader_memory.planes == before).all()


@pytest.mark.parametrize("name", TRANSPORTS)
def test_no_blocks_no_frames(name: str, owner: PoolMemory) -> None:
    assert list(transport.load(name).serve(owner, [])) == []


@pytest.mark.parametrize("name", TRANSPORTS)
@pytest.mark.parametrize("block_id", [-1, 12, 2**40])
def test_owner_serves_only_its_blocks(name: str, owner: PoolMemory, block_id: int) -> None:
    """12 is below the ceiling: not every address that is reserved may be read."""
    with pytest.raises(TransportError, match=f"source block {block_id} is outside the pool of 12"):
        list(transport.load(name).serve(owner, [0, block_id]))


@pytest.mark.parametrize("name", TRANSPORTS)
@pytest.mark.parametrize("block_id", [-1, 8, 2**40])
def test_destination_outside_the_pool(
    name: str, lasting_owner: PoolMemory, reader_memory: PoolMemory, block_id: int, connect: Connect
) -> None:
    reader, frame = connect(name), one_frame(name, lasting_owner, [1, 2])
    with pytest.raises(TransportError, match=f"destination block {block_id} is outside the pool of 8"):
        reader.receive(frame, reader_memory, [0, block_id])
    assert not reader_memory.planes.any()


@pytest.mark.parametrize("name", TRANSPORTS)
def test_frame_and_destinations_differ_in_number(
    name: str, lasting_owner: PoolMemory, reader_memory: PoolMemory, connect: Connect
) -> None:
    reader, frame = connect(name), one_frame(name, lasting_owner, [1, 2])
    with pytest.raises(TransportError, match="a frame of 2 blocks for 1"):
        reader.receive(frame, reader_memory, [0])
    assert not reader_memory.planes.any()


@pytest.mark.parametrize("name", TRANSPORTS)
@pytest.mark.parametrize("change", [-1, 1])
def test_data_of_wrong_length(
    name: str, change: int, lasting_owner: PoolMemory, reader_memory: PoolMemory, connect: Connect
) -> None:
    reader, frame = connect(name), one_frame(name, lasting_owner, [1])
    data = frame.data[:change] if frame.data and change < 0 else frame.data + b"x"
    with pytest.raises(TransportError, match="bytes of data instead of"):
        reader.receive(Frame(frame.block_ids, data), reader_memory, [0])
    assert not reader_memory.planes.any()


@pytest.mark.parametrize("name", TRANSPORTS)
def test_layouts_differ_at_the_reader(name: str, lasting_owner: PoolMemory, connect: Connect) -> None:
    other = PoolMemory(KVLayout(2, 4, 4, 4, "float32"), 10)  # as many bytes, other meaning
    other.commit(8)
    with pytest.raises(TransportError, match="KV layouts differ"):
        connect(name).receive(one_frame(name, lasting_owner, [1]), other, [0])
    other.close()


@pytest.mark.parametrize("name", TRANSPORTS)
def test_closed_reader(name: str, lasting_owner: PoolMemory, reader_memory: PoolMemory, connect: Connect) -> None:
    reader, frame = connect(name), one_frame(name, lasting_owner, [1])
    reader.close()
    reader.close()
    with pytest.raises(TransportError, match="closed"):
        reader.receive(frame, reader_memory, [0])


def test_grpc_frames_are_bounded_and_checked() -> None:
    layout = KVLayout(num_layers=4, block_size=16, num_kv_heads=8, head_dim=64, dtype="float32")  # 256 KiB a block
    memory = PoolMemory(layout, 20)
    memory.commit(20)
    memory.planes[:] = np.arange(20, dtype=np.uint8).reshape(1, 20, 1)
    frames = list(transport.load("grpc").serve(memory, range(20)))
    assert [len(frame.block_ids) for frame in frames] == [8, 8, 4]
    assert len(frames[0].data) == grpc_transport.FRAME_BYTES == 2**21
    checksum = 0
    for frame in frames:
        checksum = add_to_checksum(frame, checksum)
    flipped = Frame(frames[2].block_ids, frames[2].data[:-1] + bytes([frames[2].data[-1] ^ 1]))
    swapped = add_to_checksum(frames[2], add_to_checksum(frames[0], add_to_checksum(frames[1])))
    assert checksum not in (0, swapped)
    assert add_to_checksum(flipped, add_to_checksum(frames[1], add_to_checksum(frames[0]))) != checksum
    memory.close()


def test_grpc_data_is_plane_by_plane(owner: PoolMemory) -> None:
    frame = one_frame("grpc", owner, [5, 2])
    expected = b"".join(owner.planes[plane, block].tobytes() for plane in range(4) for block in (5, 2))
    assert frame.data == expected


def test_grpc_is_not_offered_for_blocks_beyond_a_message() -> None:
    assert grpc_transport.MAX_BLOCK_BYTES + 2**20 <= MAX_MESSAGE_BYTES
    memory = PoolMemory(KVLayout(64, 128, 8, 128, "bfloat16"), 1)  # 32 MiB a block
    assert transport.load("grpc").offer(memory) is None
    memory.close()


@pytest.mark.parametrize("name", TRANSPORTS)
def test_which_need_a_checksum(name: str, connect: Connect) -> None:
    """Only bytes in messages carry one."""
    assert connect(name).passes_through_host == (name == "grpc")


def test_shm_is_not_offered_without_a_file(reader_memory: PoolMemory) -> None:
    assert transport.load("shm").offer(reader_memory) is None
    assert transport.offers(loaded(*NAMES), reader_memory) == [("grpc", {})]


def shm_offer(owner: PoolMemory, **changes: str) -> dict[str, str]:
    parameters = transport.load("shm").offer(owner, "nonce")
    assert parameters is not None
    return {**parameters, **changes}


def connect_shm(owner: PoolMemory) -> base.Reader:
    return transport.load("shm").connect(shm_offer(owner), LAYOUT, "nonce")


def refuse_shm(parameters: dict[str, str], nonce: str, message: str, layout: KVLayout = LAYOUT) -> None:
    shm = transport.load("shm")
    with pytest.raises(TransportError, match=message):
        shm.connect(parameters, layout, nonce)


def test_shm_wrong_nonce(owner: PoolMemory) -> None:
    refuse_shm(shm_offer(owner), "another", "not the file that the owner wrote")


@pytest.mark.parametrize("proof", ["", "00" * 16, "ü"])
def test_shm_wrong_proof(owner: PoolMemory, proof: str) -> None:
    refuse_shm(shm_offer(owner, proof=proof), "nonce", "not the file that the owner wrote")


def test_shm_file_of_the_same_name_on_another_host(owner: PoolMemory, tmp_path: Path) -> None:
    (tmp_path / "host").mkdir()
    twin = PoolMemory(LAYOUT, 16, shared_path=tmp_path / "host" / "baton-kv-1-1")
    refuse_shm(shm_offer(owner, path=str(twin.shared_path)), "nonce", "not the file that the owner wrote")
    twin.close()


def test_shm_dead_path(owner: PoolMemory) -> None:
    parameters = shm_offer(owner)
    owner.close()
    refuse_shm(parameters, "nonce", "No such file")


@pytest.mark.parametrize("path", ["", "\0", "/dev/zero", "/"])
def test_shm_absurd_path(owner: PoolMemory, path: str) -> None:
    refuse_shm(shm_offer(owner, path=path), "nonce", "not the name of a pool file")


def test_shm_path_with_a_null_character(owner: PoolMemory) -> None:
    refuse_shm(shm_offer(owner, path="/tmp/baton-kv-\0"), "nonce", "null byte")


@pytest.mark.parametrize("name", ["path", "layout", "proof"])
def test_shm_offer_without_a_parameter(owner: PoolMemory, name: str) -> None:
    parameters = shm_offer(owner)
    del parameters[name]
    refuse_shm(parameters, "nonce", f"the offer lacks {name}")


def test_shm_layouts_differ(owner: PoolMemory) -> None:
    refuse_shm(shm_offer(owner), "nonce", "KV layouts differ", KVLayout(2, 4, 4, 4, "float32"))


@pytest.mark.parametrize("block_id", [-1, 12, 16, 2**40])
def test_shm_source_outside_the_pool(owner: PoolMemory, reader_memory: PoolMemory, block_id: int) -> None:
    reader = connect_shm(owner)
    with pytest.raises(TransportError, match=f"source block {block_id} is outside the pool of 12"):
        reader.receive(Frame((0, block_id)), reader_memory, [0, 1])
    assert not reader_memory.planes.any()


def test_shm_reads_blocks_added_later(owner: PoolMemory, reader_memory: PoolMemory) -> None:
    reader = connect_shm(owner)
    owner.commit(16)
    owner.planes[:, 15] = 200
    reader.receive(one_frame("shm", owner, [15]), reader_memory, [0])
    assert (reader_memory.planes[:, 0] == 200).all()


def test_shm_reader_outlives_the_file(owner: PoolMemory, reader_memory: PoolMemory) -> None:
    """A worker that ends takes the name away, never the pages from under a reader."""
    reader = connect_shm(owner)
    expected = owner.planes[:, 3].copy()
    owner.close()
    reader.receive(Frame((3,)), reader_memory, [0])
    assert (reader_memory.planes[:, 0] == expected).all()


READ = """
import json, sys
from kvstore import transport
from kvstore.layout import KVLayout
from kvstore.memory import PoolMemory
from kvstore.transport.base import Frame
parameters = json.loads(sys.argv[1])
memory = PoolMemory(KVLayout(2, 4, 2, 8, "float32"), 4)
memory.commit(4)
shm = transport.load("shm")
reader = shm.connect(parameters, memory.layout, "nonce")
reader.receive(Frame((9, 2)), memory, [3, 0])
sys.stdout.buffer.write(memory.planes.tobytes())
"""


def test_shm_between_two_processes(owner: PoolMemory) -> None:
    command = [sys.executable, "-c", READ, json.dumps(shm_offer(owner))]
    ended = subprocess.run(command, capture_output=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, b"")
    got = np.frombuffer(ended.stdout, dtype=np.uint8).reshape(4, 4, 256)
    expected = np.zeros_like(got)
    expected[:, [3, 0]] = owner.planes[:, [9, 2]]
    assert (got == expected).all()


def test_choose_prefers_shm_whatever_the_order(owner: PoolMemory) -> None:
    offered = transport.offers(loaded(*QUIET), owner, "nonce")
    assert [name for name, _ in offered] == ["shm", "grpc"]
    chosen, reader = transport.choose(loaded(*QUIET), offered[::-1], LAYOUT, "nonce")
    assert chosen.name == "shm" and not reader.passes_through_host


def test_choose_falls_back_where_shm_is_not_proved(owner: PoolMemory) -> None:
    offered = transport.offers(loaded(*QUIET), owner, "nonce")
    assert transport.choose(loaded(*QUIET), offered, LAYOUT, "another")[0].name == "grpc"
    assert transport.choose(loaded("grpc"), offered, LAYOUT, "nonce")[0].name == "grpc"


def test_choose_ignores_what_it_does_not_know(owner: PoolMemory) -> None:
    assert transport.choose(loaded(*NAMES), [("pigeon", {}), ("grpc", {})], LAYOUT)[0].name == "grpc"


@pytest.mark.parametrize(
    ("local", "offered"), [([], ["grpc"]), (["grpc"], []), (["shm"], ["grpc"]), (["shm"], ["shm"])]
)
def test_choose_nothing_in_common(local: list[str], offered: list[str]) -> None:
    with pytest.raises(TransportError, match="no usable transport"):
        transport.choose(loaded(*local), [(name, {}) for name in offered], LAYOUT)
