"""Configurations: what each family reads, what is refused; and what a runner answers whatever the batch."""

from __future__ import annotations

import importlib
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from model_driver import GREEDY, Driver, load_runner
from tiny_models import BASE, FAMILIES, LLAMA3_SCALING, family_config, random_weights, write_folder

from engine.batch import Batch, SampleRow
from engine.decoder import Decoder
from engine.model_runner import ModelRunner, ModelSpec, model_spec
from engine.models import known_models, load_model_class
from engine.request import SamplingParams
from engine.rope import inverse_frequencies
from engine.sampler import LogitsNotFinite
from runtime.checkpoint import open_checkpoint
from runtime.errors import CheckpointError, ConfigError


def read_spec(folder: Path, changes: dict[str, Any], dtype: str = "auto") -> ModelSpec:
    """The spec of a Llama folder with some keys changed; None removes a key. Its weights do not matter."""
    config = BASE | {"model_type": "llama"} | changes
    config = {key: value for key, value in config.items() if value is not ...}
    write_folder(folder, config, {"model.norm.weight": torch.zeros(1)})
    return model_spec(open_checkpoint(str(folder)), dtype)


def test_each_file_of_models_is_a_model() -> None:
    assert known_models() == ["llama", "mistral", "qwen2", "qwen3"]
    for name in known_models():
        model = importlib.import_module(f"engine.models.{name}").Model
        assert issubclass(model, Decoder) and not model.__abstractmethods__
        assert load_model_class(name, Path("x")) is model


@pytest.mark.parametrize("model_type", ["gpt2", "qwen3_moe", "", "../llama", "__init__", None, 7])
def test_unknown_model_lists_the_known_ones(model_type: object, tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"model_type .* is not supported; supported are: llama, mistral, qwen2, q"
    ):
        read_spec(tmp_path, {"model_type": model_type})


def test_spec_is_known_before_weights_are_read(tmp_path: Path) -> None:
    spec = read_spec(tmp_path, {"head_dim": 24, "torch_dtype": "bfloat16"})
    assert (spec.architecture, spec.vocab_size, spec.max_context_len, spec.dtype) == ("llama", 320, 512, "bfloat16")
    layout = spec.kv_layout(16)
    assert layout.fingerprint == "layers=3,block=16,heads=2,dim=24,dtype=bfloat16"


