"""Device operations and nothing else: what a model needs from a device, one file or folder per implementation.

`Ops` is the contract, `reference.py` its specification in plain torch, and everything else here is named after the
torch device type it serves; `load_ops` finds it by that name. Nothing here knows about models, requests or blocks'
owners. Invariants: an op never keeps a tensor it was given beyond the call, except weights given to `prepare_linear`.

The name clashes with the Hub package that is also imported as `kernels`, which `transformers` probes for when it is
imported. Baton therefore does not depend on `transformers`, and a process that imports it must not have this folder on
its path. If `kernels` turns out not to have `load_ops`, the foreign package was found first.
"""

from __future__ import annotations

import importlib
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Quantization = Literal["none", "int8"]
"""What a linear layer computes with: "none", the numbers it was given; "int8", weights rounded to 8 bits at load, a
scale for each output, and inputs rounded to 8 bits at every call, a range for each row: see `reference.py`."""


KVDtype = Literal["auto", "int8"]
"""How KV is kept: "auto", as numbers of the type that the model computes in; "int8", rounded to 8 bits, each head of a
position with a scale of its own: see `reference.round_kv`."""
SCALE_BYTES = 4
"""Bytes that a head of KV in 8 bits ends with: its scale, a float32."""


class DeviceUnavailable(Exception):
    """A device cannot be used; the text says what is missing, and what to do about it."""


@dataclass(frozen=True, slots=True)
class MemoryBytes:
    """Memory that a device has of its own."""

    free: int
    """Of it, what nobody uses now."""
    total: int
    """All of it."""


Counted = Literal["units", "memory"]
"""What a device is to count: how long its units worked, or what its cores read and wrote in its memory."""


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """What a device has counted of some steps, over all kernels; what it was not told to count stays 0."""

    kernels_s: float = 0.0
    """That kernels ran."""
    cube_s: float = 0.0
    """That the unit for products of matrices worked."""
    vector_s: float = 0.0
    """That the vector units worked."""
    load_s: float = 0.0
    """That data came from its memory to its cores."""
    read_bytes: float = 0.0
    """That came so."""
    written_bytes: float = 0.0
    """That went the other way."""


class DeviceCounter(ABC):
    """Has a device count, once: `start`, steps, `stop`, `read`."""

    @abstractmethod
    def start(self) -> None:
        """Called by the thread that computes. Raises DeviceUnavailable if the device cannot count."""

    @abstractmethod
    def stop(self) -> None:
        """Called by the thread that computes."""

    @abstractmethod
    def read(self) -> DeviceUse:
        """What was counted; takes seconds, so another thread calls it. Raises DeviceUnavailable if nothing was."""

    @abstractmethod
    def close(self) -> None:
        """Leaves nothing behind, whatever came before."""


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Where the T packed tokens of B sequences stand and where their KV lies; one per step, the same for all layers.

    The plain tuples repeat what the tensors say, so that a device need not be asked for what the host knew already.
    """

    query_starts: Tensor  # [B + 1] int32
    """Sequence b owns packed rows query_starts[b] .. query_starts[b + 1] - 1; none is empty."""
    context_lens: Tensor  # [B] int32
    """KV positions of each sequence, this step's tokens included; those are the last ones."""
    block_tables: Tensor  # [B, M] int32
    """Block ids in order, padded with 0."""
    slots: Tensor  # [T] int64
    """block * block_size + offset: where each packed token's KV goes."""
    positions: Tensor  # [T] int64
    """Position of each packed token in its sequence."""
    query_lens_list: tuple[int, ...]  # [B]
    """Packed rows of each sequence."""
    context_lens_list: tuple[int, ...]  # [B]
    """As `context_lens`."""
    block_size: int
    """Token positions a block."""
    plan: object = None
    """What `Ops.plan_attention` worked out for this step; opaque to everyone else."""


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """Sizes that all layers of a decoder share."""

    hidden_size: int
    """H."""
    intermediate_size: int
    """I."""
    num_heads: int
    """Query heads."""
    num_kv_heads: int
    """Key/value heads."""
    head_dim: int
    """D."""
    eps: float
    """Of the norms."""


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer's weights, as the device wants them."""

    input_norm: Tensor  # [H]
    """Before attention."""
    qkv: object
    """Query, key and value projections, in this order: H to (num_heads + 2 num_kv_heads) * head_dim."""
    query_norm: Tensor | None  # [D]
    """On each query head; None where the family has no head norms."""
    key_norm: Tensor | None  # [D]
    """On each key head."""
    output: object
    """num_heads * head_dim to H."""
    post_attention_norm: Tensor  # [H]
    """Before the MLP."""
    gate_up: object
    """Gate and up projections, in this order: H to 2 I."""
    down: object
    """I to H."""
    window: int | None
    """Sliding window in positions."""


