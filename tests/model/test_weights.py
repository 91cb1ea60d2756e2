"""Reading weights: formats agree with independent decoders, and every broken file is named with its tensor."""

from __future__ import annotations

import json
import re
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from model_driver import Driver, load_runner
from safetensors.torch import save_file
from tiny_models import LLAMA3_SCALING, family_config, random_weights, to_gguf_name, write_folder, write_gguf

from engine.model_runner import load_model, model_spec
from engine.rope import inverse_frequencies
from engine.weights import open_weights
from engine.weights.blocks import DECODERS, SLICE_ELEMENTS, decode_blocks
from kernels import load_ops
from runtime.checkpoint import open_checkpoint
from runtime.errors import CheckpointError
from runtime.gguf import GGUFTensor

PROMPT = [5, 17, 300, 2, 9, 64, 64, 101]
FLOAT_OFFSETS = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}
"""Where a block holds float16 scales; all other bytes may be anything."""


def no_progress(share: float) -> None:
    """For tests that do not look at it."""


def logits_of(model: Path) -> torch.Tensor:
    runner = load_runner(model, num_tokens=32)
    return Driver(runner, [16]).logits(0, PROMPT, 16, range(len(PROMPT)))


def load(model: Path) -> None:
    checkpoint = open_checkpoint(str(model))
    load_model(checkpoint, model_spec(checkpoint), load_ops("cpu"))


def random_blocks(kind: str, num_blocks: int, rng: np.random.Generator) -> np.ndarray:
    """Blocks [n, bytes] of random bits, their scales finite."""
    num_bytes = DECODERS[kind].num_bytes
    if kind not in FLOAT_OFFSETS:
        numbers = torch.from_numpy(rng.normal(size=(num_blocks, 1)))
        floats = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
        return numbers.to(floats[kind]).view(torch.uint8).numpy()
    blocks = rng.integers(0, 256, size=(num_blocks, num_bytes), dtype=np.uint8)
    for offset in FLOAT_OFFSETS[kind]:
        blocks[:, offset : offset + 2] = rng.normal(size=(num_blocks, 1)).astype(np.float16).view(np.uint8)
    return blocks


@pytest.mark.parametrize("kind", DECODERS)
def test_decoded_blocks_equal_those_of_the_gguf_package(kind: str) -> None:
    # One block more than a slice, where that is cheap, so that the seam is tested.
    num_blocks = SLICE_ELEMENTS // DECODERS[kind].num_elements + 1
    blocks = random_blocks(kind, num_blocks, np.random.default_rng(4))
    expected = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind]).astype(np.float32).flatten()
    decoded = decode_blocks(torch.from_numpy(blocks.flatten()), kind, torch.float32)
    assert np.array_equal(decoded.numpy(), expected)
    halved = decode_blocks(torch.from_numpy(blocks.flatten()), kind, torch.bfloat16)
    assert torch.equal(halved, torch.from_numpy(expected).to(torch.bfloat16))


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_quantised_file_equals_folder_of_the_same_numbers(kind: str, tmp_path: Path) -> None:
    """Query and key included: their rows are turned after decoding, in whole rows of blocks."""
    config = family_config("llama-mha-untied-llama3") | {"rope_scaling": None}
    weights = random_weights(config)
    quantised = gguf.GGMLQuantizationType[kind]
    kinds, rounded = {}, {}
    for name, tensor in weights.items():
        rounded[name] = tensor
        if tensor.dim() == 2:
            kinds[to_gguf_name(name)] = quantised
            as_stored = gguf.quants.quantize(tensor.numpy(), quantised)
            rounded[name] = torch.from_numpy(gguf.quants.dequantize(as_stored, quantised).astype(np.float32).copy())
    file = write_gguf(tmp_path / "tiny.gguf", config, weights, kinds)
    folder = write_folder(tmp_path / "folder", config, rounded)
    assert torch.equal(logits_of(file), logits_of(folder))


def test_rope_factors_in_a_file_equal_llama3_scaling_in_a_folder(tmp_path: Path) -> None:
    config = family_config("llama-mha-untied-llama3")
    weights = random_weights(config)
    plain = inverse_frequencies(16, 10000.0, None, tmp_path)
    scaled = inverse_frequencies(16, 10000.0, LLAMA3_SCALING, tmp_path)
    assert not torch.equal(plain, scaled)
    file = write_gguf(tmp_path / "tiny.gguf", config | {"rope_scaling": None}, weights, rope_factors=plain / scaled)
    folder = write_folder(tmp_path / "folder", config, weights)
    torch.testing.assert_close(logits_of(file), logits_of(folder), atol=1e-4, rtol=0)
    without = write_gguf(tmp_path / "without.gguf", config | {"rope_scaling": None}, weights)
    assert (logits_of(without) - logits_of(folder)).abs().max() > 1e-2


