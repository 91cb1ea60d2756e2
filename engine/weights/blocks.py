"""GGUF's block quantisations turned back into numbers, whole tensors at a time.

Owns the bit layouts: a tensor is a row of blocks, each holding a few scales and the packed weights of 32 (or, in the K
kinds, 256) elements. Arithmetic is float32 in the order in which the format defines it, so results are exact; the
model's dtype comes last. Invariant: memory beside the result stays small whatever the tensor's size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

SLICE_ELEMENTS = 1 << 18
"""Elements decoded at a time: what is in flight fits the cache."""


@dataclass(frozen=True, slots=True)
class BlockDecoder:
    """One quantisation."""

    num_elements: int
    """Elements a block."""
    num_bytes: int
    """Bytes a block."""
    decode: Callable[[Tensor], Tensor]
    """Blocks [n, num_bytes] uint8 to [n, num_elements] float."""


def decode_blocks(stored: Tensor, type_name: str, dtype: torch.dtype) -> Tensor:
    """Bytes [n * num_bytes] uint8 of a tensor to its elements [n * num_elements] in `dtype`, a copy.

    `type_name` is a key of DECODERS; the bytes are whole blocks.
    """
    decoder = DECODERS[type_name]
    blocks = stored.view(-1, decoder.num_bytes)  # [n, num_bytes]
    result = torch.empty(blocks.shape[0], decoder.num_elements, dtype=dtype)
    step = max(1, SLICE_ELEMENTS // decoder.num_elements)
    for start in range(0, blocks.shape[0], step):
        result[start : start + step] = decoder.decode(blocks[start : start + step])
    return result.flatten()


def _floats(kind: torch.dtype) -> Callable[[Tensor], Tensor]:
    """Plain elements. Offsets in a file are aligned, but a slice's bytes need not be: hence the copy."""
    return lambda blocks: blocks.clone().view(kind)


def _half(blocks: Tensor, start: int) -> Tensor:
    """The float16 at a byte offset of each block: [n, 1] float32."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """[..., k] bytes to [..., 2 k]: all low halves, then all high halves."""
    return torch.cat((packed & 0x0F, packed >> 4), dim=-1)


def _fifth_bits(packed: Tensor) -> Tensor:
    """[n, 4] bytes, 32 bits in little-endian order, to [n, 32] of 0 or 16."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return (((packed[:, :, None] >> shifts) & 1) << 4).flatten(1)


def _q4_0(blocks: Tensor) -> Tensor:
    return _nibbles(blocks[:, 2:]).float().sub_(8).mul_(_half(blocks, 0))


def _q4_1(blocks: Tensor) -> Tensor:
    return _nibbles(blocks[:, 4:]).float().mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q5_0(blocks: Tensor) -> Tensor:
    quants = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])  # [n, 32]
    return quants.float().sub_(16).mul_(_half(blocks, 0))


def _q5_1(blocks: Tensor) -> Tensor:
    quants = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])  # [n, 32]
    return quants.float().mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].view(torch.int8).float().mul_(_half(blocks, 0))


def _six_bit_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """12 bytes a block hold eight 6-bit scales and eight 6-bit minima: [n, 12] to two of [n, 8, 1] float32."""
    first, second, third = packed.split(4, dim=1)  # [n, 4] each
    scales = torch.cat((first & 0x3F, (third & 0x0F) | ((first >> 6) << 4)), dim=1)  # [n, 8]
    minima = torch.cat((second & 0x3F, (third >> 4) | ((second >> 6) << 4)), dim=1)  # [n, 8]
    return scales.float()[:, :, None], minima.float()[:, :, None]


def _k_scaled(blocks: Tensor, quants: Tensor) -> Tensor:
    """Applies the head shared by Q4_K and Q5_K (scale, scale of minima, 12 bytes) to quants [n, 8, 32]."""
    scales, minima = _six_bit_scales(blocks[:, 4:16])
    scale, offset = _half(blocks, 0)[:, :, None] * scales, _half(blocks, 2)[:, :, None] * minima  # [n, 8, 1]
    return (scale * quants.float() - offset).flatten(1)


def _q4_k(blocks: Tensor) -> Tensor:
    quants = _nibbles(blocks[:, 16:].view(-1, 4, 32))  # [n, 4, 64]: two sub-blocks of 32 in each
    return _k_scaled(blocks, quants.view(-1, 8, 32))


def _q5_k(blocks: Tensor) -> Tensor:
    quants = _nibbles(blocks[:, 48:].view(-1, 4, 32)).view(-1, 8, 32)
    shifts = torch.arange(8, dtype=torch.uint8)[:, None]  # [8, 1]: bit j of byte i belongs to element i of sub-block j
    fifth = ((blocks[:, None, 16:48] >> shifts) & 1) << 4  # [n, 8, 32]
    return _k_scaled(blocks, quants | fifth)


def _q6_k(blocks: Tensor) -> Tensor:
    low = _nibbles(blocks[:, :128].view(-1, 2, 64)).view(-1, 2, 4, 32)  # two halves of four sub-blocks
    shifts = torch.tensor((0, 2, 4, 6), dtype=torch.uint8)[:, None]  # [4, 1]
    high = (blocks[:, 128:192].view(-1, 2, 1, 32) >> shifts) & 3  # [n, 2, 4, 32]
    quants = (low | (high << 4)).float().view(-1, 16, 16) - 32  # one scale for each 16 elements
    scales = blocks[:, 192:208].view(torch.int8).float()[:, :, None]  # [n, 16, 1]
    return (_half(blocks, 208)[:, :, None] * scales * quants).flatten(1)


DECODERS = {
    "F32": BlockDecoder(1, 4, _floats(torch.float32)),
    "F16": BlockDecoder(1, 2, _floats(torch.float16)),
    "BF16": BlockDecoder(1, 2, _floats(torch.bfloat16)),
    "Q4_0": BlockDecoder(32, 18, _q4_0),
    "Q4_1": BlockDecoder(32, 20, _q4_1),
    "Q5_0": BlockDecoder(32, 22, _q5_0),
    "Q5_1": BlockDecoder(32, 24, _q5_1),
    "Q8_0": BlockDecoder(32, 34, _q8_0),
    "Q4_K": BlockDecoder(256, 144, _q4_k),
    "Q5_K": BlockDecoder(256, 176, _q5_k),
    "Q6_K": BlockDecoder(256, 210, _q6_k),
}
"""By the name that `runtime.gguf` gives a type."""
