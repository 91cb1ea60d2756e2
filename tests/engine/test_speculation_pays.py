"""How many drafts pay by virtual costs: as fast as the best fixed number, never slower than none, hardly tried in vain.

Texts are what a model said, so prompt lookup is right where it would be; other guesses come true by chance. Shares of
what could be had are of one run each, with times that are off by some percent, as they are on machines.
"""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from drafting import WRONG_DRAFT
from virtual_costs import (
    COSTS,
    Chancy,
    Measured,
    Text,
    always_dear,
    counted,
    measure,
    reading_weights,
    recorded,
    two_cores,
)

from engine.drafters import Drafter, ngram
from engine.sequence import Sequence

NUM_TOKENS = 400
WARM_UP_STEPS = 20
"""First steps of a worker, in which times become known; they are not measured."""
LENGTHS = (1, 2, 3, 5, 8)
"""Fixed ones to compare with. Where nothing comes true the shortest is the best of them."""


def measured(batch_size, cost, drafter: Drafter | None, texts=None, **options) -> Measured:
    return measure(texts or counted(batch_size, NUM_TOKENS), batch_size, cost, drafter, WARM_UP_STEPS, **options)


@pytest.mark.parametrize("rate", [0.0, 0.6, 0.9])
@pytest.mark.parametrize("batch_size", [1, 32])
@pytest.mark.parametrize("cost", COSTS)
def test_it_is_about_as_fast_as_the_best_fixed_length_and_never_slower_than_none(cost, batch_size, rate):
    none = measured(batch_size, COSTS[cost], None)
    fixed = [
        measured(batch_size, COSTS[cost], Chancy(lambda *_: rate), is_fixed=True, draft_length=length).rate
        for length in (LENGTHS if rate else LENGTHS[:1])
    ]
    adaptive = measured(batch_size, COSTS[cost], Chancy(lambda *_: rate), draft_length=8)
    assert adaptive.rate >= 0.98 * none.rate
    assert adaptive.rate >= 0.93 * max(fixed)  # times are noisy: the worst of these is 0.934


@pytest.mark.parametrize("rate", [0.0, 0.9])
@pytest.mark.parametrize("batch_size", [4, 32])
@pytest.mark.parametrize("cost", COSTS)
def test_so_it_is_where_a_model_drafts(cost, batch_size, rate):
    """Each draft of the longest run takes a run of it."""
    none = measured(batch_size, COSTS[cost], None)
    fixed = [
        measured(batch_size, COSTS[cost], Chancy(lambda *_: rate, True), is_fixed=True, draft_length=length).rate
        for length in (LENGTHS if rate else LENGTHS[:1])
    ]
    adaptive = measured(batch_size, COSTS[cost], Chancy(lambda *_: rate, True), draft_length=8)
    assert adaptive.rate >= 0.98 * none.rate
    assert adaptive.rate >= 0.8 * max(fixed)


@pytest.mark.parametrize("text", ["story", "records"])
@pytest.mark.parametrize("batch_size", [1, 16, 32])
@pytest.mark.parametrize("cost", COSTS)
def test_so_it_is_on_what_a_model_said(cost, batch_size, text):
    texts = [recorded(text)[index % 8] for index in range(max(8, 2 * batch_size))]
    none = measured(batch_size, COSTS[cost], None, texts)
    fixed = [
        measured(batch_size, COSTS[cost], ngram.Drafter(), texts, is_fixed=True, draft_length=length).rate
        for length in LENGTHS
    ]
    adaptive = measured(batch_size, COSTS[cost], ngram.Drafter(), texts, draft_length=8, noise=0.04, drift=0.1)
    assert adaptive.rate >= 0.99 * none.rate
    assert adaptive.rate >= 0.98 * max(fixed)


class Mistaken(ngram.Drafter):
    """Has guesses where prompt lookup has, and none comes true."""

    def propose(self, sequence: Sequence, most: int) -> tuple[int, ...]:
        return (WRONG_DRAFT,) * len(super().propose(sequence, most))


@pytest.mark.parametrize("text", ["story", "records"])
@pytest.mark.parametrize("batch_size", [1, 32])
@pytest.mark.parametrize("cost", COSTS)
def test_what_is_always_mistaken_costs_next_to_nothing(cost, batch_size, text):
    texts = [recorded(text)[index % 8] for index in range(max(8, 2 * batch_size))]
    none = measured(batch_size, COSTS[cost], None, texts)
    adaptive = measured(batch_size, COSTS[cost], Mistaken(), texts, draft_length=8, noise=0.03, drift=0.05)
    assert adaptive.num_drafts > 0 and adaptive.num_right == 0
    assert adaptive.rate >= 0.98 * none.rate


