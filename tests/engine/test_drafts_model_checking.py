"""Every order of events of small pools whose steps compute drafts: right and wrong ones roll back to the same accounts.

The cases of `test_model_checking` in which blocks, seats or places are short, with scripts of how many drafts are
right. Blocks have four tokens and drafts are up to five, so that they cross into one block more, and two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from decode_world import Asked, DecodeWorld
from exploring import Found, explore
from pools import BLOCK_SIZE
from test_model_checking import DECODE, MAX_STATES

from decode_svc.speculation import Speculation
from engine.holdings import Holdings
from engine.request import Priority, Sample
from engine.scheduling import NewToken
from engine.sequence import Sequence

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
LONG = [Asked(3, 1, Priority.NORMAL, 9), Asked(3, 2, Priority.HIGH, 9, first=100)]
MANY_DRAFTS = {"script": (1, 0, 3, 2), "expected": 99, "max_num_tokens": 24, "num_faults": 0}


@pytest.mark.parametrize("draft_length", [1, 5])
@pytest.mark.parametrize("script", SCRIPTS.values(), ids=list(SCRIPTS))
@pytest.mark.parametrize("case", CASES)
def test_drafts_whatever_the_order(case, script, draft_length):
    num_blocks, asked, options = DECODE[case]
    options = {"max_num_tokens": 24, "expected": 99, **options, "draft_length": draft_length}
    explored = explore(DecodeWorld(num_blocks, asked, script=script, **options), MAX_STATES)
    assert explored.num_states > 50, "too few for what the case is about"


def test_drafts_for_which_the_step_has_no_room_give_their_blocks_back():
    """Two sequences of five drafts each, in steps of six tokens."""
    explored = explore(DecodeWorld(8, LONG, **{**MANY_DRAFTS, "max_num_tokens": 6}), MAX_STATES)
    assert explored.num_states > 50


Accept = Callable[[Speculation, Sequence, tuple[int, ...], list[Sample], Callable[[Sequence, Sample], NewToken]], Any]
ACCEPT: Accept = Speculation.accept


def takes_every_draft(speculation, sequence, drafts, samples, append):
    """Believes what follows a wrong guess."""
    sequence.num_computed += len(drafts)
    return [append(sequence, sample) for sample in samples if not sequence.is_over]


def takes_one_too_many(speculation, sequence, drafts, samples, append):
    """Believes what follows the first wrong guess."""
    new_tokens = ACCEPT(speculation, sequence, drafts, samples, append)
    if len(new_tokens) < len(samples) and not sequence.is_over:
        sequence.num_computed += 1
        new_tokens.append(append(sequence, samples[len(new_tokens)]))
    return new_tokens


def passes_over_one(speculation, sequence, drafts, samples, append):
    """Loses the first token that came true."""
    if len(drafts) > 1 and drafts[0] == sequence.token_ids[-1]:
        sequence.num_computed += 1
        return [append(sequence, samples[1])]
    return ACCEPT(speculation, sequence, drafts, samples, append)


def counts_wrong_ones_as_computed(speculation, sequence, drafts, samples, append):
    new_tokens = ACCEPT(speculation, sequence, drafts, samples, append)
    if len(new_tokens) < len(drafts) and not sequence.is_over:
        sequence.num_computed += 1
    return new_tokens


def keeps_blocks_of_wrong_ones(speculation, sequence, drafts, samples, append):
    num_blocks = len(sequence.block_table)
    new_tokens = ACCEPT(speculation, sequence, drafts, samples, append)
    if not new_tokens and not sequence.is_over:
        speculation._holdings.grow(sequence, num_blocks * BLOCK_SIZE)
    return new_tokens


def gives_back_what_came_true(speculation, sequence, drafts, samples, append):
    """The block that its last token has just begun."""
    new_tokens = ACCEPT(speculation, sequence, drafts, samples, append)
    if not sequence.is_over and sequence.num_computed % BLOCK_SIZE == 1 and len(new_tokens) > 1:
        speculation._holdings.shrink(sequence, sequence.num_computed - 1)
    return new_tokens


def lets_others_find_wrong_ones(speculation, sequence, drafts, samples, append):
    """Registers rows before it knows which came true."""
    if not sequence.is_over:
        sequence.num_computed += len(drafts)
        speculation._holdings.register_computed(sequence)
        sequence.num_computed -= len(drafts)
    return ACCEPT(speculation, sequence, drafts, samples, append)


BROKEN: dict[Accept, str] = {
    takes_every_draft: "another token",
    takes_one_too_many: "another token",
    passes_over_one: "another token",
    counts_wrong_ones_as_computed: "the work stands still",
    keeps_blocks_of_wrong_ones: "blocks of drafts were kept",
    gives_back_what_came_true: r"AssertionError\(\)",
    lets_others_find_wrong_ones: "a block is 4 tokens",
}


@pytest.mark.parametrize("broken", BROKEN, ids=[each.__name__ for each in BROKEN])
def test_an_exploration_finds_an_acceptance_that(broken, monkeypatch):
    monkeypatch.setattr(Speculation, "accept", broken)
    with pytest.raises(Found, match=BROKEN[broken]):
        script = (0,) if broken is keeps_blocks_of_wrong_ones else MANY_DRAFTS["script"]
        explore(DecodeWorld(8, LONG, **{**MANY_DRAFTS, "script": script}), MAX_STATES)


def test_an_exploration_finds_blocks_of_drafts_that_were_not_taken(monkeypatch):
    add_to, shrink = Speculation.add_to, Holdings.shrink

    def keeping(speculation, plan):
        monkeypatch.setattr(Holdings, "shrink", lambda *_: None)
        add_to(speculation, plan)
        monkeypatch.setattr(Holdings, "shrink", shrink)

    monkeypatch.setattr(Speculation, "add_to", keeping)
    with pytest.raises(Found, match="blocks of drafts were kept"):
        explore(DecodeWorld(8, LONG, **{**MANY_DRAFTS, "max_num_tokens": 3}), MAX_STATES)
