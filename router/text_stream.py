"""From a request's output tokens to the text its client may see.

Joins `router.detokenizer` and `router.stops`, and knows which token completed a stop string, so that the output can be
cut there. Its state depends on the tokens alone: an attempt that takes over goes on with the same stream, and pushing
the same tokens into a new one rebuilds it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from router.detokenizer import Detokenizer
from router.stops import StopDelta, StopMatcher
from router.tokenizer import Tokenizer


class TextDelta(NamedTuple):
    """What a token led to. There is one for each token, and a tuple takes a quarter of the time of a dataclass."""

    text: str
    """Text to send now: whole characters, never part of a stop string unless that was asked for."""
    matched_stop: str | None = None
    """The stop string that was found; the output ends with it."""
    num_output_tokens: int | None = None
    """With a match: the output's tokens up to and including the one that completed the stop string. May be fewer than
    were pushed, when a longer stop string that began further left had to be ruled out first."""


class TextStream:
    """The text of one request's output."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        stops: Sequence[str],
        include_stop: bool,
        min_tokens: int = 0,
    ) -> None:
        """Of the prompt only an incomplete last character matters: its last few tokens are enough. The text of the
        first `min_tokens` output tokens is not searched for stop strings."""
        self._detokenizer = Detokenizer(tokenizer, prompt_token_ids=prompt_token_ids)
        self._matcher = StopMatcher(stops, include_stop)
        self._has_stops = bool(stops)
        self._num_tokens = 0
        self._min_tokens = min_tokens
        self._num_unsearched_chars = 0
        self._num_chars_after: list[int] = []  # for each token: characters that are whole after it

    def push(self, token_id: int) -> TextDelta:
        """Takes the next output token. After a match tokens lead to nothing."""
        text = self._detokenizer.push((token_id,))
        self._num_tokens += 1
        if not self._has_stops:
            return TextDelta(text)
        num_chars_before = self._num_chars_after[-1] if self._num_chars_after else 0
        self._num_chars_after.append(num_chars_before + len(text))
        if self._num_tokens <= self._min_tokens:
            self._num_unsearched_chars += len(text)
            return TextDelta(text)
        return self._delta(self._matcher.push(text))

    @property
    def num_certain_tokens(self) -> int:
        """Leading tokens that no match can cut off any more; all that were pushed, unless a match waits for a longer
        one to be ruled out."""
        end = self._matcher.waiting_end
        return self._num_tokens if end is None else self._num_tokens_to(end)

    def finish(self) -> TextDelta:
        """Ends the output: gives what was held back. Even now a stop string may turn out to have matched."""
        before = self._matcher.push(self._detokenizer.flush())
        return self._delta(before if before.matched is not None else self._join(before, self._matcher.flush()))

    @staticmethod
    def _join(first: StopDelta, second: StopDelta) -> StopDelta:
        return StopDelta(first.text + second.text, second.matched, second.end)

    def _delta(self, delta: StopDelta) -> TextDelta:
        if delta.end is None:
            return TextDelta(delta.text)
        return TextDelta(delta.text, delta.matched, self._num_tokens_to(delta.end))

    def _num_tokens_to(self, end: int) -> int:
        """Tokens up to the one that completed the searched text's first `end` characters."""
        # The end of an incomplete character is whole only after the last token.
        num_tokens = bisect_left(self._num_chars_after, self._num_unsearched_chars + end) + 1
        return min(num_tokens, len(self._num_chars_after))
