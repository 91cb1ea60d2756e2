"""How large a worker's KV pool may get, where its bytes are, and how many of them it takes at the start.

Owns the rule: what all seats could use, within a part of the memory that there is. In host memory the pool starts small
and grows up to that; a device's pool is taken whole, since nobody else should use the device. Beside that one lies, in
host memory, what its sequences can be swapped out to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.config import WorkerConfig
from engine.loading import ModelParts
from kvstore.layout import KVLayout
from kvstore.memory import BlockMemory, PoolMemory, unlink_dead
from kvstore.swap import SwapSpace
from runtime.errors import ConfigError
from runtime.host import memory_limit_bytes

if TYPE_CHECKING:
    from kernels import MemoryBytes

INITIAL_BLOCKS = 128
"""Blocks at the start where nothing says how many will be needed: a start is fast."""
DEVICE_RESERVE_BYTES = 2 << 30
"""What a device keeps for activations, operators' own memory and recorded steps."""


def open_memory(config: WorkerConfig, model: ModelParts, layout: KVLayout, epoch: int) -> BlockMemory:
    """The pool's memory. Raises ConfigError for options that do not fit together, PoolMemoryFull without room."""
    device_bytes = model.device_bytes()
    ceiling = config.num_kv_blocks
    if ceiling is None:
        useful = _useful_blocks(config, model, layout)
        # Each rank's device has its own part of a block; the host's memory has all of them.
        stored = layout if device_bytes is None else layout.of_one_rank
        affordable = _affordable_bytes(config, model, device_bytes) // stored.block_bytes
        ceiling = max(1, min(useful, affordable))
    if config.max_model_len is not None and layout.num_blocks(config.max_model_len) > ceiling:
        raise ConfigError(
            f"--max-model-len: the KV pool holds {ceiling * layout.block_size} tokens "
            f"(--num-kv-blocks {ceiling}), got {config.max_model_len}"
        )
    if device_bytes is not None:
        return model.open_device_memory(layout, ceiling)
    initial, expected = INITIAL_BLOCKS, config.expected_sequence_tokens
    if expected is not None:
        initial = config.max_num_seqs * layout.num_blocks(expected)
    directory = config.shared_memory_dir
    if directory is not None and directory.is_dir():
        unlink_dead(directory)
    return PoolMemory.create(layout, ceiling, min(ceiling, initial), directory=directory, epoch=epoch)


def open_swap_space(config: WorkerConfig, model: ModelParts, memory: BlockMemory) -> SwapSpace | None:
    """Host memory for KV that makes room in a device's pool; None where the pool is host memory itself, or none is
    wanted, or several ranks have it in devices of their own. Raises ConfigError without room."""
    layout = memory.layout
    affordable = int(config.swap_space_gib * 2**30) // layout.block_bytes
    num_blocks = min(affordable, _useful_blocks(config, model, layout))
    if model.device_bytes() is None or num_blocks < 1 or config.tensor_parallel_size > 1:
        return None
    try:
        return SwapSpace(memory, num_blocks)
    except (RuntimeError, MemoryError) as error:
        gib = num_blocks * layout.block_bytes / 2**30
        raise ConfigError(
            f"--swap-space-gib: no room for {gib:.1f} GiB of host memory, got {config.swap_space_gib:g}: {error}"
        ) from error


def _useful_blocks(config: WorkerConfig, model: ModelParts, layout: KVLayout) -> int:
    """Blocks of all seats, should each sequence get as long as it may."""
    return config.max_num_seqs * layout.num_blocks(config.max_model_len or model.max_context)


def _affordable_bytes(config: WorkerConfig, model: ModelParts, device_bytes: MemoryBytes | None) -> int:
    """What the pool may take. The weights of the model are not loaded yet."""
    if device_bytes is None:
        return int(config.kv_cache_gpu_mem_utilization * memory_limit_bytes())
    free = device_bytes.free - model.weight_bytes - DEVICE_RESERVE_BYTES
    if free <= 0:
        raise ConfigError(
            f"--device: {config.device} has {device_bytes.free >> 20} MiB free; the model's weights take "
            f"{model.weight_bytes >> 20} MiB, and {DEVICE_RESERVE_BYTES >> 20} MiB are kept for steps"
        )
    return min(free, int(config.kv_cache_gpu_mem_utilization * device_bytes.total))
