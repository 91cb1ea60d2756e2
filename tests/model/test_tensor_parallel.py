"""A model in several ranks says what it says in one, and refuses to be cut where it does not come out even."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from model_driver import BLOCK_SIZE, Driver, load_runner
from rank_threads import RankThreads
from tiny_models import FAMILIES, family_config, random_weights, write_folder, write_gguf

from engine.batch import Batch
from engine.loading import open_model
from engine.model_runner import model_spec
from engine.rank_model import FirstRank
from engine.ranks import Ranks
from engine.tensor_parallel import RankGroup, Shard
from kernels import load_ops
from kvstore.cache import KVCache
from kvstore.layout import KVLayout
from kvstore.memory import PoolMemory, SharedPool
from runtime.checkpoint import open_checkpoint
from runtime.errors import ConfigError

LENGTHS = [1, 17, 70, 130]
NUM_NEW = 16
NUM_BLOCKS = 40
TIE_MARGIN = 1e-4
LOGIT_TOLERANCE = 1e-3
Cut = Callable[..., RankThreads]


@pytest.fixture
def cut(tmp_path: Path) -> Iterator[Cut]:
    """A model in ranks whose KV lies in one pool file, as in a worker on a CPU."""
    closing: list[RankThreads | PoolMemory] = []

    def load(model: Path, num_ranks: int, dtype: str = "float32", quantization: str = "none") -> RankThreads:
        folder = tmp_path / f"ranks-{len(closing)}"
        folder.mkdir()
        layout = model_spec(open_checkpoint(str(model)), dtype).kv_layout(BLOCK_SIZE, num_ranks=num_ranks)
        memory = PoolMemory.create(layout, NUM_BLOCKS, NUM_BLOCKS, epoch=1, directory=folder)
        assert memory.shared_path is not None

        def part(rank: int) -> tuple[Any, KVCache]:
            pool = memory if rank == 0 else SharedPool(memory.shared_path, layout, is_writable=True)  # type: ignore[arg-type]
            return load_ops("cpu"), KVCache(pool, rank)

        ranks = RankThreads(model, layout, folder, part, quantization)
        closing.extend((ranks, memory))
        return ranks

    yield load
    for each in closing:
        each.close()


def write_tiny(folder: Path, family: str, **changes: Any) -> Path:
    config = family_config(family) | changes
    return write_folder(folder / family, config, random_weights(config))


def whole(model: Path, **options: Any) -> Driver:
    runner = load_runner(model, num_tokens=(NUM_BLOCKS - 1) * BLOCK_SIZE, dtype="float32", **options)
    return Driver(runner, [length + NUM_NEW for length in LENGTHS])


def in_parts(ranks: RankThreads) -> Driver:
    return Driver(ranks, [length + NUM_NEW for length in LENGTHS])  # type: ignore[arg-type]


def prompts_of(vocab_size: int) -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(vocab_size) for _ in range(length)] for length in LENGTHS]


def count_near_ties(one: Driver, prompts: list[list[int]], expected: list[list[int]], said: list[list[int]]) -> int:
    """Answers that part, each where the two best tokens are closer than TIE_MARGIN."""
    num_ties = 0
    for index, (prompt, right, answer) in enumerate(zip(prompts, expected, said, strict=True)):
        places = [place for place, pair in enumerate(zip(right, answer, strict=True)) if pair[0] != pair[1]]
        if places:
            sequence = [*prompt, *right[: places[0]]]
            best = one.logits(index, sequence, 512, [len(sequence) - 1])[0].topk(2).values
            assert best[0] - best[1] < TIE_MARGIN, f"prompt {index} parts at output {places[0]}, led by {best}"
            num_ties += 1
    return num_ties


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_say_what_one_process_says(family: str, cut: Cut, tmp_path: Path) -> None:
    """Chunks of prompts, steps of decode, several rows that sample in one step."""
    model, prompts = write_tiny(tmp_path, family), prompts_of(320)
    one, two = whole(model), in_parts(cut(model, 2))
    expected = one.generate(prompts, NUM_NEW, chunk_size=512)
    for chunk_size in (512, 50, 7):
        said = two.generate(prompts, NUM_NEW, chunk_size=chunk_size)
        assert count_near_ties(one, prompts, expected, said) <= 1
    assert len({tuple(tokens) for tokens in expected}) == len(prompts), "the answers tell prompts apart"
    places = [0, 63, 64, 100, 128, 129]
    difference = one.logits(3, prompts[3], 512, places) - two.logits(3, prompts[3], 64, places)
    assert difference.abs().max() < LOGIT_TOLERANCE


def test_kv_of_two_ranks_is_that_of_one_process_head_by_head(cut: Cut, tmp_path: Path) -> None:
    """All of it lies in the one pool file that is handed to readers."""
    model, (*_, prompt) = write_tiny(tmp_path, "qwen3"), prompts_of(320)
    one, ranks = whole(model), cut(model, 2)
    two = in_parts(ranks)
    assert one.tables == two.tables
    for driver in (one, two):
        driver.prefill(3, prompt, 512)
    num_blocks = len(prompt) // BLOCK_SIZE
    blocks = one.tables[3][:num_blocks]
    layout = ranks.cache.layout
    assert (layout.num_ranks, layout.heads_per_plane, layout.num_planes) == (2, 1, 12)
    (memory,) = [SharedPool(path, layout) for path in sorted(tmp_path.glob("ranks-*/baton-kv-*"))]
    planes = torch.from_numpy(memory.planes.copy()).view(torch.float32)
    planes = planes.view(2, layout.num_layers, 2, -1, BLOCK_SIZE, 1, layout.head_dim)  # rank, layer, K or V
    for layer in range(layout.num_layers):
        for kind, caches in enumerate((one.runner.cache.keys, one.runner.cache.values)):
            heads = torch.cat([planes[rank, layer, kind][blocks] for rank in (0, 1)], dim=2)  # [n, block, 2, D]
            assert torch.allclose(heads, caches[layer][blocks], atol=1e-4)


def test_a_prompt_that_is_cached_in_part_goes_on_from_there(cut: Cut, tmp_path: Path) -> None:
    model, (*_, prompt) = write_tiny(tmp_path, "llama-gqa-tied"), prompts_of(320)
    two = in_parts(cut(model, 2))
    computed = two.logits(3, prompt, 512, [63, 69])
    two.tables[2][:4] = two.tables[3][:4]
    batch = Batch()
    two.add(batch, 2, prompt[64:70], 64)
    two.ask(batch)
    reused = two.runner.logits(batch)
    assert torch.allclose(reused[0], computed[1], atol=1e-4)
    assert not torch.allclose(reused[0], computed[0], atol=1e-1)


def test_a_gguf_file_is_cut_like_a_folder(cut: Cut, tmp_path: Path) -> None:
    """Its query and key rows lie in another order, and its frequencies in a tensor that nobody cuts."""
    config = family_config("llama-mha-untied-llama3")
    model = write_gguf(tmp_path / "model.gguf", config, random_weights(config), rope_factors=torch.full((8,), 2.0))
    prompts = prompts_of(320)
    one = whole(model)
    expected = one.generate(prompts, NUM_NEW)
    assert count_near_ties(one, prompts, expected, in_parts(cut(model, 4)).generate(prompts, NUM_NEW)) <= 1


def test_a_vocabulary_that_does_not_come_out_even(cut: Cut, tmp_path: Path) -> None:
    """The last rank has fewer rows of the head, or none; nobody can say a token that there is not."""
    model = write_tiny(
        tmp_path, "llama-gqa-tied", vocab_size=5, num_attention_heads=4, num_key_value_heads=4, eos_token_id=0
    )
    (prompt,) = [[1, 3, 4, 2, 0, 1]]
    one, four = whole(model), in_parts(cut(model, 4))
    logits = four.logits(1, prompt, 512, range(len(prompt)))
    assert logits.shape == (len(prompt), 5)
    assert torch.allclose(logits, one.logits(1, prompt, 512, range(len(prompt))), atol=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_numbers_are_added_up_as_well(dtype: str, cut: Cut, tmp_path: Path) -> None:
    """As near to float32 as one process is."""
    model, (*_, prompt) = write_tiny(tmp_path, "qwen2"), prompts_of(320)
    narrow = load_runner(model, num_tokens=256, dtype=dtype)
    places = range(0, 130, 10)
    exact = whole(model).logits(3, prompt, 512, places)
    alone = Driver(narrow, [len(prompt)]).logits(0, prompt, 512, places)
    parts = in_parts(cut(model, 2, dtype)).logits(3, prompt, 512, places)
    assert (parts - exact).abs().mean() < 1.5 * (alone - exact).abs().mean()


def test_8_bits_are_as_exact_in_parts(cut: Cut, tmp_path: Path) -> None:
    """Each rank rounds its own weights and inputs, so the numbers are others."""
    model, (*_, prompt) = write_tiny(tmp_path, "llama-biases-linear"), prompts_of(320)
    places = range(0, 130, 10)
    exact = whole(model).logits(3, prompt, 512, places)
    alone = whole(model, quantization="int8").logits(3, prompt, 512, places)
    parts = in_parts(cut(model, 2, quantization="int8")).logits(3, prompt, 512, places)
    assert not torch.equal(parts, alone)
    assert (parts - exact).abs().mean() < 1.5 * (alone - exact).abs().mean()


def ranks(num_ranks: int) -> Ranks:
    return Ranks(num_ranks, "w", "info", pytest.fail)


def test_what_does_not_come_out_even_is_refused() -> None:
    """SmolLM2 has 9 query heads and 3 KV heads: 3 ranks, or one."""
    sizes = "num_attention_heads 9, num_key_value_heads 3, intermediate_size 1536"
    for size in (2, 4, 9):
        text = f"--tensor-parallel-size: must divide what smollm2 has, {sizes}; got {size}"
        with pytest.raises(ConfigError, match=text):
            open_model("smollm2", "auto", None, ranks=ranks(size))
    layout = open_model("smollm2", "auto", None, ranks=ranks(3)).layout(16)
    assert (layout.num_ranks, layout.num_kv_heads, layout.heads_per_plane) == (3, 3, 1)


def test_unequal_degrees_are_not_paired() -> None:
    """Layouts differ in their text; the model is the same, but where each rank rounds by itself."""
    one, three = (open_model("smollm2", "auto", None, ranks=each) for each in (None, ranks(3)))
    assert one.layout(16).fingerprint != three.layout(16).fingerprint
    assert one.layout(16).block_bytes == three.layout(16).block_bytes
    assert one.fingerprint == three.fingerprint
    rounded = [open_model("smollm2", "auto", None, "int8", ranks=each).fingerprint for each in (None, ranks(3))]
    assert rounded[1] == f"{rounded[0]}-3ranks"


def test_a_step_that_fails_in_one_rank_is_the_end_of_all() -> None:
    """The others may wait in the middle of it: nothing is tried again."""

    class Broken:
        def logits(self, batch: Batch) -> torch.Tensor:
            raise RuntimeError("out of memory")

    failures: list[str] = []
    runner = FirstRank(Broken(), Ranks(2, "w", "info", failures.append))  # type: ignore[arg-type]
    assert runner.run(Batch()) == [] and not failures, "a step of nothing is none"
    with pytest.raises(RuntimeError):
        runner.run(Batch([1], [0], [0], [0, 1], [1], [[0]]))
    assert failures == ["a step failed in rank 0: out of memory"]


def test_ranks_on_npus_meet_over_hccl(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        dist, "init_process_group", lambda backend, **given: asked.append((backend, given["rank"], given["world_size"]))
    )
    RankGroup(Shard(1, 4), "npu", tmp_path / "meeting")
    assert asked == [("hccl", 1, 4)]


def test_layout_of_one_rank() -> None:
    layout = KVLayout(2, 16, 6, 8, "float32", num_ranks=3)
    own = layout.of_one_rank
    assert (own.num_planes, own.num_kv_heads, own.plane_block_bytes) == (4, 2, layout.plane_block_bytes)
    assert layout.fingerprint == "layers=2,block=16,heads=6,dim=8,dtype=float32,ranks=3"
    assert own.fingerprint == "layers=2,block=16,heads=2,dim=8,dtype=float32"
