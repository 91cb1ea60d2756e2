"""KV that decode lends to prefill: what it saves, and that nothing depends on its coming."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import Any

import grpc
import pytest
from harness import FINISHED, KV_LOST, LIMIT_S, PROMPT, Cell, Stream, attempt, cell, expected, gated
from transports_here import TRANSPORTS

from engine.worker_service import WorkerService
from kvstore.transport import grpc as grpc_transport
from protos import inference_pb2, worker_pb2

BLOCK = 16
NUM_TOKENS = 40
MORE = tuple(b" And what does the crowd say then, when the last of them has come home?")


async def first_turn(c: Cell) -> tuple[int, ...]:
    """What was said by its end; decode has the KV of all whole blocks of it, prefill of the prompt."""
    answer = await c.router.generate(attempt(PROMPT, max_tokens=NUM_TOKENS))
    return (*PROMPT, *answer.tokens)


async def lent_turn(c: Cell, request: worker_pb2.Attempt) -> tuple[list[int], worker_pb2.PrefillFirstToken]:
    """A turn in which decode lends; its tokens, and what prefill reports."""
    async with asyncio.timeout(2 * LIMIT_S):
        prefilling, decoding = await opened(c, request)
        record = await decoding
        events = await prefilling.rest()
    assert record.outcome == FINISHED, record
    num_new = record.num_tokens - len(request.prompt_token_ids)
    tokens = await c.router.until_tokens(request.attempt_id, num_new)
    await c.balanced()
    return tokens, events[0].first_token


async def opened(c: Cell, request: worker_pb2.Attempt) -> tuple[Stream, Any]:
    lender = worker_pb2.KVSource(worker_id="decode", address=c.decode.address, epoch=c.d.epoch)
    prefilling = Stream(c.p.prefill.Run(worker_pb2.PrefillRunRequest(attempt=request, lender=lender)))
    assert (await prefilling.next()).HasField("accepted")
    decoding = c.d.decode.Run(
        worker_pb2.DecodeRunRequest(attempt=request, router_id=c.router.router_id, source=c.router.source(), lends=True)
    )
    return prefilling, decoding


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_prefill_computes_only_what_is_new(transport: str) -> None:
    async with cell(kv_transports=(transport,)) as c:
        said = await first_turn(c)
        num_held = (len(said) - 1) // BLOCK
        tokens, first = await lent_turn(c, attempt((*said, *MORE)))
        assert tokens == expected((*said, *MORE), 8)
        assert first.cached_tokens == num_held * BLOCK
        block_bytes = c.decode.parts.identity.layout.block_bytes
        assert first.lent_bytes == (num_held - len(PROMPT) // BLOCK) * block_bytes
        assert c.prefill is not None and c.prefill.role.load().fetch_bytes_per_s > 0
        again = await c.router.generate(attempt((*said, *MORE)))
        assert again.prefill_cached == (len(said) + len(MORE) - 1) // BLOCK * BLOCK, "what was lent is cached"


async def test_an_input_that_is_held_to_its_end_is_lent_but_for_its_last_block() -> None:
    async with cell() as c:
        said = (await first_turn(c))[:128]
        tokens, first = await lent_turn(c, attempt(said))
        assert tokens == expected(said, 8)
        assert first.cached_tokens == 128 - BLOCK


async def test_what_prefill_has_itself_is_not_fetched() -> None:
    async with cell() as c:
        said = await first_turn(c)
        await c.router.generate(attempt((*said, *MORE)))
        tokens, first = await lent_turn(c, attempt((*said, *MORE)))
        assert tokens == expected((*said, *MORE), 8) and first.lent_bytes == 0


async def test_decode_that_holds_nothing_lends_nothing() -> None:
    async with cell() as c:
        tokens, first = await lent_turn(c, attempt(PROMPT))
        assert tokens == expected(PROMPT, 8) and (first.lent_bytes, first.cached_tokens) == (0, 0)


# What goes wrong


def spoil(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode lends, and something is wrong with it. Before workers start."""
    fetch, release = WorkerService.Fetch, WorkerService.Release

    def is_lender(service: WorkerService) -> bool:
        return service.identity.role == inference_pb2.WORKER_ROLE_DECODE

    async def spoilt_fetch(service: WorkerService, request: Any, context: Any) -> Any:
        async for frame in fetch(service, request, context):
            if is_lender(service) and how == "a bit flipped":
                frame.data = bytes([frame.data[0] ^ 1]) + frame.data[1:]
            if is_lender(service) and how == "lease broken":
                service.leases.break_(service.leases.find(request.attempt_id, request.epoch))
            yield frame

    async def spoilt_release(service: WorkerService, request: Any, context: Any) -> Any:
        answer = await release(service, request, context)
        answer.num_tokens -= is_lender(service) and how == "another count"
        return answer

    monkeypatch.setattr(WorkerService, "Fetch", spoilt_fetch)
    monkeypatch.setattr(WorkerService, "Release", spoilt_release)


