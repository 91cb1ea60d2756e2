"""Every order of events of small pools: nothing deadlocks, leaks, is written twice, taken against rank, or starves.

Each case is a few requests over a few blocks of four tokens. All states that arrivals, steps, transfers, losses,
cancellation and the return of evicted requests can reach are visited, and from each of them the work ends.
"""

from __future__ import annotations

import pytest
from decode_world import Asked, DecodeWorld
from exploring import Explored, Found, explore
from prefill_world import PrefillWorld, Prompt

from engine.request import Priority
from engine.sequence import Sequence

LOW, NORMAL, HIGH = Priority.LOW, Priority.NORMAL, Priority.HIGH
MAX_STATES = 10_000

DECODE = {
    "two that wait for each other's look-ahead block": (
        7,
        [Asked(16, 1, source="p", max_tokens=5), Asked(12, 2, source="p", max_tokens=5, first=100)],
        {"num_faults": 1},
    ),
    "two that outgrow the pool together": (
        4,
        [Asked(7, 1, max_tokens=4), Asked(6, 2, max_tokens=4, first=100)],
        {"num_faults": 1},
    ),
    "outputs twice as long as the pool has room for at once": (
        4,
        [Asked(3, 1, max_tokens=6), Asked(3, 2, max_tokens=6, first=100), Asked(3, 3, max_tokens=6, first=200)],
        {"num_faults": 0, "max_num_seqs": 3},
    ),
    "a high class lacks a seat": (
        9,
        [Asked(3, 1, LOW, 3), Asked(3, 2, LOW, 3, "p", 100), Asked(3, 3, HIGH, first=200)],
        {"num_faults": 0},
    ),
    "a high class lacks blocks": (
        5,
        [Asked(3, 1, LOW, 3), Asked(7, 2, LOW, 3, "p", 100), Asked(7, 3, HIGH, 3, first=200)],
        {"num_faults": 0, "max_num_seqs": 3},
    ),
    "a high class lacks places in the step": (
        4,
        [Asked(5, 1, LOW, 4), Asked(3, 2, NORMAL, 4, first=100), Asked(3, 3, HIGH, 3, first=200)],
        {"num_faults": 0, "max_num_seqs": 3, "max_batch_size": 1},
    ),
    "a low class that has waited longer than classes weigh": (
        5,
        [Asked(3, 1, NORMAL, 6), Asked(5, 2, LOW, 6, first=100), Asked(5, 50, HIGH, 4, "p", 200)],
        {"num_faults": 0, "max_num_seqs": 3},
    ),
    "growth beside what a high class has reserved": (
        5,
        [Asked(3, 4, HIGH, 2, "p"), Asked(6, 9.25, LOW, 4, first=100), Asked(7, 3.5, HIGH, 3, "p")],
        {"num_faults": 0, "max_num_seqs": 3, "chunk_size": 3},
    ),
    "a shared prefix": (
        4,
        [Asked(9, 1, LOW, 3), Asked(9, 2, LOW, 3, "p"), Asked(9, 3, HIGH, 3)],
        {"num_faults": 0, "max_num_seqs": 3},
    ),
    "a cap of no preemption at all": (
        5,
        [Asked(3, 1, LOW, 3), Asked(7, 2, LOW, 3, "p", 100), Asked(7, 3, HIGH, 3, first=200)],
        {"num_faults": 0, "max_preemptions": 0},
    ),
    "reservations that take turns": (
        7,
        [Asked(5, 1, NORMAL, 2, "p"), Asked(9, 2, NORMAL, 2, "p", 100), Asked(2, 3, NORMAL, 2, "p", 200)],
        {"num_faults": 0, "max_num_seqs": 3, "reserved": 6},
    ),
    "static batches": (
        6,
        [Asked(3, 1, LOW, 3), Asked(3, 2, NORMAL, 2, "p", 100), Asked(3, 3, HIGH, 1, first=200)],
        {"num_faults": 0, "is_static": True},
    ),
    "static batches that outgrow the pool": (
        4,
        [Asked(7, 1, LOW, 4), Asked(6, 2, HIGH, 4, "p", 100)],
        {"num_faults": 1, "is_static": True},
    ),
}

