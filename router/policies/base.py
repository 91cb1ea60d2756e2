"""How a router picks among workers that can all serve a request: the interface of a policy, and what policies share.

A file of this package holds one policy, as class `Policy`. It sees proved, serving workers only, and keeps no state
that another router would need. Affinity is bounded by load, so that what many requests have in common (a system prompt,
a busy holder) cannot overload one worker: a worker that is not `has_room` is passed over for the next one.

Load is the larger of what the worker last reported and what this router has given it since, so that requests between
two reports do not all go to the same worker.
"""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from router.links import Incarnation

BOUND = 1.25
"""How much more than its share of all load a worker is given for affinity."""
SEATS_SPARED = 16
"""A decode worker with no more than one in so many of its seats taken has room, whatever the others have."""
Load = Callable[[Incarnation], int]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a policy may know of a request."""

    token_ids: Sequence[int]
    """Its input: prompt and what earlier attempts have generated."""
    session_key: bytes = b""
    """Of its session; empty for none."""
    holder: Incarnation | None = None
    """Of the candidates the decode worker that keeps KV of the session's earlier turns."""


class Policy(ABC):
    """Picks one worker of each pool, independently."""

    @abstractmethod
    def pick_prefill(self, candidates: Sequence[Incarnation], wanted: Wanted) -> Incarnation:
        """One of the prefill workers, at least one."""

    @abstractmethod
    def pick_decode(self, candidates: Sequence[Incarnation], wanted: Wanted) -> Incarnation:
        """One of the decode or mixed workers, at least one."""


def prefill_load(worker: Incarnation) -> int:
    """Tokens that it has to compute."""
    return max(worker.load.num_queued_tokens, worker.num_assigned_tokens)


def decode_load(worker: Incarnation) -> int:
    """Sequences that it has."""
    return max(worker.load.num_queued + worker.load.num_running, worker.num_assigned)


def prefill_has_room(worker: Incarnation, candidates: Sequence[Incarnation], wanted: Wanted) -> bool:
    """Whether it has little more than its share of tokens, or no more than the request adds."""
    num_new, load = len(wanted.token_ids), prefill_load(worker)
    share = (sum(map(prefill_load, candidates)) + num_new) / len(candidates)
    return load + num_new <= BOUND * share or load <= num_new


def decode_has_room(worker: Incarnation, candidates: Sequence[Incarnation]) -> bool:
    """Whether it has a free seat, and little more than its share of sequences or few at all."""
    share = (sum(map(decode_load, candidates)) + 1) / len(candidates)
    most = max(math.ceil(BOUND * share), worker.description.num_seats // SEATS_SPARED)
    return worker.num_free > 0 and decode_load(worker) + 1 <= most


def less_loaded_of_two(candidates: Sequence[Incarnation], load: Load) -> Incarnation:
    """The less loaded of two that are drawn: nearly as even as the least of all, without the herd that all routers
    make when they pick the same one between two reports."""
    return min(random.sample(candidates, min(2, len(candidates))), key=load)


def by_affinity(candidates: Sequence[Incarnation], key: bytes) -> list[Incarnation]:
    """All candidates in an order that depends on the key and their ids alone, so that every router has the same one;
    a worker that comes or goes moves nobody else (rendezvous hashing)."""
    return sorted(candidates, key=lambda worker: blake2b(worker.worker_id.encode(), digest_size=8, key=key).digest())