def stuttering(num_texts: int, num_tokens: int = 1200) -> list[Text]:
    """One token again and again, now and then another one: always there is a guess, for which little or much speaks."""
    chance, texts = random.Random(1), list[Text]()
    for _ in range(num_texts):
        answer = [100 + index if chance.random() < 0.08 else 5 for index in range(num_tokens)]
        texts.append(Text((5,) * 4, tuple(answer)))
    return texts


@pytest.mark.parametrize("draft_ms", [0.5, 2, 5, 10])
@pytest.mark.parametrize("batch_size", [1, 4])
def test_so_does_what_is_always_mistaken_however_much_speaks_for_it(batch_size, draft_ms):
    """A draft takes up to half a step."""

    def cost(_, num_drafts: int, __: int = 0) -> float:
        return 20 + draft_ms * num_drafts

    none = measured(batch_size, cost, None, stuttering(batch_size))
    adaptive = measured(batch_size, cost, Mistaken(), stuttering(batch_size))
    assert adaptive.num_drafts > 0 and adaptive.num_right == 0
    assert adaptive.rate >= 0.98 * none.rate


@pytest.mark.parametrize("seed", range(5))
def test_a_few_unlucky_times_do_not_end_drafting(seed):
    """Steps are off by a quarter; what drafts give is worth more."""
    none = measured(4, two_cores, None)
    adaptive = measured(4, two_cores, Chancy(lambda *_: 0.8, seed=seed), draft_length=8, noise=0.25, seed=seed)
    assert adaptive.rate > 1.8 * none.rate


class NowAndThen(Chancy):
    """Has a guess for a few sequences only, a right one."""

    def propose(self, sequence: Sequence, most: int) -> tuple[int, ...]:
        return super().propose(sequence, most) if sequence.token_ids[0] % 10 == 9 else ()


@pytest.mark.parametrize("batch_size", [16, 32])
def test_those_without_a_guess_do_not_keep_others_from_drafting(batch_size):
    none = measured(batch_size, two_cores, None)
    assert measured(batch_size, two_cores, NowAndThen(lambda *_: 0.95), draft_length=8).rate > 1.03 * none.rate


class TwoKinds(Chancy):
    """Guesses for which something speaks come true, others do not."""

    most_evidence = 9

    def propose(self, sequence: Sequence, most: int) -> tuple[int, ...]:
        self._is_good = sequence.num_tokens % 3 == 0
        return super().propose(sequence, most)

    def evidence(self, sequence: Sequence) -> int:
        return 9 if self._is_good else 1


def test_evidence_tells_good_guesses_from_bad_ones():
    drafter = TwoKinds(lambda num_outputs, _: 0.95 if num_outputs % 3 == 0 else 0.05)
    found = measured(1, always_dear, drafter, draft_length=1)
    assert found.num_right > 0.8 * found.num_drafts > 100


def test_what_never_pays_is_hardly_tried():
    drafter = Chancy(lambda *_: 0.0)
    found = measured(1, always_dear, drafter)
    assert drafter.num_asked < 0.1 * len(found.lengths)
    assert sum(found.lengths[200:]) <= 20


def test_drafts_begin_when_a_text_begins_to_repeat_itself_and_end_when_it_does_not():
    def rate(num_outputs: int, _: int) -> float:
        return 0.9 if 200 <= num_outputs < 400 else 0.0

    lengths = measured(1, always_dear, Chancy(rate), counted(1, 800)).lengths
    before, after = lengths[40:190], lengths[-150:]
    assert sum(before) < 0.1 * len(before) and sum(after) < 0.2 * len(after)
    assert max(lengths) >= 3


def test_few_changes_where_times_and_guesses_are_steady():
    lengths = measured(4, reading_weights, Chancy(lambda *_: 0.7), noise=0.05).lengths[50:]
    assert sum(one != other for one, other in pairwise(lengths)) < 0.2 * len(lengths)


def test_a_step_is_not_made_longer_than_its_target():
    lengths = measured(1, always_dear, Chancy(lambda *_: 1.0), target_step_ms=5.5, noise=0.0).lengths
    assert max(lengths[60:]) == 2
