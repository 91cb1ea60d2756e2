"""Who waits how long, in simulated time: bounds of the lowest class, of long prompts, and of short ones behind them."""

from __future__ import annotations

import random

import pytest
from simulating import STEP_S, Client, DecodeSimulation, PrefillSimulation

from engine.ranking import AGEING_S
from engine.request import Priority

OVERLOAD = 1.5
"""Work that arrives, as a multiple of what the pool can do."""


def stream(until_s: float, interval_s: float, length: int, **client: object) -> list[Client]:
    return [
        Client(index * interval_s, length, Priority.HIGH, **client)  # type: ignore[arg-type]
        for index in range(int(until_s / interval_s))
    ]


def bound_s(low: Client, others: list[Client], service_s: float) -> float:
    """When the low one is in at the latest: two constants after it came, and the work that ranks before it then.
    `service_s` is the pool's time for one of the others, others beside it counted."""
    num_ahead = sum(1 for other in others if other.asked_s < low.asked_s + 2 * AGEING_S)
    return low.asked_s + 2 * AGEING_S + num_ahead * service_s


@pytest.mark.parametrize(
    "shortage, num_blocks, limits",
    [
        ("seats", 200, {"max_num_seqs": 4}),
        ("blocks", 16, {"max_num_seqs": 12}),  # each of the others needs 4
        ("places in the step", 200, {"max_num_seqs": 64, "max_batch_size": 4}),
    ],
)
@pytest.mark.parametrize("source", [None, "p"])
def test_decode_lets_the_lowest_class_in_within_its_bound(shortage, num_blocks, limits, source):
    num_at_once, num_steps = 4, 9 + 3 * (source is not None)
    service_s = num_steps * STEP_S / num_at_once
    others = stream(60, service_s / OVERLOAD, 6, max_tokens=9, source=source)
    # One that is older and stays long, so that the low one is not protected as the oldest.
    elder = Client(0.0, 3, Priority.HIGH, max_tokens=40)
    low = Client(1.0, 14, Priority.LOW, max_tokens=8)
    DecodeSimulation([elder, low, *others], num_blocks, **limits).run()
    latest_s = bound_s(low, others, service_s) + 40 * STEP_S / num_at_once
    assert low.first_token_s <= latest_s, shortage
    # From then on nothing that comes ranks before it: it goes on to its end.
    assert low.done_s <= latest_s + 2 * low.max_tokens * STEP_S, shortage
    assert low.done_s > low.asked_s + AGEING_S, "the others were no hindrance: the test says nothing"


def test_prefill_lets_the_lowest_class_in_within_its_bound():
    service_s = STEP_S / 2  # two in a step
    others = stream(60, service_s / OVERLOAD, 8)
    low = Client(1.0, 64, Priority.LOW)
    PrefillSimulation([low, *others], max_num_tokens=16, chunk_size=16).run()
    own_s = 2 * (64 / 16) * STEP_S
    assert low.asked_s + 10 * STEP_S < low.done_s <= bound_s(low, others, service_s) + own_s


def test_a_long_prompt_takes_at_most_twice_its_time_under_a_stream_of_short_ones():
    num_chunks, budget = 50, 32
    alone = Client(0.0, num_chunks * budget)
    PrefillSimulation([alone], max_num_tokens=budget, chunk_size=budget).run()
    long = Client(0.0, num_chunks * budget)
    short = [Client(index * STEP_S / 4, 16) for index in range(800)]  # twice what the pool can do
    PrefillSimulation([long, *short], max_num_tokens=budget, chunk_size=budget).run()
    assert alone.done_s == num_chunks * STEP_S
    assert 1.5 * alone.done_s < long.done_s <= 2 * alone.done_s + 2 * STEP_S


@pytest.mark.parametrize("max_queue_latency_ms", [50, 1000, 1e9])
def test_a_stream_of_shorter_ones_keeps_nobody_out_beyond_the_longest_wait(max_queue_latency_ms):
    middle = Client(STEP_S, 60)
    shorter = [Client(index * STEP_S, 16) for index in range(120)]  # all of what the long one leaves
    limits = {"max_num_tokens": 32, "chunk_size": 32, "max_queue_latency_ms": max_queue_latency_ms}
    PrefillSimulation([Client(0.0, 100 * 32), middle, *shorter], **limits).run()
    num_steps = 60 / (32 / 4) + 2  # a quarter of each
    if max_queue_latency_ms < 1e9:
        assert middle.done_s - middle.asked_s <= max_queue_latency_ms / 1000 + num_steps * STEP_S
    else:
        assert middle.done_s > 100 * STEP_S, "without a longest wait it is kept out: the test says something"


