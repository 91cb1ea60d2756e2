"""What a scheduler counts from the start of its process: numbers, raised where it happens, read by a scrape.

Owned by the scheduler, since nearly all of it happens there. Nothing is decided by these numbers, and none is raised
for each token.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from engine.sequence import State


@dataclass(slots=True)
class Totals:
    """Totals of one worker."""

    endings: Counter[State] = field(default_factory=Counter)
    """Attempts that ended here, by how."""
    evictions: Counter[str] = field(default_factory=Counter)
    """Of these, those given back: for "blocks" that growth lacked, for a higher "class", because of a "drain"."""
    swaps: Counter[str] = field(default_factory=Counter)
    """Times that a sequence's KV went to host memory in place of an eviction, by the same causes."""
    num_pauses: int = 0
    """How often a sequence left the batch for others and kept its KV."""
    num_prompt_tokens: int = 0
    """Tokens of the inputs whose KV was completed by computing here, those from the prefix cache included."""
    num_generated_tokens: int = 0
    """Tokens added to sequences that decode here, first ones that came with their KV included."""
