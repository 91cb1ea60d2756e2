"""Drafters guess how sequences go on, for speculative decoding: the interface, and how one is found by its file's name.

A file of this package holds one drafter, as class `Drafter`. Wrong guesses cost time and change no token, so a drafter
owes no exactness: only that what it holds for a sequence follows from the sequence's tokens, and goes with it. Who
drafts how many is decided in `decode_svc.speculation`. Invariant: whatever keeps a drafter from being had, the worker
serves without it and says so once.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from dataclasses import dataclass

from engine.batch import Runner
from engine.config import WorkerConfig
from engine.sequence import Sequence
from kvstore.layout import KVLayout
from runtime import plugins
from runtime.errors import BatonError, ConfigError

LOG = logging.getLogger(__name__)
NONE = "none"
"""Names no drafter."""
UNKNOWN = -1
"""Stands for a draft that the step makes itself, before it checks it."""
FIRST_RATE = 0.7
"""How often drafts of models are believed to come true before any was checked."""
MAX_EVIDENCE = 15
"""Up to which it is told apart how much speaks for a draft."""
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Target:
    """What a drafter may know of the model whose tokens it guesses."""

    config: WorkerConfig
    """What the worker is told."""
    layout: KVLayout
    """How the model's KV is laid out."""
    runner: Runner
    """Runs the model."""

    def check_budget(self, num_own_bytes: int) -> int:
        """Bytes of `spec_memory_budget_mb` that are left beside what a drafter has of its own and the KV of all drafts
        that may be checked at once. Raises ConfigError if that is more than there may be."""
        config, layout = self.config, self.layout
        num_drafts = config.max_num_seqs * config.draft_length
        num_bytes = num_own_bytes + num_drafts * layout.block_bytes // layout.block_size
        if num_bytes > config.spec_memory_budget_mb * MIB:
            raise ConfigError(
                f"--spec-memory-budget-mb: {num_bytes / MIB:.1f} MiB are needed, "
                f"with the KV of {num_drafts} drafts; got {config.spec_memory_budget_mb}"
            )
        return config.spec_memory_budget_mb * MIB - num_bytes


class Drafter(ABC):
    """Used by the event loop, between steps; what it does there may take microseconds."""

    most_evidence = 0
    """Of what `evidence` answers."""
    has_passes = False
    """Whether its drafts are UNKNOWN, and each further one of the longest takes another run of a model."""

    @classmethod
    @abstractmethod
    def open(cls, target: Target) -> Drafter:
        """Makes a drafter; called in a thread. Raises BatonError where it cannot be had."""

    @abstractmethod
    def propose(self, sequence: Sequence, most: int) -> tuple[int, ...]:
        """Tokens that may follow those of a sequence, at most `most`, for which its table has blocks; none where it has
        no guess."""

    def evidence(self, sequence: Sequence) -> int:
        """How much speaks for the first of the tokens proposed last: 0, or more where it comes true more often. Each
        that comes true speaks for the next as 1 more does."""
        return 0

    def first_rate(self, evidence: int) -> float:
        """How often a draft with so much evidence is believed to come true before any was checked."""
        return FIRST_RATE

    def judge(self, sequence: Sequence, num_drafts: int, num_accepted: int) -> None:
        """Of what was proposed so many were computed, and the first ones came true: the sequence has them and one token
        more. None are computed where they would not have paid."""
        return None

    @abstractmethod
    def forget(self, sequence: Sequence) -> None:
        """The sequence is over: nothing is kept for it."""

    def runner(self, runner: Runner) -> Runner:
        """Runs steps in place of `runner`: one that puts tokens in the place of drafts that are UNKNOWN."""
        return runner


def open_drafter(target: Target) -> Drafter | None:
    """The drafter that is asked for; None, with the reason in the log, where it cannot be had: then decoding goes on
    without. Raises ConfigError for a name that no file has."""
    name = target.config.speculation
    if name == NONE:
        return None
    drafter_class: type[Drafter] = plugins.load(__name__, name, "Drafter")
    try:
        return drafter_class.open(target)
    except BatonError as error:
        LOG.warning("decoding without speculation: %s", error.message)
        return None
