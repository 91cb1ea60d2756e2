"""Answers of a prefill and a decode worker, token for token those of the oracle."""

from __future__ import annotations

from harness import FINISHED, PROMPT, attempt, cell, expected


async def test_smoke():
    async with cell() as c:
        answer = await c.router.generate(attempt())
        assert answer.tokens == expected(PROMPT, 8)
        assert answer.record.outcome == FINISHED
        assert answer.events == ["first_token", "finished"]
        await c.balanced()
