"""Sequences that wait in host memory, in the whole system: any order of events, any fault, answers as undisturbed.

The CPU is declared a device with memory of its own. Decode workers have few blocks and expect short answers, so that
what runs outgrows its pool.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import random_walks
from every_order import Follower, every_order
from injected_faults import Setting, single_faults
from playing import Play
from whole_system import Ask, Size

sys.path.insert(0, str(Path(__file__).parents[1] / "tracer"))

from own_memory import declare_own_memory, expect_little

NUM_WALKS = 100
NUM_RUNS = 40
MAX_ORDERS, SOME_ORDERS = 20_000, 30
CROWDED = {"num_kv_blocks": 6, "max_num_seqs": 3}
TWO = [Ask(b"abcde", 5), Ask(b"vwxyz", 5)]


@pytest.fixture
def swapped(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Blocks that were copied, by direction."""
    declare_own_memory(monkeypatch)
    return expect_little(monkeypatch)


def test_in_every_order_two_that_outgrow_a_pool_are_answered(swapped: Counter[str], deep: bool) -> None:
    def play(follower: Follower) -> Play:
        return Play(TWO, follower, size=Size(num_prefill=0, num_decode=1, decode=CROWDED, has_probes=False))

    explored = every_order(play, MAX_ORDERS if deep else SOME_ORDERS)
    assert explored.num_orders > 1
    print(f"\n{explored}, {dict(swapped)}")
    assert swapped["in"] > 0


def test_whatever_fails_beside_swaps_answers_are_right_and_nothing_is_held(
    swapped: Counter[str], deep: bool, first_seed: int
) -> None:
    setting = Setting("swaps", TWO, Size(num_prefill=1, num_decode=1, decode=CROWDED, has_probes=False))
    faults = list(single_faults(setting))
    chosen = faults if deep else random.Random(first_seed).sample(faults, NUM_RUNS)
    num_by_attempts = Counter(setting.play(fault).run().num_attempts for fault in chosen)
    print(f"\n{len(chosen)} of {len(faults)} faults, by attempts: {dict(num_by_attempts)}, {dict(swapped)}")
    assert num_by_attempts[2] > 10, "the faults have become too mild"
    assert swapped["out"] > swapped["in"] > 0, "some ended in host memory"


def test_random_walks_with_swaps(
    swapped: Counter[str], monkeypatch: pytest.MonkeyPatch, deep: bool, first_seed: int, tmp_path: Path
) -> None:
    if not deep:
        pytest.skip("takes most of a minute, and seldom swaps: goes with --deep")
    draw_size = random_walks._size

    def crowded(draws: random.Random, directory: Path) -> Size:
        """All at one decode worker, whose pool holds little more than the longest of them."""
        size = draw_size(draws, directory)
        return replace(size, num_decode=1, decode={**size.decode, "num_kv_blocks": 8, "max_num_seqs": 4})

    monkeypatch.setattr(random_walks, "_size", crowded)
    for seed in range(first_seed, first_seed + 10 * NUM_WALKS):
        try:
            random_walks.walk(seed, tmp_path).run()
        except AssertionError as violation:
            raise AssertionError(f"walk {seed}: {violation}") from violation
    print(f"\n{dict(swapped)}")
    assert swapped["out"] > swapped["in"] > 0
