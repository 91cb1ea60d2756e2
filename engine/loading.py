"""From a model's name to something that runs batches: the real models, or the tracer.

What is known before the weights are read (sizes, ids, names) decides the KV pool; then `load` makes the runner over
that pool. torch is imported by the real models alone, so that tracer processes start at once.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from engine import tracer
from engine.batch import Runner
from kvstore.layout import KVLayout
from kvstore.memory import PoolMemory
from runtime import huge_pages
from runtime.checkpoint import open_checkpoint
from runtime.host import num_cpus

LOG = logging.getLogger(__name__)
TRACER = "tracer"
Progress = Callable[[float], None]


@dataclass(frozen=True, slots=True)
class ModelParts(ABC):
    """A model that is known but not loaded."""

    name: str
    """Its public name."""
    architecture: str
    """For example "llama"."""
    dtype: str
    """Type of weights and activations."""
    fingerprint: str
    """Equal on workers that may be paired."""
    vocab_size: int
    """Number of token ids."""
    max_context: int
    """Most tokens of prompt and output together that the model allows."""
    eos_token_ids: tuple[int, ...]
    """Ids that end generation."""

    @abstractmethod
    def layout(self, block_size: int) -> KVLayout:
        """How its KV is laid out."""

    @abstractmethod
    def set_num_threads(self, count: int) -> None:
        """How many cores the steps use from now on; called by the thread that runs them."""

    @abstractmethod
    def load(self, memory: PoolMemory, layout: KVLayout, progress: Progress) -> Runner:
        """Reads the weights; blocks, so call it from a thread. `progress` is told the part done, 0 to 1."""


def open_model(
    model: str, dtype: str, served_model_name: str | None, quantization: Literal["none", "int8"] = "none"
) -> ModelParts:
    """Finds a model and reads what is needed before its weights. Raises CheckpointError or ConfigError.

    The tracer has neither a choice of dtype nor anything to quantise.
    """
    if model == TRACER:
        return _Tracer(
            name=served_model_name or TRACER,
            architecture=TRACER,
            dtype="uint8",
            fingerprint=TRACER,
            vocab_size=tracer.VOCAB_SIZE,
            max_context=tracer.MAX_MODEL_LEN,
            eos_token_ids=(tracer.EOS_TOKEN_ID,),
        )
    return _open_checkpoint(model, dtype, served_model_name, quantization)


class _Tracer(ModelParts):
    __slots__ = ()

    def layout(self, block_size: int) -> KVLayout:
        return tracer.layout(block_size)

    def set_num_threads(self, count: int) -> None:
        """It has no use for them."""

    def load(self, memory: PoolMemory, layout: KVLayout, progress: Progress) -> Runner:
        return tracer.TracerRunner(memory, layout)


def _open_checkpoint(
    model: str, dtype: str, served_model_name: str | None, quantization: Literal["none", "int8"]
) -> ModelParts:
    from engine import model_runner

    checkpoint = open_checkpoint(model)
    spec = model_runner.model_spec(checkpoint, dtype)

    class TorchModel(ModelParts):
        __slots__ = ()

        def layout(self, block_size: int) -> KVLayout:
            return spec.kv_layout(block_size)

        def set_num_threads(self, count: int) -> None:
            import torch

            torch.set_num_threads(count)

        def load(self, memory: PoolMemory, layout: KVLayout, progress: Progress) -> Runner:
            from kernels import load_ops
            from kvstore.cache import KVCache

            # More threads would fight each other and the other workers.
            self.set_num_threads(num_cpus())
            ops = load_ops("cpu")
            decoder = model_runner.load_model(checkpoint, spec, ops, progress, quantization)
            LOG.info("%d MiB of memory in huge pages", huge_pages.collapse_private_memory() >> 20)
            return model_runner.ModelRunner(decoder, ops, KVCache(memory))

    return TorchModel(
        name=served_model_name or checkpoint.name,
        architecture=spec.architecture,
        dtype=spec.dtype,
        # Workers of another dtype or quantisation compute other KV and other tokens.
        fingerprint="-".join((checkpoint.fingerprint, spec.dtype, *([] if quantization == "none" else [quantization]))),
        vocab_size=spec.vocab_size,
        max_context=spec.max_context_len,
        eos_token_ids=checkpoint.eos_token_ids,
    )
