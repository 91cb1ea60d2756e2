"""Drafters: every file of engine/drafters keeps the contract; prompt lookup guesses what it should; what cannot be had
is done without."""

from __future__ import annotations

import logging
import random

import pytest
from pools import make_sequence

from engine import tracer
from engine.config import WorkerConfig
from engine.drafters import Drafter, Target, ngram, open_drafter
from engine.sequence import DECODE_MOVES
from kvstore.layout import KVLayout
from runtime import plugins
from runtime.errors import ConfigError

LAYOUT = tracer.layout(16)
NEED_MODELS = ("draft_model", "self")


class NoRunner:
    """Nothing is run here."""

    def run(self, batch):
        raise AssertionError("a step was run")


def opened(layout=LAYOUT, **options) -> Drafter | None:
    return open_drafter(Target(WorkerConfig(model="tracer", **options), layout, NoRunner()))


@pytest.mark.parametrize("name", plugins.available("engine.drafters"))
def test_every_drafter_guesses_within_bounds_and_forgets(name):
    if name in NEED_MODELS:
        assert opened(speculation=name) is None  # tests/model has those
        return
    drafter, chance = opened(speculation=name), random.Random(3)
    sequences = [make_sequence([chance.randrange(4) for _ in range(20)], DECODE_MOVES) for _ in range(3)]
    for _ in range(50):
        for sequence in sequences:
            before = list(sequence.token_ids)
            most = chance.randint(1, 15)
            drafts = drafter.propose(sequence, most)
            assert isinstance(drafts, tuple) and len(drafts) <= most and sequence.token_ids == before
            sequence.token_ids += [chance.randrange(4) for _ in range(chance.randint(1, 4))]
    fresh = opened(speculation=name)
    for sequence in sequences:
        assert drafter.propose(sequence, 5) == fresh.propose(sequence, 5), "what is held follows from the tokens alone"
        drafter.forget(sequence)
        drafter.forget(sequence)


def guess(token_ids: list[int], most: int = 4) -> tuple[int, ...]:
    return ngram.Drafter().propose(make_sequence(token_ids, DECODE_MOVES), most)


def test_prompt_lookup_takes_what_followed():
    assert guess([1, 2, 3, 4, 5, 6, 9, 2, 3]) == (4, 5, 6, 9)
    assert guess([1, 2, 3, 4, 5, 6, 9, 2, 3], 2) == (4, 5)
    assert guess([1, 2, 3, 4, 5, 6, 7, 8]) == ()
    assert guess([1]) == guess([1, 1]) == ()


def test_prompt_lookup_takes_the_longest_run_and_of_equal_ones_the_latest():
    assert guess([1, 2, 3, 4, 50, 9, 3, 4, 60, 9, 1, 2, 3, 4], 1) == (50,)
    assert guess([3, 4, 50, 9, 3, 4, 60, 8, 3, 4], 1) == (60,)


def test_prompt_lookup_goes_on_with_its_own_guess_in_a_loop():
    assert guess([9, 1, 2, 3, 1, 2, 3, 1, 2], 8) == (3, 1, 2, 3, 1, 2, 3, 1)
    assert guess([5, 5, 5], 4) == (5, 5, 5, 5)


def test_a_drafter_that_does_not_exist_is_refused():
    with pytest.raises(
        ConfigError, match=r"engine\.drafters: 'oracle' does not exist; available: draft_model, ngram, self"
    ):
        opened(speculation="oracle")


def test_without_memory_for_drafts_decoding_goes_on_without_and_says_so_once(caplog):
    layout = KVLayout(32, 16, 8, 128, "float16")  # 128 KiB a token
    with caplog.at_level(logging.WARNING):
        assert opened(layout, speculation="ngram", draft_length=8, spec_memory_budget_mb=63) is None
    (record,) = caplog.records
    assert record.message.endswith("--spec-memory-budget-mb: 64.0 MiB are needed, with the KV of 512 drafts; got 63")
    assert opened(layout, speculation="ngram", draft_length=8, spec_memory_budget_mb=64) is not None
    assert opened(speculation="none") is None
    assert isinstance(opened(speculation="ngram"), ngram.Drafter)