def test_shards_equal_one_file(tmp_path: Path) -> None:
    config = family_config("qwen3")
    weights = random_weights(config)
    single = write_folder(tmp_path / "single", config, weights)
    sharded = write_folder(tmp_path / "sharded", config, weights, num_shards=3)
    assert torch.equal(logits_of(single), logits_of(sharded))


@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("wanted", ["float32", "bfloat16", "float16"])
def test_folders_are_read_into_any_dtype(stored: torch.dtype, wanted: str, tmp_path: Path) -> None:
    config = family_config("qwen2")
    weights = {name: tensor.to(stored) for name, tensor in random_weights(config).items()}
    checkpoint = open_checkpoint(str(write_folder(tmp_path, config, weights)))
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[wanted]
    source = open_weights(checkpoint, dtype, no_progress)
    read = source.read("lm_head.weight", (320, 64))
    assert torch.equal(read, weights["lm_head.weight"].to(dtype))
    read.zero_()
    assert torch.equal(source.read("lm_head.weight", (320, 64)), weights["lm_head.weight"].to(dtype))


def test_progress_rises_to_one(tmp_path: Path) -> None:
    config = family_config("llama-gqa-tied")
    for model in (
        write_folder(tmp_path / "folder", config, random_weights(config)),
        write_gguf(tmp_path / "tiny.gguf", config, random_weights(config)),
    ):
        shares: list[float] = []
        checkpoint = open_checkpoint(str(model))
        load_model(checkpoint, model_spec(checkpoint), load_ops("cpu"), shares.append)
        assert shares == sorted(shares) and 0 < shares[0] < 0.9 and shares[-1] == 1.0


# Broken checkpoints


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = family_config("llama-gqa-tied")
    return write_folder(tmp_path / "model", config, random_weights(config), num_shards=2)


def rewrite(folder: Path, name: str, tensor: torch.Tensor | None) -> Path:
    """Writes the folder again as one file, with a tensor replaced or left out."""
    config = family_config("llama-gqa-tied")
    weights = random_weights(config)
    if tensor is None:
        del weights[name]
    else:
        weights[name] = tensor
    return write_folder(folder, config, weights)


def test_truncated_safetensors_names_file_and_tensor(folder: Path) -> None:
    shard = folder / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=rf"{shard.name}: tensor model\.\S+ ends at byte \d+.*truncated"):
        load(folder)


def test_file_truncated_after_it_was_opened_is_an_error(folder: Path) -> None:
    checkpoint = open_checkpoint(str(folder))
    shard = checkpoint.weight_files[0]
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=re.escape(str(shard))):
        open_weights(checkpoint, torch.float32, no_progress)


