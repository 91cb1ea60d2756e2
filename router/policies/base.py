"""How a router picks among workers that can all serve a request: the interface of a policy.

A file of this package holds one policy, as class `Policy`. It sees proved, serving workers only, and keeps no state
that another router would need.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from router.links import Incarnation


class Policy(ABC):
    """Picks one worker of each pool, independently."""

    @abstractmethod
    def pick_prefill(self, candidates: Sequence[Incarnation]) -> Incarnation:
        """One of the prefill workers, at least one."""

    @abstractmethod
    def pick_decode(self, candidates: Sequence[Incarnation]) -> Incarnation:
        """One of the decode or mixed workers, at least one."""
