"""Drafts for scheduler tests: guesses that are right as often as a script says, and what is sampled after them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from decode_svc.scheduler import DecodeScheduler
from engine.drafters import Drafter, Target
from engine.planning import Slice
from engine.request import Sample
from engine.sequence import Sequence

TrueToken = Callable[[Sequence, int], int]
"""What is sampled at a position of a sequence."""
WRONG_DRAFT, AFTER_WRONG_DRAFT = 7, 8
"""A guess that never comes true, and what is sampled after it: it may never become a token."""


class MadeByTests(Drafter):
    """A drafter that nobody opens by its name."""

    @classmethod
    def open(cls, target: Target) -> Drafter:
        raise AssertionError("tests make it")

    def forget(self, sequence: Sequence) -> None:
        pass


class Scripted(MadeByTests):
    """Guesses of which the first ones are right: how many, the script says, in turn by the sequence's length."""

    def __init__(self, true_token: TrueToken, script: tuple[int, ...]) -> None:
        self._true_token = true_token
        self._script = script
        self.num_asked = 0
        self.known: set[Sequence] = set()

    def propose(self, sequence: Sequence, most: int) -> tuple[int, ...]:
        self.num_asked += 1
        self.known.add(sequence)
        num_tokens = sequence.num_tokens
        num_right = min(most, self._script[num_tokens % len(self._script)])
        right = [self._true_token(sequence, num_tokens + index) for index in range(num_right)]
        return (*right, *[WRONG_DRAFT] * (most - num_right))

    def forget(self, sequence: Sequence) -> None:
        self.known.discard(sequence)


class NoTime:
    """Step times that are known, and the same for all steps: every draft pays."""

    is_known = True

    def with_drafts(self, load: object) -> Callable[[int, int], float]:
        return lambda num_drafts, num_passes: 1.0

    def predict_ms(self, load: object) -> float | None:
        return None  # nothing is known of prompts, which other tests are about

    def observe(self, load: object, duration_ms: float) -> None:
        pass


def take_no_time(scheduler: DecodeScheduler) -> None:
    """Has a scheduler draft as much as it may."""
    assert scheduler.speculation is not None
    scheduler.step_times = scheduler.speculation._step_times = NoTime()  # type: ignore[assignment]
    scheduler.speculation._usual_drafts = scheduler.speculation._usual_length = 1e9
    scheduler.speculation._num_drafting = -(10**9)


def samples_of(part: Slice, true_token: TrueToken) -> Iterator[Sample]:
    """What a model samples after the rows of a slice."""
    sequence, is_right = part.sequence, True
    if not part.samples:
        return
    for index in range(len(part.drafts) + 1):
        token_id = true_token(sequence, sequence.num_tokens + index) if is_right else AFTER_WRONG_DRAFT
        yield Sample(token_id)
        is_right = is_right and index < len(part.drafts) and part.drafts[index] == token_id
