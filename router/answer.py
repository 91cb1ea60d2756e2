"""A request's answer as it grows: every position once and in order, its text, and what the client has yet to take.

Prefill and decode both report the first token, a new attempt may repeat some, tokens may be under way when a stop
string is found: `add` takes what is next and drops the rest. Reading and writing sides meet in one asyncio loop.
"""

from __future__ import annotations

import asyncio
import math
import time

from protos import inference_pb2, worker_pb2
from router.text_stream import TextDelta, TextStream
from router.tokenizer import Tokenizer
from router.turns import Signal, Turns
from router.validation import PreparedRequest


class TokensMissing(Exception):
    """A token came before its predecessor: messages were lost on the way, and the attempt must end."""


class Answer:
    """The output of one request over all its attempts."""

    def __init__(
        self,
        request: PreparedRequest,
        tokenizer: Tokenizer,
        arrived_s: float,
        time_allowed_s: float | None = None,
        turns: Turns | None = None,
    ) -> None:
        """`time_allowed_s` is what the client's deadline leaves from now; None: no deadline. `turns` are those of all
        streams that write beside this one; None: there are none."""
        self.request = request
        self.worker_ids = ("", "")
        """Who prefills and who decodes in the attempt of this moment; empty before the first."""
        self.token_ids: list[int] = []
        """Output so far, up to the end of a stop string."""
        self.matched_stop: str | None = None
        """The stop string that ended it."""
        self.arrived_s = arrived_s
        """Monotonic clock."""
        self.deadline_s = None if time_allowed_s is None else time.monotonic() + time_allowed_s
        """When the client stops waiting, monotonic clock; None: never."""
        self.first_token_s: float | None = None
        """When the first token came."""
        self.last_token_s: float | None = None
        """When the last one came."""
        self.changed = Signal(turns or Turns())
        """Something can be taken; for the side that writes to the client."""
        self.complete = asyncio.Event()
        """All that `expect` named is here; for the attempt that waits for the last tokens."""
        self._text = TextStream(
            tokenizer,
            request.prompt_token_ids,
            request.stops,
            request.include_stop,
            min_tokens=request.sampling.min_tokens,
        )
        self._pending_text = ""
        self._pending_tokens: list[inference_pb2.GeneratedToken] = []
        self._num_taken = 0
        self._num_expected = math.inf

    @property
    def next_position(self) -> int:
        """Position of the token that is next, in prompt + output."""
        return len(self.request.prompt_token_ids) + len(self.token_ids)

    def add(self, token: worker_pb2.DecodedToken) -> None:
        """Takes a token if it is the next one; drops one that is here already or comes after a stop string.
        Raises TokensMissing for a gap."""
        position, next_position = token.position, self.next_position
        if self.matched_stop is not None or position < next_position:
            return
        if position > next_position:
            raise TokensMissing(f"token {position} came where {next_position} was expected")
        token_id, token_ids = token.token_id, self.token_ids
        generated = inference_pb2.GeneratedToken(token_id=token_id, index=len(token_ids))
        if token.HasField("logprob"):
            generated.logprob = token.logprob
            generated.top_logprobs.extend(token.top_logprobs)
        token_ids.append(token_id)
        self._pending_tokens.append(generated)
        self.last_token_s = time.monotonic()
        if self.first_token_s is None:
            self.first_token_s = self.last_token_s
        self._take_text(self._text.push(token_id))
        if next_position + 1 >= self._num_expected:
            self.complete.set()

    def expect(self, num_tokens: int) -> None:
        """So many tokens, prompt and output, are all there will be; sets `complete` when they are here."""
        self._num_expected = num_tokens
        if self.next_position >= num_tokens or self.matched_stop is not None:
            self.complete.set()
        else:
            self.complete.clear()

    def finish(self) -> None:
        """No more tokens: what was held back is text now."""
        if self.matched_stop is None:
            self._take_text(self._text.finish())

    def _take_text(self, delta: TextDelta) -> None:
        self._pending_text += delta.text
        if delta.matched_stop is not None:
            self.matched_stop = delta.matched_stop
            assert delta.num_output_tokens is not None
            del self.token_ids[delta.num_output_tokens :]
            # None of those cut off was taken: they were not certain.
            del self._pending_tokens[max(0, len(self.token_ids) - self._num_taken) :]
            self.complete.set()
        self.changed.set()

    @property
    def can_take(self) -> bool:
        """Whether there is anything for the client."""
        return bool(self._pending_text) or self._num_takeable > 0

    @property
    def _num_takeable(self) -> int:
        """Pending tokens that no stop string can cut off any more."""
        if self.matched_stop is not None:
            return len(self._pending_tokens)
        return max(0, min(len(self._pending_tokens), self._text.num_certain_tokens - self._num_taken))

    def take(self) -> inference_pb2.GenerateResponse:
        """What is certain and the client has not taken yet, in one message."""
        num_tokens, tokens = self._num_takeable, self._pending_tokens
        if num_tokens == len(tokens):
            self._pending_tokens = []
        else:
            tokens, self._pending_tokens = tokens[:num_tokens], tokens[num_tokens:]
        response = inference_pb2.GenerateResponse(
            request_id=self.request.request_id, text=self._pending_text, tokens=tokens
        )
        self._pending_text = ""
        self._num_taken += num_tokens
        return response

    @property
    def inter_token_latency_ms(self) -> float:
        """Mean gap between tokens after the first; 0 with fewer than two."""
        if len(self.token_ids) < 2 or self.first_token_s is None or self.last_token_s is None:
            return 0.0
        return 1000 * (self.last_token_s - self.first_token_s) / (len(self.token_ids) - 1)
