"""The model of step times: it finds what made steps long, follows changes, and shrugs at hiccups."""

from __future__ import annotations

import random

import pytest

from engine.batch import Batch
from engine.step_time import MIN_STEPS, WARM_UP_STEPS, StepLoad, StepTimes, load_of


def takes_ms(load: StepLoad) -> float:
    """A worker whose attention is slow."""
    rows = 0.3 * load.num_sequences + 0.0004 * load.num_context_tokens
    return 20 + rows + 0.15 * load.num_prompt_tokens + 2e-5 * load.num_prompt_pairs


def traffic(num_steps: int, seed: int) -> list[StepLoad]:
    """Sequences that come and go, grow, and long prompts now and then."""
    chance, num_sequences, length, loads = random.Random(seed), 8, 300, []
    for index in range(num_steps):
        if chance.random() < 0.05:
            num_sequences = max(1, min(64, num_sequences + chance.choice([-3, -1, 1, 3])))
        length = max(50, min(2000, length + chance.randint(-20, 20)))
        load = StepLoad(num_sequences, num_sequences * length)
        if index // 50 % 4 == 3:
            load = load.with_chunk(chance.choice([64, 256, 512]), index % 50 * 100)
        loads.append(load)
    return loads


def learned(loads: list[StepLoad], seed: int = 0, noise: float = 0.03) -> StepTimes:
    chance, model = random.Random(seed), StepTimes()
    for load in loads:
        model.observe(load, takes_ms(load) * (1 + chance.gauss(0, noise)))
    return model


def off(model: StepTimes, load: StepLoad) -> float:
    predicted = model.predict_ms(load)
    assert predicted is not None
    return abs(predicted / takes_ms(load) - 1)


@pytest.mark.parametrize("seed", range(4))
def test_predictions_are_close_also_amid_hiccups(seed):
    chance, model, misses = random.Random(seed), StepTimes(), []
    for index, load in enumerate(traffic(1500, seed)):
        if index > 200:
            misses.append(off(model, load))
        hiccup_ms = 300 if chance.random() < 0.02 else 0
        model.observe(load, takes_ms(load) * (1 + chance.gauss(0, 0.03)) + hiccup_ms)
    misses.sort()
    assert misses[len(misses) // 2] < 0.01 and misses[int(0.95 * len(misses))] < 0.05


def test_it_says_nothing_before_it_has_seen_enough():
    model = StepTimes()
    for _ in range(WARM_UP_STEPS + MIN_STEPS):
        assert model.predict_ms(StepLoad(1, 10)) is None
        assert model.num_prompt_tokens_within(1.0, StepLoad(1, 10), 0, 77) == 77
        model.observe(StepLoad(1, 10), 20.0)
    assert model.predict_ms(StepLoad(1, 10)) == pytest.approx(20.0)


def test_the_first_steps_of_a_process_teach_nothing():
    model = StepTimes()
    for index in range(WARM_UP_STEPS + MIN_STEPS):
        model.observe(StepLoad(4, 100), 5000.0 if index < WARM_UP_STEPS else 20.0)
    assert model.predict_ms(StepLoad(4, 100)) == pytest.approx(20.0)


def test_one_hiccup_moves_little_and_a_lasting_change_is_followed():
    load, model = StepLoad(16, 16 * 400), learned([StepLoad(16, 16 * 400)] * 200)
    before_ms = takes_ms(load)
    model.observe(load, 50 * before_ms)
    assert model.predict_ms(load) == pytest.approx(before_ms, rel=0.02)
    for _ in range(100):
        model.observe(load, 3 * before_ms)
    assert model.predict_ms(load) == pytest.approx(3 * before_ms, rel=0.2)


def test_what_is_new_is_no_hiccup():
    model = learned([StepLoad(16, 16 * 400)] * 200)
    chunk = StepLoad(16, 16 * 400).with_chunk(512, 0)
    model.observe(chunk, takes_ms(chunk))
    assert off(model, chunk) < 0.15, "one step taught it"


def test_no_step_becomes_shorter_by_holding_more():
    chance, model = random.Random(5), StepTimes()
    for load in traffic(300, 5):
        model.observe(load, chance.uniform(5, 100))
        small = StepLoad(4, 1000)
        for larger in (StepLoad(5, 1000), StepLoad(4, 2000), small.with_chunk(64, 0)):
            now_ms, more_ms = model.predict_ms(small), model.predict_ms(larger)
            assert now_ms is None or more_ms is None or now_ms <= more_ms


def test_a_chunk_is_as_large_as_the_target_allows():
    model, rows = learned(traffic(800, 1), noise=0.0), StepLoad(8, 2400)
    for target_ms in (10.0, 40.0, 80.0):
        fit = model.num_prompt_tokens_within(target_ms, rows, 1000, 512)
        within = [n for n in range(1, 513) if model.predict_ms(rows.with_chunk(n, 1000)) <= target_ms]
        assert fit == max(within, default=0)


def test_what_a_batch_holds():
    rows = Batch(list(range(3)), [0] * 3, [0] * 3, [0, 1, 2, 3], [7, 20, 1])
    assert load_of(rows) == StepLoad(3, 28)
    mixed = Batch(list(range(13)), [0] * 13, [0] * 13, [0, 1, 5, 13], [7, 24, 8])
    assert load_of(mixed) == StepLoad(1, 7, 12, 4 * (20 + 2) + 8 * (0 + 4))
