"""What the bench asks: datasets, a file that is cut off, seeds, and arrival times."""

from __future__ import annotations

import io
import itertools
import json
import statistics
from pathlib import Path

import pytest

from baton.bench import asks as module
from baton.bench.asks import MAX_OUTPUT_TOKENS, Asks, read_conversations, read_records
from baton.bench.load import arrival_times
from runtime.errors import ConfigError


def conversation(question: str, answer: str, first: str = "human") -> dict[str, object]:
    turns = [{"from": first, "value": question}, {"from": "gpt", "value": answer}, {"from": "human", "value": "more"}]
    return {"id": "x", "conversations": turns}


def written(folder: Path, records: list[object], cut: int = 0) -> Path:
    """A file of these records, without its last `cut` bytes."""
    content = json.dumps(records, ensure_ascii=False, indent=1).encode()
    path = folder / "conversations.json"
    path.write_bytes(content[: len(content) - cut])
    return path


def test_a_file_that_is_cut_off_gives_its_whole_records(tmp_path: Path) -> None:
    records = [conversation(f"question {index}", f"answer {index}") for index in range(5)]
    turns = read_conversations(written(tmp_path, records, cut=40), 100)
    assert turns == [(f"question {index}", f"answer {index}") for index in range(4)]


def test_a_file_may_be_cut_at_any_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a character of several bytes too, and whatever the size of a read."""
    monkeypatch.setattr(module, "CHUNK_BYTES", 7)
    records = [{"text": "größer [als] {das}, \u4f60\u597d"}, {"text": "\\u00e9 \U0001f600"}, {"n": [1, 2]}]
    content = json.dumps(records, ensure_ascii=False).encode()
    counts = []
    for length in range(len(content) + 1):
        found = list(read_records(io.BytesIO(content[:length])))
        assert found == records[: len(found)]
        counts.append(len(found))
    assert counts == sorted(counts) and counts[-1] == 3


def test_only_as_much_is_read_as_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_BYTES", 64)
    content = io.BytesIO(written(tmp_path, [conversation("q" * 50, "a")] * 1000).read_bytes())
    assert len(list(itertools.islice(read_records(content), 3))) == 3
    assert content.tell() < 2000


def test_records_of_another_shape_are_passed_over(tmp_path: Path) -> None:
    others: list[object] = [7, [], {}, {"conversations": []}, {"conversations": [1, 2]}, {"conversations": "ab"}]
    others += [conversation("q", "a", first="system"), conversation("", "a"), conversation("q", "")]
    assert read_conversations(written(tmp_path, [*others, conversation("kept", "a")]), 9) == [("kept", "a")]


def test_lengths_of_conversations_are_those_of_question_and_answer(tmp_path: Path) -> None:
    """The tracer's tokens are bytes."""
    records = [conversation("four", "answer"), conversation("abc", "too short"), conversation("q" * 1025, "too long")]
    records += [conversation("q" * 1024, "a" * 600)]
    found = Asks(257, 1).from_conversations(4, "tracer", written(tmp_path, list(records)))
    lengths = sorted((len(ask.prompt_token_ids), ask.output_tokens) for ask in found)
    assert lengths == [(4, 6), (4, 6), (1024, MAX_OUTPUT_TOKENS), (1024, MAX_OUTPUT_TOKENS)]


def test_a_seed_chooses_among_conversations_and_repeats(tmp_path: Path) -> None:
    file = written(tmp_path, [conversation("q" * (4 + index), "a" * (1 + index)) for index in range(50)])
    first, again, other = (Asks(257, seed).from_conversations(10, "tracer", file) for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize("content", ["", "no JSON", "[]", '[{"conversations": []}]'])
def test_a_file_without_conversations_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "empty.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match="no conversation in it"):
        Asks(257, 0).from_conversations(1, "tracer", path)


def test_conversations_that_are_all_too_short_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="4 to 1024 tokens"):
        Asks(257, 0).from_conversations(1, "tracer", written(tmp_path, [conversation("abc", "a")]))


def test_a_missing_file_and_a_missing_package_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.json cannot be read"):
        read_conversations(tmp_path / "nowhere.json", 1)
    monkeypatch.setattr(module, "SHAREGPT_PACKAGE", "no_such_package")
    with pytest.raises(ConfigError, match=r"no-such-package is not installed.*--dataset-file"):
        read_conversations(None, 1)


def test_random_prompts_have_their_length_and_share_no_beginning() -> None:
    found = Asks(49152, 3).many(20, 16, 5)
    assert {(len(ask.prompt_token_ids), ask.output_tokens) for ask in found} == {(16, 5)}
    assert len({ask.prompt_token_ids[:4] for ask in found}) == 20
    assert found == Asks(49152, 3).many(20, 16, 5) != Asks(49152, 4).many(20, 16, 5)


def test_prefix_prompts_share_three_quarters_with_a_few() -> None:
    found = Asks(49152, 3).with_prefixes(100, 20, 5)
    assert {len(ask.prompt_token_ids) for ask in found} == {20}
    assert len({ask.prompt_token_ids[:15] for ask in found}) == 4
    assert len({ask.prompt_token_ids for ask in found}) == 100


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_arrivals_have_rate_and_burstiness(burstiness: float) -> None:
    """Gaps of a gamma distribution: mean 1 / rate, and a variance of mean² / shape."""
    times = list(itertools.islice(arrival_times(5.0, burstiness, seed=7), 20_000))
    gaps = [later - earlier for earlier, later in itertools.pairwise([0.0, *times])]
    assert min(gaps) >= 0
    assert statistics.fmean(gaps) == pytest.approx(0.2, rel=0.05)
    assert statistics.variance(gaps) == pytest.approx(0.04 / burstiness, rel=0.1)


def test_arrivals_repeat_with_their_seed() -> None:
    first, again, other = (list(itertools.islice(arrival_times(5.0, 1.0, seed), 50)) for seed in (1, 1, 2))
    assert first == again != other
