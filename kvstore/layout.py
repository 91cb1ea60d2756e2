"""The shape of a KV pool: what a block is in bytes. No torch.

Storage is layer-major: a pool is `num_planes` planes (layer 0 K, layer 0 V, layer 1 K, ...), each an array of
`ceiling` blocks, each block `block_size` token positions. Where several ranks compute a model, each has its heads in
planes of its own, one rank's after the other's. Two pools may exchange blocks when `fingerprint` is equal; the ceiling
may differ.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1, "int8": 1}
SCALE_BYTES = 4
"""With "int8", each head of a position ends with the float32 that its elements are multiplied with; the same as
`kernels.SCALE_BYTES`, which cannot be had without torch."""


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
    num_ranks: int = 1
    """Ranks that share each layer's heads evenly; divides num_kv_heads."""

    @property
    def heads_per_plane(self) -> int:
        """Key/value heads of a layer that one rank has."""
        return self.num_kv_heads // self.num_ranks

    @property
    def num_planes(self) -> int:
        """K and V of each layer, for each rank."""
        return 2 * self.num_layers * self.num_ranks

    @property
    def of_one_rank(self) -> KVLayout:
        """What one rank has of it, as a layout of its own."""
        return replace(self, num_kv_heads=self.heads_per_plane, num_ranks=1)

    @property
    def head_bytes(self) -> int:
        """Bytes of one head of one position."""
        return self.head_dim * DTYPE_BYTES[self.dtype] + (SCALE_BYTES if self.dtype == "int8" else 0)

    @property
    def plane_block_bytes(self) -> int:
        """Bytes of one block in one plane."""
        return self.block_size * self.heads_per_plane * self.head_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all planes."""
        return self.num_planes * self.plane_block_bytes

    @property
    def fingerprint(self) -> str:
        """Equal where blocks can be exchanged byte for byte."""
        shape = f"layers={self.num_layers},block={self.block_size},heads={self.num_kv_heads},dim={self.head_dim}"
        return f"{shape},dtype={self.dtype}" + (f",ranks={self.num_ranks}" if self.num_ranks > 1 else "")

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` positions need."""
        return -(-num_tokens // self.block_size)


def differences(theirs: str, mine: str) -> str:
    """In what the layouts behind two fingerprints differ: "ranks: 2 there, 1 here"."""
    there, here = _sizes(theirs), _sizes(mine)
    names = [name for name in {**here, **there} if there.get(name) != here.get(name)]
    return "; ".join(f"{name}: {there.get(name, 'none')} there, {here.get(name, 'none')} here" for name in names)


def _sizes(fingerprint: str) -> dict[str, str]:
    return {"ranks": "1"} | dict(part.split("=", 1) for part in fingerprint.split(",") if "=" in part)
