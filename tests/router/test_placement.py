"""Who computes what is new in a turn: the choice by cost, and that it is hardly ever worse than any fixed one."""

from __future__ import annotations

import math
from collections.abc import Sequence

import grpc.aio
import pytest
from dispatching import LONG, d, p, system, turn_of
from fake_workers import answer_of
from hypothesis import given
from hypothesis import strategies as st

from protos import worker_pb2
from router.links import Incarnation
from router.placement import HYSTERESIS, Measured, Outset, Placement, Speed, choose, costs

LOCAL, PREFILL, LENT = Placement.LOCAL, Placement.PREFILL, Placement.LENT
SPEEDS = st.builds(Speed, st.floats(0, 0.1), st.floats(50, 50_000))
OUTSETS = st.builds(
    Outset,
    num_new=st.integers(1, 20_000),
    num_held=st.integers(16, 100_000),
    num_ahead=st.integers(0, 20_000),
    num_streams=st.integers(0, 256),
    token_bytes=st.sampled_from((4, 23_040, 131_072)),
    at_decode=SPEEDS,
    at_prefill=SPEEDS,
    bytes_per_s=st.floats(1e6, 2e10),
)


def outset(num_new: int, num_streams: int = 4, bytes_per_s: float = 2e9, num_ahead: int = 0) -> Outset:
    """SmolLM2-135M on a small machine."""
    speed = Speed(0.01, 2000)
    return Outset(num_new, 1000, num_ahead, num_streams, 23_040, speed, speed, bytes_per_s)


def total(outsets: Sequence[Outset], placements: Sequence[Placement]) -> float:
    return math.fsum(costs(each)[placement] for each, placement in zip(outsets, placements, strict=True))


@given(st.lists(OUTSETS, min_size=1, max_size=60))
def test_no_mix_of_turns_is_ever_served_worse_than_by_the_best_fixed_choice(outsets: list[Outset]) -> None:
    chosen: list[Placement] = []
    for each in outsets:
        chosen.append(choose(each, chosen[-1] if chosen else None))
    best = min(total(outsets, [fixed] * len(outsets)) for fixed in Placement)
    assert total(outsets, chosen) <= (1 + HYSTERESIS) * best * (1 + 1e-9)


@given(st.lists(OUTSETS, min_size=1, max_size=30), st.floats(0.9, 1.1), st.floats(0.9, 1.1), st.floats(0.9, 1.1))
def test_rates_that_are_a_tenth_wrong_cost_no_more_than_that(
    outsets: list[Outset], here: float, there: float, move: float
) -> None:
    """Each cost is a sum of times that are by a tenth wrong at most, so two costs are confused only within a fifth."""
    chosen: list[Placement] = []
    for each in outsets:
        believed = Outset(
            each.num_new,
            each.num_held,
            each.num_ahead,
            each.num_streams,
            each.token_bytes,
            Speed(each.at_decode.step_s * here, each.at_decode.tokens_per_s / here),
            Speed(each.at_prefill.step_s * there, each.at_prefill.tokens_per_s / there),
            each.bytes_per_s / move,
        )
        chosen.append(choose(believed, chosen[-1] if chosen else None))
    best = min(total(outsets, [fixed] * len(outsets)) for fixed in Placement)
    assert total(outsets, chosen) <= (1 + HYSTERESIS) * 1.1 / 0.9 * best * (1 + 1e-9)


def test_short_parts_are_computed_by_the_holder_and_long_ones_elsewhere() -> None:
    assert choose(outset(8, num_streams=1), None) is LOCAL
    assert choose(outset(2000, num_streams=1), None) is LENT


def test_what_runs_at_the_holder_counts() -> None:
    assert choose(outset(100, num_streams=0), None) is LOCAL
    assert choose(outset(100, num_streams=8), None) is LENT


def test_a_queue_at_prefill_counts() -> None:
    assert choose(outset(400, num_streams=1), None) is LENT
    assert choose(outset(400, num_streams=1, num_ahead=4000), None) is LOCAL


