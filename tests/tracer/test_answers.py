"""Answers of whole workers, token for token those of the oracle: over transports, chunk and block sizes, and reuse."""

from __future__ import annotations

import asyncio
import random
import time

import pytest
from harness import EVICTED, FINISHED, PROMPT, attempt, cell, expected
from transports_here import TRANSPORTS

from engine import tracer
from engine.lengths import MIN_FINISHED
from protos import inference_pb2

LONG = (PROMPT * 3)[:250]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("chunk_size, block_size", [(16, 4), (16, 16), (64, 16), (512, 16), (512, 64), (64, 7)])
async def test_handoff(transport, chunk_size, block_size):
    async with cell(kv_transports=(transport,), chunk_size=chunk_size, kv_block_size=block_size) as c:
        for prompt in (LONG, PROMPT[:1], PROMPT[:block_size], PROMPT[: block_size + 1]):
            answer = await c.router.generate(attempt(prompt))
            assert answer.tokens == expected(prompt, 8)
            assert (answer.record.outcome, answer.record.transport) == (FINISHED, transport)
            assert answer.record.finish_reason == inference_pb2.FINISH_REASON_LENGTH
            assert answer.record.num_tokens == len(prompt) + 8
            assert answer.events == ["first_token", "finished"]
        await c.balanced()


@pytest.mark.parametrize("chunk_size, block_size", [(16, 16), (64, 7), (512, 64)])
async def test_mixed_worker(chunk_size, block_size):
    async with cell(mixed=True, chunk_size=chunk_size, kv_block_size=block_size) as c:
        for prompt in (LONG, PROMPT[:1], LONG):
            answer = await c.router.generate(attempt(prompt))
            assert answer.tokens == expected(prompt, 8)
            assert answer.record.transport == "" and answer.record.kv_bytes == 0
        assert answer.record.cached_tokens == (len(LONG) - 1) // block_size * block_size
        await c.balanced()


async def test_shared_memory_is_preferred_and_the_network_is_the_fallback():
    async with cell() as c:
        assert (await c.router.generate(attempt())).record.transport == "shm"
    async with cell(prefill={"kv_shared_memory_dir": "none"}) as c:
        answer = await c.router.generate(attempt())
        assert (answer.record.transport, answer.tokens) == ("grpc", expected(PROMPT, 8))


async def test_cold_is_not_called_cached_and_a_repeat_moves_only_the_rest():
    """peers.md #31."""
    prompt = LONG[:100]
    async with cell() as c:
        cold = await c.router.generate(attempt(prompt))
        warm = await c.router.generate(attempt(prompt))
        block_bytes = c.decode.parts.identity.layout.block_bytes
        assert (cold.prefill_cached, cold.record.cached_tokens, cold.record.kv_bytes) == (0, 0, 7 * block_bytes)
        assert (warm.prefill_cached, warm.record.cached_tokens, warm.record.kv_bytes) == (96, 96, block_bytes)
        assert cold.tokens == warm.tokens == expected(prompt, 8)


async def test_a_longer_prompt_reuses_the_shorter_and_another_tenant_reuses_nothing():
    async with cell() as c:
        await c.router.generate(attempt(LONG[:100]))
        longer = await c.router.generate(attempt(LONG))
        assert (longer.prefill_cached, longer.tokens) == (96, expected(LONG, 8))
        other = attempt(LONG)
        other.tenant = "other"
        answer = await c.router.generate(other)
        assert (answer.prefill_cached, answer.record.cached_tokens) == (0, 0)
        assert answer.tokens == expected(LONG, 8)


async def test_a_whole_prompt_that_decode_has_moves_no_bytes():
    async with cell() as c:
        for _ in range(2):
            answer = await c.router.generate(attempt(LONG[:96]))
            assert answer.tokens == expected(LONG[:96], 8)
        assert (answer.record.cached_tokens, answer.record.kv_bytes) == (96, 0)
        await c.balanced()


