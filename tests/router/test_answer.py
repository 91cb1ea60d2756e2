"""The answer as it grows: every position once, in order, cut where a stop string ends."""

from __future__ import annotations

import asyncio

import pytest
from fake_workers import PROMPT, answer_of

from protos import inference_pb2, worker_pb2
from router.answer import Answer, TokensMissing


def token(index: int, text: str | bytes, **fields: object) -> worker_pb2.DecodedToken:
    """The token of one byte at an index of the output."""
    (byte,) = text.encode() if isinstance(text, str) else text
    return worker_pb2.DecodedToken(position=len(PROMPT) + index, token_id=byte, **fields)


def give(answer: Answer, text: str | bytes, first: int = 0) -> None:
    for index, byte in enumerate(text.encode() if isinstance(text, str) else text):
        answer.add(token(first + index, bytes([byte])))


def drain(answer: Answer) -> tuple[str, list[int]]:
    """Takes until nothing is left, as a client does."""
    text, ids = "", []
    while answer.can_take:
        response = answer.take()
        text += response.text
        ids += [each.token_id for each in response.tokens]
    return text, ids


def test_each_position_is_taken_once() -> None:
    answer = answer_of()
    give(answer, "abc")
    give(answer, "abc")
    give(answer, "bcd", first=1)
    assert drain(answer) == ("abcd", list(b"abcd"))
    assert answer.token_ids == list(b"abcd")
    assert answer.next_position == len(PROMPT) + 4


def test_a_repeated_position_keeps_the_first_token() -> None:
    answer = answer_of()
    give(answer, "a")
    give(answer, "X")
    assert answer.token_ids == list(b"a")


def test_a_gap_is_refused_and_changes_nothing() -> None:
    answer = answer_of()
    give(answer, "ab")
    with pytest.raises(TokensMissing, match=f"token {len(PROMPT) + 3} came where {len(PROMPT) + 2}"):
        answer.add(token(3, "d"))
    assert answer.token_ids == list(b"ab")
    give(answer, "cd", first=2)
    assert drain(answer) == ("abcd", list(b"abcd"))


def test_indices_and_logprobs_reach_the_client() -> None:
    answer = answer_of()
    top = [inference_pb2.TokenLogprob(token_id=97, logprob=-0.5)]
    answer.add(token(0, "a", logprob=-0.5, top_logprobs=top))
    answer.add(token(1, "b"))
    first, second = answer.take().tokens
    assert (first.index, first.logprob, list(first.top_logprobs)) == (0, -0.5, top)
    assert second.index == 1 and not second.HasField("logprob")


def test_half_a_character_waits_for_its_other_half() -> None:
    answer = answer_of()
    halves = "é".encode()
    give(answer, halves[:1])
    response = answer.take()
    assert (response.text, [each.token_id for each in response.tokens]) == ("", [halves[0]])
    give(answer, halves[1:], first=1)
    assert answer.take().text == "é"


def test_a_stop_string_cuts_text_and_tokens() -> None:
    answer = answer_of(stops=["cd"])
    give(answer, "abcdefg")
    assert answer.matched_stop == "cd"
    assert answer.complete.is_set()
    assert answer.token_ids == list(b"abcd")
    assert drain(answer) == ("ab", list(b"abcd"))
    assert not answer.can_take


def test_an_included_stop_string_stays_in_the_text() -> None:
    answer = answer_of(stops=["cd"], include_stop=True)
    give(answer, "abcdefg")
    assert drain(answer) == ("abcd", list(b"abcd"))


def test_no_prefix_of_a_stop_string_is_shown_before_its_time() -> None:
    answer = answer_of(stops=["DEFGHIJ"])
    shown = ""
    for index, char in enumerate("ABC DEFGHX DEFGHIJ tail"):
        give(answer, char, first=index)
        shown += answer.take().text
        assert not any(shown.endswith("DEFGHIJ"[:n]) for n in range(1, 8)), shown
    answer.finish()
    assert shown + drain(answer)[0] == "ABC DEFGHX "
    assert answer.matched_stop == "DEFGHIJ"


