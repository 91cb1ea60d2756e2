"""What a worker counts of the KV that it fetched from others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from protos import worker_pb2
from runtime.metrics import TIME_BOUNDS_S, Family, HistogramSet, counter

BYTES_BOUNDS = tuple(4.0**power * 1024 for power in range(3, 13))
"""64 KiB to 16 GiB."""
CHECKS = tuple(name.removeprefix("KV_CHECK_").lower() for name in worker_pb2.KVCheck.keys()[1:])


class Handoffs:
    """Of one worker, since it started."""

    def __init__(self, transports: tuple[str, ...]) -> None:
        self.lost: Counter[str] = Counter()
        """Those whose KV did not come or was not attested, by the check that failed. None was answered from."""
        self._bytes = HistogramSet(BYTES_BOUNDS, "transport", transports)
        self._durations_s = HistogramSet(TIME_BOUNDS_S, "transport", transports)

    def note(self, transport: str, num_bytes: int, duration_s: float) -> None:
        """One was attested."""
        self._bytes.observe(transport, num_bytes)
        self._durations_s.observe(transport, duration_s)

    def families(self) -> Iterator[Family]:
        """For a scrape."""
        yield self._bytes.add_to(Family("baton_handoff_bytes", "histogram", "KV bytes of an attested handoff."))
        yield self._durations_s.add_to(
            Family(
                "baton_handoff_duration_seconds",
                "histogram",
                "From the request for KV to its attestation, what it waits for at its owner included.",
            )
        )
        lost = counter("baton_handoffs_lost_total", "Handoffs whose KV did not come or was not attested, by check.")
        for check in CHECKS:
            lost.add(self.lost[check], check=check)
        yield lost
