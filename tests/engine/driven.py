"""Schedulers driven by hand: requests that come one by one, steps that are over at once, a clock that tests move."""

from __future__ import annotations

from pools import BLOCK_SIZE, Memory, Step, make_holdings, make_limits, make_sequence

from decode_svc.scheduler import DecodeScheduler
from engine.lengths import OutputLengths
from engine.request import Sample
from engine.sequence import DECODE_MOVES, PREFILL_MOVES, Sequence
from prefill_svc.scheduler import PrefillScheduler


class Prefill:
    """A prefill scheduler; each `add` is a second later than the one before."""

    def __init__(self, num_blocks=100, **limits):
        self.holdings = make_holdings(num_blocks)
        self.scheduler = PrefillScheduler(self.holdings, make_limits(**{"max_model_len": 400, **limits}))
        self.now_s = 0.0

    def add(self, length, credit=True, first=1, **request) -> Sequence:
        self.now_s += 1
        sequence = make_sequence(range(first, first + length), PREFILL_MOVES, self.now_s, **request)
        self.scheduler.add(sequence)
        if credit:
            self.scheduler.credit(sequence)
        return sequence

    def step(self):
        plan = self.scheduler.plan(self.now_s)
        took = [(part.sequence, part.num_tokens) for part in plan.slices]
        self.scheduler.commit(plan, [Sample(1) for part in plan.slices if part.samples], self.now_s)
        return took


class Decode:
    """A decode scheduler; each `add` is a second later than the one before. Fetches stay open until `arrive`.

    Every answer is expected to have `expected` tokens more, so that by default nothing is kept free for growth."""

    def __init__(self, num_blocks=100, reserved=1000, expected=1, num_host_blocks=0, **limits):
        self.holdings = make_holdings(num_blocks, num_host_blocks=num_host_blocks)
        self.memory = Memory()
        merged = {"max_model_len": num_blocks * 4, "max_num_tokens": 64, "chunk_size": 64, **limits}
        self.scheduler = DecodeScheduler(
            self.holdings, make_limits(**merged), reserved, OutputLengths(prior_tokens=expected)
        )
        self.now_s = 0.0

    def add(self, length, source=None, first=1, **request) -> Sequence:
        self.now_s += 1
        sequence = make_sequence(
            range(first, first + length), DECODE_MOVES, self.now_s, **{"max_tokens": 99, **request}
        )
        self.scheduler.add(sequence, source)
        return sequence

    def step(self):
        plan = self.scheduler.plan(self.now_s)
        for sequence in self.scheduler.take_fetches():
            sequence.num_pins += 1
        took = [(part.sequence, part.num_tokens) for part in plan.slices]
        step = Step(plan, self.holdings)
        self.memory.swap(self.holdings)
        step.run(self.memory)
        self.scheduler.commit(plan, [Sample(1) for part in plan.slices if part.samples], self.now_s)
        return took

    def arrive(self, sequence: Sequence) -> None:
        for index in range(sequence.num_cached // BLOCK_SIZE, self.holdings.num_blocks(sequence.num_tokens)):
            self.memory.write_block(sequence, index, sequence.num_tokens)
        self.scheduler.fetched(sequence, Sample(1), self.now_s)
        self.holdings.unpin(sequence)
