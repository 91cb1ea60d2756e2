"""From outcomes to figures: one row for each configuration or class of stream that is compared.

Owns the definitions. Gaps are between messages that carried tokens, the one after the first token included: what a
reader sees as stalling. A row may be limited to a window of time; then tokens, gaps, first tokens and good ends outside
it do not count, so that running up and running out do not dilute what happens in between. Failures always count.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from baton.bench.load import Outcome
from baton.bench.options import SLO_NAMES, Slo

Window = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Spread:
    """A distribution in five numbers."""

    mean: float
    """Mean."""
    p50: float
    """Median."""
    p90: float
    """90th percentile."""
    p99: float
    """99th percentile."""
    max: float
    """The largest."""


Figure = float | Spread | None


@dataclass(frozen=True, slots=True)
class Row:
    """Figures of one configuration or class of stream. A spread is None where nothing was measured."""

    name: str
    """What was measured."""
    requests: int
    """Requests that ended well."""
    failed: int
    """Requests that did not."""
    refused: int
    """Requests that the service had no room for."""
    duration_s: float
    """What rates are taken over: from the first request to the last end, or the window."""
    output_tok_s: float
    """Generated tokens a second."""
    total_tok_s: float
    """Generated tokens and tokens of prompts that were answered, a second."""
    goodput_rps: float | None
    """Requests within all limits a second; None without limits."""
    cpu_s_per_token: float | None
    """CPU seconds of all service processes over the phase for each token generated in it, by whichever row; None where
    the service was not started here."""
    ttft_ms: Spread | None
    """From the call to the first token."""
    tpot_ms: Spread | None
    """Mean time of a token after the first, of each request."""
    itl_ms: Spread | None
    """Gaps between messages with tokens."""
    e2e_ms: Spread | None
    """From the call to its end; for a row of refusals, to the refusal."""
    cached_tokens: int
    """Prompt tokens whose KV was reused."""
    recomputed: int
    """Attempts beyond the first."""
    figures: Mapping[str, Figure] = field(default_factory=dict)
    """What this scenario measures besides; in JSON they stand beside the others."""
    gaps_ms: tuple[float, ...] = ()
    """Every gap, for drawing; not in JSON."""

    def to_json(self) -> dict[str, Any]:
        """The row as it stands in the results."""
        values = dataclasses.asdict(self)
        figures: dict[str, Any] = values.pop("figures")
        del values["gaps_ms"]
        return {**values, **figures}


def spread(values: Sequence[float]) -> Spread | None:
    """The distribution of `values`, percentiles interpolated; None when there are none."""
    if not values:
        return None
    if len(values) == 1:
        return Spread(*[values[0]] * 5)
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return Spread(statistics.fmean(values), cuts[49], cuts[89], cuts[98], max(values))


def summarize(
    name: str,
    outcomes: Sequence[Outcome],
    *,
    slo: Slo,
    cpu_s_per_token: float | None,
    window: Window | None = None,
    figures: Mapping[str, Figure] | None = None,
) -> Row:
    """The row of `outcomes`, of refusals none but their number unless all of them are."""
    window = window or _whole(outcomes)
    duration_s = window[1] - window[0]
    ended = [each for each in outcomes if _is_within(each.ended_s, window)]
    good = [each for each in ended if each.finish is not None]
    refused = [each for each in outcomes if each.is_refused]
    num_failed = sum(each.has_failed for each in outcomes)
    answered = [each for each in outcomes if each.message_times_s and _is_within(each.message_times_s[0], window)]
    num_output = sum(_tokens_within(each, window) for each in outcomes)
    num_prompt = sum(each.num_prompt_tokens for each in answered)
    gaps = tuple(gap for each in outcomes for gap in gaps_of(each, window))
    whole = good or refused
    return Row(
        name=name,
        requests=len(good),
        failed=num_failed,
        refused=len(refused),
        duration_s=duration_s,
        output_tok_s=_rate(num_output, duration_s),
        total_tok_s=_rate(num_output + num_prompt, duration_s),
        goodput_rps=_rate(sum(meets(each, slo) for each in good), duration_s) if slo.has_limits else None,
        cpu_s_per_token=cpu_s_per_token,
        ttft_ms=spread([_ttft_ms(each) for each in answered]),
        tpot_ms=spread([tpot for each in good if (tpot := _tpot_ms(each)) is not None]),
        itl_ms=spread(gaps),
        e2e_ms=spread([_e2e_ms(each) for each in whole]),
        cached_tokens=sum(each.finish.usage.cached_tokens for each in good if each.finish),
        recomputed=sum(max(0, each.finish.served_by.num_attempts - 1) for each in good if each.finish),
        figures=dict(figures or {}),
        gaps_ms=gaps,
    )


def gaps_of(outcome: Outcome, window: Window | None = None) -> list[float]:
    """Milliseconds between messages with tokens, of gaps that end within the window."""
    return [
        1000 * (later - earlier)
        for earlier, later in itertools.pairwise(outcome.message_times_s)
        if window is None or _is_within(later, window)
    ]


def meets(outcome: Outcome, slo: Slo) -> bool:
    """Whether a request that ended well did so within all limits."""
    measured = {
        "ttft": _ttft_ms(outcome) if outcome.message_times_s else 0.0,
        "tpot": _tpot_ms(outcome) or 0.0,
        "itl": max(gaps_of(outcome), default=0.0),
        "e2e": _e2e_ms(outcome),
    }
    limits = {name: getattr(slo, name) for name in SLO_NAMES}
    return all(limit is None or measured[name] <= limit for name, limit in limits.items())


def _ttft_ms(outcome: Outcome) -> float:
    return 1000 * (outcome.message_times_s[0] - outcome.sent_s)


def _tpot_ms(outcome: Outcome) -> float | None:
    num_later = outcome.num_output_tokens - 1
    if num_later < 1:
        return None
    return 1000 * (outcome.message_times_s[-1] - outcome.message_times_s[0]) / num_later


def _e2e_ms(outcome: Outcome) -> float:
    return 1000 * (outcome.ended_s - outcome.sent_s)


def _whole(outcomes: Sequence[Outcome]) -> Window:
    if not outcomes:
        return 0.0, 0.0
    return min(each.sent_s for each in outcomes), max(each.ended_s for each in outcomes)


def _is_within(time_s: float, window: Window) -> bool:
    return window[0] <= time_s <= window[1]


def _tokens_within(outcome: Outcome, window: Window) -> int:
    pairs = zip(outcome.message_times_s, outcome.message_tokens, strict=True)
    return sum(count for time_s, count in pairs if _is_within(time_s, window))


def _rate(count: float, duration_s: float) -> float:
    return count / duration_s if duration_s > 0 else 0.0
