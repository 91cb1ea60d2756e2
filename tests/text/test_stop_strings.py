"""Stop strings in a stream mean what they mean in the whole text, and nothing of them leaks."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.stops import StopMatcher
from router.text_stream import TextStream

ALPHABETS = st.sampled_from(["ab", "abc", "日本é", "👩‍👧x", "가각 \n"])
CASES = ALPHABETS.flatmap(
    lambda letters: st.tuples(
        st.text(alphabet=letters, max_size=40),
        st.lists(st.text(alphabet=letters, min_size=1, max_size=6), max_size=5),
    )
)


def specification(text: str, stops: list[str]) -> tuple[int, int, str] | None:
    """(start, end, stop): leftmost start, of these the one that ends first. By trying everything."""
    found = [(start, start + len(s), s) for s in stops for start in range(len(text)) if text.startswith(s, start)]
    return min(found, default=None)


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    return [text[start:end] for start, end in pairwise(places)]


@given(case=CASES, cuts=st.lists(st.integers(0, 40), max_size=12), include=st.booleans())
def test_equals_a_search_of_the_whole_text(case, cuts, include):
    text, stops = case
    matcher = StopMatcher(stops, include)
    expected = specification(text, stops)
    emitted, matched = "", None
    for piece in pieces_of(text, cuts):
        delta = matcher.push(piece)
        emitted += delta.text
        assert matched is None or delta.text == ""
        matched = delta if delta.matched is not None else matched
        limit = len(text) if expected is None else expected[1] if include and matched else expected[0]
        assert emitted == text[: min(len(emitted), limit)], "part of a stop string leaked"
    delta = matcher.flush()
    emitted += delta.text
    matched = delta if delta.matched is not None else matched
    if expected is None:
        assert (emitted, matched) == (text, None)
    else:
        start, end, stop = expected
        assert emitted == text[: end if include else start]
        assert matched is not None and (matched.matched, matched.end) == (stop, end)


@given(case=CASES, cuts=st.lists(st.integers(0, 40), max_size=12))
def test_holds_back_no_more_than_may_become_a_stop_string(case, cuts):
    text, stops = case
    matcher, read, emitted = StopMatcher(stops, False), "", ""
    for piece in pieces_of(text, cuts):
        delta = matcher.push(piece)
        read, emitted = read + piece, emitted + delta.text
        if delta.matched is not None or specification(read, stops) is not None:
            return
        longest = max((n for stop in stops for n in range(1, len(stop)) if read.endswith(stop[:n])), default=0)
        assert len(emitted) == len(read) - longest


@pytest.mark.parametrize(
    ("stops", "pieces", "texts", "matched"),
    [
        (["\n\n"], ["a\n", "b\n", "\nc"], ["a", "\nb", ""], "\n\n"),
        (["abcd", "bc"], ["abc", "d"], ["", ""], "abcd"),
        (["abcd", "bc"], ["abc", "x"], ["", "a"], "bc"),
        (["ab", "abc"], ["a", "bc"], ["", ""], "ab"),
        (["aab"], ["aaa", "b"], ["a", ""], "aab"),
        (["x"], ["abc"], ["abc"], None),
        ([], ["any", "thing"], ["any", "thing"], None),
    ],
)
def test_examples(stops, pieces, texts, matched):
    matcher = StopMatcher(stops, include_stop=False)
    got = [matcher.push(piece) for piece in pieces]
    assert [delta.text for delta in got] == texts
    assert got[-1].matched == matched


def test_flush_decides_for_a_match_that_waited():
    matcher = StopMatcher(["abcd", "bc"], include_stop=True)
    assert matcher.push("xabc").text == "x"
    delta = matcher.flush()
    assert (delta.text, delta.matched, delta.end) == ("abc", "bc", 4)
    assert matcher.flush().text == matcher.push("more").text == ""


def test_work_does_not_grow_with_what_is_held_back():
    stop = "a" * 1023 + "b"
    matcher = StopMatcher([stop, "a" * 1000 + "c"], include_stop=False)
    text = "".join(matcher.push("a").text for _ in range(20_000))
    assert len(text) == 20_000 - 1023
    assert matcher.push("b").matched == stop


@given(case=CASES, include=st.booleans())
def test_stream_counts_tokens_up_to_the_one_that_completed_the_stop(byte_tokenizer, case, include):
    text, stops = case
    token_ids = list(text.encode())
    stream = TextStream(byte_tokenizer, [], stops, include)
    emitted, found = "", None
    for token_id in token_ids:
        delta = stream.push(token_id)
        emitted += delta.text
        found = found or (delta if delta.matched_stop is not None else None)
    delta = stream.finish()
    emitted += delta.text
    found = found or (delta if delta.matched_stop is not None else None)
    expected = specification(text, stops)
    if expected is None:
        assert (emitted, found) == (text, None)
    else:
        start, end, stop = expected
        assert emitted == text[: end if include else start]
        assert found is not None
        assert (found.matched_stop, found.num_output_tokens) == (stop, len(text[:end].encode()))


def test_stream_with_a_prompt_that_ends_inside_a_character(byte_tokenizer):
    prompt, output = "日".encode()[:2], [*"日".encode()[2:], *b"stop", *b"more"]
    stream = TextStream(byte_tokenizer, list(prompt), ["日s"], include_stop=False)
    got = [stream.push(token_id) for token_id in output]
    assert (got[1].matched_stop, got[1].num_output_tokens) == ("日s", 2)
    assert "".join(delta.text for delta in got) == ""


def test_stream_matches_a_replacement_character_at_the_end(byte_tokenizer):
    stream = TextStream(byte_tokenizer, [], ["�"], include_stop=False)
    assert [stream.push(token_id).text for token_id in (*b"a", 0xE6)] == ["a", ""]
    delta = stream.finish()
    assert (delta.text, delta.matched_stop, delta.num_output_tokens) == ("", "�", 2)


def test_stream_gives_back_what_it_held_when_the_output_ends(byte_tokenizer):
    stream = TextStream(byte_tokenizer, [], ["stop"], include_stop=False)
    assert "".join(stream.push(token_id).text for token_id in b"do st") == "do "
    assert stream.finish().text == "st"
