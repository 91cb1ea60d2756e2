"""The header of a GGUF file: read exactly, and never trusted."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from model_files import (
    ARRAY,
    BOOL,
    F32,
    F64,
    I8,
    I16,
    I32,
    I64,
    STRING,
    U8,
    U16,
    U32,
    U64,
    byte_level_metadata,
    gguf_string,
    write_gguf,
)
from model_files import gguf_bytes as build

from router.tokenizer import load_tokenizer
from runtime.checkpoint import open_checkpoint
from runtime.errors import CheckpointError
from runtime.gguf import read_gguf

TENSORS = [("a.weight", [64, 2], 0, bytes(512)), ("b.weight", [32], 2, bytes(18)), ("c.weight", [5], 99, bytes(7))]


def read_bytes(tmp_path: Path, data: bytes):
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    return read_gguf(path)


def test_packaged_model_reads_as_the_reference_reader_does():
    path = open_checkpoint("smollm2").path
    ours, reference = read_gguf(path), gguf.GGUFReader(path)
    expected = {key: field.contents() for key, field in reference.fields.items() if not key.startswith("GGUF.")}
    assert ours.metadata == expected
    assert ours.data_start == reference.data_offset
    assert list(ours.tensors) == [tensor.name for tensor in reference.tensors]
    for tensor in reference.tensors:
        mine = ours.tensors[tensor.name]
        assert mine.shape == tuple(reversed(tensor.shape.tolist()))
        assert (mine.type_name, mine.offset) == (tensor.tensor_type.name, tensor.data_offset)
        assert mine.num_bytes == tensor.n_bytes


@pytest.mark.parametrize("version", [2, 3])
def test_every_kind_of_value(tmp_path, version):
    metadata = {
        "u8": (U8, 200),
        "i8": (I8, -5),
        "u16": (U16, 60000),
        "i16": (I16, -300),
        "u32": (U32, 1 << 31),
        "i32": (I32, -7),
        "u64": (U64, 1 << 63),
        "i64": (I64, -(1 << 62)),
        "f32": (F32, 0.5),
        "f64": (F64, 0.1),
        "bool": (BOOL, True),
        "text": (STRING, "日本"),
        "texts": ([STRING], ["a", "", "é"]),
        "numbers": ([I32], [1, -2, 3]),
        "nothing": ([U64], []),
        "nested": ([[F32]], [[1.0], [], [2.0, 3.0]]),
    }
    file = read_bytes(tmp_path, build(metadata, version=version))
    assert file.metadata == {key: value for key, (_, value) in metadata.items()}
    assert file.tensors == {}


def test_tensors_have_torch_order_and_absolute_offsets(tmp_path):
    file = read_bytes(tmp_path, build({}, TENSORS))
    a, b, c = (file.tensors[name] for name in ("a.weight", "b.weight", "c.weight"))
    assert (a.shape, a.type_name, a.num_bytes, a.offset) == ((2, 64), "F32", 512, file.data_start)
    assert (b.shape, b.type_name, b.num_bytes, b.offset) == ((32,), "Q4_0", 18, file.data_start + 512)
    assert (c.type_name, c.num_bytes, c.offset) == ("unknown type 99", None, file.data_start + 544)


def test_alignment_of_the_file_is_used(tmp_path):
    data = build({"general.alignment": (U32, 8)}, TENSORS, alignment=8)
    assert read_bytes(tmp_path, data).tensors["b.weight"].offset % 8 == 0


def array_in(levels: int) -> bytes:
    return struct.pack("<IQ", ARRAY, 1) * levels + struct.pack("<IQB", U8, 1, 1)


MALFORMED = {
    "empty": (b"", "empty"),
    "other magic": (b"GGML" + bytes(40), "not a GGUF file"),
    "version 1": (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "too many tensors": (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0), "do not fit"),
    "too many entries": (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60), "do not fit"),
    "long string": (build({"k": (STRING, "x")}).replace(struct.pack("<Q", 1) + b"x", b"\xff" * 8 + b"x"), '"k"'),
    "long array": (
        build({"k": ([U8], [7] * 5)}).replace(struct.pack("<QB", 5, 7), struct.pack("<QB", 1 << 50, 7)),
        '"k"',
    ),
    "value type": (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + gguf_string("k") + struct.pack("<IQ", 77, 0), "type 77"),
    "nesting": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + gguf_string("k") + struct.pack("<I", ARRAY) + array_in(9),
        "nested",
    ),
    "not UTF-8": (build({"k": (STRING, b"\xff\xfe")}), "UTF-8"),
    "key twice": (build({"k": (U8, 1), "l": (U8, 1)}).replace(gguf_string("l"), gguf_string("k")), "twice"),
    "alignment 0": (build({"general.alignment": (U32, 0)}), "power of two"),
    "alignment 24": (build({"general.alignment": (U32, 24)}), "power of two"),
    "alignment text": (build({"general.alignment": (STRING, "32")}), "power of two"),
    "dimensions": (build({}, [("w", [1] * 5, 0, bytes(4))]), 'tensor "w"'),
    "no elements": (build({}, [("w", [0], 0, b"")]), 'tensor "w"'),
    "odd row": (build({}, [("w", [33], 2, bytes(36))]), 'tensor "w"'),
    "tensor past the end": (build({}, [("w", [64], 0, bytes(255))]), 'tensor "w"'),
    "huge tensor": (build({}, [("w", [1 << 62, 1 << 62], 0, bytes(4))]), 'tensor "w"'),
    "tensor twice": (build({}, [("w", [1], 0, bytes(4))] * 2), "twice"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_file_is_named(tmp_path, case):
    data, words = MALFORMED[case]
    with pytest.raises(CheckpointError) as caught:
        read_bytes(tmp_path, data)
    assert words in str(caught.value)
    assert "model.gguf" in str(caught.value)


def test_misaligned_tensor_is_refused(tmp_path):
    data = build({}, [("w", [1], 0, bytes(4)), ("x", [1], 0, bytes(4))], alignment=4)
    with pytest.raises(CheckpointError, match=r'tensor "x": starts at offset 4'):
        read_bytes(tmp_path, data)


def test_missing_file_and_folder(tmp_path):
    for path in (tmp_path / "none.gguf", tmp_path):
        with pytest.raises(CheckpointError, match="cannot be read"):
            read_gguf(path)


def test_every_truncation_is_noticed(tmp_path):
    data = build({"k": (STRING, "value"), "l": ([I32], [1, 2])}, TENSORS[:2])
    for length in range(len(data)):
        with pytest.raises(CheckpointError):
            read_bytes(tmp_path, data[:length])


@settings(max_examples=300, deadline=2000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    flips=st.lists(st.tuples(st.floats(0, 0.999999), st.integers(1, 255)), min_size=1, max_size=4), cut=st.booleans()
)
def test_damaged_file_gives_a_checkpoint_error_or_a_checkpoint(tmp_path, flips, cut):
    data = bytearray(FUZZED)
    for place, mask in flips:
        data[int(place * len(data))] ^= mask
    if cut:
        del data[int(flips[0][0] * len(data)) :]
    path = tmp_path / "fuzzed.gguf"
    path.write_bytes(data)
    try:
        tokenizer = load_tokenizer(open_checkpoint(str(path)))
    except CheckpointError as error:
        assert "fuzzed.gguf" in str(error)
    else:
        assert not cut
        assert isinstance(tokenizer.encode("ab <|end|>", True), list)


FUZZED = build(byte_level_metadata(), TENSORS[:2])


def test_undamaged_file_of_the_fuzz_test_is_whole(tmp_path):
    path = write_gguf(tmp_path / "whole.gguf", byte_level_metadata(), tensors=TENSORS[:2])
    assert load_tokenizer(open_checkpoint(str(path))).encode("ab", True) == [256]
