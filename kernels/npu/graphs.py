"""A recorded step on an NPU: one launch instead of one for every operator.

Owns the recording; the tensors it reads and writes are its caller's. The lengths of contexts are lists on the host that
attention was given by name: `auto_dispatch_capture` notes those calls, and each replay exchanges the lists. Nothing of
the step before may still run then, which holds because its samples have been read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

import kernels
from kernels import AttentionMetadata


class NpuGraph(kernels.Graph):
    """One recording."""

    def __init__(self, npu: Any, pool: Any) -> None:
        self._npu = npu
        self._pool = pool  # memory for what lives only within a step, shared by recordings that never run together
        self._graph = npu.NPUGraph()

    def capture(self, compute: Callable[[], Tensor]) -> Tensor:
        compute()  # whatever is done once only, is done before
        self._npu.synchronize()
        with self._npu.graph(self._graph, pool=self._pool, auto_dispatch_capture=True):
            return compute()

    def replay(self, metadata: AttentionMetadata) -> None:
        self._graph.update(cpu_update_input=[{"actual_seq_lengths_kv": list(metadata.context_lens_list)}])
        self._graph.replay()
