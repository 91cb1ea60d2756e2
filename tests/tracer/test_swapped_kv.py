"""Workers whose pool is too small for their batch, over real sockets: KV waits in host memory, answers are the same."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from harness import EVICTED, FINISHED, attempt, balanced, cell, expected
from own_memory import declare_own_memory, expect_little

from kvstore.swap import SwapSpace

BLOCK_BYTES = 4 * 4 * 8  # planes, positions, bytes of the tracer's
SMALL = {"kv_block_size": 4, "num_kv_blocks": 16, "max_num_seqs": 8}
PROMPTS = [bytes([65 + index]) * (9 + index) for index in range(6)]


@pytest.fixture
def swapped(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    declare_own_memory(monkeypatch)
    return expect_little(monkeypatch)


async def test_answers_of_a_pool_that_is_too_small_for_its_batch(swapped: Counter[str]) -> None:
    async with cell(mixed=True, **SMALL) as c:
        asking = [c.router.generate(attempt(prompt, max_tokens=24)) for prompt in PROMPTS]
        for prompt, answer in zip(PROMPTS, await asyncio.gather(*asking), strict=True):
            assert (answer.record.outcome, answer.tokens) == (FINISHED, expected(prompt, 24))
        assert swapped["out"] >= swapped["in"] > 0
        assert not c.decode.role.scheduler.totals.evictions
        families = {family.name: family for family in c.decode.step_loop.families()}
        counted = families["baton_swapped_blocks_total"].samples
        assert {labels["direction"]: value for _, labels, value in counted} == dict(swapped)
        assert all(value > 0 for _, _, value in families["baton_swap_seconds_total"].samples)
        await c.balanced()
        states = {labels["state"]: value for _, labels, value in families["baton_swap_space_blocks"].samples}
        assert states["free"] > 0


async def test_kv_that_was_handed_over_goes_there_as_well(swapped: Counter[str]) -> None:
    """What is still being fetched when blocks are short is evicted, and asked for again as a router does."""

    async def answer_to(prompt: bytes) -> list[int]:
        outputs: list[int] = []
        while True:
            answer = await c.router.generate(attempt(prompt, outputs, max_tokens=24))
            outputs += answer.tokens
            if answer.record.outcome == FINISHED:
                return outputs
            assert answer.record.outcome == EVICTED

    async with cell(prefill={"num_kv_blocks": 64}, **SMALL) as c:
        answers = await asyncio.gather(*map(answer_to, PROMPTS))
        assert answers == [expected(prompt, 24) for prompt in PROMPTS]
        assert swapped["out"] >= swapped["in"]
        await c.balanced()


async def test_the_size_of_host_memory_is_what_was_told(swapped: Counter[str]) -> None:
    async with cell(mixed=True, swap_space_gib=5.5 * BLOCK_BYTES / 2**30, **SMALL) as c:
        assert c.decode.parts.holdings.host_pool.num_total == 5
    async with cell(mixed=True, swap_space_gib=0, **SMALL) as c:
        asking = [c.router.generate(attempt(prompt, max_tokens=24)) for prompt in PROMPTS]
        outcomes = {answer.record.outcome for answer in await asyncio.gather(*asking)}
        assert outcomes == {FINISHED, EVICTED} and not swapped


async def test_prefill_workers_take_none(swapped: Counter[str]) -> None:
    async with cell(**SMALL) as c:
        assert c.prefill is not None
        assert c.prefill.parts.holdings.host_pool.num_total == 0 < c.decode.parts.holdings.host_pool.num_total


async def test_copies_that_fail_cost_a_new_attempt(swapped: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(SwapSpace, "copy", fail)
    async with cell(mixed=True, **SMALL) as c:
        asking = [c.router.generate(attempt(prompt, max_tokens=24)) for prompt in PROMPTS]
        answers = await asyncio.gather(*asking)
        assert {answer.record.outcome for answer in answers} == {FINISHED, EVICTED}
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            assert answer.tokens == expected(prompt, 24)[: len(answer.tokens)]
            assert (
                answer.record.outcome == FINISHED or "could not be copied: the device is gone" in answer.record.detail
            )
        await balanced(c.decode)
