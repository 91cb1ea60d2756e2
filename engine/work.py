"""What a step has to do, counted from the model's shape and the batch: arithmetic, and bytes to be read from memory.

The one place of these sums: profiles of workers and tests/perf/roofline.py use them. Counted is what the result needs,
whatever a device does beside it: multiplications and additions of linear layers and attention (a token looks at what
is before it, no further), weights once a step, the KV that rows look at. Norms, rotation and the rows between
operations, which stay in caches, are not counted, nor is what a drafter computes. No torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.batch import Batch
    from engine.decoder_spec import DecoderSpec


@dataclass(frozen=True, slots=True)
class Work:
    """Of an operation, or of a step."""

    num_flops: float = 0.0
    """Multiplications and additions."""
    num_bytes: float = 0.0
    """Of weights and KV."""

    def __add__(self, other: Work) -> Work:
        return Work(self.num_flops + other.num_flops, self.num_bytes + other.num_bytes)

    def times(self, count: int) -> Work:
        """As often."""
        return Work(count * self.num_flops, count * self.num_bytes)

    def least_s(self, flops_per_s: float, bytes_per_s: float) -> float:
        """The roofline: seconds that it takes at least, since it can be no faster than either peak allows."""
        return max(self.num_flops / flops_per_s, self.num_bytes / bytes_per_s)


def linear_work(num_rows: int, num_out: int, num_in: int, weight_bytes: int) -> Work:
    """Rows times a weight whose elements have so many bytes."""
    if num_rows == 0:
        return Work()
    return Work(2.0 * num_rows * num_out * num_in, float(weight_bytes) * num_out * num_in)


def attention_work(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    element_bytes: float,
    window: int | None = None,
) -> Work:
    """Attention of one layer to KV whose elements have so many bytes, for sequences with so many rows and positions."""
    num_pairs = num_read = 0
    for num_rows, context_len in zip(query_lens, context_lens, strict=True):
        num_pairs += _num_pairs(num_rows, context_len, window or context_len)
        num_read += min(context_len, (window or context_len) + num_rows - 1)
    return Work(4.0 * num_pairs * num_heads * head_dim, 2.0 * num_read * num_kv_heads * head_dim * element_bytes)


def _num_pairs(num_rows: int, context_len: int, window: int) -> int:
    """Positions that the last `num_rows` of a context look at, together: each at itself and those before it."""
    first = context_len - num_rows + 1  # what the first row looks at, without a window
    num_growing = min(num_rows, max(0, window - first))  # rows that look at fewer than the window
    growing = num_growing * first + num_growing * (num_growing - 1) // 2
    return growing + (num_rows - num_growing) * min(window, context_len)


def step_work(
    spec: DecoderSpec, batch: Batch, element_bytes: int, layer_weight_bytes: int, kv_element_bytes: float | None = None
) -> Work:
    """A whole step. The head has elements of `element_bytes`, as KV has if nothing is said of it, the weights of layers
    of `layer_weight_bytes`.

    After the last layer's attention only rows that sample are needed.
    """
    num_rows, num_sampled = batch.num_tokens, len(batch.sample_rows)
    hidden, inner, head_dim = spec.hidden_size, spec.intermediate_size, spec.head_dim
    num_query, num_kv = spec.num_heads * head_dim, spec.num_kv_heads * head_dim

    def mlp(count: int) -> Work:
        up = linear_work(count, 2 * inner, hidden, layer_weight_bytes)
        return up + linear_work(count, hidden, inner, layer_weight_bytes)

    projections = linear_work(num_rows, num_query + 2 * num_kv, hidden, layer_weight_bytes)
    projections += linear_work(num_rows, hidden, num_query, layer_weight_bytes)
    total = projections.times(spec.num_layers) + mlp(num_rows).times(spec.num_layers - 1) + mlp(num_sampled)
    total += linear_work(num_sampled, spec.vocab_size, hidden, element_bytes)
    query_lens = [end - start for start, end in pairwise(batch.query_starts)]
    for window, num_layers in Counter(spec.windows).items():
        sizes = (spec.num_heads, spec.num_kv_heads, head_dim, kv_element_bytes or element_bytes)
        total += attention_work(query_lens, batch.context_lens, *sizes, window).times(num_layers)
    return total
