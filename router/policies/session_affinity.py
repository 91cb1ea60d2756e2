"""A session's turns go to who has its KV, as long as that worker has room; everything else as `least_loaded`.

Where nobody is known to have it, the session's key decides, so that routers which have lost its record still agree.
A session alone is never spread: its next turn finds what the last one left behind.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.links import Incarnation
from router.policies import base
from router.policies.base import (
    Wanted,
    by_affinity,
    decode_has_room,
    decode_load,
    less_loaded_of_two,
    prefill_has_room,
    prefill_load,
)


class Policy(base.Policy):
    """See the module."""

    def pick_prefill(self, candidates: Sequence[Incarnation], wanted: Wanted) -> Incarnation:
        """The session's first that has room: it has the earlier prompts."""
        if wanted.session_key:
            for worker in by_affinity(candidates, wanted.session_key):
                if prefill_has_room(worker, candidates, wanted):
                    return worker
        return less_loaded_of_two(candidates, prefill_load)

    def pick_decode(self, candidates: Sequence[Incarnation], wanted: Wanted) -> Incarnation:
        """The holder, or the session's first, that has room."""
        if wanted.session_key:
            holders = [] if wanted.holder is None else [wanted.holder]
            for worker in (*holders, *by_affinity(candidates, wanted.session_key)):
                if decode_has_room(worker, candidates):
                    return worker
        return less_loaded_of_two(candidates, decode_load)