def test_kv_that_moves_slower_than_it_is_computed_is_not_lent() -> None:
    assert choose(outset(3000, bytes_per_s=3e7), None) is PREFILL


def test_a_choice_is_kept_where_another_is_hardly_better() -> None:
    """From the length at which the two cost the same it takes some tokens to change it, either way."""
    switches = {}
    for before, other in ((LOCAL, LENT), (LENT, LOCAL)):
        lengths = range(1, 500) if before is LOCAL else range(500, 0, -1)
        switches[before] = next(length for length in lengths if choose(outset(length, 1), before) is other)
    assert switches[LENT] < switches[LOCAL] < 2 * switches[LENT]


def worker(tokens_per_s: float, bytes_per_s: float = 0.0, num_running: int = 0) -> Incarnation:
    description = worker_pb2.DescribeResponse(worker_id="w", block_size=16, block_bytes=16 * 23_040)
    made = Incarnation("127.0.0.1:1", grpc.aio.insecure_channel("127.0.0.1:1"), description)
    made.load.prompt_tokens_per_s, made.load.fetch_bytes_per_s, made.load.num_running = (
        tokens_per_s,
        bytes_per_s,
        num_running,
    )
    return made


@pytest.mark.parametrize(
    ("here", "there", "bytes_per_s", "num_new", "placement"),
    [
        (0.0, 0.0, 0.0, 10, None),
        (0.0, 2000.0, 0.0, 4, LOCAL),
        (2000.0, 0.0, 0.0, 4000, LENT),
        (50.0, 2000.0, 0.0, 400, LENT),
        (5000.0, 500.0, 0.0, 400, LOCAL),
        (500.0, 2000.0, 2e7, 4000, PREFILL),
    ],
)
async def test_what_nobody_has_measured_is_taken_to_be_usual(
    here: float, there: float, bytes_per_s: float, num_new: int, placement: Placement | None
) -> None:
    decode, prefill = worker(here, num_running=2), worker(there, bytes_per_s)
    assert Measured().choose(decode, prefill, num_new, 1000) is placement


@pytest.mark.parametrize(
    ("turn_placement", "limit", "rates", "placement"),
    [
        ("fixed", 0, (9000.0, 1.0), PREFILL),
        ("fixed", 8, (1.0, 9000.0), LOCAL),
        ("lent", 0, (9000.0, 1.0), LENT),
        ("lent", 8, (1.0, 9000.0), LOCAL),
        ("measured", 0, (9000.0, 1.0), LOCAL),
        ("measured", 8, (1.0, 9000.0), LENT),
        ("measured", 8, (0.0, 0.0), LOCAL),
        ("measured", 7, (0.0, 0.0), PREFILL),
    ],
)
async def test_workers_are_told_and_the_choice_is_counted(
    turn_placement: str, limit: int, rates: tuple[float, float], placement: Placement
) -> None:
    prefill, holder = p(), d("d2")
    holder.load.prompt_tokens_per_s, prefill.load.prompt_tokens_per_s = rates
    async with system(prefill, d("d1"), holder, local_turn_max_tokens=limit, turn_placement=turn_placement) as s:
        await s.serve(answer_of(prompt_token_ids=LONG), turn_of("d2", holder.epoch, LONG, 32))
        (request,) = holder.decodes
        assert request.HasField("source") == (placement is not LOCAL)
        assert request.lends == (placement is LENT)
        assert [each.HasField("lender") for each in prefill.prefills] == [placement is LENT] * (placement is not LOCAL)
        if placement is LENT:
            assert prefill.prefills[0].lender.epoch == holder.epoch
        assert s.dispatcher.num_placed == {placement: 1}


async def test_nothing_is_lent_where_nothing_is_held() -> None:
    prefill, other = p(), d("d1")
    async with system(prefill, other, turn_placement="lent") as s:
        await s.serve(answer_of(prompt_token_ids=LONG), turn_of("d2", 1, LONG, 32))
        assert not other.decodes[0].lends and s.dispatcher.num_placed == {PREFILL: 1}
