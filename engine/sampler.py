"""Chooses tokens from logits.

A draw is keyed: the one uniform number of a position comes from a hash of (seed, position), not from a generator with
a state. So preemption, migration between workers, other rows in the batch and recomputation after a failure cannot
change what a request says: given equal logits, the same token follows. For the same reason the draw walks the
vocabulary in order of ids instead of probabilities: there two tokens that are nearly equally likely may change places
under rounding, which would move every boundary between them; in order of ids the boundaries move by no more than the
rounding itself.

Steps, in this order: logit_bias; repetition, frequency and presence penalties; suppressed ids; at temperature 0 the
highest logit (the lowest id among equals); otherwise temperature, top_k, top_p, min_p, draw. At the edge of top_k and
top_p, tokens that are equally likely stay or go together. Log-probabilities are those of the logits as they came.
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.batch import SampleRow
from engine.request import Sample, SamplingParams
from runtime.errors import BatonError

NUM_LIKELY = 1024
"""top_p first looks among this many; sorting a whole vocabulary is only for flat distributions."""


class LogitsNotFinite(BatonError):
    """The model's output is not numbers (NaN or infinite): our failure, or the checkpoint's, never the caller's.

    The step's KV is written and other rows are sound: the step may be repeated without the sequences named.
    """

    def __init__(self, rows: Sequence[SampleRow]) -> None:
        positions = ", ".join(str(row.position) for row in rows)
        super().__init__(f"the model's output is not finite; token positions: {positions}")
        self.rows = tuple(rows)
        """Where it happened."""


def uniform(seed: int, position: int) -> float:
    """The number in [0, 1) that decides the token at `position`, one of 2**53; `seed` is unsigned 64 bit."""
    digest = hashlib.blake2b(struct.pack("<QQ", seed, position), digest_size=8, person=b"baton-draw").digest()
    return float(int.from_bytes(digest, "little") >> 11) * 2.0**-53


def sample(logits: Tensor, rows: Sequence[SampleRow]) -> list[Sample]:
    """One sample for each row of logits [S, V] float32, which are left as they are.

    Raises LogitsNotFinite naming the rows that hold NaN or positive infinity, or nothing that could be chosen.
    """
    if not rows:
        return []
    highest, token_ids = logits.max(dim=-1)  # [S], [S]; several times as fast as argmax
    require_finite(highest, rows)
    if not all(takes_highest(row) for row in rows):
        chosen = choose_among_likely(logits, rows) if logits.device.type != "cpu" else None
        if chosen is None:
            # Not every device has float64, and what follows is small work.
            logits = logits.cpu()
            chosen = choose(logits, rows)
        token_ids = chosen
    return [
        describe(logits[index], token_id, row.sampling)
        for index, (token_id, row) in enumerate(zip(token_ids.tolist(), rows, strict=True))
    ]


def require_finite(highest: Tensor, rows: Sequence[SampleRow]) -> None:
    """Raises LogitsNotFinite unless the highest logit of each row, [S], is a finite number; NaN counts as such."""
    finite = highest.isfinite().tolist()
    if not all(finite):
        raise LogitsNotFinite([row for row, sound in zip(rows, finite, strict=True) if not sound])


def takes_highest(row: SampleRow) -> bool:
    """Whether the highest logit as it came is the answer."""
    sampling = row.sampling
    untouched = not sampling.logit_bias and not row.suppressed_token_ids and not has_penalties(sampling)
    return sampling.temperature == 0 and untouched


def has_penalties(sampling: SamplingParams) -> bool:
    """Whether earlier tokens matter."""
    return sampling.repetition_penalty != 1 or sampling.frequency_penalty != 0 or sampling.presence_penalty != 0


def choose(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """Token ids [S] int64 for logits [S, V] on the CPU, by all the steps."""
    adjusted = torch.stack([adjust(logits[index], row) for index, row in enumerate(rows)])  # [S, V]
    highest, token_ids = adjusted.max(dim=-1)  # [S], [S]
    require_finite(highest, rows)
    drawing = [index for index, row in enumerate(rows) if row.sampling.temperature > 0]
    if drawing:
        weights = torch.stack([weigh(adjusted[index], rows[index].sampling) for index in drawing])  # [R, V] float64
        keys = [uniform(rows[index].sampling.seed, rows[index].position) for index in drawing]
        token_ids[drawing] = draw(weights, torch.tensor(keys, dtype=torch.float64))
    return token_ids


def choose_among_likely(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor | None:
    """What `choose` answers for logits [S, V], from so few of them that moving them off a device takes no time.

    None where other tokens might matter: without a top_k that is less than NUM_LIKELY, with anything that changes or
    describes logits, or where tokens at the edge of top_k are as likely as some that were left behind.
    """
    if not all(takes_highest(row) or draws_among_likely(row) for row in rows):
        return None
    likely = logits.topk(min(NUM_LIKELY, logits.shape[1]))
    values, ids = likely.values.cpu(), likely.indices.cpu()  # [S, C], descending
    token_ids = []
    for row, row_values, row_ids in zip(rows, values, ids, strict=True):
        is_greedy, top_k = row.sampling.temperature == 0, row.sampling.top_k
        edge = row_values[0 if is_greedy else min(top_k, len(row_values)) - 1]
        if edge == row_values[-1] and len(row_values) < logits.shape[1]:
            return None
        ascending = row_ids.argsort()  # the draw walks the vocabulary in order of ids
        row_values, row_ids = row_values[ascending], row_ids[ascending]
        if is_greedy:
            token_ids.append(int(row_ids[row_values.argmax()]))
            continue
        key = torch.tensor([uniform(row.sampling.seed, row.position)], dtype=torch.float64)
        token_ids.append(int(row_ids[draw(weigh(row_values, row.sampling)[None], key)]))
    return torch.tensor(token_ids)


def draws_among_likely(row: SampleRow) -> bool:
    """Whether top_k alone says which tokens a draw can choose, and nothing is asked about others."""
    sampling = row.sampling
    untouched = not sampling.logit_bias and not row.suppressed_token_ids and not has_penalties(sampling)
    described = sampling.logprobs or sampling.top_logprobs
    return untouched and not described and sampling.temperature > 0 and 0 < sampling.top_k < NUM_LIKELY


def adjust(logits: Tensor, row: SampleRow) -> Tensor:
    """Logits [V] float32 of one row with bias, penalties and suppressed ids applied; a copy."""
    sampling, logits = row.sampling, logits.clone()
    if sampling.logit_bias:
        ids, biases = zip(*sampling.logit_bias, strict=True)
        logits.index_add_(0, torch.tensor(ids), torch.tensor(biases, dtype=logits.dtype))
    if sampling.repetition_penalty != 1:
        seen = torch.tensor(sorted({*row.prompt_token_ids, *row.output_token_ids}), dtype=torch.int64)
        values = logits[seen]
        penalty = sampling.repetition_penalty
        logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if sampling.frequency_penalty or sampling.presence_penalty:
        counts = Counter(row.output_token_ids)
        generated = torch.tensor(list(counts), dtype=torch.int64)
        times = torch.tensor(list(counts.values()), dtype=logits.dtype)
        logits[generated] -= sampling.frequency_penalty * times + sampling.presence_penalty
    if row.suppressed_token_ids:
        logits[torch.tensor(row.suppressed_token_ids)] = -torch.inf
    return logits


def weigh(logits: Tensor, sampling: SamplingParams) -> Tensor:
    """Unnormalised probabilities [V] float64 after temperature, top_k, top_p and min_p; what is cut off is 0."""
    wide = logits.double()
    # The highest becomes 0 before the division, so that no temperature is too low.
    scaled = (wide - wide.max()) / sampling.temperature
    if 0 < sampling.top_k < scaled.numel():
        scaled[scaled < scaled.topk(sampling.top_k).values[-1]] = -torch.inf
    weights = scaled.exp()  # [V], the highest is 1
    if sampling.top_p < 1:
        weights[weights < nucleus_floor(weights, sampling.top_p)] = 0
    if sampling.min_p > 0:
        weights[weights < sampling.min_p] = 0
    return weights


def nucleus_floor(weights: Tensor, top_p: float) -> float:
    """The least weight among the fewest, taken from the highest down, that make up `top_p` of the sum of [V]."""
    wanted = top_p * weights.sum()
    descending = weights.topk(min(NUM_LIKELY, weights.numel())).values
    sums = descending.cumsum(0)
    if sums[-1] < wanted:
        descending = weights.sort(descending=True).values
        sums = descending.cumsum(0)
    # Rounding may leave the last sum below what is wanted; then all are needed.
    index = min(int(torch.searchsorted(sums, wanted)), descending.numel() - 1)
    return float(descending[index])


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Inverse of the cumulative distribution: ids [R] for weights [R, V] and uniforms [R] in [0, 1), float64.

    The first id whose cumulative weight exceeds the target, so never one of weight 0.
    """
    cumulative = weights.cumsum(dim=-1)  # [R, V]
    targets = uniforms[:, None] * cumulative[:, -1:]  # [R, 1], below the last sum since uniforms are below 1
    return torch.searchsorted(cumulative, targets, right=True)[:, 0]


def describe(logits: Tensor, token_id: int, sampling: SamplingParams) -> Sample:
    """The sample with as much about logits [V] float32 as was asked for."""
    if not sampling.logprobs and not sampling.top_logprobs:
        return Sample(token_id)
    logprobs = logits.log_softmax(dim=-1)  # [V]
    top: tuple[tuple[int, float], ...] = ()
    if sampling.top_logprobs:
        best = logprobs.topk(min(sampling.top_logprobs, logprobs.numel()))
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        top = tuple(sorted(pairs, key=lambda pair: (-pair[1], pair[0])))
    return Sample(token_id, float(logprobs[token_id]), top)