async def test_decode_reuses_what_it_generated_itself():
    async with cell() as c:
        first = await c.router.generate(attempt(LONG[:90], max_tokens=40))
        prompt = [*LONG[:90], *first.tokens]
        second = await c.router.generate(attempt(prompt))
        assert second.record.cached_tokens == 128, "90 + 39 computed tokens are 8 whole blocks"
        assert second.tokens == expected(prompt, 8)


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("num_given", [1, 7, 16, 17])
async def test_resuming_after_given_output_says_the_same(mixed, num_given):
    whole = expected(PROMPT, 20, temperature=1.0, seed=5)
    async with cell(mixed=mixed) as c:
        request = attempt(outputs=whole[:num_given], max_tokens=20, temperature=1.0, seed=5)
        answer = await c.router.generate(request)
        assert answer.tokens == whole[num_given:]
        assert answer.record.num_tokens == len(PROMPT) + 20
        await c.balanced()


@pytest.mark.parametrize("mixed", [False, True])
async def test_complete_output_is_finished_at_once(mixed):
    given = expected(PROMPT, 8)
    async with cell(mixed=mixed) as c:
        record = await c.router.decode(attempt(outputs=given, max_tokens=8), None if mixed else c.router.source())
        assert (record.outcome, record.num_tokens) == (FINISHED, len(PROMPT) + 8)
        assert record.finish_reason == inference_pb2.FINISH_REASON_LENGTH
        await c.balanced()


def prompt_before_eos() -> tuple[int, ...]:
    """A prompt whose first answer token ends the sequence."""
    return next(
        prompt
        for number in range(100_000)
        if expected(prompt := tuple(str(number).encode()), 1) == [tracer.EOS_TOKEN_ID]
    )


@pytest.mark.parametrize("mixed", [False, True])
async def test_end_of_sequence_as_first_token(mixed):
    prompt = prompt_before_eos()
    async with cell(mixed=mixed) as c:
        answer = await c.router.generate(attempt(prompt, ignore_eos=False))
        assert answer.tokens == [tracer.EOS_TOKEN_ID]
        assert answer.record.finish_reason == inference_pb2.FINISH_REASON_STOP
        assert answer.record.matched_token_id == tracer.EOS_TOKEN_ID
        await c.balanced()
        ignoring = await c.router.generate(attempt(prompt, ignore_eos=True))
        assert ignoring.tokens == expected(prompt, 8)
        at_least = await c.router.generate(attempt(prompt, ignore_eos=False, min_tokens=1, max_tokens=1))
        assert at_least.tokens != [tracer.EOS_TOKEN_ID]
        assert at_least.record.finish_reason == inference_pb2.FINISH_REASON_LENGTH


@pytest.mark.parametrize("mixed", [False, True])
async def test_one_token_is_enough(mixed):
    async with cell(mixed=mixed) as c:
        answer = await c.router.generate(attempt(max_tokens=1))
        assert answer.tokens == expected(PROMPT, 1)
        assert (answer.record.outcome, answer.record.num_tokens) == (FINISHED, len(PROMPT) + 1)
        await c.balanced()


async def test_a_stop_id_ends_and_is_sent():
    tokens = expected(PROMPT, 30)
    stop = next(token for index, token in enumerate(tokens) if index > 3 and token not in tokens[:index])
    async with cell() as c:
        answer = await c.router.generate(attempt(max_tokens=30, stop_token_ids=[stop]))
        assert answer.tokens == tokens[: tokens.index(stop) + 1]
        assert answer.record.matched_token_id == stop


async def test_the_context_ends_generation():
    async with cell(max_model_len=len(PROMPT) + 5) as c:
        answer = await c.router.generate(attempt(max_tokens=100))
        assert answer.tokens == expected(PROMPT, 5)
        assert answer.record.finish_reason == inference_pb2.FINISH_REASON_LENGTH
        prompt = (*PROMPT, 1, 2, 3, 4)
        assert (await c.router.generate(attempt(prompt, max_tokens=100))).tokens == expected(prompt, 1)