@pytest.mark.parametrize(
    ("how", "check"), [("a bit flipped", "checksum"), ("lease broken", "lease"), ("another count", "count")]
)
async def test_what_is_lent_and_not_attested_is_computed(how: str, check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No attempt fails for it, no wrong KV is kept, and it is counted."""
    spoil(how, monkeypatch)
    async with cell(kv_transports=("grpc",)) as c:
        said = await first_turn(c)
        tokens, first = await lent_turn(c, attempt((*said, *MORE)))
        assert tokens == expected((*said, *MORE), 8)
        assert (first.lent_bytes, first.cached_tokens) == (0, len(PROMPT) // BLOCK * BLOCK)
        assert c.prefill is not None and dict(c.prefill.role.load().handoffs_lost) == {check: 1}
        assert not c.decode.role.load().num_handoffs_lost
        again = await c.router.generate(attempt((*said, *MORE)))
        assert again.tokens == expected((*said, *MORE), 8)
        await c.balanced()


async def test_a_lender_that_is_not_there_is_done_without() -> None:
    async with cell() as c:
        said = await first_turn(c)
        request = attempt((*said, *MORE))
        lender = worker_pb2.KVSource(worker_id="ghost", address="127.0.0.1:1", epoch=7)
        prefilling = Stream(c.p.prefill.Run(worker_pb2.PrefillRunRequest(attempt=request, lender=lender)))
        await prefilling.next()
        decoding = c.d.decode.Run(
            worker_pb2.DecodeRunRequest(
                attempt=request, router_id=c.router.router_id, source=c.router.source(), lends=True
            )
        )
        assert (await decoding).outcome == FINISHED
        assert c.prefill is not None and dict(c.prefill.role.load().handoffs_lost) == {"reachable": 1}
        await c.balanced()


@pytest.mark.parametrize("who", ["router", "prefill"])
async def test_an_attempt_that_ends_while_it_fetches_leaves_nothing(who: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither worker frees a block under the copy; then both give all back."""
    entered, proceed, loop = asyncio.Event(), threading.Event(), asyncio.get_running_loop()
    receive = grpc_transport.Reader.receive
    async with cell(kv_transports=("grpc",)) as c:
        said = await first_turn(c)

        def slow(*arguments: Any) -> int:
            loop.call_soon_threadsafe(entered.set)
            proceed.wait(LIMIT_S)
            return receive(*arguments)

        monkeypatch.setattr(grpc_transport.Reader, "receive", slow)
        prefilling, decoding = await opened(c, attempt((*said, *MORE)))
        await asyncio.wait_for(entered.wait(), LIMIT_S)
        assert c.prefill is not None
        (sequence,) = c.prefill.role.scheduler.live()  # type: ignore[attr-defined]
        if who == "router":
            prefilling.cancel()
            decoding.cancel()
        else:
            c.prefill.role.evict_all("a test wants it")
        await until_idle(c)
        assert sequence.num_pins == 1 and c.prefill.parts.holdings.pool.num_used > 0
        proceed.set()
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
            await decoding
        await c.balanced()
        assert (await c.router.generate(attempt((*said, *MORE)))).tokens == expected((*said, *MORE), 8)


async def until_idle(c: Cell) -> None:
    """Waits until prefill has no attempt."""
    reports = Stream(c.p.worker.Watch(worker_pb2.WatchRequest()))
    while c.prefill is not None and c.prefill.role.live_attempts():
        await reports.next()
    reports.cancel()


async def test_an_attempt_that_cannot_lend_ends_and_leaves_nothing() -> None:
    """Its id has a lease at decode already, which no router of ours lets happen."""
    async with cell() as c:
        said = await first_turn(c)
        request = attempt((*said, *MORE))
        lease = c.decode.parts.leases.lend(request.attempt_id, [], 0, lambda: None)
        prefilling, decoding = await opened(c, request)
        record = await decoding
        assert (record.outcome, record.failed_check) == (KV_LOST, worker_pb2.KV_CHECK_READER)
        prefilling.cancel()
        c.decode.parts.leases.break_(lease)
        await c.balanced()


async def test_decode_is_told_what_prefill_computes_on_lent_kv_chunk_by_chunk() -> None:
    """While prefill fetches and computes decode waits with its blocks; the loan ends with the attempt's fetch."""
    async with cell(chunk_size=16, max_num_tokens=16, max_num_seqs=16) as c:
        said = await first_turn(c)
        assert c.prefill is not None
        with gated(c.prefill) as gate:
            prefilling, decoding = await opened(c, attempt((*said, *MORE)))
            await gate.arrival()
            assert len(c.decode.parts.leases) == 0, "what was lent has been read"
            gate.open()
            assert (await decoding).outcome == FINISHED
        await prefilling.rest()
        await c.balanced()


@pytest.mark.parametrize(
    ("have_tokens", "lent_tokens", "code"),
    [
        (64, 48, grpc.StatusCode.OK),
        (64, 7, grpc.StatusCode.INVALID_ARGUMENT),
        (48, 64, grpc.StatusCode.INVALID_ARGUMENT),
        (64, 64, grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
async def test_only_what_can_be_lent_is_taken(have_tokens: int, lent_tokens: int, code: grpc.StatusCode) -> None:
    """Whole blocks, of what the reader has, and never the whole input. Without a lender that is known nothing is."""
    async with cell() as c:
        request = attempt(PROMPT[:64])
        prefilling = await c.router.prefill(request)
        fetch = c.p.fetch(request.attempt_id, have_tokens=have_tokens, lent_tokens=lent_tokens)
        assert await fetch.code() is code
        prefilling.cancel()
        await c.balanced()
