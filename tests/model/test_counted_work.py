"""What profiles say a step has to do, beside what torch counts of the same step.

The other count knows nothing of formulas: torch's counter sees every product of matrices that the reference makes, and
the bytes are those of the tensors that the step takes. Attention is computed row by row, over exactly the keys that
the row may see.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from model_driver import GREEDY, Driver
from tiny_models import family_config, random_weights, write_folder
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from baton.profiling.figures import rows_of
from baton.profiling.options import Limits
from baton.profiling.workers import Profile
from engine.batch import Batch, SampleRow
from engine.measures import ModelMeasures
from engine.model_runner import ModelRunner, load_model, model_spec
from kernels import AttentionMetadata, Quantization, reference
from kvstore.cache import KVCache
from kvstore.memory import PoolMemory
from protos import worker_pb2
from runtime.checkpoint import open_checkpoint

BLOCK_SIZE = 16
AGREEMENT = 0.001
"""Relative; 0.05 is promised."""


class CountingOps(reference.Ops):
    """The reference, with attention row by row, that notes the tensors which are read."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.weights: dict[int, int] = {}
        """Bytes of the weights that were used, by tensor."""
        self.num_kv_bytes = 0
        """Of the keys and values that were used, each once a layer and sequence."""

    def linear(self, x: Tensor, prepared: object) -> Tensor:
        assert isinstance(prepared, reference.LinearWeights)
        if x.shape[0]:
            self.weights[prepared.weight.data_ptr()] = prepared.weight.nbytes
        return super().linear(x, prepared)

    def paged_attention(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        metadata: AttentionMetadata,
        scale: float,
        window: int | None,
    ) -> Tensor:
        output, row = torch.empty_like(query), 0
        for sequence, num_rows in enumerate(metadata.query_lens_list):
            context = metadata.context_lens_list[sequence]
            blocks = metadata.block_tables[sequence].long()
            keys, values = (cache[blocks].flatten(0, 1)[:context] for cache in (key_cache, value_cache))
            oldest = context
            for end in range(context - num_rows + 1, context + 1):
                begin = 0 if window is None else max(0, end - window)
                oldest = min(oldest, begin)
                for kv_head, heads in enumerate(torch.arange(query.shape[1]).chunk(key_cache.shape[2])):
                    scores = query[row, heads] @ keys[begin:end, kv_head].T * scale  # [heads, L]
                    output[row, heads] = scores.float().softmax(-1).to(values.dtype) @ values[begin:end, kv_head]
                row += 1
            self.num_kv_bytes += keys[oldest:].nbytes + values[oldest:].nbytes
        return output


def runner_of(model: str, dtype: str = "auto", quantization: Quantization = "none") -> tuple[ModelRunner, CountingOps]:
    checkpoint, ops = open_checkpoint(model), CountingOps()
    spec = model_spec(checkpoint, dtype)
    memory = PoolMemory(spec.kv_layout(BLOCK_SIZE), 64)
    memory.commit(64)
    return ModelRunner(load_model(checkpoint, spec, ops, None, quantization), ops, KVCache(memory)), ops


def counted(runner: ModelRunner, ops: CountingOps, batch: Batch) -> tuple[float, float]:
    """Multiplications and additions, and bytes, of one step."""
    ops.weights, ops.num_kv_bytes = {}, 0
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        runner.logits(batch)
    return counter.get_total_flops(), sum(ops.weights.values()) + ops.num_kv_bytes


def mixed_batch(runner: ModelRunner, sequences: list[tuple[int, int]], num_silent: int = 0) -> Batch:
    """Rows of a context each; the last `num_silent` sequences sample nothing. KV is whatever lies there."""
    driver, batch = Driver(runner, [context for _, context in sequences]), Batch()
    for index, (rows, context) in enumerate(sequences):
        driver.add(batch, index, [5 + position % 300 for position in range(rows)], context - rows)
        if index < len(sequences) - num_silent:
            driver.ask(batch, GREEDY)
    return batch


