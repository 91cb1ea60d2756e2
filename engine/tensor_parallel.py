"""A model computed by several ranks, processes with a device each: every rank has a part of each layer's heads and MLP.

Owns the parts: which rows and columns of which weight a rank reads, and what the ranks tell each other in a step. A
family's file does not know of it: a rank's decoder is the decoder of a narrower model, whose two sums a layer are added
up over the ranks, and whose head has a part of the vocabulary. Embedding and norms are whole everywhere. Does not own
processes (`ranks.py`). Invariant: ranks run the same steps in the same order, or none goes on.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from engine.decoder_spec import DecoderSpec
from engine.weights.source import Weights
from runtime.errors import ConfigError

ROWS = frozenset({"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"})
"""Layers of which a rank computes some outputs."""
COLUMNS = frozenset({"o_proj", "down_proj"})
"""Layers of which a rank has some inputs: what it computes is one term of each output."""
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
BACKENDS = {"cpu": "gloo", "npu": "hccl"}
"""How ranks on a kind of device reach each other."""
SILENCE_LIMIT = timedelta(minutes=30)
"""How long one waits for another within a step, or while it loads. That one has died shows at once; that it stands
still is seen by who watches the steps."""


@dataclass(frozen=True, slots=True)
class Shard:
    """A rank's place."""

    rank: int
    """From 0."""
    num_ranks: int
    """All of them."""

    def narrowed(self, spec: DecoderSpec) -> DecoderSpec:
        """The model as this rank computes it."""
        return replace(
            spec,
            num_heads=spec.num_heads // self.num_ranks,
            num_kv_heads=spec.num_kv_heads // self.num_ranks,
            intermediate_size=spec.intermediate_size // self.num_ranks,
            tied_head=False,
        )


def check_shards(spec: DecoderSpec, num_ranks: int, model: str) -> None:
    """Raises ConfigError unless the model can be shared evenly."""
    sizes = {
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "intermediate_size": spec.intermediate_size,
    }
    if any(size % num_ranks for size in sizes.values()):
        text = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise ConfigError(f"--tensor-parallel-size: must divide what {model} has, {text}; got {num_ranks}")


class ShardedWeights:
    """The part of a checkpoint that one rank has: `engine.weights.source.Weights` for a narrowed model."""

    def __init__(self, weights: Weights, shard: Shard, is_head_tied: bool) -> None:
        self._weights = weights
        self._shard = shard
        self._is_head_tied = is_head_tied

    def holds(self, name: str) -> bool:
        """As the whole."""
        return self._weights.holds(name)

    def read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """A part of `shape`; of the head a part of its rows, as many for each rank."""
        rank, num_ranks = self._shard.rank, self._shard.num_ranks
        layer = name.split(".")[-2]
        if name == HEAD:
            whole = self._weights.read(EMBEDDING if self._is_head_tied else HEAD, shape, dtype)  # [V, H]
            num_rows = rows_of_head(shape[0], num_ranks)
            part = whole[rank * num_rows : (rank + 1) * num_rows]
            return F.pad(part, (0, 0, 0, num_rows - part.shape[0]))  # [V / n, H], a copy
        if layer in ROWS:
            whole = self._weights.read(name, (num_ranks * shape[0], *shape[1:]), dtype)
            return whole.chunk(num_ranks)[rank].clone()
        if layer in COLUMNS and len(shape) == 2:
            whole = self._weights.read(name, (shape[0], num_ranks * shape[1]), dtype)
            return whole.chunk(num_ranks, dim=1)[rank].clone(memory_format=torch.contiguous_format)
        whole = self._weights.read(name, shape, dtype)
        # A bias is a term of the sum: it is added once.
        return torch.zeros_like(whole) if layer in COLUMNS and rank else whole


def rows_of_head(vocab_size: int, num_ranks: int) -> int:
    """Of the vocabulary, what each rank computes; the last one's may be fewer, and nobody's after them."""
    return -(-vocab_size // num_ranks)


class RankGroup:
    """One rank's way to the others. Its calls are made by all of them, in the same order."""

    def __init__(self, shard: Shard, device_kind: str, meeting_file: Path) -> None:
        """Returns when all ranks are here. `meeting_file`, not there before the first comes, is where they find each
        other; they are processes of one machine, and listen on loopback."""
        self._num_ranks = shard.num_ranks
        c10d: Any = dist  # whose types leave out the half of it
        store = c10d.FileStore(str(meeting_file), shard.num_ranks)
        self._group: Any
        if BACKENDS[device_kind] == "gloo":
            options = c10d.ProcessGroupGloo._Options()
            options._timeout = SILENCE_LIMIT
            # Without being told it takes the address that the machine's name stands for.
            options._devices = [c10d.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
            self._group = c10d.ProcessGroupGloo(store, shard.rank, shard.num_ranks, options)
            return
        dist.init_process_group(
            BACKENDS[device_kind],
            timeout=SILENCE_LIMIT,
            store=store,
            rank=shard.rank,
            world_size=shard.num_ranks,
        )
        self._group = dist.group.WORLD

    def add_up(self, x: Tensor) -> Tensor:
        """x, of the same shape in every rank, becomes the sum of all."""
        self._group.allreduce([x]).wait()
        return x

    def gather(self, part: Tensor) -> Tensor:
        """Parts [S, V / n] side by side in the order of ranks: [S, V]."""
        num_rows, size = part.shape
        parts = part.new_empty((self._num_ranks * num_rows, size))  # [n * S, V / n]
        self._group._allgather_base(parts, part).wait()
        return parts.view(-1, num_rows, size).transpose(0, 1).flatten(1)
