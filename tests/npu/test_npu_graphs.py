"""Recorded steps over a simulated NPUGraph: the same logits as launched step by step, whatever the batch."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from contracts import ContractViolation
from model_driver import Driver
from npu_runner import load_runner, write_tiny
from simulated_device import NPUGraph
from simulated_host import Npu

from engine.batch import Batch
from engine.decode_graphs import MAX_ROWS
from engine.model_runner import ModelRunner
from kernels import load_ops

FUSED = "npu_fused_infer_attention_score"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("model"), "qwen3", num_hidden_layers=2)


def prompt_of(length: int) -> list[int]:
    rng = random.Random(length)
    return [rng.randrange(320) for _ in range(length)]


def decode_step(driver: Driver, sequences: dict[int, int], sampling: set[int] | None = None) -> Batch:
    """One token for each sequence, at the position that it has; some of them sample."""
    batch = Batch()
    for sequence, position in sequences.items():
        driver.add(batch, sequence, [sequence + 7], position)
        if sampling is None or sequence in sampling:
            driver.ask(batch)
    return batch


def logits(runner: ModelRunner, batch: Batch) -> torch.Tensor:
    with torch.inference_mode():
        return runner.logits(batch)


def drivers(folder: Path, lengths: list[int], max_graph_rows: int) -> tuple[Driver, Driver]:
    """Two runners with the same KV, the second with recordings."""
    made = []
    for rows in (0, max_graph_rows):
        driver = Driver(load_runner(folder, "npu", num_blocks=24, max_graph_rows=rows), [n + 20 for n in lengths])
        for sequence, length in enumerate(lengths):
            driver.prefill(sequence, prompt_of(length), 512)
        made.append(driver)
    return made[0], made[1]


def test_every_power_of_two_is_recorded(npu: Npu, folder: Path) -> None:
    load_runner(folder, "npu", max_graph_rows=5)
    assert len(npu.device.graphs) == 4  # 8, 4, 2, 1
    assert all(sum(call.name == f"npu::{FUSED}" for call in graph.calls) == 2 for graph in npu.device.graphs)
    assert MAX_ROWS == 256


def test_replays_equal_single_launches(npu: Npu, folder: Path) -> None:
    """Sizes that fill a recording and sizes that do not; contexts within a block, at its end, and beyond."""
    lengths = [3, 127, 128, 300, 20]
    eager, recorded = drivers(folder, lengths, 8)
    npu.device.graphs[0].num_replays = 0
    places = dict(enumerate(lengths))
    for chosen in ([0], [1, 2], [3, 0, 4], [4, 3, 2, 1, 0], [2]):
        batch = {sequence: places[sequence] for sequence in chosen}
        expected = logits(eager.runner, decode_step(eager, batch))
        npu.operators.num_calls.clear()
        assert torch.equal(logits(recorded.runner, decode_step(recorded, batch)), expected)
        for sequence in chosen:
            places[sequence] += 1
    assert [graph.num_replays for graph in npu.device.graphs] == [1, 1, 1, 2]


def test_rows_that_do_not_sample_are_computed_and_left_out(npu: Npu, folder: Path) -> None:
    eager, recorded = drivers(folder, [3, 127, 40], 4)
    for sampling in ({1}, {0, 2}, set()):
        steps = [decode_step(driver, {0: 3, 1: 127, 2: 40}, sampling) for driver in (eager, recorded)]
        expected = logits(eager.runner, steps[0])
        assert torch.equal(logits(recorded.runner, steps[1]), expected) and len(expected) == len(sampling)


def test_rows_of_nobody_touch_no_block_of_the_pool(npu: Npu, folder: Path) -> None:
    _, recorded = drivers(folder, [3, 127, 40], 4)
    cache = recorded.runner.cache
    slots = slice(0, cache.scratch_slots.start)
    written = decode_step(recorded, {0: 3, 1: 127, 2: 40})
    before = [tensor.flatten(0, 1)[slots].clone() for tensor in (*cache.keys, *cache.values)]
    logits(recorded.runner, written)
    for old, tensor in zip(before, (*cache.keys, *cache.values), strict=True):
        changed = (old != tensor.flatten(0, 1)[slots]).flatten(1).any(1).nonzero()[:, 0].tolist()
        assert sorted(changed) == sorted(written.slots)


def test_steps_with_chunks_and_larger_steps_are_launched(npu: Npu, folder: Path) -> None:
    _, recorded = drivers(folder, [3, 127, 40], 2)
    for graph in npu.device.graphs:
        graph.num_replays = 0
    logits(recorded.runner, decode_step(recorded, {0: 3, 1: 127, 2: 40}))
    chunk = Batch()
    recorded.add(chunk, 0, [5, 6], 4)
    logits(recorded.runner, chunk)
    assert not any(graph.num_replays for graph in npu.device.graphs)
    logits(recorded.runner, decode_step(recorded, {1: 128, 2: 41}))
    assert [graph.num_replays for graph in npu.device.graphs] == [1, 0]


def test_recordings_can_be_turned_off_and_are_not_made_where_they_would_be_wrong(
    npu: Npu, folder: Path, tmp_path: Path
) -> None:
    load_runner(folder, "npu", max_graph_rows=0)
    load_runner(folder, "reference", max_graph_rows=4)
    load_runner(write_tiny(tmp_path, "mistral-window"), "npu", max_graph_rows=4)
    load_runner(write_tiny(tmp_path / "older", "qwen3", head_dim=32), "npu", max_graph_rows=4)
    assert not npu.device.graphs


def test_without_its_lists_a_replay_would_be_wrong(npu: Npu, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lengths that a step was recorded with stay, unless they are exchanged; without that it does not begin."""
    eager, recorded = drivers(folder, [3, 127], 2)
    expected = logits(eager.runner, decode_step(eager, {0: 3, 1: 127}))
    true = NPUGraph.update
    monkeypatch.setattr(NPUGraph, "update", lambda self, cpu_update_input: true(self, [{}]))
    assert not torch.equal(logits(recorded.runner, decode_step(recorded, {0: 3, 1: 127})), expected)
    monkeypatch.setattr(NPUGraph, "update", lambda self, cpu_update_input: None)
    with pytest.raises(ContractViolation, match="attention waits for an update, once for each replay"):
        logits(recorded.runner, decode_step(recorded, {0: 3, 1: 127}))


def test_what_a_device_cannot_record_is_caught(npu: Npu) -> None:
    device, ones = npu.device, torch.ones(3)
    for forbidden in (lambda: ones.sum().item(), ones.nonzero, lambda: torch.tensor([1, 2])):
        with pytest.raises(ContractViolation, match="cannot be recorded"), device.graph(NPUGraph()):
            forbidden()
    graph = NPUGraph()
    with pytest.raises(ContractViolation, match="nothing is recorded"):
        graph.replay()
    with device.graph(graph):
        result = ones * 2
    ones.fill_(5)
    graph.replay()
    assert result.tolist() == [10, 10, 10]
    with pytest.raises(ContractViolation, match="without auto_dispatch_capture"):
        graph.update([{"actual_seq_lengths_kv": [1]}])


def test_the_older_operators_are_not_recorded(npu: Npu) -> None:
    ops = load_ops("npu")
    ops.prepare(4, 2, 32, 128, torch.bfloat16)
    assert ops.new_graph() is None
    ops.prepare(4, 2, 64, 128, torch.bfloat16)
    assert ops.new_graph() is not None
