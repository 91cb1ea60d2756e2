"""All ranks of a model in threads of this process, over gloo: their steps are what processes would compute."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch

from engine import sampler
from engine.batch import Batch
from engine.rank_model import RankModel
from engine.ranks import RankTask
from engine.request import Sample
from kernels import Ops
from kvstore.cache import KVCache
from kvstore.layout import KVLayout

LIMIT_S = 120.0
Part = Callable[[int], tuple[Ops, KVCache]]
"""What the rank of that number computes on, and where its KV is."""


class RankThreads:
    """Answers like a ModelRunner."""

    def __init__(
        self, model: Path | str, layout: KVLayout, folder: Path, part: Part, quantization: str = "none"
    ) -> None:
        """`folder` is where they meet; it has nothing else."""
        task = RankTask(
            str(model), layout.dtype, quantization, "cpu", 1, layout, 0, None, meeting_file=folder / "meeting"
        )
        self._threads = ThreadPoolExecutor(layout.num_ranks)
        self.caches: list[KVCache] = []
        parts = [part(rank) for rank in range(layout.num_ranks)]
        self.cache = parts[0][1]
        """The first rank's."""
        loading = [
            self._threads.submit(RankModel, replace(task, rank=rank), ops, cache)
            for rank, (ops, cache) in enumerate(parts)
        ]
        self._models = [each.result(LIMIT_S) for each in loading]

    def logits(self, batch: Batch) -> torch.Tensor:
        """Those of the first rank; all ranks have the same."""
        computing = [self._threads.submit(model.logits, batch) for model in self._models]
        first, *others = [each.result(LIMIT_S) for each in computing]
        assert all(torch.equal(first, other) for other in others)
        return first

    def run(self, batch: Batch) -> list[Sample]:
        """As ModelRunner."""
        return sampler.sample(self.logits(batch), batch.sample_rows)

    def close(self) -> None:
        """Ends the threads."""
        self._threads.shutdown()