class LayerStack(ABC):
    """All layers of a decoder as one operation, for steps that it fits."""

    @abstractmethod
    def fits(self, metadata: AttentionMetadata) -> bool:
        """Whether `run` takes a step, whose plan is made."""

    @abstractmethod
    def run(
        self,
        hidden: Tensor,
        rope: tuple[Tensor, Tensor],
        metadata: AttentionMetadata,
        key_caches: Sequence[Tensor],
        value_caches: Sequence[Tensor],
    ) -> Tensor:
        """Embedded tokens [T, H], through all layers and the final norm: [T, H], valid until the next call.

        `rope` is what `Ops.rope_rows` answered; the caches of all layers are as for `Ops.rope_and_write_kv`. The KV of
        all T tokens is written. `Ops.between_layers` is called now and then.
        """


class Graph(ABC):
    """A step that is recorded once and run again over the same tensors, where launching it piece by piece is slow."""

    @abstractmethod
    def capture(self, compute: Callable[[], Tensor]) -> Tensor:
        """Records what `compute`, which is called twice, does; answers the tensor that every `replay` writes."""

    @abstractmethod
    def replay(self, metadata: AttentionMetadata) -> None:
        """Runs it over what the recorded tensors hold now. `metadata` has those tensors, and this step's tuples."""


