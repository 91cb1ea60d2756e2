"""What steps have to do, counted pair by pair and weight by weight where the sums are formulas."""

from __future__ import annotations

import itertools

import pytest

from engine.batch import Batch, SampleRow
from engine.decoder_spec import DecoderSpec
from engine.request import SamplingParams
from engine.work import Work, attention_work, linear_work, step_work

SPEC = DecoderSpec(
    vocab_size=50,
    hidden_size=12,
    intermediate_size=20,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    rms_norm_eps=1e-5,
    inverse_frequencies=(1.0, 0.5, 0.1),
    max_context_len=100,
    tied_head=True,
    qkv_bias=False,
    output_bias=False,
    mlp_bias=False,
    head_norms=False,
    windows=(None, 5, 5),
)


def batch_of(sequences: list[tuple[int, int]], num_sampled: int) -> Batch:
    """Sequences with so many rows of a context, of which the first ones sample after their last row."""
    batch = Batch()
    for rows, context in sequences:
        batch.token_ids += [1] * rows
        batch.query_starts.append(batch.num_tokens)
        batch.context_lens.append(context)
    ends = batch.query_starts[1 : num_sampled + 1]
    batch.sample_rows = [SampleRow(end - 1, 0, SamplingParams()) for end in ends]
    return batch


@pytest.mark.parametrize("window", [None, 1, 4, 9, 30])
def test_rows_look_at_themselves_and_what_is_before_within_the_window(window: int | None) -> None:
    for context in range(1, 14):
        for rows in range(1, context + 1):
            seen = [
                [key for key in range(row + 1) if window is None or row - key < window]
                for row in range(context - rows, context)
            ]
            work = attention_work([rows], [context], 4, 2, 6, element_bytes=2, window=window)
            # For each pair of a head: 6 products and sums for its score, as many for its value.
            assert work.num_flops == 4 * 2 * (6 + 6) * sum(map(len, seen))
            # K and V of each position once, whoever looks at it.
            assert work.num_bytes == 2 * 2 * 6 * 2 * len(set(itertools.chain.from_iterable(seen)))


def test_sequences_add_up() -> None:
    both = attention_work([1, 3], [9, 7], 4, 2, 6, 2)
    assert both == attention_work([1], [9], 4, 2, 6, 2) + attention_work([3], [7], 4, 2, 6, 2)


def test_a_weight_is_read_once_for_all_rows_and_not_for_none() -> None:
    assert linear_work(3, 5, 7, 2) == Work(2 * 3 * 5 * 7, 2 * 5 * 7)
    assert linear_work(300, 5, 7, 2).num_bytes == linear_work(1, 5, 7, 2).num_bytes
    assert linear_work(0, 5, 7, 2) == Work()


def test_a_step_is_the_sum_of_its_layers() -> None:
    sequences = [(1, 20), (4, 10)]
    batch = batch_of(sequences, num_sampled=1)
    rows, contexts = [1, 4], [20, 10]
    expected = Work()
    for layer, window in enumerate(SPEC.windows):
        expected += linear_work(5, (4 + 2 + 2) * 6, 12, 1) + linear_work(5, 12, 4 * 6, 1)
        expected += attention_work(rows, contexts, 4, 2, 6, 2, window)
        # Only the row that samples goes on after the last attention.
        mlp_rows = 1 if layer == 2 else 5
        expected += linear_work(mlp_rows, 2 * 20, 12, 1) + linear_work(mlp_rows, 12, 20, 1)
    expected += linear_work(1, 50, 12, 2)  # the head is never rounded to 8 bits
    assert step_work(SPEC, batch, element_bytes=2, layer_weight_bytes=1) == expected


def test_a_chunk_that_samples_nothing_needs_no_head() -> None:
    sampled = step_work(SPEC, batch_of([(4, 10)], 1), 2, 2)
    silent = step_work(SPEC, batch_of([(4, 10)], 0), 2, 2)
    # One row of the last MLP, whose weights nobody reads either, and of the head.
    num_weights = 3 * 20 * 12 + 50 * 12
    assert sampled.num_flops - silent.num_flops == 2 * num_weights
    assert sampled.num_bytes - silent.num_bytes == 2 * num_weights


def test_the_roofline_is_the_longer_of_two_times() -> None:
    work = Work(num_flops=6.0, num_bytes=10.0)
    assert work.least_s(flops_per_s=2.0, bytes_per_s=10.0) == 3.0
    assert work.least_s(flops_per_s=6.0, bytes_per_s=2.0) == 5.0
