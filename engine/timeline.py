"""What happened to an attempt at this worker, as it tells the router that writes the trace.

Noted while it happens, sent once, at the end: nothing is written for a token, and nothing at all for an attempt whose
call brought no trace context. Bounded: of a long prompt in small chunks, or of endless pauses, the first moments stay.
"""

from __future__ import annotations

from collections.abc import Callable

from protos import worker_pb2

MAX_MOMENTS = 128
CREDIT, CHUNK, FIRST_BYTES = "credit", "chunk", "first_bytes"
"""Moments that are no states: the reader has come, a chunk was computed, the first bytes of KV are here."""


class Timeline:
    """The moments of one attempt."""

    __slots__ = ("_arrived_s", "_clock", "_moments", "_num_left_out")

    def __init__(self, arrived_s: float, clock: Callable[[], float]) -> None:
        """`arrived_s` is by `clock`."""
        self._arrived_s = arrived_s
        self._clock = clock
        self._moments: list[tuple[str, float, int]] = []
        self._num_left_out = 0

    def note(self, name: str, num_tokens: int = 0) -> None:
        """It happens now."""
        if len(self._moments) < MAX_MOMENTS:
            self._moments.append((name, self._clock(), num_tokens))
        else:
            self._num_left_out += 1

    def to_proto(self) -> worker_pb2.Timeline:
        """The moments so far."""
        return worker_pb2.Timeline(
            age_ms=self._since_arrival_ms(self._clock()),
            moments=[
                worker_pb2.Moment(name=name, at_ms=self._since_arrival_ms(at_s), num_tokens=num_tokens)
                for name, at_s, num_tokens in self._moments
            ],
            num_left_out=self._num_left_out,
        )

    def _since_arrival_ms(self, at_s: float) -> float:
        return 1000 * (at_s - self._arrived_s)
