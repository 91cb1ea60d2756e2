"""Every order of events of small pools whose steps compute drafts: right and wrong ones roll back to the same accounts.

The cases of `test_model_checking` in which blocks, seats or places are short, with scripts of how many drafts are
right. Blocks have four tokens and drafts are up to five, so that they cross into one block more, and two.
"""

from __future__ import annotations

import pytest
from decode_world import Asked, DecodeWorld
from exploring import Found, explore
from test_model_checking import DECODE, MAX_STATES

from engine.holdings import Holdings
from engine.request import Priority

SCRIPTS = {"none right": (0,), "all right": (9,), "some right": (1, 0, 3, 2)}
CASES = (
    "two that wait for each other's look-ahead block",
    "two that outgrow the pool together",
    "outputs twice as long as the pool has room for at once",
    "a high class lacks a seat",
    "a high class lacks blocks",
    "a high class lacks places in the step",
    "a shared prefix",
    "static batches that outgrow the pool",
)


@pytest.mark.parametrize("draft_length", [1, 5])
@pytest.mark.parametrize("script", SCRIPTS.values(), ids=list(SCRIPTS))
@pytest.mark.parametrize("case", CASES)
def test_drafts_whatever_the_order(case, script, draft_length):
    num_blocks, asked, options = DECODE[case]
    options = {"max_num_tokens": 24, "expected": 99, **options, "draft_length": draft_length}
    explored = explore(DecodeWorld(num_blocks, asked, script=script, **options), MAX_STATES)
    assert explored.num_states > 50, "too few for what the case is about"


LONG = [Asked(3, 1, Priority.NORMAL, 9), Asked(3, 2, Priority.HIGH, 9, first=100)]
MANY_DRAFTS = {"script": (1, 0, 3, 2), "expected": 99, "max_num_tokens": 24, "num_faults": 0}


def test_an_exploration_finds_blocks_of_wrong_drafts_that_are_kept(monkeypatch):
    monkeypatch.setattr(Holdings, "shrink", lambda *_: None)
    with pytest.raises(Found, match="blocks of drafts were kept"):
        explore(DecodeWorld(8, LONG, **{**MANY_DRAFTS, "script": (0,)}), MAX_STATES)


class TakesEveryDraft(DecodeWorld):
    """Believes what follows a wrong guess."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.scheduler.speculation.accept = self.accept  # type: ignore[method-assign]

    def accept(self, sequence, drafts, samples, append):
        sequence.num_computed += len(drafts)
        return [append(sequence, sample) for sample in samples if not sequence.is_over]


def test_an_exploration_finds_what_follows_a_wrong_draft():
    with pytest.raises(Found, match="KV of someone else"):
        explore(TakesEveryDraft(8, LONG, **MANY_DRAFTS), MAX_STATES)
