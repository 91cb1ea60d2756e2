"""The engine on `kernels.npu.Ops` over the simulated operators says what it says on the reference operations."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from harness import FINISHED, attempt, cell
from model_driver import GREEDY, Driver
from npu_runner import BLOCK_SIZE, load_runner, write_tiny
from rounding import assert_same_up_to_rounding
from simulated_host import Npu

from engine.batch import Batch
from engine.model_runner import ModelRunner
from engine.request import SamplingParams

FAMILIES = [
    "llama-gqa-tied",
    "llama-mha-untied-llama3",
    "llama-biases-linear",
    "qwen2",
    "qwen2-window",
    "qwen3",
    "mistral-window",
]
LENGTHS = [1, 127, 128, 129, 300]
NUM_NEW = 12
SEEDED = SamplingParams(temperature=0.9, top_k=50, seed=77)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {family: write_tiny(folder, family) for family in FAMILIES}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Sums that do not depend on the machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def prompts_of(lengths: list[int], seed: int = 1) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(320) for _ in range(length)] for length in lengths]


def check(
    said: list[list[int]],
    prompts: list[list[int]],
    model: Path | str,
    expected: list[list[int]],
    sampling: SamplingParams = GREEDY,
) -> None:
    exact = partial(load_runner, model, "reference", dtype="float32")
    assert_same_up_to_rounding(said, expected, prompts, exact, sampling)


def answers(runner: ModelRunner, prompts: list[list[int]], **options: object) -> list[list[int]]:
    return Driver(runner, [len(prompt) + NUM_NEW for prompt in prompts]).generate(prompts, NUM_NEW, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chunk_size", [512, 100])
def test_tokens_of_chunks_and_decode_steps(npu: Npu, folders: dict[str, Path], family: str, chunk_size: int) -> None:
    prompts = prompts_of(LENGTHS)
    expected = answers(load_runner(folders[family], "reference"), prompts, chunk_size=chunk_size)
    said = answers(load_runner(folders[family], "npu"), prompts, chunk_size=chunk_size)
    check(said, prompts, folders[family], expected)
    assert len({tuple(tokens) for tokens in expected}) == len(prompts), "the answers tell prompts apart"
    assert npu.operators.num_calls["npu_fused_infer_attention_score"]
    assert "_npu_paged_attention" not in npu.operators.num_calls


@pytest.mark.parametrize("family", ["llama-gqa-tied", "qwen3"])
def test_logits_are_as_exact_as_the_references(npu: Npu, folders: dict[str, Path], family: str) -> None:
    """To those of float32."""
    (prompt,) = prompts_of([290])
    kinds = [("reference", "float32"), ("reference", "bfloat16"), ("npu", "bfloat16")]
    exact, rounded, mine = (
        Driver(load_runner(folders[family], device, dtype=dtype), [300]).logits(0, prompt, 100, [0, 127, 128, 200, 289])
        for device, dtype in kinds
    )
    assert (mine - exact).abs().mean() < 1.1 * (rounded - exact).abs().mean()


def test_a_step_mixes_chunks_and_single_rows(npu: Npu, folders: dict[str, Path]) -> None:
    """One step of a decode row, a first chunk, a later chunk and a row that samples nothing."""
    prompts = prompts_of([140, 30, 260, 9], seed=2)
    tokens = []
    for device in ("reference", "npu"):
        driver = Driver(load_runner(folders["qwen3"], device), [200, 100, 300, 100])
        first = driver.prefill(0, prompts[0], 512).token_id
        before = Batch()
        driver.add(before, 2, prompts[2][:130], 0)
        assert driver.runner.run(before) == []
        step = Batch()
        driver.add(step, 0, [first], 140)
        driver.ask(step)
        driver.add(step, 1, prompts[1], 0)
        driver.ask(step, SEEDED)
        driver.add(step, 2, prompts[2][130:], 130)
        driver.ask(step)
        driver.add(step, 3, prompts[3][:1], 0)
        tokens.append([sample.token_id for sample in driver.runner.run(step)])
    assert tokens[0] == tokens[1] and len(tokens[0]) == 3


def test_seeded_draws(npu: Npu, folders: dict[str, Path]) -> None:
    prompts = prompts_of([20, 150], seed=3)
    folder = folders["llama-gqa-tied"]
    expected = answers(load_runner(folder, "reference"), prompts, sampling=SEEDED)
    said = answers(load_runner(folder, "npu"), prompts, sampling=SEEDED)
    check(said, prompts, folder, expected, SEEDED)


def test_head_sizes_of_the_older_operators(npu: Npu, tmp_path: Path) -> None:
    folder = write_tiny(tmp_path, "qwen2", head_dim=32)
    prompts = prompts_of([5, 140], seed=4)
    expected = answers(load_runner(folder, "reference"), prompts, chunk_size=100)
    check(answers(load_runner(folder, "npu"), prompts, chunk_size=100), prompts, folder, expected)
    calls = npu.operators.num_calls
    assert calls["_npu_paged_attention"] and calls["_npu_paged_attention_splitfuse"]
    assert not calls["npu_fused_infer_attention_score"]


def test_smollm2(npu: Npu) -> None:
    prompts = [list(range(1000, 1020)), list(range(5000, 5133))]
    expected = answers(load_runner("smollm2", "reference", num_blocks=6), prompts)
    check(answers(load_runner("smollm2", "npu", num_blocks=6), prompts), prompts, "smollm2", expected)


OPTIONS = {"dtype": "auto", "device": "npu:0", "num_kv_blocks": 24, "kv_block_size": None, "max_num_seqs": 8}


def request_for(prompt: list[int], fingerprint: str, num_tokens: int = NUM_NEW) -> object:
    request = attempt(prompt, max_tokens=num_tokens)
    request.fingerprint = fingerprint
    return request


@pytest.mark.parametrize("decode_graphs", [False, True])
async def test_workers_hand_over_from_npu_to_npu(npu: Npu, folders: dict[str, Path], decode_graphs: bool) -> None:
    """Whole workers over sockets: KV leaves one device's memory and reaches the other's through messages."""
    folder = folders["qwen3"]
    (prompt,) = prompts_of([300], seed=5)
    (expected,) = answers(load_runner(folder, "reference"), [prompt], chunk_size=64)
    async with cell(model=str(folder), decode_graphs=decode_graphs, **OPTIONS) as c:
        identity = c.decode.parts.identity
        assert (identity.layout.block_size, identity.layout.dtype) == (BLOCK_SIZE, "bfloat16")
        answer = await c.router.generate(request_for(prompt, identity.model.fingerprint))
        assert (answer.record.outcome, answer.record.transport) == (FINISHED, "grpc")
        check([answer.tokens], [prompt], folder, [expected])
        again = await c.router.generate(request_for(prompt, identity.model.fingerprint))
        check([again.tokens], [prompt], folder, [expected])
        assert again.prefill_cached == again.record.cached_tokens == 2 * BLOCK_SIZE
        await c.balanced()
    assert bool(npu.device.graphs) == decode_graphs
    assert all(graph.num_replays for graph in npu.device.graphs[-1:]) or not decode_graphs


async def test_a_mixed_worker_reuses_prefixes(npu: Npu, folders: dict[str, Path]) -> None:
    folder = folders["llama-gqa-tied"]
    base, other = prompts_of([280, 40], seed=6)
    prompts = [base, base[:260] + other, base]
    expected = answers(load_runner(folder, "reference", num_blocks=32), prompts, chunk_size=64)
    async with cell(mixed=True, model=str(folder), **OPTIONS) as c:
        fingerprint = c.decode.parts.identity.model.fingerprint
        said = []
        for prompt, cached in zip(prompts, (0, 256, 256), strict=True):
            answer = await c.router.generate(request_for(prompt, fingerprint))
            assert answer.record.cached_tokens == cached
            said.append(answer.tokens)
        await c.balanced()
    check(said, prompts, folder, expected)