PREFILL = {
    "more prompts than blocks": (5, [Prompt(9, 1), Prompt(12, 2, first=100), Prompt(3, 3, HIGH, 200)], {}),
    "more prompts than seats": (
        7,
        [Prompt(9, 1), Prompt(4, 2, LOW, 100), Prompt(3, 3, HIGH, 200)],
        {"max_num_seqs": 1},
    ),
    "short ones beside a patient long one": (
        7,
        [Prompt(13, 1, LOW), Prompt(6, 30, HIGH, 100), Prompt(3, 31, LOW, 200)],
        {"max_num_tokens": 4, "chunk_size": 4, "num_faults": 0},
    ),
    "a shared prefix": (4, [Prompt(9, 1), Prompt(9, 2), Prompt(12, 3, HIGH)], {"num_faults": 0}),
    "a high class lacks a seat": (
        9,
        [Prompt(9, 1, NORMAL), Prompt(5, 2, LOW, 100), Prompt(3, 3, HIGH, 200)],
        {"max_num_seqs": 2, "max_num_tokens": 4, "chunk_size": 4},
    ),
    "a high class lacks blocks": (
        6,
        [Prompt(9, 1, NORMAL), Prompt(5, 2, LOW, 100), Prompt(7, 3, HIGH, 200), Prompt(4, 4, NORMAL, 300)],
        {"max_num_seqs": 4, "max_num_tokens": 4, "chunk_size": 4, "num_faults": 0},
    ),
    "a high class lacks blocks beside a shared prefix": (
        5,
        [Prompt(9, 1, NORMAL), Prompt(6, 2, LOW), Prompt(9, 3, HIGH)],
        {"max_num_seqs": 3, "max_num_tokens": 4, "chunk_size": 4, "num_faults": 0},
    ),
    "readers lend what they have": (
        7,
        [Prompt(13, 1, NORMAL, lent=8), Prompt(13, 2, LOW, lent=12), Prompt(5, 3, HIGH, 200)],
        {"max_num_seqs": 2, "max_num_tokens": 4, "chunk_size": 4},
    ),
}


@pytest.mark.parametrize("case", DECODE)
@pytest.mark.parametrize("expected", [1, 99], ids=["expects too little", "expects all that may come"])
def test_decode_whatever_the_order(case, expected):
    num_blocks, asked, options = DECODE[case]
    explored = explore(DecodeWorld(num_blocks, asked, expected=expected, **options), MAX_STATES)
    assert explored.num_states > 100, "too few for what the case is about"


@pytest.mark.parametrize("case", PREFILL)
def test_prefill_whatever_the_order(case):
    num_blocks, prompts, options = PREFILL[case]
    explored = explore(PrefillWorld(num_blocks, prompts, **options), MAX_STATES)
    assert explored.num_states > 100, "too few for what the case is about"


def test_an_exploration_finds_blocks_that_leak():
    world = DecodeWorld(4, [Asked(3, 1), Asked(3, 2, first=100)])
    world.holdings.pool.allocate(1)
    with pytest.raises(Found, match="none is accounted for"):
        explore(world, MAX_STATES)


class OneMsEach:
    """Step times that are known: a millisecond for each sequence, one for each token of a prompt."""

    def predict_ms(self, load):
        return load.num_sequences + load.num_prompt_tokens

    def num_prompt_tokens_within(self, target_ms, load, num_computed, most):
        return max(0, min(most, int(target_ms) - load.num_sequences))