def test_dtype_names(tmp_path: Path) -> None:
    assert read_spec(tmp_path, {"torch_dtype": "bfloat16"}, "float16").dtype == "float16"
    assert read_spec(tmp_path, {"torch_dtype": ...}).dtype == "float32"
    assert model_spec(open_checkpoint("smollm2")).dtype == "float32"
    assert model_spec(open_checkpoint("smollm2"), "bfloat16").dtype == "bfloat16"
    with pytest.raises(ConfigError, match=r"dtype must be auto or one of float32, bfloat16, float16, got 'int8'"):
        read_spec(tmp_path, {}, "int8")
    with pytest.raises(CheckpointError, match=r"config\.json: dtype 'float8_e4m3fn' cannot be computed in"):
        read_spec(tmp_path, {"torch_dtype": "float8_e4m3fn"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": ...}, "hidden_size must be a whole number of at least 1, got None"),
        ({"vocab_size": 0}, "vocab_size must be a whole number of at least 1, got 0"),
        ({"vocab_size": "320"}, "vocab_size must be a whole number of at least 1, got '320'"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be a whole number of at least 1, got True"),
        ({"max_position_embeddings": ...}, "max_position_embeddings must be a whole number"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3 does not divide num_attention_heads 4"),
        ({"hidden_size": 66}, "num_attention_heads 4 does not divide hidden_size 66"),
        ({"head_dim": 15}, "head_dim must be even for rotary positions, got 15"),
        ({"rms_norm_eps": -1e-5}, "rms_norm_eps must be a positive number, got -1e-05"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps must be a positive number, got nan"),
        ({"rope_theta": 0}, "rope_theta must be a positive number, got 0"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings must be true or false, got 1"),
        ({"attention_bias": "yes"}, "attention_bias must be true or false, got 'yes'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; supported is: silu"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config: quantised folders are not supported"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "rope_parameters that differ between layers"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            "rope_scaling of type 'yarn' is not supported; .*: default, linear, ll",
        ),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "rope_scaling of type 'dynamic' is not supported"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_scaling of type 'longrope' is not supported"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor must be a positive number, got None"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 0}},
            "rope_scaling.factor must be a positive number, got 0",
        ),
        (
            {"rope_scaling": LLAMA3_SCALING | {"low_freq_factor": 4.0}},
            "rope_scaling.high_freq_factor must exceed low_freq_factor 4.0",
        ),
        ({"model_type": "mistral", "sliding_window": 0}, "sliding_window must be a whole number of at least 1, got 0"),
        (
            {"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 9, "layer_types": ["full_attention"]},
            "layer_types must hold 3 times one of sliding_attention, full_attention",
        ),
    ],
)
def test_configuration_that_cannot_be_used_is_named(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"config\.json: {message}"):
        read_spec(tmp_path, changes)


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"model_type": "llama", "sliding_window": 8}, (None, None, None)),
        ({"model_type": "mistral"}, (4096, 4096, 4096)),
        ({"model_type": "mistral", "sliding_window": None}, (None, None, None)),
        ({"model_type": "mistral", "sliding_window": 8}, (8, 8, 8)),
        ({"model_type": "qwen2", "sliding_window": 8}, (None, None, None)),
        ({"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": True}, (None, None, None)),
        ({"model_type": "qwen2", "sliding_window": None, "use_sliding_window": True}, (None, None, None)),
        (
            {"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 2},
            (None, None, 8),
        ),
        ({"model_type": "qwen3", "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 0}, (8, 8, 8)),
        (
            {
                "model_type": "qwen3",
                "sliding_window": 8,
                "use_sliding_window": True,
                "max_window_layers": 0,
                "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            },
            (None, 8, None),
        ),
    ],
)
def test_windows_of_each_layer(changes: dict[str, Any], windows: tuple[int | None, ...], tmp_path: Path) -> None:
    assert read_spec(tmp_path, changes).decoder.windows == windows


def test_head_dim_defaults_differ_between_families(tmp_path: Path) -> None:
    assert read_spec(tmp_path / "llama", {"head_dim": None}).decoder.head_dim == 16
    assert read_spec(tmp_path / "qwen3", {"model_type": "qwen3"}).decoder.head_dim == 128


def test_rope_of_either_age_of_file_is_the_same(tmp_path: Path) -> None:
    older = read_spec(tmp_path / "a", {"rope_theta": 5e5, "rope_scaling": LLAMA3_SCALING})
    newer = read_spec(tmp_path / "b", {"rope_theta": ..., "rope_parameters": LLAMA3_SCALING | {"rope_theta": 5e5}})
    assert older == newer


def test_llama3_scaling_keeps_short_stretches_long_and_blends_between() -> None:
    plain = inverse_frequencies(64, 500_000.0, None, Path("x"))
    scaled = inverse_frequencies(64, 500_000.0, LLAMA3_SCALING | {"original_max_position_embeddings": 8192}, Path("x"))
    turns = 8192 * plain / (2 * math.pi)  # over the original context
    ratio = plain / scaled
    assert torch.equal(ratio[turns > 4.0], torch.ones(int((turns > 4.0).sum())))
    torch.testing.assert_close(ratio[turns < 1.0], torch.full((int((turns < 1.0).sum()),), 8.0))
    between = ratio[(turns > 1.0) & (turns < 4.0)]
    assert between.numel() > 0 and bool(((between > 1) & (between < 8)).all())
    assert bool((ratio.diff() >= -1e-5).all())


# Runner


@pytest.fixture(scope="module", params=["llama-gqa-tied", "mistral-window", "qwen3"])
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    config = family_config(request.param)
    folder = write_folder(tmp_path_factory.mktemp("model"), config, random_weights(config))
    return load_runner(folder, num_tokens=4000, num_sequences=40)


def prompts_of(lengths: list[int], seed: int = 1) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(320) for _ in range(length)] for length in lengths]


SEEDED = SamplingParams(temperature=0.9, top_p=0.95, seed=77, logprobs=True)


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED])
def test_chunk_size_and_company_do_not_change_tokens(runner: ModelRunner, sampling: SamplingParams) -> None:
    prompts = prompts_of([1, 16, 17, 33, 90])
    capacities = [len(prompt) + 12 for prompt in prompts]
    expected = Driver(runner, capacities).generate(prompts, 12, chunk_size=1000, sampling=sampling)
    for chunk_size in (7, 16, 64):
        assert Driver(runner, capacities).generate(prompts, 12, chunk_size=chunk_size, sampling=sampling) == expected
    for prompt, tokens in zip(prompts, expected, strict=True):
        assert Driver(runner, [len(prompt) + 12]).generate([prompt], 12, sampling=sampling) == [tokens]
    assert len({tuple(tokens) for tokens in expected}) == 5


