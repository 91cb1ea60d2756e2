"""From a model's name to something that runs batches: the real models, or the tracer.

What is known before the weights are read (sizes, ids, names, the device's memory) decides the KV pool; then `load`
makes the runner over that pool. torch is imported by the real models alone, so that tracer processes start at once.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from engine import tracer
from engine.batch import Runner
from engine.profiling import Measures
from engine.ranks import Ranks, RankTask
from kvstore.layout import DTYPE_BYTES, KVLayout
from kvstore.memory import BlockMemory, PoolMemory
from runtime import huge_pages
from runtime.checkpoint import Checkpoint, open_checkpoint
from runtime.devices import device_kind
from runtime.errors import ConfigError
from runtime.host import num_cpus

if TYPE_CHECKING:
    from engine.model_runner import ModelSpec
    from kernels import MemoryBytes, Ops

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
    weight_bytes: int
    """What its weights will take, or those of one rank, about."""

    @abstractmethod
    def layout(self, block_size: int) -> KVLayout:
        """How its KV is laid out."""

    @abstractmethod
    def set_num_threads(self, count: int) -> None:
        """How many cores the steps use from now on; called by the thread that runs them."""

    def device_bytes(self) -> MemoryBytes | None:
        """The memory of its device; None: it computes in the host's."""
        return None

    def open_device_memory(self, layout: KVLayout, num_blocks: int) -> BlockMemory:
        """A pool there. Raises PoolMemoryFull; only where `device_bytes` answers."""
        raise NotImplementedError

    @abstractmethod
    def load(self, memory: BlockMemory, layout: KVLayout, progress: Progress) -> Runner:
        """Reads the weights, in other ranks too; blocks, so call it from a thread. `progress` is told the part done, 0
        to 1. Raises ConfigError for a pool that ranks cannot share."""

    def measures(self, runner: Runner) -> Measures | None:
        """What profiles ask of what `load` made; None: it computes nothing that could be measured."""
        return None