STEPS = {
    "decode": [(1, 7), (1, 33), (1, 50)],
    "chunk": [(24, 40)],
    "whole prompt": [(30, 30)],
    "both": [(1, 45), (9, 20), (1, 12), (16, 48)],
}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("family", ["llama-gqa-tied", "llama-mha-untied-llama3", "qwen2", "qwen3", "mistral-window"])
def test_tiny_models(family: str, step: str, tmp_path: Path) -> None:
    config = family_config(family)
    runner, ops = runner_of(str(write_folder(tmp_path / family, config, random_weights(config))))
    num_silent = 1 if step == "both" else 0
    batch = mixed_batch(runner, STEPS[step], num_silent)
    work = ModelMeasures(runner, "none").work(batch)
    num_flops, num_bytes = counted(runner, ops, batch)
    assert work.num_flops == pytest.approx(num_flops, rel=AGREEMENT)
    assert work.num_bytes == pytest.approx(num_bytes, rel=AGREEMENT)


def test_drafts_are_rows_that_sample(tmp_path: Path) -> None:
    config = family_config("llama-gqa-tied")
    runner, ops = runner_of(str(write_folder(tmp_path / "m", config, random_weights(config))))
    batch = mixed_batch(runner, [(4, 20), (1, 9)])
    batch.num_draft_rows = 3
    batch.sample_rows = [SampleRow(row, 0, GREEDY) for row in range(5)]
    work = ModelMeasures(runner, "none").work(batch)
    num_flops, num_bytes = counted(runner, ops, batch)
    assert (work.num_flops, work.num_bytes) == (pytest.approx(num_flops), pytest.approx(num_bytes))


@pytest.fixture(scope="module")
def smollm2() -> tuple[ModelRunner, CountingOps]:
    return runner_of("smollm2", "bfloat16")


@pytest.mark.parametrize("sequences", [[(1, 100)], [(1, 60), (1, 17), (1, 90), (1, 33)], [(6, 60)]])
def test_the_roofline_share_of_smollm2(
    smollm2: tuple[ModelRunner, CountingOps], sequences: list[tuple[int, int]]
) -> None:
    """The share that a profile shows is the one that follows from the other count."""
    runner, ops = smollm2
    batch = mixed_batch(runner, sequences)
    work = ModelMeasures(runner, "none").work(batch)
    step = worker_pb2.ProfiledStep(
        duration_ms=20.0, num_tokens=batch.num_tokens, num_flops=work.num_flops, num_bytes=work.num_bytes
    )
    response = worker_pb2.ProfileResponse(worker_id="w", steps=[step])
    (row,) = rows_of([Profile("", response, 0.0)], {"w": Limits(bytes_per_s=20e9, flops_per_s=800e9)})
    num_flops, num_bytes = counted(runner, ops, batch)
    assert row.compute_share == pytest.approx(num_flops / 800e9 / 0.02, rel=AGREEMENT)
    assert row.bandwidth_share == pytest.approx(num_bytes / 20e9 / 0.02, rel=AGREEMENT)
    assert row.roofline_share == pytest.approx(max(num_flops / 800e9, num_bytes / 20e9) / 0.02, rel=AGREEMENT)


def test_weights_of_8_bits_are_half_as_much_to_read(smollm2: tuple[ModelRunner, CountingOps]) -> None:
    runner, _ = smollm2
    batch, spec = mixed_batch(runner, [(1, 10)]), runner.model.spec
    whole, rounded = (ModelMeasures(runner, quantization).work(batch) for quantization in ("none", "int8"))
    head = spec.vocab_size * spec.hidden_size
    assert whole.num_flops == rounded.num_flops
    assert whole.num_bytes - rounded.num_bytes == spec.num_weights - head


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_peaks_are_measured_with_what_steps_use(quantization: Quantization, tmp_path: Path) -> None:
    from kernels import load_ops

    config = family_config("llama-gqa-tied")
    folder = str(write_folder(tmp_path / "m", config, random_weights(config)))
    checkpoint, ops = open_checkpoint(folder), load_ops("cpu")
    spec = model_spec(checkpoint)
    memory = PoolMemory(spec.kv_layout(BLOCK_SIZE), 4)
    measures = ModelMeasures(ModelRunner(load_model(checkpoint, spec, ops), ops, KVCache(memory)), quantization)
    peaks = measures.peaks()
    assert measures.device == "cpu" and measures.dtype == ("float32" if quantization == "none" else "int8")
    # Any machine that can run this computes a milliard a second, and none a million times as much.
    assert 1e9 < peaks.flops_per_s < 1e15 and 1e8 < peaks.bytes_per_s < 1e13
    assert peaks.num_threads == torch.get_num_threads()