def test_prefill_and_decode_mix_in_one_batch(runner: ModelRunner) -> None:
    first, second, third = prompts_of([20, 30, 41], seed=5)
    alone = Driver(runner, [64, 64, 64])
    expected = [alone.prefill(index, prompt, 100).token_id for index, prompt in enumerate((first, second, third))]
    mixed = Driver(runner, [64, 64, 64])
    mixed.prefill(0, first[:-1], 100)
    mixed.prefill(2, third[:25], 100)
    batch = Batch()
    mixed.add(batch, 0, first[-1:], len(first) - 1)
    mixed.ask(batch)
    mixed.add(batch, 1, second, 0)
    mixed.ask(batch)
    mixed.add(batch, 2, third[25:], 25)
    mixed.ask(batch)
    assert [answer.token_id for answer in runner.run(batch)] == expected


def test_samples_come_in_the_order_of_their_rows(runner: ModelRunner) -> None:
    (prompt,) = prompts_of([24], seed=6)
    driver = Driver(runner, [32])
    logits = driver.logits(0, prompt, 100, range(24))
    batch = Batch()
    driver.add(batch, 0, prompt, 0)
    batch.sample_rows = [SampleRow(row, row + 1, GREEDY) for row in (20, 3, 11)]
    assert [answer.token_id for answer in runner.run(batch)] == logits.argmax(dim=-1)[[20, 3, 11]].tolist()


def test_chunk_without_samples_writes_kv_and_answers_nothing(runner: ModelRunner) -> None:
    (prompt,) = prompts_of([20], seed=8)
    driver = Driver(runner, [32])
    batch = Batch()
    driver.add(batch, 0, prompt, 0)
    for cache in (*runner.cache.keys, *runner.cache.values):
        cache[driver.tables[0]] = math.nan
    assert runner.run(batch) == []
    for cache in (*runner.cache.keys, *runner.cache.values):
        written = cache[driver.tables[0]].flatten(0, 1)
        assert bool(written[:20].isfinite().all()) and bool(written[20:].isnan().all())
        cache[driver.tables[0]] = 0
    assert runner.run(Batch()) == []


def test_damaged_kv_of_one_sequence_stays_with_it(runner: ModelRunner) -> None:
    prompts = prompts_of([20, 20], seed=9)
    driver = Driver(runner, [40, 40])
    outputs = [driver.prefill(index, prompt, 100).token_id for index, prompt in enumerate(prompts)]
    batch = Batch()
    for index in (0, 1):
        driver.add(batch, index, [outputs[index]], 20)
        driver.ask(batch)
    expected = runner.run(batch)[1]
    runner.cache.values[0][driver.tables[0]] = math.nan
    with pytest.raises(LogitsNotFinite) as caught:
        runner.run(batch)
    assert caught.value.rows == (batch.sample_rows[0],)
    alone = Batch()
    driver.add(alone, 1, [outputs[1]], 20)
    driver.ask(alone)
    assert runner.run(alone) == [expected]
    runner.cache.values[0][driver.tables[0]] = 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_half_precision_is_near_float32(family: str, dtype: str, tmp_path: Path) -> None:
    config = family_config(family)
    folder = write_folder(tmp_path, config, random_weights(config))
    (prompt,) = prompts_of([60], seed=10)
    exact, near = (
        Driver(load_runner(folder, num_tokens=64, dtype=name), [64]).logits(0, prompt, 25, range(60))
        for name in ("float32", dtype)
    )
    assert near.dtype == torch.float32
    error = (exact - near).square().mean().sqrt() / exact.square().mean().sqrt()
    assert 0 < error < {"bfloat16": 0.05, "float16": 0.006}[dtype]


def test_packaged_model_answers() -> None:
    config = json.loads(json.dumps(dict(open_checkpoint("smollm2").config)))
    assert config["model_type"] == "llama"
    runner = load_runner("smollm2", num_tokens=64)
    # "What is the capital of France?" in the model's chat format, and the beginning of its answer.
    prompt = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]
    assert Driver(runner, [40]).generate([prompt], 8) == [[504, 3575, 282, 4649, 314, 7042, 30, 2]]
