"""A decode pool of scheduler and runner that tests drive step by step, with and without drafts."""

from __future__ import annotations

from typing import Any

from drafting import take_no_time

from decode_svc.scheduler import DecodeScheduler
from engine.drafters import Drafter
from engine.holdings import Holdings
from engine.model_runner import ModelRunner
from engine.planning import build_batch, take_drafts
from engine.request import Request, Sample, SamplingParams
from engine.scheduling import Limits, NewToken
from engine.sequence import DECODE_MOVES, Sequence
from kvstore.blocks import BlockPool
from kvstore.hashing import PrefixHasher

NUM_TOKENS = 40
EOS = (0, 2)
GREEDY, SAMPLED = SamplingParams(), SamplingParams(temperature=0.8, top_p=0.95, seed=11)


class Pool:
    """One worker's scheduler over a runner."""

    def __init__(self, runner: ModelRunner, drafter: Drafter | None, num_blocks: int = 64, **limits: Any) -> None:
        self.runner = runner if drafter is None else drafter.runner(runner)
        self.block_size = block_size = runner.cache.layout.block_size
        self.holdings = Holdings(BlockPool(num_blocks), PrefixHasher("model", "layout", block_size), block_size)
        merged = {"max_model_len": num_blocks * block_size, "max_num_seqs": 8, "max_num_tokens": 256, **limits}
        self.limits = Limits(chunk_size=256, eos_token_ids=EOS, **merged)
        self.scheduler = DecodeScheduler(self.holdings, self.limits, 0, drafter=drafter)
        if drafter is not None:
            take_no_time(self.scheduler)
        self.now_s = 0.0
        self.samples: dict[bytes, list[Sample]] = {}

    def add(self, request: Request) -> Sequence:
        sequence = Sequence(request, DECODE_MOVES, self.now_s)
        self.scheduler.add(sequence, None)
        return sequence

    def receive(self, request: Request) -> Sequence:
        """One whose KV comes from elsewhere: it has its blocks, and `arrived` begins it."""
        sequence = Sequence(request, DECODE_MOVES, self.now_s)
        self.scheduler.add(sequence, "elsewhere")
        while sequence not in self.scheduler.take_fetches():
            self.step()
        return sequence

    def arrived(self, sequence: Sequence, sample: Sample) -> None:
        """Its KV and its first token are here."""
        self.scheduler.received(sequence)
        self._note([self.scheduler.fetched(sequence, sample, self.now_s)])

    def step(self) -> None:
        self.now_s += 1
        plan = self.scheduler.plan(self.now_s)
        batch = build_batch(plan, self.block_size, EOS)
        samples = self.runner.run(batch)
        take_drafts(plan, batch, 0.0)
        self._note(self.scheduler.commit(plan, samples, self.now_s))

    def _note(self, new_tokens: list[NewToken]) -> None:
        for token in new_tokens:
            said = self.samples.setdefault(token.sequence.request.attempt_id, [])
            assert token.position == token.sequence.request.num_input_tokens + len(said)
            said.append(token.sample)

    def run(self) -> None:
        while self.scheduler.live():
            self.step()
        self.holdings.check()
        assert self.holdings.pool.num_used == 0


def request(index: int, prompt: list[int], sampling: SamplingParams, outputs: tuple[int, ...] = (), **more: Any) -> Any:
    return Request(index.to_bytes(16, "big"), "r", tuple(prompt), outputs, sampling, **more)


def with_length(sampling: SamplingParams, **changes: Any) -> SamplingParams:
    fields = {name: getattr(sampling, name) for name in SamplingParams.__slots__}
    return SamplingParams(**{**fields, "max_tokens": NUM_TOKENS, "ignore_eos": True, **changes})


def tokens(samples: list[Sample]) -> list[int]:
    return [sample.token_id for sample in samples]
