"""How large a worker's pool may get, and how much of it has memory at the start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine import pool_sizing
from engine.config import WorkerConfig
from engine.loading import open_model
from engine.pool_sizing import INITIAL_BLOCKS, open_memory
from kvstore.memory import BlockMemory
from runtime.errors import ConfigError


def opened(tmp_path: Path, **options: Any) -> BlockMemory:
    config = WorkerConfig("tracer", kv_shared_memory_dir=str(tmp_path), **options)
    model = open_model(config.model, config.dtype, None)
    return open_memory(config, model, model.layout(config.block_size), epoch=7)


def test_the_ceiling_is_what_the_longest_sequences_could_use_within_the_memory(tmp_path, monkeypatch):
    memory = opened(tmp_path, max_num_seqs=4, max_model_len=160)
    assert (memory.ceiling, memory.num_blocks) == (40, 40)
    memory.close()
    monkeypatch.setattr(pool_sizing, "memory_limit_bytes", lambda: 1000 * memory.layout.block_bytes)
    memory = opened(tmp_path, max_num_seqs=64, kv_cache_gpu_mem_utilization=0.25)
    assert (memory.ceiling, memory.num_blocks) == (250, INITIAL_BLOCKS)
    memory.close()


@pytest.mark.parametrize("expected, num_blocks", [(40, 4 * 3), (16, 4), (2000, 256)])
def test_what_is_expected_is_there_at_the_start(tmp_path, expected, num_blocks):
    memory = opened(tmp_path, max_num_seqs=4, expected_sequence_tokens=expected, num_kv_blocks=256)
    assert memory.num_blocks == num_blocks
    memory.close()


def test_no_sequence_is_expected_to_be_longer_than_it_may():
    with pytest.raises(ConfigError, match=r"--expected-sequence-tokens: .*--max-model-len, which is 64; got 65"):
        WorkerConfig("tracer", max_model_len=64, expected_sequence_tokens=65)
