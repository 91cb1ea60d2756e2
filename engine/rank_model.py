"""A rank's part of a model at work: loaded, in touch with the other ranks, computing its part of each step.

`FirstRank` runs in the worker process, has the others compute along, and samples; what another rank needs is
`load_rank`. Does not own processes (`ranks.py`) nor what is whose (`tensor_parallel.py`). Invariant: a step that fails
in one rank is the end of all, since the others may be waiting for its part.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from engine import sampler
from engine.batch import Answer, Batch, Runner
from engine.loading import open_device
from engine.model_runner import ModelRunner, load_model, model_spec
from engine.ranks import Ranks, RankTask
from engine.request import Sample
from engine.tensor_parallel import RankGroup, Shard
from engine.weights import Progress
from kernels import Ops, load_ops
from kvstore.cache import KVCache
from kvstore.device_memory import DeviceMemory
from kvstore.memory import SharedPool
from runtime import huge_pages
from runtime.checkpoint import open_checkpoint
from runtime.devices import device_kind, device_of_rank

LOG = logging.getLogger(__name__)


class RankModel:
    """A rank's part of a model. Used by one thread at a time."""

    def __init__(self, task: RankTask, ops: Ops, cache: KVCache, progress: Progress | None = None) -> None:
        """Reads the rank's weights, then waits for the other ranks."""
        shard, checkpoint = Shard(task.rank, task.layout.num_ranks), open_checkpoint(task.model)
        spec = model_spec(checkpoint, task.dtype)
        ops.sum_parts_by(self._add_up)
        decoder = load_model(checkpoint, spec, ops, progress, task.quantization, shard=shard)
        self._runner = ModelRunner(decoder, ops, cache)
        self._vocab_size = spec.vocab_size
        self._group = RankGroup(shard, device_kind(task.device), task.meeting_file)
        # Between devices the way opens with the first call.
        self._group.add_up(torch.zeros(1, device=ops.device))

    def _add_up(self, x: Tensor) -> Tensor:
        return self._group.add_up(x)

    def logits(self, batch: Batch) -> Tensor:
        """The step's logits [S, V] float32, computed by all ranks and the same in each."""
        self._runner.ops.enter_thread()
        with torch.inference_mode():
            part = self._runner.logits(batch)  # [S, V / n]
            return self._group.gather(part)[:, : self._vocab_size] if batch.sample_rows else part

    def call_between_layers(self, call: Callable[[], None]) -> None:
        """See `engine.batch.Runner`."""
        self._runner.call_between_layers(call)


class FirstRank(Runner):
    """Runs batches on a model of several ranks."""

    def __init__(self, model: RankModel, ranks: Ranks) -> None:
        self._model = model
        self._ranks = ranks

    def run(self, batch: Batch) -> list[Sample]:
        """See `engine.batch.Runner`."""
        if not batch.num_tokens:
            return []
        try:
            self._ranks.send(batch)
            logits = self._model.logits(batch)
        except Exception as error:
            self._ranks.fail(f"a step failed in rank 0: {error}")
            raise
        with torch.inference_mode():
            return sampler.sample(logits, batch.sample_rows)

    def call_between_layers(self, call: Callable[[], None]) -> None:
        """See `engine.batch.Runner`."""
        self._model.call_between_layers(call)

    def call_aside(self, call: Callable[[], Answer]) -> Answer:
        """See `engine.batch.Runner`."""
        return call()


def load_first_rank(task: RankTask, ranks: Ranks, ops: Ops, cache: KVCache, progress: Progress) -> FirstRank:
    """Starts the other ranks, which `task` tells the same but for their device, and loads along with them."""
    with tempfile.TemporaryDirectory(prefix="baton-ranks-") as folder:
        first = replace(task, meeting_file=Path(folder, "meeting"))
        others = range(1, ranks.num_ranks)
        ranks.start([replace(first, rank=rank, device=device_of_rank(task.device, rank)) for rank in others])
        model = RankModel(first, ops, cache, progress)
    LOG.info("the model is computed by %d ranks, of %d threads each", ranks.num_ranks, task.num_threads)
    return FirstRank(model, ranks)


def load_rank(task: RankTask) -> RankModel:
    """Another rank than the first, in a process of its own."""
    torch.set_num_threads(task.num_threads)
    ops = load_ops("cpu") if task.device == "cpu" else open_device(task.device)
    ops.enter_thread()
    if task.pool_file is not None:
        cache = KVCache(SharedPool(task.pool_file, task.layout, is_writable=True), task.rank)
    else:
        cache = KVCache(DeviceMemory(task.layout.of_one_rank, task.num_blocks, ops.device))
    model = RankModel(task, ops, cache)
    if task.device == "cpu":
        LOG.info("%d MiB of memory in huge pages", huge_pages.collapse_private_memory() >> 20)
    return model
