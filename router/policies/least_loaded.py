"""Least loaded, by the power of two choices; knows nothing of what workers have cached."""

from __future__ import annotations

from collections.abc import Sequence

from router.links import Incarnation
from router.policies import base
from router.policies.base import Wanted, decode_load, less_loaded_of_two, prefill_load


class Policy(base.Policy):
    """See the module."""

    def pick_prefill(self, candidates: Sequence[Incarnation], wanted: Wanted) -> Incarnation:
        """Of two drawn the one with fewer tokens to compute."""
        return less_loaded_of_two(candidates, prefill_load)

    def pick_decode(self, candidates: Sequence[Incarnation], wanted: Wanted) -> Incarnation:
        """Of two drawn the one with fewer sequences."""
        return less_loaded_of_two(candidates, decode_load)
