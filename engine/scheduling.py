"""What the step loop needs of a scheduler, and the limits that both pools share.

Order, admission and victims are the difference between the pools and live in `prefill_svc` and `decode_svc`. A
scheduler is synchronous, does no I/O and knows no torch: it can be tested and model-checked without a model. Endings
are not returned: `Sequence.move` tells the observer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from engine.holdings import Holdings
from engine.lengths import QUANTILE
from engine.planning import Plan
from engine.ranking import AGEING_S
from engine.request import Sample
from engine.sequence import Sequence, State
from engine.step_time import StepTimes
from engine.totals import Totals


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds a scheduler's steps and sequences."""

    max_model_len: int
    """Most tokens of prompt and output together."""
    max_num_seqs: int
    """Most sequences that hold KV at once: seats."""
    max_num_tokens: int
    """Most tokens a step computes; at least `max_num_seqs` where sequences decode."""
    chunk_size: int
    """Most tokens of one sequence that a step computes."""
    eos_token_ids: tuple[int, ...] = ()
    """Ids that end generation."""
    max_batch_size: int | None = None
    """Most sequences that decode in one step; those that rank behind keep their KV and pause. None: all seats."""
    is_static: bool = False
    """Decode pool: static batching, the baseline; see `decode_svc.scheduler`."""
    max_preemptions: int = 3
    """How often a request may be evicted so that one of a higher class gets in."""
    ageing_s: float = AGEING_S
    """Seconds of waiting that weigh as much as one class of priority."""
    max_queue_latency_ms: float = 50.0
    """Waiting after which a prompt has a claim to the steps beside shorter ones of its class; see
    `engine.planning.fill_shared`."""
    output_length_quantile: float = QUANTILE
    """Decode pool: the quantile of learned output lengths that admission counts on."""
    target_step_ms: float | None = None
    """Decode pool: what a step may take before no more is admitted to it; see `decode_svc.scheduler`."""
    draft_length: int = 5
    """Decode pool, with a drafter: most drafts of a sequence in a step; see `decode_svc.speculation`."""
    acceptance_threshold: float = 0.0
    """Decode pool, with a drafter: part of its drafts that must come true, else a sequence gets fewer."""
    expected_sequence_tokens: int | None = None
    """Tokens that a sequence usually has; None: as was learned. The pool grows to that for all seats in large steps."""

    @property
    def batch_size(self) -> int:
        """Most sequences that decode in one step."""
        return min(self.max_num_seqs, self.max_batch_size or self.max_num_seqs)


class NewToken(NamedTuple):  # not a dataclass: one is made for each sequence at every step
    """A token to report to the router."""

    sequence: Sequence
    """Whose it is."""
    position: int
    """Its index in prompt + output."""
    sample: Sample
    """The token."""


class Scheduler(Protocol):
    """Decides steps and records what they did."""

    holdings: Holdings
    """The blocks of its sequences."""
    limits: Limits
    """What bounds its steps."""
    step_times: StepTimes | None
    """Is told what steps took; None where nobody asks it."""
    totals: Totals
    """What it has counted."""

    def plan(self, now_s: float) -> Plan:
        """Admits what can be admitted and fills a step; empty when there is nothing to compute."""
        ...

    def commit(self, plan: Plan, samples: list[Sample], now_s: float) -> list[NewToken]:
        """Records a step's results; `samples` has one entry for each slice that samples, in order, each followed by one
        for each of its drafts."""
        ...

    def end(self, sequence: Sequence, state: State, detail: str = "") -> None:
        """Moves a sequence to a terminal state and gives its blocks back once nothing touches them."""
        ...

    def abandon(self, plan: Plan, detail: str) -> None:
        """Ends the sequences of a step that could not be computed as FAILED."""
        ...

    @property
    def num_queued(self) -> int:
        """Sequences without blocks."""
        ...

    @property
    def num_queued_tokens(self) -> int:
        """Tokens still to be computed or fetched."""
        ...

    @property
    def num_running(self) -> int:
        """Sequences that hold blocks and make progress."""
        ...

    def num_wanted_blocks(self) -> int:
        """Available blocks that would let everything waiting be admitted and everything running grow by one."""
        ...