def test_what_was_held_back_is_text_at_the_end() -> None:
    answer = answer_of(stops=["cdX"])
    give(answer, "abcd")
    assert drain(answer)[0] == "ab"
    answer.finish()
    assert answer.matched_stop is None
    assert drain(answer)[0] == "cd"


def test_a_match_that_waited_for_a_longer_one_counts_at_the_end() -> None:
    """ "bcde" begins further left than "c", so "c" waits for it to be ruled out; the output ends before it is."""
    answer = answer_of(stops=["c", "bcde"])
    give(answer, "abcd")
    assert answer.matched_stop is None
    text, ids = drain(answer)
    answer.finish()
    assert answer.matched_stop == "c"
    rest = drain(answer)
    assert text + rest[0] == "ab"
    assert answer.token_ids == list(b"abc")
    # The client never gets more tokens than the usage counts.
    assert ids + rest[1] == list(b"abc")


def test_a_longer_stop_string_that_is_ruled_out_takes_no_token_back() -> None:
    answer = answer_of(stops=["c", "bcde"])
    ids = []
    for index, char in enumerate("abcdX"):
        give(answer, char, first=index)
        ids += drain(answer)[1]
    assert answer.matched_stop == "c"
    assert ids == answer.token_ids == list(b"abc")


def test_a_longer_stop_string_that_wins_brings_its_tokens() -> None:
    answer = answer_of(stops=["c", "bcde"])
    ids, text = [], ""
    for index, char in enumerate("abcdeX"):
        give(answer, char, first=index)
        new = drain(answer)
        text, ids = text + new[0], ids + new[1]
    assert answer.matched_stop == "bcde"
    assert (text, ids) == ("a", list(b"abcde"))
    assert answer.token_ids == list(b"abcde")


def test_stop_strings_are_not_looked_for_in_the_first_tokens() -> None:
    answer = answer_of(stops=["ab"], min=3)
    give(answer, "abcab!")
    assert answer.matched_stop == "ab"
    assert answer.token_ids == list(b"abcab")
    assert drain(answer)[0] == "abc"


async def test_a_new_token_wakes_the_writing_side_and_the_last_one_the_attempt() -> None:
    answer = answer_of()
    writing = asyncio.create_task(answer.changed.wait())
    await asyncio.sleep(0)
    give(answer, "a")
    await asyncio.wait_for(writing, 1)
    # Used up: the next wait is for the next token, also one that came before it.
    writing = asyncio.create_task(answer.changed.wait())
    await asyncio.sleep(0)
    assert not writing.done()
    give(answer, "ab")
    give(answer, "c", first=2)
    await asyncio.wait_for(writing, 1)
    answer.expect(len(PROMPT) + 5)
    give(answer, "d", first=3)
    assert not answer.complete.is_set()
    await asyncio.wait_for(answer.changed.wait(), 1)
    give(answer, "e", first=4)
    assert answer.complete.is_set()
    answer.expect(len(PROMPT) + 6)
    assert not answer.complete.is_set()
    answer.expect(len(PROMPT) + 5)
    assert answer.complete.is_set()


def test_a_stop_string_completes_an_answer() -> None:
    answer = answer_of(stops=["b"])
    answer.expect(len(PROMPT) + 6)
    give(answer, "ab")
    assert answer.complete.is_set() and answer.matched_stop == "b"
    answer.expect(len(PROMPT) + 6)
    assert answer.complete.is_set()


def test_times_of_tokens() -> None:
    answer = answer_of()
    assert answer.inter_token_latency_ms == 0
    give(answer, "a")
    assert answer.first_token_s is not None and answer.inter_token_latency_ms == 0
    assert answer.first_token_s == answer.last_token_s
    give(answer, "b", first=1)
    assert answer.inter_token_latency_ms == pytest.approx(1000 * (answer.last_token_s - answer.first_token_s))
