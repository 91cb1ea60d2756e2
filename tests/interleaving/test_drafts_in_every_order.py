"""Speculative decoding in the whole system: drafts that are right and wrong, in any order of events and with any fault.

Steps cost nothing here, so every one drafts as much as it may: the tracer's own next tokens, as many of them right as a
script says. One wrong token, block or position would change the answers.
"""

from __future__ import annotations

from collections import Counter
from itertools import islice
from pathlib import Path

import pytest
import whole_system
from every_order import Follower, every_order
from injected_faults import Setting, single_faults
from playing import Play
from random_walks import walk
from whole_system import Ask, Size

from decode_svc import speculation
from decode_svc.speculation import Speculation
from engine import tracer
from engine.batch import SampleRow
from engine.drafters import ngram
from engine.sequence import Sequence
from engine.step_time import StepTimes

SCRIPT = (1, 3, 0, 2)
WRONG = 0
"""The tracer never says it."""
NUM_WALKS = 40
MAX_ORDERS = 20_000


def propose(_: ngram.Drafter, sequence: Sequence, most: int) -> tuple[int, ...]:
    """Right drafts, in turn by the sequence's length, and wrong ones after them."""
    num_right = min(most, SCRIPT[sequence.num_tokens % len(SCRIPT)])
    row = SampleRow(0, 0, sequence.request.sampling)
    return (*tracer.expected_tokens(sequence.token_ids, num_right, row), *[WRONG] * (most - num_right))


@pytest.fixture
def drafts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """All workers draft; counts what came of it."""
    found: Counter[str] = Counter()
    judge = Speculation.judge

    def count(deciding: Speculation, sequence: Sequence, num_drafts: int, num_accepted: int) -> None:
        found.update(drafts=num_drafts, accepted=num_accepted)
        judge(deciding, sequence, num_drafts, num_accepted)

    monkeypatch.setitem(whole_system.WORKER, "speculation", "ngram")
    monkeypatch.setitem(whole_system.WORKER, "draft_length", 4)
    monkeypatch.setattr(ngram.Drafter, "propose", propose)
    monkeypatch.setattr(ngram.Drafter, "evidence", lambda *_: 0)
    monkeypatch.setattr(StepTimes, "with_drafts", lambda *_: lambda num_drafts, num_passes: 1.0)
    monkeypatch.setattr(StepTimes, "is_known", True)
    monkeypatch.setattr(speculation, "PLAIN_EVERY", 10**9)
    monkeypatch.setattr(Speculation, "judge", count)
    return found


def test_in_every_order_a_request_with_drafts_is_answered(drafts: Counter[str]) -> None:
    def play(follower: Follower) -> Play:
        return Play([Ask(num_tokens=5)], follower, size=Size(num_prefill=0, num_decode=1))

    explored = every_order(play, MAX_ORDERS)
    assert explored.is_complete and explored.num_orders > 1
    assert 0 < drafts["accepted"] < drafts["drafts"]


def test_whatever_fails_the_answer_with_drafts_is_right_and_nothing_is_held(drafts: Counter[str], deep: bool) -> None:
    setting = Setting("drafts", [Ask(num_tokens=6)], Size(num_prefill=1, num_decode=1, has_probes=False))
    faults = islice(single_faults(setting), None, None, 1 if deep else 2)  # all are played without drafts
    num_by_attempts = Counter(setting.play(fault).run().num_attempts for fault in faults)
    print(f"\n{sum(num_by_attempts.values())} runs, by attempts: {dict(num_by_attempts)}, {dict(drafts)}")
    assert num_by_attempts[2] > 10, "the faults have become too mild"
    assert 0 < drafts["accepted"] < drafts["drafts"]


def test_random_walks_with_drafts(drafts: Counter[str], deep: bool, first_seed: int, tmp_path: Path) -> None:
    for seed in range(first_seed, first_seed + (10 if deep else 1) * NUM_WALKS):
        try:
            walk(seed, tmp_path).run()
        except AssertionError as violation:
            raise AssertionError(f"walk {seed}: {violation}") from violation
    assert 0 < drafts["accepted"] < drafts["drafts"]
