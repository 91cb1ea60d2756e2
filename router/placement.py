"""Who computes what is new in a session's turn: the decode worker that holds the rest, or a prefill worker.

A pure decision over costs: the seconds that this turn waits, and what runs beside it waits because of it. `LOCAL`: the
holder computes, and each of its running streams waits as long. `PREFILL`: a prefill worker computes what it has not
cached, which may be all. `LENT`: it takes the KV of the earlier turns from the holder first. The new part's KV then
goes to the holder in both. The choice of before is kept until another one is cheaper by HYSTERESIS, so that no cost is
ever exceeded by more than that. Where nothing was measured a fixed limit decides (`router.dispatch`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from router.links import Incarnation

HYSTERESIS = 0.05
"""By how much of the least cost the choice of before may cost more, and is kept."""
ROUND_TRIP_S = 0.003
"""What it takes to have a second worker at work, and again to have it fetch, beside computing and moving."""
ASSUMED_BYTES_PER_S = 1e9
"""How fast KV moves, where nobody has found out lately: the next choice by it finds out."""


class Placement(Enum):
    """Where a turn's new part is computed."""

    LOCAL = "local"
    """At decode, which holds the rest."""
    PREFILL = "prefill"
    """At a prefill worker, from what that has cached."""
    LENT = "lent"
    """At a prefill worker, on KV that decode lends."""


@dataclass(frozen=True, slots=True)
class Speed:
    """How fast a worker computes prompts."""

    step_s: float
    """What it takes to compute any token."""
    tokens_per_s: float
    """How fast it goes on from there."""

    def seconds(self, num_tokens: int) -> float:
        """What so many tokens take."""
        return self.step_s + num_tokens / self.tokens_per_s


@dataclass(frozen=True, slots=True)
class Outset:
    """What a choice depends on."""

    num_new: int
    """Tokens that decode does not hold."""
    num_held: int
    """Tokens that it holds; prefill may have cached none of them."""
    num_ahead: int
    """Tokens that prefill computes before."""
    num_streams: int
    """Streams that decode runs."""
    token_bytes: int
    """KV of a token."""
    at_decode: Speed
    """How fast decode computes prompts."""
    at_prefill: Speed
    """How fast prefill does."""
    bytes_per_s: float
    """How fast KV moves."""


def costs(outset: Outset) -> dict[Placement, float]:
    """Seconds that each placement makes this turn and others wait."""
    new_s, held_s = (num * outset.token_bytes / outset.bytes_per_s for num in (outset.num_new, outset.num_held))
    there, num_before = outset.at_prefill, outset.num_ahead
    return {
        Placement.LOCAL: outset.at_decode.seconds(outset.num_new) * (1 + outset.num_streams),
        Placement.PREFILL: there.seconds(num_before + outset.num_held + outset.num_new) + new_s + ROUND_TRIP_S,
        Placement.LENT: there.seconds(num_before + outset.num_new) + held_s + new_s + 2 * ROUND_TRIP_S,
    }


def choose(outset: Outset, before: Placement | None) -> Placement:
    """The cheapest, or the choice of before where that is as good."""
    all_costs = costs(outset)
    cheapest = min(all_costs, key=all_costs.__getitem__)
    if before is not None and all_costs[before] <= (1 + HYSTERESIS) * all_costs[cheapest]:
        return before
    return cheapest


class Measured:
    """Choices by what workers report of themselves, each with the one before in mind."""

    def __init__(self) -> None:
        self._before: Placement | None = None

    def choose(self, decode: Incarnation, prefill: Incarnation, num_new: int, num_held: int) -> Placement | None:
        """Where to compute what is new; None where nobody has measured how fast that goes."""
        here, there = _speed(decode), _speed(prefill)
        # Workers of one model, as long as one of them has not shown how fast it is.
        either = here or there
        if either is None:
            return None
        outset = Outset(
            num_new=max(1, num_new),
            num_held=num_held,
            num_ahead=max(prefill.load.num_queued_tokens, prefill.num_assigned_tokens),
            num_streams=decode.load.num_running,
            token_bytes=decode.description.block_bytes // decode.description.block_size,
            at_decode=here or either,
            at_prefill=there or either,
            bytes_per_s=prefill.load.fetch_bytes_per_s or ASSUMED_BYTES_PER_S,
        )
        self._before = choose(outset, self._before)
        return self._before


def _speed(worker: Incarnation) -> Speed | None:
    """By its own reports; None where it has not computed lately."""
    load = worker.load
    return Speed(load.prompt_step_ms / 1000, load.prompt_tokens_per_s) if load.prompt_tokens_per_s else None
