"""The shape of a KV pool: what a block is in bytes. No torch.

Storage is layer-major: a pool is `num_planes` planes (layer 0 K, layer 0 V, layer 1 K, ...), each an array of
`ceiling` blocks, each block `block_size` token positions. Two pools may exchange blocks when `fingerprint` is equal;
the ceiling may differ.
"""

from __future__ import annotations

from dataclasses import dataclass

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1, "int8": 1}
SCALE_BYTES = 4
"""With "int8", each head of a position ends with the float32 that its elements are multiplied with."""


@dataclass(frozen=True, slots=True)
class KVLayout:
    """How one block is laid out."""

    num_layers: int
    """Layers that keep KV."""
    block_size: int
    """Token positions a block."""
    num_kv_heads: int
    """Key/value heads a layer."""
    head_dim: int
    """Elements a head."""
    dtype: str
    """Element type, a key of DTYPE_BYTES."""

    @property
    def num_planes(self) -> int:
        """K and V of each layer."""
        return 2 * self.num_layers

    @property
    def head_bytes(self) -> int:
        """Bytes of one head of one position."""
        return self.head_dim * DTYPE_BYTES[self.dtype] + (SCALE_BYTES if self.dtype == "int8" else 0)

    @property
    def plane_block_bytes(self) -> int:
        """Bytes of one block in one plane."""
        return self.block_size * self.num_kv_heads * self.head_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all planes."""
        return self.num_planes * self.plane_block_bytes

    @property
    def fingerprint(self) -> str:
        """Equal where blocks can be exchanged byte for byte."""
        shape = f"layers={self.num_layers},block={self.block_size},heads={self.num_kv_heads},dim={self.head_dim}"
        return f"{shape},dtype={self.dtype}"

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` positions need."""
        return -(-num_tokens // self.block_size)
