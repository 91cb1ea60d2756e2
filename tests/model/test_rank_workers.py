"""Workers whose model several processes compute: what is handed over is the KV of all of them, or nothing."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import FINISHED, KV_LOST, Answer, Cell, attempt, cell
from model_driver import Driver, load_runner
from tiny_models import family_config, random_weights, write_folder

from decode_svc.service import DecodeService
from engine.config import WorkerConfig
from engine.worker import Worker
from prefill_svc.service import PrefillService
from protos import worker_pb2
from runtime.errors import ConfigError
from runtime.status import StatusReporter

NUM_NEW = 24
SHARED: dict[str, Any] = {"dtype": "float32", "chunk_size": 64, "num_kv_blocks": 64, "max_num_seqs": 8}


@pytest.fixture(autouse=True)
def restored_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = family_config("qwen3")
    return write_folder(tmp_path_factory.mktemp("model"), config, random_weights(config))


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    rng = random.Random(3)
    return [rng.randrange(320) for _ in range(200)]


@pytest.fixture(scope="module")
def expected(model: Path, prompt: list[int]) -> list[int]:
    """What one process says; no choice of it hangs on less than the sums of two ranks may differ by."""
    driver = Driver(load_runner(model, num_tokens=240, dtype="float32"), [len(prompt) + NUM_NEW])
    (tokens,) = driver.generate([prompt], NUM_NEW)
    sequence = [*prompt, *tokens[:-1]]
    best = driver.logits(0, sequence, 512, range(len(prompt) - 1, len(sequence))).topk(2).values
    assert (best[:, 0] - best[:, 1]).min() > 1e-3
    return tokens


async def ask(c: Cell, prompt: list[int]) -> Answer:
    request = attempt(prompt, max_tokens=NUM_NEW)
    request.fingerprint = c.decode.parts.identity.model.fingerprint
    return await c.router.generate(request)


@pytest.mark.parametrize("transport", ["shm", "grpc"])
async def test_kv_of_all_ranks_is_handed_over(
    transport: str, model: Path, prompt: list[int], expected: list[int]
) -> None:
    """And found again by the next prompt, at both workers."""
    options = {"model": str(model), "tensor_parallel_size": 2, "kv_transports": (transport,), **SHARED}
    async with cell(**options) as c:
        layout = c.decode.parts.identity.layout
        answer = await ask(c, prompt)
        assert (answer.record.outcome, answer.record.transport) == (FINISHED, transport)
        assert answer.tokens == expected
        assert answer.record.kv_bytes == layout.num_blocks(len(prompt)) * layout.block_bytes
        again = await ask(c, prompt)
        assert again.tokens == expected and again.prefill_cached == again.record.cached_tokens == 192
        await c.balanced()


async def test_unequal_degrees_are_refused_at_the_handshake(model: Path, prompt: list[int]) -> None:
    """By the reader, and by the owner if the reader goes on all the same."""
    async with cell(model=str(model), decode={"tensor_parallel_size": 2}, **SHARED) as c:
        request = attempt(prompt)
        request.fingerprint = c.decode.parts.identity.model.fingerprint
        prefilling = await c.router.prefill(request)
        record = await c.router.decode(request, c.router.source())
        assert (record.outcome, record.failed_check) == (KV_LOST, worker_pb2.KV_CHECK_LAYOUT)
        assert record.detail.endswith("KV layouts differ, ranks: 1 there, 2 here")
        fetching = c.p.fetch(request.attempt_id, layout=c.decode.parts.identity.layout.fingerprint)
        with pytest.raises(Exception, match="ranks=2; ranks: 2 there, 1 here"):
            await fetching.rest()
        prefilling.cancel()
        await c.balanced()


async def test_a_mixed_worker_drafts_from_the_text(model: Path, prompt: list[int], expected: list[int]) -> None:
    """Rows that check drafts are rows like others; drafters that compute have no part in ranks."""
    options = {"mixed": True, "model": str(model), "tensor_parallel_size": 2, **SHARED}
    async with cell(speculation="ngram", **options) as c:
        known = [*prompt, *expected]
        repeated = await ask(c, [*known, *known[:100]])
        assert repeated.record.outcome == FINISHED
        assert (await ask(c, prompt)).tokens == expected
        await c.balanced()


@pytest.mark.parametrize("name", ["self", "draft_model"])
async def test_drafters_that_compute_are_done_without(
    name: str, model: Path, prompt: list[int], expected: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    options = {"mixed": True, "model": str(model), "tensor_parallel_size": 2, **SHARED}
    async with cell(speculation=name, draft_model_path=str(model), **options) as c:
        assert f"--speculation: {name} needs weights in one process; got {model} in 2" in caplog.text
        assert (await ask(c, prompt)).tokens == expected


async def test_a_pool_that_ranks_cannot_share_is_refused(model: Path, tmp_path: Path) -> None:
    """There is no room for its file."""
    config = WorkerConfig(
        str(model), tensor_parallel_size=2, kv_shared_memory_dir=str(tmp_path / "nowhere"), num_kv_blocks=8
    )
    worker = Worker(config, "mixed", "w", StatusReporter(None), DecodeService)
    with pytest.raises(ConfigError, match=r"--kv-shared-memory-dir: ranks share the KV pool.*tensor-parallel-size 2"):
        async with worker.serving():
            pass


async def test_on_npus_only_mixed_workers_have_ranks(model: Path) -> None:
    """Their KV lies in devices that the worker's process does not reach."""
    config = WorkerConfig(str(model), tensor_parallel_size=4, device="npu:0")
    assert config.usable_transports == () and config.kv_transports
    for role, make in (("prefill", PrefillService), ("decode", DecodeService)):
        worker = Worker(config, role, "w", StatusReporter(None), make)
        with pytest.raises(ConfigError, match=f"the role must be mixed; got 4, role {role}"):
            async with worker.serving():
                pass
