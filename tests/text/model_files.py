"""Writes small model files for the tests of this folder: GGUF and Hugging Face folders, whole or broken on purpose."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
_FORMATS = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "?", U64: "Q", I64: "q", F64: "d"}

LLAMA_METADATA: dict[str, tuple[Any, Any]] = {
    "general.architecture": (STRING, "llama"),
    "llama.block_count": (U32, 2),
    "llama.embedding_length": (U32, 64),
    "llama.feed_forward_length": (U32, 128),
    "llama.attention.head_count": (U32, 4),
    "llama.attention.head_count_kv": (U32, 2),
    "llama.attention.layer_norm_rms_epsilon": (F32, 1e-5),
    "llama.rope.freq_base": (F32, 10000.0),
    "llama.context_length": (U32, 256),
}


def gguf_string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def gguf_value(kind: Any, value: Any) -> bytes:
    """`kind` is a number, or [kind] for an array."""
    if isinstance(kind, list):
        inner = ARRAY if isinstance(kind[0], list) else kind[0]
        return struct.pack("<IQ", inner, len(value)) + b"".join(gguf_value(kind[0], item) for item in value)
    return gguf_string(value) if kind == STRING else struct.pack("<" + _FORMATS[kind], value)


def gguf_bytes(
    metadata: Mapping[str, tuple[Any, Any]],
    tensors: Sequence[tuple[str, Sequence[int], int, bytes]] = (),
    version: int = 3,
    alignment: int = 32,
) -> bytes:
    """Tensors are (name, dimensions in the file's order, type id, data)."""
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    for key, (kind, value) in metadata.items():
        head += gguf_string(key) + struct.pack("<I", ARRAY if isinstance(kind, list) else kind)
        head += gguf_value(kind, value)
    data = b""
    for name, dims, type_id, content in tensors:
        data += b"\0" * (-len(data) % alignment)
        head += gguf_string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, type_id, len(data))
        data += content
    return head + b"\0" * (-len(head) % alignment) + data


def byte_level_metadata() -> dict[str, tuple[Any, Any]]:
    """A Llama model whose vocabulary is the 256 bytes, one merge, a control and a user-defined token."""
    from router.tokenizer import byte_level_alphabet

    tokens = [*byte_level_alphabet().values(), "ab", "<|end|>", "<think>"]
    return {
        **LLAMA_METADATA,
        "tokenizer.ggml.model": (STRING, "gpt2"),
        "tokenizer.ggml.pre": (STRING, "gpt-2"),
        "tokenizer.ggml.tokens": ([STRING], tokens),
        "tokenizer.ggml.token_type": ([I32], [1] * 257 + [3, 4]),
        "tokenizer.ggml.merges": ([STRING], ["a b"]),
        "tokenizer.ggml.eos_token_id": (U32, 257),
        "tokenizer.ggml.bos_token_id": (U32, 257),
    }


def sentencepiece_vocabulary() -> tuple[list[str], list[int], list[float]]:
    """Tokens, types and scores of a small SentencePiece vocabulary with all bytes."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [2, 3, 3, *[6] * 256]
    words = ["▁t", "he", "▁the", "in", "er", "▁a", "an", "▁an", "th", "▁▁", "ing", "▁in", "日本", "ana", "na", "ban"]
    letters = sorted(set("".join(words)) | set("bcdefghijklmnopqrstuvwxyz.,é"))
    pieces = words + letters
    tokens += pieces
    types += [1] * len(pieces)
    scores = [0.0] * 259 + [float(-i) for i in range(len(pieces))]
    return tokens, types, scores


def sentencepiece_metadata() -> dict[str, tuple[Any, Any]]:
    tokens, types, scores = sentencepiece_vocabulary()
    return {
        **LLAMA_METADATA,
        "tokenizer.ggml.model": (STRING, "llama"),
        "tokenizer.ggml.tokens": ([STRING], tokens),
        "tokenizer.ggml.token_type": ([I32], types),
        "tokenizer.ggml.scores": ([F32], scores),
        "tokenizer.ggml.bos_token_id": (U32, 1),
        "tokenizer.ggml.eos_token_id": (U32, 2),
    }


def safetensors_bytes(tensors: Mapping[str, bytes]) -> bytes:
    """A file of one-dimensional tensors of bytes."""
    header, start = {}, 0
    for name, data in tensors.items():
        header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [start, start + len(data)]}
        start += len(data)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + b"".join(tensors.values())


def write_folder(folder: Path, config: Mapping[str, Any] | None = None, **files: object) -> Path:
    """A Hugging Face folder; `files` are JSON contents by file name without its ending."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"model_type": "llama", "vocab_size": 300} if config is None else config
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(safetensors_bytes({"w": bytes(range(200)) * 50}))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def write_gguf(path: Path, metadata: Mapping[str, tuple[Any, Any]], **arguments: Any) -> Path:
    path.write_bytes(gguf_bytes(metadata, **arguments))
    return path