class Ops(ABC):
    """The operations of one kind of device.

    Each file here defines a concrete class `Ops` taking the `torch.device`. Tensors are of one of `dtypes`
    unless a comment says otherwise; sums, norms and softmax accumulate in float32 whatever the tensors are.
    """

    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)
    """What models may compute in."""
    kv_dtypes: tuple[KVDtype, ...] = ("auto", "int8")
    """How KV may be kept."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        """Where all tensors given to the operations live."""
        self._between_layers: Callable[[], None] = lambda: None
        self._sum_parts: Callable[[Tensor], Tensor] | None = None

    def call_between_layers(self, call: Callable[[], None]) -> None:
        """From now on steps make this call between layers; it may change the number of torch's threads."""
        self._between_layers = call

    def between_layers(self) -> None:
        """Makes that call, if there is one."""
        self._between_layers()

    def sum_parts_by(self, call: Callable[[Tensor], Tensor]) -> None:
        """Said before a model is loaded whose layers' heads and MLPs this device has only a part of: `call` adds to a
        tensor, in place, what the devices with the other parts have computed in its place."""
        self._sum_parts = call

    def sum_parts(self, x: Tensor) -> Tensor:
        """What all parts add up to; x itself where this device has the whole of the model."""
        return x if self._sum_parts is None else self._sum_parts(x)

    @property
    def has_parts(self) -> bool:
        """Whether `sum_parts` asks other devices."""
        return self._sum_parts is not None

    @staticmethod
    def open_device(index: int) -> torch.device:
        """The device of this kind with that number. Raises DeviceUnavailable if it cannot be used."""
        return torch.device("cpu")

    def enter_thread(self) -> None:
        """Called by a thread before it computes, again and again."""
        return None

    def memory_bytes(self) -> MemoryBytes | None:
        """The device's own memory; None where it uses the host's."""
        return None

    def new_counter(self, counted: Counted) -> DeviceCounter | None:
        """Counts what steps use of the device; None where it has no counters."""
        return None

    def new_graph(self) -> Graph | None:
        """A recording yet to be made, after `prepare`; None where the device has no such thing."""
        return None

    def prepare(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        dtype: torch.dtype,
        kv_dtype: KVDtype = "auto",
    ) -> None:
        """Called once before a model of this shape runs: whatever its first step would otherwise wait for."""
        return None

    @abstractmethod
    def prepare_linear(self, weight: Tensor, bias: Tensor | None, quantization: Quantization = "none") -> object:
        """Takes over a weight [N, K] and bias [N] and returns them in the form that `linear` wants; called at load."""

    @abstractmethod
    def linear(self, x: Tensor, prepared: object) -> Tensor:
        """x [T, K] times a prepared weight, plus its bias: [T, N]."""

    @abstractmethod
    def embedding(self, token_ids: Tensor, table: Tensor) -> Tensor:
        """Rows of table [V, H] for token_ids [T] int64: [T, H]."""

    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [..., H], divided by its root mean square over the last dimension, times weight [H]. x may be strided."""

    @abstractmethod
    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """`(rms_norm(x + residual), x + residual)`; both inputs [T, H] may be overwritten."""

    @abstractmethod
    def rope_rows(self, positions: Tensor, inverse_frequencies: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine, each [T, D / 2] float32, of positions [T] int64 times inverse_frequencies [D / 2] float32.

        Called once a step; all layers hand the result to `rope_and_write_kv`, so a device may have a form of its own.
        """

    @abstractmethod
    def rope_and_write_kv(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cosine: Tensor,
        sine: Tensor,
        slots: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
    ) -> Tensor:
        """Rotates query [T, Hq, D] and key [T, Hkv, D], writes key and value to their slots, returns the query.

        Element i of a head is paired with element i + D / 2 (the Hugging Face order). Query, key and value may be
        views of one fused projection and may be overwritten; caches are [num_blocks, block_size, Hkv, D], or, where
        KV is kept in 8 bits, int8 [num_blocks, block_size, Hkv, D + SCALE_BYTES], each head followed by its scale.
        """

    def plan_attention(self, metadata: AttentionMetadata) -> object:
        """Whatever `paged_attention` would otherwise work out again in every layer; becomes `metadata.plan`."""
        return None

    @abstractmethod
    def paged_attention(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        metadata: AttentionMetadata,
        scale: float,
        window: int | None,
    ) -> Tensor:
        """Causal attention of query [T, Hq, D] to each sequence's own context, read through its block table.

        This step's KV is in the cache already. Query head h reads KV head h // (Hq / Hkv). With a window, a token
        sees itself and the `window - 1` tokens before it. KV past a sequence's context never reaches the result, not
        even if it is NaN. Returns [T, Hq, D], contiguous.
        """

    def fuse_layers(self, layers: Sequence[DecoderLayer], final_norm: Tensor, shape: DecoderShape) -> LayerStack | None:
        """The layers as one operation, where the device has something better than one operation after the other."""
        return None

    @abstractmethod
    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up, where gate_up [T, 2 I] holds the gate first: [T, I]."""


def available_ops() -> list[str]:
    """Names that `load_ops` accepts: the files of this folder."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def load_ops(device_type: str, index: int = 0) -> Ops:
    """The operations in `kernels/<device_type>.py` or the folder of that name; "reference" runs on the CPU.

    Raises ValueError naming the known ones for a device type that has no file here, DeviceUnavailable if there is no
    such device that works.
    """
    if device_type not in available_ops():
        raise ValueError(f"device {device_type!r} is not supported; supported are: {', '.join(available_ops())}")
    module = importlib.import_module(f"{__name__}.{device_type}")
    ops = module.Ops(module.Ops.open_device(index))
    if not isinstance(ops, Ops):
        raise TypeError(f"kernels/{device_type}.py: class Ops does not derive from kernels.Ops")
    return ops