def test_missing_shard_names_it(folder: Path) -> None:
    (folder / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00001-of-00002\.safetensors: missing.* tensor model\."):
        load(folder)


def test_garbage_names_the_file(folder: Path) -> None:
    shard = folder / "model-00001-of-00002.safetensors"
    shard.write_bytes(b"\x10\0\0\0\0\0\0\0" + b"not json at all.")
    with pytest.raises(CheckpointError, match=re.escape(shard.name)):
        load(folder)


def test_missing_tensor_is_named(folder: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: tensor {re.escape(name)} is missing"):
        load(rewrite(folder, name, None))


def test_missing_tensor_of_shards_is_named(folder: Path) -> None:
    shard = folder / "model-00001-of-00002.safetensors"
    save_file({"model.embed_tokens.weight": torch.zeros(320, 64)}, shard)
    with pytest.raises(CheckpointError, match=rf"{folder.name}: tensor model\.\S+ is missing"):
        load(folder)


def test_wrong_shape_says_both_shapes(folder: Path) -> None:
    name = "model.layers.2.self_attn.k_proj.weight"
    message = rf"model\.safetensors: tensor {re.escape(name)} has shape \[16, 64\].* asks for \[32, 64\]"
    with pytest.raises(CheckpointError, match=message):
        load(rewrite(folder, name, torch.zeros(16, 64)))


def test_transposed_tensor_of_equal_size_is_refused(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"down_proj\.weight has shape \[96, 64\].* asks for \[64, 96\]"):
        load(rewrite(folder, "model.layers.0.mlp.down_proj.weight", torch.zeros(96, 64)))


def test_integer_tensor_is_refused(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is of type I8.*supported are: BF16, F16, F32, F64"):
        load(rewrite(folder, "model.norm.weight", torch.zeros(64, dtype=torch.int8)))


def test_tensor_in_two_shards_is_refused(folder: Path) -> None:
    first, second = sorted(folder.glob("*.safetensors"))
    first.write_bytes(second.read_bytes())
    with pytest.raises(CheckpointError, match=rf"{second.name}: tensor model\.\S+ stands in {first.name} too"):
        load(folder)


def test_gguf_with_unknown_quantisation_names_file_and_tensor(tmp_path: Path) -> None:
    config = family_config("llama-gqa-tied")
    file = write_gguf(tmp_path / "tiny.gguf", config, random_weights(config))
    data = file.read_bytes()
    entry = data.index(b"blk.1.ffn_down.weight") + len(b"blk.1.ffn_down.weight")
    for type_id, type_name in ((99, "unknown type 99"), (24, "I8")):
        kind_at = entry + 4 + 2 * 8
        file.write_bytes(data[:kind_at] + type_id.to_bytes(4, "little") + data[kind_at + 4 :])
        message = rf"tiny\.gguf: tensor blk\.1\.ffn_down\.weight has quantisation {type_name}.*supported are: .*Q4_K"
        with pytest.raises(CheckpointError, match=message):
            load(file)


def test_truncated_gguf_names_file_and_tensor(tmp_path: Path) -> None:
    config = family_config("llama-gqa-tied")
    file = write_gguf(tmp_path / "tiny.gguf", config, random_weights(config))
    data = file.read_bytes()
    checkpoint = open_checkpoint(str(file))
    file.write_bytes(data[:-1000])
    with pytest.raises(CheckpointError, match=r'tiny\.gguf: tensor "\S+": ends at byte .*truncated'):
        load(file)
    with pytest.raises(CheckpointError, match=r"tiny\.gguf: tensor \S+ ends at byte .*truncated"):
        load_model(checkpoint, model_spec(checkpoint), load_ops("cpu"))
    file.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"tiny\.gguf: cannot be mapped"):
        load_model(checkpoint, model_spec(checkpoint), load_ops("cpu"))


def test_gguf_with_missing_or_misshapen_tensor(tmp_path: Path) -> None:
    config = family_config("llama-gqa-tied")
    weights = random_weights(config)
    lacking = {name: tensor for name, tensor in weights.items() if name != "model.norm.weight"}
    with pytest.raises(CheckpointError, match=r"lacking\.gguf: tensor model\.norm\.weight is missing"):
        load(write_gguf(tmp_path / "lacking.gguf", config, lacking))
    misshapen = weights | {"model.layers.0.self_attn.q_proj.weight": torch.zeros(32, 64)}
    with pytest.raises(CheckpointError, match=r"misshapen\.gguf: tensor .*q_proj\.weight has shape \[32, 64\]"):
        load(write_gguf(tmp_path / "misshapen.gguf", config, misshapen))


def test_gguf_rows_that_heads_cannot_share(tmp_path: Path) -> None:
    config = family_config("llama-gqa-tied")
    checkpoint = open_checkpoint(str(write_gguf(tmp_path / "tiny.gguf", config, random_weights(config))))
    assert checkpoint.gguf is not None
    checkpoint.gguf.metadata["llama.attention.head_count"] = 5
    with pytest.raises(CheckpointError, match=r"tensor blk\.0\.attn_q\.weight has 64 rows, which 5 heads cannot share"):
        load_model(checkpoint, model_spec(open_checkpoint(str(checkpoint.path))), load_ops("cpu"))


def test_every_decoder_is_known_to_the_header_reader() -> None:
    """Sizes of blocks stand in two places; they must agree."""
    from runtime.gguf import _TENSOR_TYPES

    sizes = {name: (elements, num_bytes) for name, elements, num_bytes in _TENSOR_TYPES.values()}
    for name, decoder in DECODERS.items():
        assert sizes[name] == (decoder.num_elements, decoder.num_bytes)
    assert "type_name" in GGUFTensor.__dataclass_fields__


def test_config_json_is_what_decides(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 4}))
    with pytest.raises(CheckpointError, match=r"tensor model\.layers\.3\.\S+ is missing"):
        load(folder)
