"""What learned output lengths are worth, in simulated time: evictions and throughput beside a fixed reserve.

Lengths are drawn as in ShareGPT, heavy-tailed and not known before the end, at a quarter of their size in blocks of a
quarter of sixteen. All requests come at once, to a pool that holds a tenth of them. A prompt costs steps their time, so
that computing it again after an eviction is not free.
"""

from __future__ import annotations

import random

from simulating import STEP_S, Client, DecodeSimulation

from decode_svc.outlook import Forecast
from engine.holdings import Prospect
from engine.lengths import OutputLengths
from engine.planning import Plan
from engine.sequence import Sequence

NUM_REQUESTS = 250
PROMPT_TOKENS_A_STEP = 64
"""Tokens of prompts that take as long as a step without any."""


class ShareGPT(DecodeSimulation):
    """A saturated pool."""

    def __init__(self, seed: int) -> None:
        chance = random.Random(seed)
        self.clients = [
            Client(
                chance.expovariate(1.0),
                _length(chance, 20, 200),
                max_tokens=256,
                ends_after=_length(chance, 33, 256),
            )
            for _ in range(NUM_REQUESTS)
        ]
        limits = {"max_num_seqs": 48, "max_num_tokens": 128, "chunk_size": 128}
        super().__init__(self.clients, 250, lengths=OutputLengths(prior_tokens=16, least_tokens=4), **limits)

    def duration_s(self, plan: Plan) -> float:
        num_prompt_tokens = sum(part.num_tokens for part in plan.slices if part.num_tokens > 1)
        return STEP_S * (1 + num_prompt_tokens / PROMPT_TOKENS_A_STEP)


class FixedReserve(ShareGPT):
    """The same with the rule that learned lengths replace: one block stays free for each that decodes."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.scheduler._outlook.has_blocks_for = self.has_blocks_for  # type: ignore[method-assign]

    def has_blocks_for(self, sequence: Sequence, prospect: Prospect, others: Forecast) -> bool:
        num_needed = self.scheduler.holdings.num_blocks(sequence.num_tokens + 1) - prospect.num_shared
        return num_needed + len(self.scheduler._decoding) <= prospect.num_available


def _length(chance: random.Random, median: int, most: int) -> int:
    return max(1, min(most, round(median * chance.lognormvariate(0, 1))))


def test_learned_lengths_save_most_evictions_and_cost_no_throughput():
    num_evictions, total_s = [0, 0], [0.0, 0.0]
    for seed in range(3):
        for index, kind in enumerate((FixedReserve, ShareGPT)):
            world = kind(seed)
            world.run()
            assert all(len(client.outputs) == client.ends_after for client in world.clients)
            num_evictions[index] += sum(client.num_evictions for client in world.clients)
            total_s[index] += max(client.done_s for client in world.clients)
    assert num_evictions[0] > 0.2 * 3 * NUM_REQUESTS, "no shortage: the test says nothing"
    assert num_evictions[1] <= num_evictions[0] / 2
    assert total_s[1] <= 1.01 * total_s[0]