def open_model(
    model: str,
    dtype: str,
    served_model_name: str | None,
    quantization: Literal["none", "int8"] = "none",
    device: str = "cpu",
    max_graph_rows: int = 0,
    kv_dtype: Literal["auto", "int8"] = "auto",
    ranks: Ranks | None = None,
) -> ModelParts:
    """Finds a model and its device, reads what is needed before its weights. Raises CheckpointError or ConfigError.

    Steps of up to `max_graph_rows` single rows are recorded where the device can. With `ranks` those compute along, and
    nothing is recorded. The tracer has neither a choice of dtype or device nor anything to round to 8 bits or to share.
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
            weight_bytes=0,
        )
    return _open_checkpoint(model, dtype, served_model_name, quantization, device, max_graph_rows, kv_dtype, ranks)


class _Tracer(ModelParts):
    __slots__ = ()

    def layout(self, block_size: int) -> KVLayout:
        return tracer.layout(block_size)

    def set_num_threads(self, count: int) -> None:
        """It has no use for them."""

    def load(self, memory: BlockMemory, layout: KVLayout, progress: Progress) -> Runner:
        assert isinstance(memory, PoolMemory)
        return tracer.TracerRunner(memory, layout)


def _open_checkpoint(
    model: str,
    dtype: str,
    served_model_name: str | None,
    quantization: Literal["none", "int8"],
    device: str,
    max_graph_rows: int,
    kv_dtype: Literal["auto", "int8"],
    ranks: Ranks | None,
) -> ModelParts:
    try:
        from engine import model_runner, tensor_parallel
    except RuntimeError as error:  # torch_npu is installed, torch loads it by itself, and it does not find CANN
        raise ConfigError(f"--device: torch cannot be imported: {error} ({error.__cause__})") from error
    checkpoint = open_checkpoint(model)
    device_ops = None if device == "cpu" else open_device(device)
    spec = _spec_for(checkpoint, dtype, device, device_ops)
    if device_ops is not None and kv_dtype not in device_ops.kv_dtypes:
        known = " or ".join(device_ops.kv_dtypes)
        raise ConfigError(f"--kv-cache-dtype: on {device} it must be {known}, got {kv_dtype}")
    num_ranks = 1 if ranks is None else ranks.num_ranks
    tensor_parallel.check_shards(spec.decoder, num_ranks, model)
    own = spec.decoder if ranks is None else tensor_parallel.Shard(0, num_ranks).narrowed(spec.decoder)
    max_graph_rows = max_graph_rows if ranks is None else 0

    class TorchModel(ModelParts):
        __slots__ = ()

        def layout(self, block_size: int) -> KVLayout:
            return spec.kv_layout(block_size, kv_dtype, num_ranks)

        def set_num_threads(self, count: int) -> None:
            import torch

            torch.set_num_threads(count)

        def device_bytes(self) -> MemoryBytes | None:
            return None if device_ops is None else device_ops.memory_bytes()

        def open_device_memory(self, layout: KVLayout, num_blocks: int) -> BlockMemory:
            from kvstore.device_memory import DeviceMemory

            assert device_ops is not None
            num_scratch_blocks = layout.num_blocks(max_graph_rows)
            return DeviceMemory(layout.of_one_rank, num_blocks, device_ops.device, num_scratch_blocks)

        def load(self, memory: BlockMemory, layout: KVLayout, progress: Progress) -> Runner:
            from kernels import load_ops
            from kvstore.cache import KVCache

            # More threads would fight each other and the other workers.
            num_threads = max(1, num_cpus() // num_ranks)
            self.set_num_threads(num_threads)
            ops = load_ops("cpu") if device_ops is None else device_ops
            ops.enter_thread()
            cache = KVCache(memory)
            runner: Runner
            if ranks is None:
                decoder = model_runner.load_model(checkpoint, spec, ops, progress, quantization)
                runner = model_runner.ModelRunner(decoder, ops, cache, max_graph_rows)
            else:
                from engine.rank_model import load_first_rank

                if device_ops is None and memory.shared_path is None:
                    raise ConfigError(
                        "--kv-shared-memory-dir: ranks share the KV pool, which is in no file; "
                        f"got --tensor-parallel-size {num_ranks}"
                    )
                task = RankTask(
                    model, spec.dtype, quantization, device, num_threads, layout, memory.ceiling, memory.shared_path
                )
                runner = load_first_rank(task, ranks, ops, cache, progress)
            if device_ops is None:
                LOG.info("%d MiB of memory in huge pages", huge_pages.collapse_private_memory() >> 20)
            return runner

        def measures(self, runner: Runner) -> Measures | None:
            from engine.measures import ModelMeasures

            if ranks is not None:  # what one of them does is not what they do
                return None
            assert isinstance(runner, model_runner.ModelRunner)
            return ModelMeasures(runner, quantization)

    # Workers of another dtype or quantisation compute other KV and other tokens. So do those of unlike devices where
    # numbers are rounded to 8 bits in other ways, or over the parts of a layer.
    rounded_weights: str = "int8-npu" if (device_kind(device), quantization) == ("npu", "int8") else quantization
    if ranks is not None and quantization == "int8":
        rounded_weights += f"-{num_ranks}ranks"
    roundings = (*([] if rounded_weights == "none" else [rounded_weights]), *(["kv8"] if kv_dtype == "int8" else []))
    return TorchModel(
        name=served_model_name or checkpoint.name,
        architecture=spec.architecture,
        dtype=spec.dtype,
        fingerprint="-".join((checkpoint.fingerprint, spec.dtype, *roundings)),
        vocab_size=spec.vocab_size,
        max_context=spec.max_context_len,
        eos_token_ids=checkpoint.eos_token_ids,
        weight_bytes=own.num_weights * DTYPE_BYTES[spec.dtype],
    )


def open_device(device: str) -> Ops:
    """The operations of "npu:0" or the like. Raises ConfigError, saying what is missing."""
    from kernels import DeviceUnavailable, load_ops

    kind, _, index = device.partition(":")
    try:
        return load_ops(kind, int(index or 0))
    except DeviceUnavailable as error:
        raise ConfigError(f"--device: {error}") from error


def _spec_for(checkpoint: Checkpoint, dtype: str, device: str, ops: Ops | None) -> ModelSpec:
    """What `dtype` means on that device: "auto" goes on to bfloat16 where float32 cannot be computed in."""
    from engine import model_runner

    spec = model_runner.model_spec(checkpoint, dtype)
    if ops is None or model_runner.DTYPES[spec.dtype] in ops.dtypes:
        return spec
    if dtype != "auto":
        known = [name for name, value in model_runner.DTYPES.items() if value in ops.dtypes]
        raise ConfigError(f"--dtype: device {device} computes in {' or '.join(known)}, got {dtype}")
    LOG.info("computing in bfloat16 instead of the checkpoint's %s, as device %s does", spec.dtype, device)
    return model_runner.model_spec(checkpoint, "bfloat16")
