"""`target_step_ms` in simulated time: what is let in, what chunks are cut to, and that all comes to its end."""

from __future__ import annotations

import random

import pytest
from simulating import Client, DecodeSimulation

from engine.batch import Batch
from engine.planning import Plan, build_batch
from engine.request import Priority
from engine.step_time import MIN_STEPS, WARM_UP_STEPS, StepLoad, load_of

TARGET_MS = 40.0
BLOCK_SIZE = 4


def takes_ms(load: StepLoad) -> float:
    """10 ms, 2 a sequence, 1 a token of a prompt."""
    return 10 + 2 * load.num_sequences + load.num_prompt_tokens + 0.002 * load.num_context_tokens


class Timed(DecodeSimulation):
    """Steps take what they hold, with noise, and the scheduler is told."""

    def __init__(self, clients: list[Client], seed: int = 0, **limits: object) -> None:
        merged = {"max_num_seqs": 64, "max_num_tokens": 256, "chunk_size": 256, **limits}
        super().__init__(clients, 4000, **merged)
        self._chance = random.Random(seed)
        self.steps: list[tuple[StepLoad, float]] = []

    def duration_s(self, plan: Plan) -> float:
        if not plan.slices:
            return 0.01
        batch: Batch = build_batch(plan, BLOCK_SIZE, ())
        load = load_of(batch)
        duration_ms = takes_ms(load) * (1 + self._chance.gauss(0, 0.02))
        if self.scheduler.step_times is not None:
            self.scheduler.step_times.observe(load, duration_ms)
        self.steps.append((load, duration_ms))
        return duration_ms / 1000


def crowd(source: str | None, length: int = 8) -> list[Client]:
    return [Client(0.01 * index, length, max_tokens=60, source=source) for index in range(150)]


def test_no_more_is_let_in_than_keeps_the_step_within_its_target():
    without, within = Timed(crowd("p")), Timed(crowd("p"), target_step_ms=TARGET_MS)
    without.run()
    within.run()
    assert max(ms for _, ms in without.steps) > 2 * TARGET_MS
    # Those that came before anything was known are not paused; from then on it holds.
    known = within.steps[WARM_UP_STEPS + MIN_STEPS + 80 :]
    over = [ms for _, ms in known if ms > 1.05 * TARGET_MS]
    assert len(over) <= 0.02 * len(known) and max(ms for _, ms in known) < 1.2 * TARGET_MS
    assert max(load.num_sequences for load, _ in known) >= 13, "as many as fit are let in"
    assert all(client.done_s for client in within._coming) and not within._client_of


def test_one_always_runs_though_no_step_is_within_the_target():
    world = Timed(crowd("p")[:30], target_step_ms=1.0)
    world.run()
    late = world.steps[-200:]
    assert {load.num_sequences for load, _ in late} == {1}


@pytest.mark.parametrize("length", [300, 900])
def test_chunks_of_prompts_are_cut_to_what_the_target_leaves(length):
    clients = [Client(0.0, 8, max_tokens=400) for _ in range(4)]
    clients += [Client(2.0 + index, length, max_tokens=4) for index in range(6)]
    world = Timed(clients, target_step_ms=TARGET_MS)
    world.run()
    mixed = [(load, ms) for load, ms in world.steps if load.num_prompt_tokens and load.num_sequences]
    assert len(mixed) > 6 * length / 256
    assert sum(ms > 1.1 * TARGET_MS for _, ms in mixed) <= 2, "the first ones teach what a prompt costs"
    assert max(load.num_prompt_tokens for load, _ in mixed[-20:]) > 15, "what is left is used"


def test_a_prompt_goes_on_by_a_block_a_step_where_the_target_leaves_nothing():
    clients = [Client(0.0, 8, max_tokens=400) for _ in range(4)] + [Client(2.0, 200, max_tokens=2)]
    world = Timed(clients, target_step_ms=5.0, max_num_tokens=64, chunk_size=64)
    world.run()
    assert all(len(client.outputs) == client.max_tokens for client in clients)
    assert {load.num_prompt_tokens for load, _ in world.steps[-200:]} <= {0, BLOCK_SIZE}


def test_a_higher_class_takes_the_place_of_a_lower_in_a_full_step():
    low = [Client(0.01 * index, 8, Priority.LOW, max_tokens=300, source="p") for index in range(30)]
    high = Client(8.0, 8, Priority.HIGH, max_tokens=5, source="p")
    world = Timed([*low, high], target_step_ms=TARGET_MS, ageing_s=60.0)
    world.run()
    assert high.first_token_s - high.asked_s < 0.5
    assert sum(client.num_preemptions for client in low) == 1, "one place, also where the step is too long already"
