"""What a decode worker counts of its drafts beside how many there were: their lengths, and what they took.

Numbers for scrapes and for the last message of an attempt; nothing is decided by them. Told of a step twice: when it
was planned, and when it has run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from engine.planning import Plan
from runtime.metrics import Family, Histogram, counter

LENGTH_BOUNDS = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 12.0, 15.0)


@dataclass(slots=True)
class DraftTotals:
    """Totals of one worker; all stay 0 where nothing is drafted."""

    drafting_s: float = 0.0
    """How long it took to decide on drafts and to make them."""
    verifying_s: float = 0.0
    """How long steps took that checked drafts, the making of these left out."""
    _lengths: Histogram = field(default_factory=lambda: Histogram(LENGTH_BOUNDS))

    def planned(self, plan: Plan, duration_s: float) -> None:
        """It took so long to decide which drafts a plan has, and to make those that are known by then."""
        plan.drafting_s += duration_s
        if plan.num_tokens == len(plan.slices):
            self._lengths.observe(0, len(plan.slices))
            return
        for part in plan.slices:
            self._lengths.observe(len(part.drafts))

    def committed(self, plan: Plan) -> None:
        """The step has run. Each sequence that had drafts in it has waited for all of them."""
        self.drafting_s += plan.drafting_s
        self.verifying_s += plan.verifying_s
        if plan.num_tokens == len(plan.slices):
            return
        for part in plan.slices:
            if part.drafts:
                part.sequence.num_draft_steps += 1
                part.sequence.drafting_s += plan.drafting_s

    def families(self) -> Iterator[Family]:
        """For a scrape."""
        yield self._lengths.add_to(
            Family("baton_draft_length", "histogram", "Drafts that a sequence computes in a step without prompts.")
        )
        yield counter(
            "baton_speculation_seconds_total", "Time to make drafts, and time of the steps that check them, without it."
        ).add_each({"drafting": self.drafting_s, "verifying": self.verifying_s}, "part")
