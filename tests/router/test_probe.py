"""The probe: a tiny request that must cross from prefill to decode."""

from __future__ import annotations

from typing import Any

import pytest
from fake_workers import DECODE, PREFILL, ROUTER_ID, TOKENIZER, FakeWorker, finished, linked

from router.probe import NUM_TOKENS, TENANT, Prober
from runtime.errors import Unavailable

PROBER = Prober(ROUTER_ID, TOKENIZER)


async def test_a_probe_is_one_block_and_a_token_of_a_tenant_of_its_own() -> None:
    p, d = FakeWorker(PREFILL, "p"), FakeWorker(DECODE, "d")
    async with linked(p) as (prefill, _), linked(d) as (decode, _):
        await PROBER(decode, prefill)
        attempt = d.decodes[0].attempt
        assert (len(attempt.prompt_token_ids), attempt.tenant) == (17, TENANT)
        assert (attempt.sampling.max_tokens, attempt.sampling.temperature) == (NUM_TOKENS, 0)
        assert p.prefills[0].attempt == attempt


async def test_a_probe_without_prefill_needs_no_transfer() -> None:
    async def local(worker: FakeWorker, request: Any) -> Any:
        worker.emit(request, *b"ab")
        return finished(request, 2, kv_bytes=0)

    async with linked(FakeWorker(DECODE, "d", decode=local)) as (decode, _):
        await PROBER(decode, None)


async def test_a_probe_that_moved_nothing_proves_nothing() -> None:
    async def still(worker: FakeWorker, request: Any) -> Any:
        worker.emit(request, *b"ab")
        return finished(request, 2, kv_bytes=0)

    p, d = FakeWorker(PREFILL, "p"), FakeWorker(DECODE, "d", decode=still)
    async with linked(p) as (prefill, _), linked(d) as (decode, _):
        with pytest.raises(Unavailable, match="moved 0 bytes"):
            await PROBER(decode, prefill)


async def test_a_probe_that_ended_early_proves_nothing() -> None:
    async def short(worker: FakeWorker, request: Any) -> Any:
        worker.emit(request, *b"a")
        return finished(request, 1)

    async with linked(FakeWorker(DECODE, "d", decode=short)) as (decode, _):
        with pytest.raises(Unavailable, match="gave 1 tokens"):
            await PROBER(decode, None)
