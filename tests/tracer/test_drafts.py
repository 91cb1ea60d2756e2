"""Workers that decode speculatively, over real sockets: the tracer's answers bit for bit, and what is counted."""

from __future__ import annotations

import asyncio

import pytest
from harness import FINISHED, PROMPT, Stream, attempt, cell, expected

from decode_svc import speculation
from engine import tracer
from engine.batch import Batch, SampleRow
from engine.drafters import ngram
from engine.request import Sample
from engine.sequence import Sequence
from engine.step_time import StepTimes
from protos import worker_pb2

SCRIPT = (4, 0, 1, 2)
WRONG = 0
DRAFTING = {"speculation": "ngram", "draft_length": 4, "kv_block_size": 4}


def propose(_: ngram.Drafter, sequence: Sequence, most: int) -> tuple[int, ...]:
    """The tracer's next tokens, as many as the script says in turn, and wrong ones."""
    num_right = min(most, SCRIPT[sequence.num_tokens % len(SCRIPT)])
    row = SampleRow(0, 0, sequence.request.sampling)
    return (*tracer.expected_tokens(sequence.token_ids, num_right, row), *[WRONG] * (most - num_right))


@pytest.fixture(autouse=True)
def always_drafted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram.Drafter, "propose", propose)
    monkeypatch.setattr(ngram.Drafter, "evidence", lambda *_: 0)
    monkeypatch.setattr(StepTimes, "with_drafts", lambda *_: lambda num_drafts, num_passes: 1.0)
    monkeypatch.setattr(StepTimes, "is_known", True)
    monkeypatch.setattr(speculation, "PLAIN_EVERY", 10**9)


@pytest.mark.parametrize("mixed", [True, False], ids=["mixed", "pair"])
async def test_answers_are_the_tracers_and_drafts_are_counted(mixed: bool) -> None:
    async with cell(mixed=mixed, **DRAFTING) as c:
        sampled = {"temperature": 0.8, "seed": 5}
        for sampling in ({}, sampled):
            answer = await c.router.generate(attempt(max_tokens=40, **sampling))
            assert answer.record.outcome == FINISHED and answer.tokens == expected(PROMPT, 40, **sampling)
            assert 0 < answer.record.num_accepted_drafts < answer.record.num_drafts
            assert 0 < answer.record.num_draft_steps < answer.record.num_drafts and answer.record.drafting_ms > 0
        answers = await asyncio.gather(*(c.router.generate(attempt(PROMPT[n:], max_tokens=30)) for n in range(6)))
        for n, answer in enumerate(answers):
            assert answer.tokens == expected(PROMPT[n:], 30)
        reports = Stream(c.d.worker.Watch(worker_pb2.WatchRequest()))
        load = (await reports.next()).load
        reports.cancel()
        assert 0 < load.num_accepted_drafts < load.num_drafts
        await c.balanced()


async def test_a_step_brings_several_tokens() -> None:
    async with cell(mixed=True, **DRAFTING) as c:
        before = c.decode.step_loop.num_steps
        answer = await c.router.generate(attempt(max_tokens=60))
        num_steps = c.decode.step_loop.num_steps - before
        num_prompt_steps = -(-len(PROMPT) // 64)
        assert num_steps == 60 - answer.record.num_accepted_drafts + num_prompt_steps - 1
        families = {family.name: family for family in c.decode.role.families()}
        lengths = {suffix: value for suffix, _, value in families["baton_draft_length"].samples}
        assert lengths["_count"] == num_steps - num_prompt_steps and lengths["_sum"] == answer.record.num_drafts
        times = [value for _, _, value in families["baton_speculation_seconds_total"].samples]
        assert len(times) == 2 and min(times) > 0


async def test_an_end_that_is_drafted_ends_it() -> None:
    tokens = expected(PROMPT, 40)
    stop = next(token for index, token in enumerate(tokens) if index > 20 and token not in tokens[:index])
    async with cell(mixed=True, **DRAFTING) as c:
        answer = await c.router.generate(attempt(max_tokens=40, stop_token_ids=[stop]))
        assert answer.tokens == tokens[: tokens.index(stop) + 1]
        assert answer.record.matched_token_id == stop
        await c.balanced()


class FailsWithDrafts:
    """A runner whose device cannot compute drafts."""

    def __init__(self, inner: tracer.TracerRunner) -> None:
        self._inner = inner
        self.num_failed = 0

    def run(self, batch: Batch) -> list[Sample]:
        if batch.num_draft_rows:
            self.num_failed += 1
            raise RuntimeError("no drafts here")
        return self._inner.run(batch)


async def test_steps_that_fail_with_drafts_are_run_without_them() -> None:
    async with cell(mixed=True, **DRAFTING) as c:
        runner = FailsWithDrafts(c.decode.step_loop.runner)
        c.decode.step_loop.runner = runner
        answers = await asyncio.gather(*(c.router.generate(attempt(PROMPT[n:], max_tokens=12)) for n in range(3)))
        for n, answer in enumerate(answers):
            assert answer.tokens == expected(PROMPT[n:], 12) and answer.record.num_drafts == 0
        assert runner.num_failed > 0
        await c.balanced()