def p95_steps(clients: list[Client]) -> float:
    steps = sorted((client.first_token_s - client.asked_s) / STEP_S for client in clients)
    return steps[int(0.95 * (len(steps) - 1))]


@pytest.mark.parametrize(
    "length, spread_steps",
    [(1, 0), (8, 0), (25, 0), (1, 1), (8, 1), (25, 1), (50, 1), (50, 2), (100, 2)],  # half of the pool carries it
)
def test_short_prompts_behind_a_long_one_are_hardly_later_than_without_it(length, spread_steps):
    budget = 128

    def short() -> list[Client]:
        return [Client(STEP_S * (1 + index * spread_steps), length) for index in range(20)]

    without, behind = short(), short()
    PrefillSimulation(without, max_num_tokens=budget, chunk_size=budget).run()
    PrefillSimulation([Client(0.0, 50 * budget), *behind], max_num_tokens=budget, chunk_size=budget).run()
    assert p95_steps(behind) <= 1.5 * p95_steps(without) + 2


def overload(seed: int, num_clients: int) -> list[Client]:
    chance = random.Random(seed)
    return [
        Client(
            chance.randrange(160) * STEP_S,
            chance.randint(1, 30),
            chance.choice(list(Priority)),
            chance.randint(1, 24),
            chance.choice([None, "p", "q"]),
        )
        for _ in range(num_clients)
    ]


@pytest.mark.parametrize("seed", range(12))
def test_under_overload_all_finish_and_nobody_is_preempted_beyond_the_cap(seed):
    clients = overload(seed, 120)
    cap = seed % 4
    batch = None if seed % 2 else 3
    limits = {"max_num_seqs": 6, "max_preemptions": cap, "max_batch_size": batch, "ageing_s": 2.0}
    DecodeSimulation(clients, num_blocks=24, **limits).run()
    assert all(len(client.outputs) == client.max_tokens for client in clients), "complete, nothing lost or repeated"
    assert max(client.num_preemptions for client in clients) <= cap
    # Growth may take more often; each time the request keeps its tokens and its place.
    assert max(client.num_evictions for client in clients) <= 4
    assert sum(client.num_evictions - client.num_preemptions for client in clients) <= len(clients) / 2


@pytest.mark.parametrize("cap", range(4))
def test_a_low_class_gives_way_to_each_that_comes_until_its_cap(cap):
    elder, low = Client(0.0, 3, max_tokens=90), Client(1.0, 3, Priority.LOW, max_tokens=60)
    urgent = [Client(2.0 + index, 3, Priority.HIGH, max_tokens=2) for index in range(6)]
    DecodeSimulation([elder, low, *urgent], num_blocks=200, max_num_seqs=2, max_preemptions=cap).run()
    assert (elder.num_evictions, low.num_preemptions) == (0, cap)
    at_once = [client for client in urgent if client.first_token_s <= client.asked_s + STEP_S]
    assert len(at_once) >= cap, "those that took the place had it at once"


@pytest.mark.parametrize("limits", [{"max_num_seqs": 4}, {"max_batch_size": 4}], ids=["seats", "batch"])
def test_urgent_requests_get_past_those_that_run_however_long_they_run(limits):
    long_s = 400 * STEP_S
    low = [Client(0.0, 3, Priority.LOW, max_tokens=400) for _ in range(4)]
    urgent = [Client(at, 3, Priority.HIGH, max_tokens=20) for at in (1.0, 0.5 * long_s, 0.9 * long_s)]
    DecodeSimulation([*low, *urgent], num_blocks=1000, **limits).run()
    assert [client.done_s - client.asked_s for client in urgent] == [20 * STEP_S] * 3
    assert all(len(client.outputs) == 400 and client.num_preemptions <= 3 for client in low)


def test_a_low_class_that_pauses_goes_on_under_a_stream_of_the_highest():
    low = Client(0.0, 3, Priority.LOW, max_tokens=80)
    urgent = [Client(1.25 * index, 3, Priority.HIGH, max_tokens=8) for index in range(80)]  # four steps of five
    DecodeSimulation([low, *urgent], num_blocks=1000, max_batch_size=1, ageing_s=2.0).run()
    # What the others leave would take five times its steps. Aged by two classes it is as good as one of them.
    assert low.done_s < 2 * 2.0 + 2 * 80 * STEP_S


def test_urgent_requests_wait_less_than_others_under_overload():
    clients = overload(1, 200)
    DecodeSimulation(clients, num_blocks=24, max_num_seqs=6).run()
    order = (Priority.HIGH, Priority.NORMAL, Priority.LOW)
    waits = [sorted(each.first_token_s - each.asked_s for each in clients if each.priority is one) for one in order]
    medians = [each[len(each) // 2] for each in waits]
    assert medians == sorted(medians) and 2 * medians[0] < medians[2]
