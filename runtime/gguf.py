"""Reads the header of a GGUF file: metadata and the tensor directory, never the weights.

Owns the file format (versions 2 and 3, little-endian) and nothing else: what keys mean is `runtime.checkpoint`'s and
`router.tokenizer`'s business, decoding of tensors `engine.weights`'s. A file is not trusted: every count is held
against the bytes that are left, so a broken or hostile file gives a CheckpointError, never another exception, a hang
or a huge allocation.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.errors import CheckpointError

MAX_ARRAY_LENGTH = 1 << 24
"""No vocabulary comes near; a longer array is taken for a broken count."""
MAX_DIMS = 4
MAX_NESTING = 4
DEFAULT_ALIGNMENT = 32

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING = 8
_ARRAY = 9

# id: (name, elements a block, bytes a block)
_TENSOR_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 36),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
}


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Where one tensor lies."""

    name: str
    """Its name, for example "blk.0.attn_q.weight"."""
    shape: tuple[int, ...]
    """In torch order, rows first: the reverse of what the file writes."""
    type_name: str
    """"F32", "Q4_1", ...; "unknown type 99" for an id that is not known."""
    offset: int
    """First byte, from the start of the file."""
    num_bytes: int | None
    """Length; None for unknown types."""


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """What the header of a GGUF file says."""

    path: Path
    """The file."""
    metadata: dict[str, Any]
    """Key to int, float, bool, str or (nested) list of these."""
    tensors: dict[str, GGUFTensor]
    """By name, in the file's order."""
    data_start: int
    """First byte after the header, from the start of the file."""


def read_gguf(path: Path) -> GGUFFile:
    """Reads the header of `path`.

    Raises CheckpointError, naming the file and where there is one the key or tensor, when it is missing, truncated,
    not GGUF, of a version other than 2 or 3, or contradicts itself.
    """
    try:
        with path.open("rb") as file:
            if file.seek(0, 2) == 0:
                raise CheckpointError(f"{path}: the file is empty")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(path, data).read()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error