class Paced(DecodeWorld):
    """Keeps steps within a target."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.scheduler.step_times = self.scheduler._outlook._step_times = OneMsEach()


@pytest.mark.parametrize("target_ms", [0.5, 2.0])
@pytest.mark.parametrize("case", ["a high class lacks a seat", "a shared prefix", "two that outgrow the pool together"])
def test_decode_with_a_target_for_its_steps_whatever_the_order(case, target_ms):
    num_blocks, asked, options = DECODE[case]
    world = Paced(num_blocks, asked, **{"max_num_seqs": 3, **options, "target_step_ms": target_ms})
    assert explore(world, MAX_STATES).num_states > 50, "too few for what the case is about"


class Forgetful(DecodeWorld):
    """Does not send again what was lost."""

    def is_own(self, event):
        return event != ("arrive", 0) and super().is_own(event)


class Reckless(DecodeWorld):
    """Gives up what it fetches, again and again."""

    def lose(self, index):
        super().lose(index)
        self.num_faults_left += 1

    def is_own(self, event):
        return event[0] == "lose" or super().is_own(event)


def test_an_exploration_finds_work_that_stands_still():
    asked = [Asked(7, 1, max_tokens=6), Asked(6, 0, max_tokens=6, first=100)]
    with pytest.raises(Found, match="the work stands still"):
        explore(Forgetful(4, asked, num_faults=0), MAX_STATES)


def test_an_exploration_finds_work_that_goes_in_circles():
    world = Reckless(4, [Asked(3, 1, source="p")], num_faults=1)
    with pytest.raises(Found, match="the work goes in circles"):
        explore(world, MAX_STATES)


class TakesFromTheFirst(DecodeWorld):
    """Growth takes from whoever ranks first."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.scheduler._victims.for_growth = self.first  # type: ignore[method-assign]

    def first(self, holders: list[Sequence]) -> Sequence:
        return min(holders, key=lambda each: (each.since_s == 1, self.rank(each)))


def test_an_exploration_finds_who_is_taken_from_against_rank():
    asked = [Asked(3, 1, NORMAL, 8), Asked(3, 2, HIGH, 8, first=100), Asked(3, 3, LOW, 8, first=200)]
    with pytest.raises(Found, match="taken from one who ranks before"):
        explore(TakesFromTheFirst(4, asked, num_faults=0, max_num_seqs=3), MAX_STATES)


def test_an_exploration_counts_what_it_did():
    # Come, plan, commit twice with one token each; a plan before it comes changes nothing.
    assert explore(DecodeWorld(2, [Asked(1, 1)], num_faults=0), 9) == Explored(6, 7, 4)


IN_HOST_MEMORY = (
    "two that outgrow the pool together",
    "outputs twice as long as the pool has room for at once",
    "a high class lacks a seat",
    "a high class lacks blocks",
    "a high class lacks places in the step",
    "a low class that has waited longer than classes weigh",
    "growth beside what a high class has reserved",
    "a shared prefix",
    "static batches that outgrow the pool",
)


class Swapping(DecodeWorld):
    """Notes that somebody was swapped out."""

    num_swaps = 0

    def copy(self):
        type(self).num_swaps += len(self.holdings.swaps)
        super().copy()


@pytest.mark.parametrize("case", IN_HOST_MEMORY)
@pytest.mark.parametrize("num_host_blocks", [1, 9])
def test_decode_with_host_memory_whatever_the_order(case, num_host_blocks):
    num_blocks, asked, options = DECODE[case]
    Swapping.num_swaps = 0
    explored = explore(Swapping(num_blocks, asked, num_host_blocks=num_host_blocks, **options), MAX_STATES)
    assert explored.num_states > 100, "too few for what the case is about"
    assert Swapping.num_swaps or num_host_blocks == 1, "nobody was swapped out"


class LeavesHostBlocks(DecodeWorld):
    """Forgets what host memory holds of those that end there."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.holdings._free_host = self.keep  # type: ignore[method-assign]

    def keep(self, sequence):
        if not sequence.is_over:
            self.holdings.host_pool.release(sequence.host_table or ())
        sequence.host_table = None


def test_an_exploration_finds_host_memory_that_leaks():
    num_blocks, asked, options = DECODE["two that outgrow the pool together"]
    with pytest.raises(Found, match="none is accounted for"):
        explore(LeavesHostBlocks(num_blocks, asked, num_host_blocks=9, **options), MAX_STATES)
