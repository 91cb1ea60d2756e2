"""Hashes are the same everywhere, and differ wherever content could differ."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.hashing import HASH_BYTES, PrefixHasher, pack_token_ids, session_key, unpack_token_ids

GOLDEN = {
    "root": "f6bd7b6e3dfae7a891d3743ba00911fa",
    "root of a tenant": "33b4d1995678d00f457b144033671df8",
    "first block": "2a90d164802a8d6edaf893addac02103",
    "second block": "5fc3caaaed32f421f9ed583f88619a02",
    "largest ids": "ab6f0143452b2d3daade2ca6d31cc007",
    "session": "a8a0f2439ef80305b48d9fa5fcfff129",
}

COMPUTE = """
from kvstore.hashing import PrefixHasher, session_key
hasher = PrefixHasher("model-1", "layers=2,block=4,heads=1,dim=8,dtype=float32", 4)
first, second = hasher.chain("", range(9))
vectors = {
    "root": hasher.root(""),
    "root of a tenant": hasher.root("tenant"),
    "first block": first,
    "second block": second,
    "largest ids": hasher.extend(second, [2**32 - 1] * 4),
    "session": session_key("tenant", "session"),
}
"""


def compute() -> dict[str, str]:
    scope: dict[str, dict[str, bytes]] = {}
    exec(COMPUTE, scope)
    return {name: value.hex() for name, value in scope["vectors"].items()}


def test_golden_vectors() -> None:
    """A change here means that workers of two versions no longer agree on names."""
    assert compute() == GOLDEN


def test_golden_vectors_in_a_fresh_process() -> None:
    code = COMPUTE + "\nfor name, value in vectors.items(): print(f'{name}={value.hex()}')"
    answer = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert dict(line.split("=", 1) for line in answer.splitlines()) == GOLDEN


def test_chain_is_extend_block_by_block() -> None:
    hasher = PrefixHasher("m", "l", 3)
    tokens = [5, 1, 4, 1, 5, 9, 2, 6]
    first = hasher.extend(hasher.root("t"), tokens[:3])
    assert hasher.chain("t", tokens) == [first, hasher.extend(first, tokens[3:6])]
    assert hasher.chain("t", tokens[:2]) == []


def test_everything_that_could_change_content_changes_the_hash() -> None:
    tokens = [1, 2]
    hashes = {
        PrefixHasher("m", "l", 2).chain("t", tokens)[0],
        PrefixHasher("n", "l", 2).chain("t", tokens)[0],
        PrefixHasher("m", "k", 2).chain("t", tokens)[0],
        PrefixHasher("m", "l", 2).chain("u", tokens)[0],
        PrefixHasher("m", "l", 2).chain("t", [1, 3])[0],
        PrefixHasher("m", "l", 2).chain("t", [0, 0, 1, 2])[1],
        PrefixHasher("m", "l", 1).chain("t", tokens)[0],
        PrefixHasher("ml", "", 2).chain("t", tokens)[0],  # framing: fields do not run together
        PrefixHasher("m", "", 2).chain("tl", tokens)[0],
    }
    assert len(hashes) == 9
    assert all(len(each) == HASH_BYTES for each in hashes)


def test_session_keys_do_not_run_together() -> None:
    assert len({session_key("a", "bc"), session_key("ab", "c"), session_key("", "abc")}) == 3


@pytest.mark.parametrize("tokens", [[], [1], [1, 2, 3]])
def test_a_block_has_exactly_its_size(tokens: list[int]) -> None:
    with pytest.raises(ValueError, match="a block is 2 tokens"):
        PrefixHasher("m", "l", 2).extend(b"", tokens)


@pytest.mark.parametrize("token_id", [-1, 2**32])
def test_ids_out_of_range_are_refused(token_id: int) -> None:
    with pytest.raises(ValueError, match="between 0 and 4294967295"):
        pack_token_ids([1, token_id])


def test_block_size_must_be_positive() -> None:
    with pytest.raises(ValueError, match="block_size"):
        PrefixHasher("m", "l", 0)


def test_packed_ids_are_whole() -> None:
    with pytest.raises(ValueError, match="5 bytes"):
        unpack_token_ids(b"12345")


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_packing_loses_nothing(tokens: list[int]) -> None:
    assert unpack_token_ids(pack_token_ids(tokens)) == tuple(tokens)