class _Reader:
    """A cursor over the header."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.size = len(data)
        self.position = 0
        self.place = "header"

    def fail(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {self.place}: {problem}")

    def read(self) -> GGUFFile:
        num_tensors, num_entries = self.read_preamble()
        metadata: dict[str, Any] = {}
        for index in range(num_entries):
            self.place = f"metadata entry {index}"
            key = self.read_string()
            self.place = f'metadata key "{key}"'
            if key in metadata:
                raise self.fail("appears twice")
            metadata[key] = self.read_value(self.read_u32(), depth=0)
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(alignment) is not int or not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
            self.place = 'metadata key "general.alignment"'
            raise self.fail(f"must be a power of two up to {1 << 20}, got {alignment!r}")
        entries = [self.read_tensor(index) for index in range(num_tensors)]
        data_start = -(-self.position // alignment) * alignment
        tensors: dict[str, GGUFTensor] = {}
        for name, dims, type_id, offset in entries:
            self.place = f'tensor "{name}"'
            if name in tensors:
                raise self.fail("appears twice")
            tensors[name] = self.locate(name, dims, type_id, offset, data_start, alignment)
        return GGUFFile(self.path, metadata, tensors, data_start)

    def read_preamble(self) -> tuple[int, int]:
        """Checks magic and version; answers the numbers of tensors and of metadata entries."""
        if self.data[:4] != b"GGUF":
            raise self.fail(f"not a GGUF file: it starts with {self.data[:4]!r}")
        self.position = 4
        version = self.read_u32()
        if version in (0x02000000, 0x03000000):
            raise self.fail("big-endian GGUF is not supported")
        if version not in (2, 3):
            raise self.fail(f"GGUF version {version} is not supported, only 2 and 3")
        num_tensors, num_entries = self.read_u64(), self.read_u64()
        # The shortest tensor entry takes 24 bytes, the shortest metadata entry 13.
        left = self.size - self.position
        if num_tensors * 24 > left or num_entries * 13 > left:
            raise self.fail(f"{num_tensors} tensors and {num_entries} metadata entries do not fit in {self.size} bytes")
        return num_tensors, num_entries

    def read_tensor(self, index: int) -> tuple[str, tuple[int, ...], int, int]:
        """One directory entry: name, dimensions as the file orders them, type id, offset in the data section."""
        self.place = f"tensor entry {index}"
        name = self.read_string()
        self.place = f'tensor "{name}"'
        num_dims = self.read_u32()
        if num_dims > MAX_DIMS:
            raise self.fail(f"has {num_dims} dimensions, at most {MAX_DIMS} are possible")
        dims = tuple(self.read_u64() for _ in range(num_dims))
        return name, dims, self.read_u32(), self.read_u64()

    def locate(
        self, name: str, dims: tuple[int, ...], type_id: int, offset: int, data_start: int, alignment: int
    ) -> GGUFTensor:
        """Holds a tensor's place and size against the file."""
        if offset % alignment:
            raise self.fail(f"starts at offset {offset}, not a multiple of the alignment {alignment}")
        start = data_start + offset
        known = _TENSOR_TYPES.get(type_id)
        if known is None:
            return GGUFTensor(name, dims[::-1], f"unknown type {type_id}", start, None)
        type_name, block_elements, block_bytes = known
        num_elements = 1
        for dim in dims:
            num_elements *= dim
        row = dims[0] if dims else 1
        if num_elements == 0 or row % block_elements:
            raise self.fail(f"shape {list(dims[::-1])} is not possible for {type_name}: rows are of {block_elements}s")
        num_bytes = num_elements // block_elements * block_bytes
        if start + num_bytes > self.size:
            raise self.fail(f"ends at byte {start + num_bytes}, but the file has {self.size}: it is truncated")
        return GGUFTensor(name, dims[::-1], type_name, start, num_bytes)

    def need(self, num_bytes: int) -> None:
        if num_bytes > self.size - self.position:
            raise self.fail(f"{num_bytes} bytes wanted at byte {self.position}, but the file has {self.size}")

    def read_u32(self) -> int:
        self.need(4)
        (value,) = _U32.unpack_from(self.data, self.position)
        self.position += 4
        return int(value)

    def read_u64(self) -> int:
        self.need(8)
        (value,) = _U64.unpack_from(self.data, self.position)
        self.position += 8
        return int(value)

    def read_string(self) -> str:
        return self.read_strings(1)[0]

    def read_strings(self, count: int) -> list[str]:
        # The one hot loop: vocabularies and merges are arrays of 50,000 to 300,000 strings.
        data, position, size, unpack = self.data, self.position, self.size, _U64.unpack_from
        strings: list[str] = []
        try:
            for _ in range(count):
                start = position + 8
                position = start + unpack(data, position)[0]
                if position > size:
                    raise self.fail(f"a string of {position - start} bytes at byte {start - 8} leaves the file")
                strings.append(data[start:position].decode())
        except struct.error as error:
            raise self.fail(f"the file ends inside a string, at byte {self.size}") from error
        except UnicodeDecodeError as error:
            raise self.fail("holds a string that is not UTF-8") from error
        self.position = position
        return strings

    def read_value(self, type_id: int, depth: int) -> Any:
        if type_id == _STRING:
            return self.read_string()
        if type_id == _ARRAY:
            return self.read_array(depth)
        return self.read_scalars(type_id, 1)[0]

    def read_scalars(self, type_id: int, count: int) -> list[Any]:
        code = _SCALARS.get(type_id)
        if code is None:
            raise self.fail(f"has unknown value type {type_id}")
        layout = struct.Struct(f"<{count}{code}")
        self.need(layout.size)
        values = list(layout.unpack_from(self.data, self.position))
        self.position += layout.size
        return values

    def read_array(self, depth: int) -> list[Any]:
        if depth >= MAX_NESTING:
            raise self.fail(f"arrays are nested deeper than {MAX_NESTING}")
        type_id, count = self.read_u32(), self.read_u64()
        # An array element takes at least 8 (string) or 12 (array) bytes, a scalar at least 1.
        least = {_STRING: 8, _ARRAY: 12}.get(type_id, 1)
        if count > MAX_ARRAY_LENGTH or count * least > self.size - self.position:
            raise self.fail(f"an array of {count} elements does not fit in the file, or is over {MAX_ARRAY_LENGTH}")
        if type_id == _STRING:
            return self.read_strings(count)
        if type_id == _ARRAY:
            return [self.read_array(depth + 1) for _ in range(count)]
        return self.read_scalars(type_id, count)
