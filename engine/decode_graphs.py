"""Steps in which every sequence computes one token, recorded once for each of some sizes and replayed.

Launching a step's operations one after the other takes longer than a device takes to compute them for few rows. Owns
the tensors that recordings read (token ids, places, tables) and the choice of a size: the next power of two, whose
rows beyond the batch compute on scratch blocks of the cache. Steps with chunks of prompts run as they are. Invariant: a
row's results follow from its own sequence; no row writes where another one reads.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.batch import Batch
from engine.decoder import Decoder
from kernels import AttentionMetadata, Graph, Ops
from kvstore.cache import KVCache

LOG = logging.getLogger(__name__)
MAX_ROWS = 256
"""Rows of the largest recording. More rows take long enough for their launches not to matter."""


@dataclass(frozen=True, slots=True)
class Recording:
    """A step of one size."""

    graph: Graph
    """Runs it."""
    metadata: AttentionMetadata
    """Views of the shared tensors; its tuples are those of rows that stand for nobody."""
    logits: Tensor  # [size, V] float32
    """What a replay writes."""


class DecodeGraphs:
    """All recordings of one model over one cache. Used by one thread at a time, like the runner."""

    def __init__(self, model: Decoder, ops: Ops, cache: KVCache, max_rows: int, first: Graph) -> None:
        """Records every size up to the next power of two of `max_rows`, at most MAX_ROWS; `first` takes the largest."""
        self._model, self._ops, self._cache = model, ops, cache
        largest = min(MAX_ROWS, 1 << (max_rows - 1).bit_length())
        assert len(cache.scratch_slots) >= largest, "each row needs a slot of its own"
        device, block_size = ops.device, cache.layout.block_size
        num_blocks = min(cache.layout.num_blocks(model.spec.max_context_len), cache.keys[0].shape[0])
        self._scratch_block = cache.scratch_slots.start // block_size
        self._token_ids = torch.zeros(largest, dtype=torch.int64, device=device)
        self._positions = torch.zeros(largest, dtype=torch.int64, device=device)
        self._slots = torch.tensor(cache.scratch_slots[:largest], dtype=torch.int64, device=device)
        self._context_lens = torch.ones(largest, dtype=torch.int32, device=device)
        tables = (largest, num_blocks)
        self._block_tables = torch.full(tables, self._scratch_block, dtype=torch.int32, device=device)
        self._rows = torch.arange(largest, device=device)
        self._recordings: dict[int, Recording] = {}
        size = largest
        while size:
            self._recordings[size] = self._record(size, first if size == largest else None)
            size //= 2

    def fits(self, batch: Batch) -> bool:
        """Whether this step is one of single rows, and not too many."""
        return batch.num_tokens == batch.num_sequences and batch.num_tokens <= max(self._recordings)

    def logits(self, batch: Batch) -> Tensor:
        """Logits [S, V] float32 of the rows that sample, valid until the next step."""
        size = 1 << (batch.num_tokens - 1).bit_length()
        recording, num_unused = self._recordings[size], size - batch.num_tokens
        longest = max(len(table) for table in batch.block_tables)
        nobody = [self._scratch_block] * longest
        tables = [table + nobody[len(table) :] for table in batch.block_tables] + [nobody] * num_unused
        context_lens = batch.context_lens + [1] * num_unused
        _fill(self._token_ids[:size], batch.token_ids + [0] * num_unused)
        _fill(self._positions[:size], batch.positions + [0] * num_unused)
        _fill(self._slots[:size], batch.slots + list(self._cache.scratch_slots[:num_unused]))
        _fill(self._context_lens[:size], context_lens)
        # Ids beyond are of earlier steps, and not read.
        self._block_tables[:size, :longest] = torch.tensor(tables, dtype=torch.int32).to(self._ops.device)
        recording.graph.replay(replace(recording.metadata, context_lens_list=tuple(context_lens)))
        return recording.logits[[row.row for row in batch.sample_rows]]

    def _record(self, size: int, graph: Graph | None) -> Recording:
        graph = graph or self._ops.new_graph()
        assert graph is not None, "a device that has had one has others"
        ops, cache = self._ops, self._cache
        metadata = AttentionMetadata(
            query_starts=torch.arange(size + 1, dtype=torch.int32, device=ops.device),  # [size + 1]
            context_lens=self._context_lens[:size],
            block_tables=self._block_tables[:size],
            slots=self._slots[:size],
            positions=self._positions[:size],
            query_lens_list=(1,) * size,
            context_lens_list=(1,) * size,
            block_size=cache.layout.block_size,
        )
        planned = replace(metadata, plan=ops.plan_attention(metadata))
        token_ids, rows = self._token_ids[:size], self._rows[:size]
        logits = graph.capture(
            lambda: self._model.forward(token_ids, planned, cache.keys, cache.values, rows)
        )  # [size, V]
        return Recording(graph, planned, logits)


def _fill(destination: Tensor, values: list[int]) -> None:
    destination.copy_(torch.tensor(values, dtype=destination.dtype))


def record_steps(model: Decoder, ops: Ops, cache: KVCache, max_rows: int) -> DecodeGraphs | None:
    """The recordings; None where nothing is to be recorded or the device or the model does not allow it."""
    if max_rows == 0:
        return None
    graph = ops.new_graph()
    if graph is None:
        return None
    if any(window is not None for window in model.spec.windows):
        LOG.info("steps are not recorded, since layers have sliding windows, whose attention the host plans")
        return None
    with torch.inference_mode():
        recorded = DecodeGraphs(model, ops, cache, max_rows, graph)
    LOG.info("steps of up to %d rows are recorded", min(MAX_ROWS, max_rows))
    return recorded
