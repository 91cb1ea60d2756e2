"""What is counted of drafts: their lengths in each step, and the time that they and the steps that check them take."""

from __future__ import annotations

import pytest
from pools import make_sequence

from decode_svc.draft_totals import DraftTotals
from engine.batch import Batch
from engine.planning import Plan, take_drafts
from engine.sequence import DECODE_MOVES


def plan_of(*num_drafts: int) -> Plan:
    """Sequences with one token each and so many drafts."""
    plan = Plan()
    for index, length in enumerate(num_drafts):
        plan.add(make_sequence([index], DECODE_MOVES), 1)
        if length:
            plan.draft(index, (7,) * length)
    return plan


def shown(totals: DraftTotals) -> dict[str, float]:
    """Samples by name, and by the value of their last label."""
    return {
        name + suffix + ("" if not labels else f" {list(labels.values())[-1]}"): value
        for family in totals.families()
        for name in [family.name]
        for suffix, labels, value in family.samples
    }


def test_lengths_are_counted_for_each_sequence_and_step() -> None:
    """Also those that draft nothing, alone or beside others."""
    totals = DraftTotals()
    totals.planned(plan_of(0, 0, 0), 0.0)
    totals.planned(plan_of(3, 0, 15), 0.0)
    totals.planned(Plan(), 0.0)
    found = shown(totals)
    assert (found["baton_draft_length_count"], found["baton_draft_length_sum"]) == (6, 18)
    assert [found[f"baton_draft_length_bucket {bound}"] for bound in ("0.0", "2.0", "3.0", "12.0", "15.0")] == [
        *(4, 4, 5, 5, 6)
    ]


def test_making_is_told_from_checking() -> None:
    """Who had drafts has waited for the making of all of them, before the step and in it; who had none has not."""
    totals, plan = DraftTotals(), plan_of(2, 0, 1)
    totals.planned(plan, 0.01)
    take_drafts(
        plan, Batch(query_starts=[0, 3, 4, 6], token_ids=[1, 8, 9, 1, 1, 6], num_draft_rows=3, drafting_s=0.2), 0.7
    )
    assert [part.drafts for part in plan.slices] == [(8, 9), (), (6,)]
    totals.committed(plan)
    assert totals.drafting_s == pytest.approx(0.21) and totals.verifying_s == pytest.approx(0.5)
    facts = [(part.sequence.num_draft_steps, part.sequence.drafting_s) for part in plan.slices]
    assert facts == [(1, pytest.approx(0.21)), (0, 0.0), (1, pytest.approx(0.21))]
    without = plan_of(0, 0)
    totals.planned(without, 0.001)
    take_drafts(without, Batch(drafting_s=0.03), 0.6)
    totals.committed(without)
    found = shown(totals)
    assert found["baton_speculation_seconds_total drafting"] == pytest.approx(0.241), "what it takes to decide on none"
    assert found["baton_speculation_seconds_total verifying"] == pytest.approx(0.5), "a step without drafts checks none"
