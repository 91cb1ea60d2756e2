"""What is known of each request when it ends: counted by its outcome, observed, and written as a line of JSON.

Owns the histograms of requests and the request log; its text never has any of a prompt, of an answer or of a session's
name. An entry is opened when a request arrives and closed exactly once, however the request ends; nothing is noted in
between. The names that begin with `vllm:` are those of that engine, for the service as its clients see it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from logging.handlers import WatchedFileHandler
from pathlib import Path
from typing import Any

import grpc.aio

from protos import inference_pb2
from router.answer import Answer
from runtime.errors import Aborted, BatonError, ConfigError, Overloaded, SessionBusy, SessionLost, Unavailable
from runtime.gen_ai import GenAi
from runtime.metrics import ENGINE, TIME_BOUNDS_S, Family, Histogram, HistogramSet, counter

NUM_RECENT = 32
"""Ended requests that are remembered for the live page."""
PARTS = ("router_queue", "prefill_queue", "prefill", "transfer", "decode")
"""Of a request's time; transfer goes on beside prefill and ends after it."""
COUNT_BOUNDS = tuple(float(step * 10**power) for power in range(6) for step in (1, 2, 5))
EACH_TOKEN_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0)
TIMES = {
    "time_to_first_token_seconds": "From a request's arrival to its first token.",
    "e2e_request_latency_seconds": "From a request's arrival to its end.",
    "request_queue_time_seconds": "Waiting of a request in the router and at its prefilling worker.",
    "request_prefill_time_seconds": "From a prompt's first chunk to its first token.",
    "request_decode_time_seconds": "From a request's first token to its last.",
    "request_inference_time_seconds": "Prefill and decode of a request together.",
}
COUNTS = {
    "request_prompt_tokens": "Prompt tokens of a request.",
    "request_generation_tokens": "Tokens generated for a request.",
    "request_max_num_generation_tokens": "Tokens generated for a request.",
    "request_params_max_tokens": "Tokens that a request allows.",
    "request_params_n": "Answers that a request asks for.",
}
EACH_TOKEN = {
    "request_time_per_output_token_seconds": "Mean time between a request's tokens after the first.",
    "inter_token_latency_seconds": "The same, counted once for each of these tokens.",
}