async def test_logprobs_and_seeds_arrive():
    async with cell() as c:
        request = attempt(logprobs=True, top_logprobs=1, temperature=1.0, seed=2**64 - 1)
        answer = await c.router.generate(request)
        assert answer.tokens == expected(PROMPT, 8, temperature=1.0, seed=2**64 - 1)
        tokens = c.router.tokens[request.attempt_id].values()
        assert all(token.HasField("logprob") and len(token.top_logprobs) == 1 for token in tokens)
        assert (await c.router.generate(attempt(temperature=1.0, seed=1))).tokens != answer.tokens


async def test_tokens_of_one_step_share_a_message():
    async with cell() as c:
        await asyncio.gather(*(c.router.generate(attempt(PROMPT[n:], max_tokens=64)) for n in range(16)))
        assert c.router.num_messages < 16 * 64 / 4


async def serve(c, request: random.Random, max_attempts: int = 50) -> int:
    """One random request, tried again as a router does when it is given back; answers how often."""
    prompt = tuple(request.choices(range(256), k=request.choice([1, 15, 16, 17, 60, 150])))
    if request.random() < 0.5:
        prompt = LONG[: request.randrange(1, 180)]
    sampling = {"max_tokens": request.choice([1, 5, 40]), "temperature": request.choice([0.0, 1.0]), "seed": 3}
    got: list[int] = []
    started_s = time.monotonic()
    for number in range(max_attempts):
        again = attempt(prompt, got, **sampling)
        again.waited_ms = round(1000 * (time.monotonic() - started_s))
        answer = await c.router.generate(again)
        got += answer.tokens
        if answer.record.outcome == FINISHED:
            assert got == expected(prompt, sampling["max_tokens"], temperature=sampling["temperature"], seed=3)
            return number
        assert answer.record.outcome == EVICTED, answer.record.detail
    raise AssertionError("was given back without end")


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_many_at_once(transport):
    async with cell(kv_transports=(transport,), chunk_size=32, max_num_seqs=16) as c:
        await asyncio.gather(*(serve(c, random.Random(number)) for number in range(32)))
        await c.balanced()


@pytest.mark.parametrize("mixed", [False, True])
async def test_a_tiny_decode_pool_gives_back_and_the_next_attempt_goes_on_bit_exactly(mixed):
    async with cell(mixed=mixed, decode={"num_kv_blocks": 56}, kv_block_size=4, max_model_len=224) as c:
        for _ in range(MIN_FINISHED):
            c.decode.role.scheduler._lengths.record(1)  # so that more is let in than there are blocks for
        counts = await asyncio.gather(*(serve(c, random.Random(number)) for number in range(48)))
        assert sum(counts) > 0, "nothing was evicted, so this tests nothing"
        await c.balanced()


async def test_two_that_almost_fill_the_pool_both_finish():
    """peers.md #40: 7 blocks, one needs 4 + 1 and the other 3 + 1."""
    async with cell(decode={"num_kv_blocks": 7}, max_model_len=112) as c:
        prompts = (LONG[:64], LONG[100:148])
        answers = await asyncio.gather(*(c.router.generate(attempt(prompt)) for prompt in prompts))
        assert [answer.tokens for answer in answers] == [expected(prompt, 8) for prompt in prompts]
        await c.balanced()


async def test_pools_grow_to_what_a_prompt_needs():
    async with cell(num_kv_blocks=2000, max_num_tokens=2048, chunk_size=2048) as c:
        prompt = (LONG * 20)[:5000]
        assert c.decode.parts.holdings.pool.num_total < c.decode.parts.holdings.num_blocks(5000)
        assert (await c.router.generate(attempt(prompt, max_tokens=2))).tokens == expected(prompt, 2)
        await c.balanced()
