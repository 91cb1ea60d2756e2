"""Least loaded: the prefill worker with the fewest tokens to compute, the decode worker with the fewest sequences.

Load is the larger of what the worker last reported and what this router has given it since, so that requests between
two reports do not all go to the same worker. Equals are drawn.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from router.links import Incarnation
from router.policies import base


class Policy(base.Policy):
    """See the module."""

    def pick_prefill(self, candidates: Sequence[Incarnation]) -> Incarnation:
        """The one with the fewest uncomputed tokens."""
        return min(
            candidates, key=lambda worker: (max(worker.load.num_queued_tokens, worker.num_assigned_tokens), _tie())
        )

    def pick_decode(self, candidates: Sequence[Incarnation]) -> Incarnation:
        """The one with the fewest sequences."""
        return min(
            candidates,
            key=lambda worker: (max(worker.load.num_queued + worker.load.num_running, worker.num_assigned), _tie()),
        )


def _tie() -> float:
    return random.random()