@contextlib.contextmanager
def request_log(path: Path | None) -> Iterator[logging.Logger | None]:
    """A logger whose records go as they are to a file, or to standard output for "-"; None without a path. It is nobody
    else's, so no other record gets there. A file that was moved away is made again. ConfigError for one that cannot be
    written."""
    if path is None:
        yield None
        return
    try:
        handler = logging.StreamHandler(sys.stdout) if str(path) == "-" else WatchedFileHandler(path, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--request-log {path}: cannot be written: {error.strerror}") from None
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger = logging.Logger("baton.requests", logging.INFO)
    logger.addHandler(handler)
    try:
        yield logger
    finally:
        handler.close()


EXPECTED = (
    *((outcome, "") for outcome in ("stop", "length", "abort", "cancelled")),
    *(("error", error.reason) for error in (BatonError, Unavailable, Overloaded, Aborted, SessionLost, SessionBusy)),
)
"""Shown before the first: an increase from nothing to one is none to Prometheus."""


@dataclass(slots=True, eq=False)
class Entry:
    """One request while it lasts."""

    arrived_s: float
    """Monotonic clock."""
    operation: str = "text_completion"
    """As the conventions for generative AI call it."""
    has_session: bool = False
    """Whether it is the turn of a session."""
    trace_id: str = ""
    """Of its trace; empty where nothing is recorded."""
    answer: Answer | None = None
    """Its request and tokens, once it was validated."""
    finish: inference_pb2.Finish | None = None
    """Its last message, once it has ended well."""


@dataclass(frozen=True, slots=True)
class Ended:
    """What stays of a request for a while: nothing of what it said."""

    request_id: str
    """Its name."""
    trace_id: str
    """Of its trace; empty where nothing was recorded."""
    finish: inference_pb2.Finish
    """Its last message."""


@dataclass(slots=True)
class Ledger:
    """The requests of a router that have ended."""

    model_name: str
    """Its public name."""
    gen_ai: GenAi | None = None
    """Is told as well; None where nobody asks."""
    log: logging.Logger | None = None
    """Gets a record for each request; None where nobody asks."""
    running: dict[Entry, None] = field(default_factory=dict)
    """Those that have not ended, in order of arrival."""
    recent: deque[Ended] = field(default_factory=lambda: deque(maxlen=NUM_RECENT))
    """The last that ended well."""
    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By outcome (stop, length, abort, cancelled, error) and reason, which errors alone have."""
    _num_ended_tokens: int = 0
    _times: dict[str, Histogram] = field(default_factory=lambda: {name: Histogram(TIME_BOUNDS_S) for name in TIMES})
    _counts: dict[str, Histogram] = field(default_factory=lambda: {name: Histogram(COUNT_BOUNDS) for name in COUNTS})
    _each_token: dict[str, Histogram] = field(
        default_factory=lambda: {name: Histogram(EACH_TOKEN_BOUNDS_S) for name in EACH_TOKEN}
    )
    _parts: HistogramSet = field(default_factory=lambda: HistogramSet(TIME_BOUNDS_S, "part", PARTS))

    @property
    def num_tokens(self) -> int:
        """Tokens generated so far for all requests."""
        answers = (entry.answer for entry in self.running)
        return self._num_ended_tokens + sum(len(answer.token_ids) for answer in answers if answer is not None)

    @contextlib.contextmanager
    def entry(self, request: inference_pb2.GenerateRequest) -> Iterator[Entry]:
        """The entry of a request that has just arrived; noted when the block ends, however it ends."""
        entry = Entry(time.monotonic(), "chat" if request.messages else "text_completion", bool(request.session_id))
        self.running[entry] = None
        try:
            yield entry
        except BatonError as error:
            self._note(entry, "error", error.reason)
            raise
        except (asyncio.CancelledError, grpc.aio.BaseError):
            self._note(entry, "cancelled", "")
            raise
        except Exception:
            self._note(entry, "error", BatonError.reason)
            raise
        else:
            assert entry.finish is not None, "a request that ends well has its last message"
            reason = inference_pb2.FinishReason.Name(entry.finish.reason).removeprefix("FINISH_REASON_")
            self._note(entry, reason.lower(), "")
        finally:
            del self.running[entry]

    def _note(self, entry: Entry, outcome: str, reason: str) -> None:
        duration_s = time.monotonic() - entry.arrived_s
        self.outcomes[outcome, reason] += 1
        if entry.answer is not None:
            self._num_ended_tokens += len(entry.answer.token_ids)
        first_s = each_s = None
        if entry.finish is not None and outcome not in ("error", "cancelled"):
            first_s = entry.finish.timing.time_to_first_token_ms / 1000
            if entry.finish.usage.completion_tokens > 1:
                each_s = entry.finish.timing.inter_token_latency_ms / 1000
            self._observe(entry, entry.finish, first_s, each_s)
        if self.gen_ai is not None:
            error_type = {"error": reason, "cancelled": "CANCELLED"}.get(outcome)
            self.gen_ai.record(entry.operation, duration_s, first_s, each_s, error_type)
        if self.log is not None:
            self.log.info("%s", json.dumps(self._line(entry, outcome, reason, duration_s)))

    def _observe(self, entry: Entry, finish: inference_pb2.Finish, first_s: float, each_s: float | None) -> None:
        """A request that has ended well."""
        assert entry.answer is not None
        self.recent.append(Ended(entry.answer.request.request_id, entry.trace_id, finish))
        timing, usage = finish.timing, finish.usage
        durations_s = {
            "router_queue": timing.router_queue_ms / 1000,
            "prefill_queue": timing.prefill_queue_ms / 1000,
            "prefill": timing.prefill_ms / 1000,
            "transfer": timing.transfer_ms / 1000,
            "decode": max(0.0, timing.total_ms - timing.time_to_first_token_ms) / 1000,
        }
        for part, duration_s in durations_s.items():
            self._parts.observe(part, duration_s)
        times, counts = self._times, self._counts
        times["time_to_first_token_seconds"].observe(first_s)
        times["e2e_request_latency_seconds"].observe(timing.total_ms / 1000)
        times["request_queue_time_seconds"].observe(durations_s["router_queue"] + durations_s["prefill_queue"])
        times["request_prefill_time_seconds"].observe(durations_s["prefill"])
        times["request_decode_time_seconds"].observe(durations_s["decode"])
        times["request_inference_time_seconds"].observe(durations_s["prefill"] + durations_s["decode"])
        counts["request_prompt_tokens"].observe(usage.prompt_tokens)
        counts["request_generation_tokens"].observe(usage.completion_tokens)
        counts["request_max_num_generation_tokens"].observe(usage.completion_tokens)
        counts["request_params_max_tokens"].observe(entry.answer.request.sampling.max_tokens)
        counts["request_params_n"].observe(1)
        if each_s is not None:
            self._each_token["request_time_per_output_token_seconds"].observe(each_s)
            self._each_token["inter_token_latency_seconds"].observe(each_s, usage.completion_tokens - 1)

    def _line(self, entry: Entry, outcome: str, reason: str, duration_s: float) -> dict[str, Any]:
        line: dict[str, Any] = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "model": self.model_name,
            "operation": entry.operation,
            "outcome": outcome,
            "reason": reason,
            "has_session": entry.has_session,
            "trace_id": entry.trace_id,
            "duration_ms": round(1000 * duration_s, 3),
        }
        if entry.answer is not None:
            request = entry.answer.request
            line |= {
                "request_id": request.request_id,
                "tenant": request.tenant,
                "priority": inference_pb2.Priority.Name(request.priority).removeprefix("PRIORITY_").lower(),
                "prompt_tokens": len(request.prompt_token_ids),
                "completion_tokens": len(entry.answer.token_ids),
            }
        if entry.finish is not None:
            timing, by = entry.finish.timing, entry.finish.served_by
            line |= {"cached_tokens": entry.finish.usage.cached_tokens}
            line |= {name.name: round(getattr(timing, name.name), 3) for name in timing.DESCRIPTOR.fields}
            line |= {name.name: getattr(by, name.name) for name in by.DESCRIPTOR.fields}
        return line

    def families(self) -> Iterator[Family]:
        """For a scrape."""
        ended = counter("baton_requests_total", "Requests that ended, by outcome; errors have a reason.")
        success = counter("vllm:request_success_total", "Requests that ended well, by why.")
        for reason in ("stop", "length", "abort"):
            success.add(self.outcomes[reason, ""], finished_reason=reason, **ENGINE)
        for (outcome, reason), number in {**dict.fromkeys(EXPECTED, 0), **self.outcomes}.items():
            ended.add(number, outcome=outcome, reason=reason)
        yield from (ended, success)
        yield self._parts.add_to(
            Family("baton_request_part_seconds", "histogram", "Parts of requests that ended well.")
        )
        for histograms, texts in ((self._times, TIMES), (self._counts, COUNTS), (self._each_token, EACH_TOKEN)):
            for name, histogram in histograms.items():
                yield histogram.add_to(Family(f"vllm:{name}", "histogram", texts[name]), **ENGINE)
        if self.gen_ai is not None:
            yield from self.gen_ai.families()
