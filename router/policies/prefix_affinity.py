"""Prompts that begin alike go to the same worker, as long as it has room: what they share is computed once.

The beginning decides, so all turns of a conversation go together as well. When a beginning has become too popular for
one worker the rest goes to the next in the order of that beginning, the same one for every router.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from kvstore.hashing import pack_token_ids
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

PREFIX_TOKENS = 256
"""How much of a prompt is looked at: enough to tell system prompts apart, short enough to be shared."""


class Policy(base.Policy):
    """See the module."""

    def pick_prefill(self, candidates: Sequence[Incarnation], wanted: Wanted) -> Incarnation:
        """The first in the prompt's order that has room, else as `least_loaded`."""
        for worker in by_affinity(candidates, _key(wanted)):
            if prefill_has_room(worker, candidates, wanted):
                return worker
        return less_loaded_of_two(candidates, prefill_load)

    def pick_decode(self, candidates: Sequence[Incarnation], wanted: Wanted) -> Incarnation:
        """The first in the prompt's order that has room, else as `least_loaded`."""
        for worker in by_affinity(candidates, _key(wanted)):
            if decode_has_room(worker, candidates):
                return worker
        return less_loaded_of_two(candidates, decode_load)


def _key(wanted: Wanted) -> bytes:
    return blake2b(pack_token_ids(wanted.token_ids[:PREFIX_TOKENS]), digest_size=16).digest()
