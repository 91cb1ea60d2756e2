"""Tokens to text: whole characters only, nothing lost, whatever the split."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.detokenizer import Detokenizer

TEXTS = st.one_of(
    st.text(max_size=30),
    st.text(alphabet="日本語漢字한국어가각힣αβжé", max_size=20),
    st.lists(st.sampled_from(["👩‍👩‍👧‍👦", "🏳️‍🌈", "👍🏽", "🇩🇪", "x", " ", "�"]), max_size=8).map("".join),
)


def deltas(detokenizer, token_ids):
    return [*(detokenizer.push([token_id]) for token_id in token_ids), detokenizer.flush()]


@given(data=st.binary(max_size=60))
def test_any_bytes_come_out_as_decoding_them_at_once(byte_tokenizer, data):
    assert "".join(deltas(Detokenizer(byte_tokenizer), data)) == data.decode(errors="replace")


@given(text=TEXTS, cuts=st.lists(st.integers(0, 200), max_size=6))
def test_every_split_of_text_gives_whole_characters(byte_tokenizer, text, cuts):
    data = text.encode()
    detokenizer, start, seen = Detokenizer(byte_tokenizer), 0, ""
    for cut in [*sorted(min(cut, len(data)) for cut in cuts), len(data)]:
        seen += detokenizer.push(data[start:cut])
        start = cut
        assert text.startswith(seen)
        assert len(data[:cut]) - len(seen.encode()) <= 3
    assert seen == text
    assert detokenizer.flush() == ""


@given(text=TEXTS)
def test_real_vocabulary(smollm2, text):
    # The vocabulary lacks a few bytes, which only control characters and planes 4 to 11 need; they vanish in encoding.
    text = "".join(char for char in text if char.isprintable() and not 0x40000 <= ord(char) < 0xC0000)
    token_ids = smollm2.encode(text, add_special_tokens=False)
    assert "".join(deltas(Detokenizer(smollm2, skip_special_tokens=False), token_ids)) == text


@given(token_ids=st.lists(st.integers(0, 49_151), max_size=40))
def test_random_tokens_of_a_real_vocabulary(smollm2, token_ids):
    data = b"".join(smollm2.token_bytes(token_id) for token_id in token_ids if not smollm2.is_special(token_id))
    assert "".join(deltas(Detokenizer(smollm2), token_ids)) == data.decode(errors="replace")


def test_special_tokens_are_skipped_or_not(byte_tokenizer):
    token_ids = [*b"a", 257, *b"b", 258]
    assert "".join(deltas(Detokenizer(byte_tokenizer), token_ids)) == "ab<think>"
    assert "".join(deltas(Detokenizer(byte_tokenizer, skip_special_tokens=False), token_ids)) == "a<|end|>b<think>"


@given(text=TEXTS.filter(bool), place=st.integers(0, 1000))
def test_prompt_may_end_inside_a_character(byte_tokenizer, text, place):
    data = text.encode()
    cut = place % (len(data) + 1)
    num_whole = len(data[:cut].decode(errors="ignore"))
    prompt, output = data[:cut], data[cut:]
    assert "".join(deltas(Detokenizer(byte_tokenizer, prompt_token_ids=list(prompt)), output)) == (
        text[num_whole:] if output else ""
    )


@pytest.mark.parametrize("output", [b"", b"A", b"\xf0\x9f\x98\x80", b"\xff"])
def test_character_of_the_prompt_that_is_never_completed_gives_nothing(byte_tokenizer, output):
    detokenizer = Detokenizer(byte_tokenizer, prompt_token_ids=[*b"x", 0xF0, 0x9F])
    assert "".join(deltas(detokenizer, output)) == output.decode(errors="replace")


def test_output_that_breaks_off_inside_a_character(byte_tokenizer):
    detokenizer = Detokenizer(byte_tokenizer)
    assert detokenizer.push([*b"ok", 0xE6, 0x97]) == "ok"
    assert detokenizer.flush() == "�"


def test_special_token_between_is_no_part_of_the_prompts_character(byte_tokenizer):
    detokenizer = Detokenizer(byte_tokenizer, prompt_token_ids=[0xE6, 0x97, 257])
    assert detokenizer.push([0xA5]) + detokenizer.flush() == "�"


def test_ids_without_a_token_give_nothing(byte_tokenizer):
    assert Detokenizer(byte_tokenizer).push([10**6, *b"a"]) == "a"


def test_sentencepiece_keeps_the_space_of_a_first_word(sentencepiece):
    token_ids = sentencepiece.encode("the", add_special_tokens=False)
    assert deltas(Detokenizer(sentencepiece), token_ids) == [" the", ""]


@given(text=TEXTS)
def test_sentencepiece_falls_back_to_bytes_without_loss(sentencepiece, text):
    token_ids = sentencepiece.encode(text, add_special_tokens=False)
    # It writes spaces and its own mark for them alike.
    expected = " " + text.replace("▁", " ") if text else ""
    assert "".join(deltas(Detokenizer(sentencepiece), token_ids)) == expected
