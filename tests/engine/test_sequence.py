"""The tables of moves, and when generation ends."""

from __future__ import annotations

import itertools

import pytest
from pools import EOS, make_request, make_sequence

from engine.sequence import DECODE_MOVES, PREFILL_MOVES, TERMINAL, FinishReason, Sequence, State

ENDINGS = {State.EVICTED, State.CANCELLED, State.FAILED}
TABLES = {
    "prefill": (
        PREFILL_MOVES,
        {
            (State.QUEUED, State.PREFILLING),
            (State.QUEUED, State.FETCHING),
            (State.FETCHING, State.PREFILLING),
            (State.PREFILLING, State.LEASED),
            (State.PREFILLING, State.QUEUED),
            (State.LEASED, State.FINISHED),
        },
    ),
    "decode": (
        DECODE_MOVES,
        {
            (State.QUEUED, State.FETCHING),
            (State.QUEUED, State.PREFILLING),
            (State.QUEUED, State.FINISHED),
            (State.FETCHING, State.DECODING),
            (State.PREFILLING, State.DECODING),
            *((state, State.PAUSED) for state in (State.FETCHING, State.PREFILLING, State.DECODING)),
            *((State.PAUSED, state) for state in (State.FETCHING, State.PREFILLING, State.DECODING)),
            # The router may find a stop string in output that it already has, at any moment.
            *((state, State.FINISHED) for state in (State.FETCHING, State.PREFILLING, State.DECODING, State.PAUSED)),
        },
    ),
}


@pytest.mark.parametrize("role", TABLES)
def test_moves_are_those_of_the_table_and_no_others(role):
    moves, ways = TABLES[role]
    states = {state for way in ways for state in way} | ENDINGS
    allowed = ways | {(state, ending) for state in states - TERMINAL for ending in ENDINGS}
    for source, target in itertools.product(State, State):
        seen = []
        sequence = Sequence(make_request([1]), moves, 0.0, lambda s, a, b, seen=seen: seen.append((s.state, a, b)))
        sequence.state = source
        if (source, target) in allowed:
            sequence.move(target)
            assert seen == [(target, source, target)], "the observer is told after the move"
        else:
            with pytest.raises(AssertionError, match="illegal move"):
                sequence.move(target)
            assert sequence.state is source and not seen


def ended(outputs, max_model_len=100, **sampling):
    sequence = make_sequence([1, 2, 3], DECODE_MOVES, outputs=outputs, **{"max_tokens": 5, **sampling})
    over = sequence.check_finished((EOS,), max_model_len)
    assert over == (sequence.finish_reason is not None)
    return sequence.finish_reason, sequence.matched_token_id


@pytest.mark.parametrize(
    "outputs, options, expected",
    [
        ((), {}, (None, None)),
        ((4,), {}, (None, None)),
        ((EOS,), {}, (FinishReason.STOP, EOS)),
        ((EOS, 4), {}, (None, None)),
        ((EOS,), {"ignore_eos": True}, (None, None)),
        ((EOS,), {"ignore_eos": True, "stop_token_ids": (EOS,)}, (FinishReason.STOP, EOS)),
        ((4, 6), {"stop_token_ids": (6,)}, (FinishReason.STOP, 6)),
        ((4,), {"max_tokens": 1}, (FinishReason.LENGTH, None)),
        ((EOS,), {"max_tokens": 1}, (FinishReason.STOP, EOS)),
        ((EOS,), {"max_tokens": 1, "ignore_eos": True}, (FinishReason.LENGTH, None)),
        ((4, 4, 4, 4, 4), {}, (FinishReason.LENGTH, None)),
        ((4, 4, 4, 4, 4, 4), {}, (FinishReason.LENGTH, None)),
        ((4,), {"max_model_len": 4}, (FinishReason.LENGTH, None)),
        ((4,), {"max_model_len": 5}, (None, None)),
        ((), {"max_model_len": 3}, (None, None)),
    ],
)
def test_when_generation_ends(outputs, options, expected):
    assert ended(outputs, **options) == expected


def test_prompt_ids_never_end_generation():
    sequence = make_sequence([EOS], DECODE_MOVES, stop_token_ids=(EOS,))
    assert not sequence.check_finished((EOS,), 100)
