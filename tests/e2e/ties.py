"""Whether two answers to the same request are the same.

They are when their tokens are equal, or when the first difference lies at a near-tie: sums in floating point depend on
the shape of a batch, so where the choice hangs on less than TIE_MARGIN either side of it is right. For a greedy token
the margin is that of the two likeliest. For a drawn one the model's logits at that place are computed again here, and
both tokens must come out of draws whose uniform number, nucleus or cut is moved by at most TIE_MARGIN.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import torch
from asked import Asked

from baton import Completion
from engine import sampler
from engine.batch import Batch, SampleRow
from engine.model_runner import ModelRunner, load_model, model_spec
from engine.request import SamplingParams
from kernels import load_ops
from kvstore.cache import KVCache
from kvstore.memory import PoolMemory
from runtime.checkpoint import open_checkpoint

TIE_MARGIN = 1e-4
BLOCK_SIZE = 16


def count_near_ties(
    requests: Sequence[Asked], expected: Sequence[Completion], answers: Sequence[Sequence[int]], label: str
) -> int:
    """Checks all answers; how many differ from what is expected, each at a near-tie."""
    num_ties = 0
    for index, (request, completion, answer) in enumerate(zip(requests, expected, answers, strict=True)):
        assert len(answer) == request.max_tokens, f"{label}, request {index}: {len(answer)} tokens"
        differing = [i for i, pair in enumerate(zip(completion.token_ids, answer, strict=True)) if pair[0] != pair[1]]
        if differing:
            what = f"{label}, request {index} (seed {request.seed}): first difference at output {differing[0]}"
            check_near_tie(request, completion, answer, differing[0], what)
            num_ties += 1
    return num_ties


def check_near_tie(request: Asked, completion: Completion, answer: Sequence[int], place: int, what: str) -> None:
    """AssertionError unless either token could follow at output index `place`."""
    (_, best), (_, second) = completion.tokens[place].top_logprobs
    tokens = {completion.token_ids[place], answer[place]}
    if best - second < TIE_MARGIN:
        return
    assert request.seed is not None, f"{what}: {tokens}, the best leads by {best - second}"
    prefix = [*request.prompt_token_ids, *answer[:place]]
    possible = possible_draws(logits_after(prefix), request, position=len(prefix))
    assert tokens <= possible, f"{what}: {tokens}, draws that close give {possible}"


def possible_draws(logits: torch.Tensor, request: Asked, position: int) -> set[int]:
    """Tokens drawn from logits [V] when the uniform number, top_p and the nucleus' edge move by TIE_MARGIN."""
    assert request.seed is not None
    plain = SamplingParams(temperature=request.temperature)
    weights = sampler.weigh(logits, plain)  # [V] float64
    uniform = sampler.uniform(request.seed, position)
    found = set()
    moves = (-TIE_MARGIN, 0.0, TIE_MARGIN)
    for by_p, by_edge, by_draw in itertools.product(moves, moves, moves):
        params = replace(plain, top_p=min(1.0, request.top_p + by_p))
        floor = sampler.nucleus_floor(weights, params.top_p) * (1 + by_edge)
        kept = torch.where(weights < floor, 0.0, weights)  # [V]
        moved = min(max(uniform + by_draw, 0.0), 1 - 2.0**-53)
        found.add(int(sampler.draw(kept[None], torch.tensor([moved], dtype=torch.float64))[0]))
    return found


def logits_after(tokens: Sequence[int]) -> torch.Tensor:
    """The model's logits [V] float32 after `tokens`, in one pass. Loads the model each time: ties are rare."""
    checkpoint, ops = open_checkpoint("smollm2"), load_ops("cpu")
    spec = model_spec(checkpoint, "float32")
    num_blocks = -(-len(tokens) // BLOCK_SIZE)
    memory = PoolMemory(spec.kv_layout(BLOCK_SIZE), num_blocks)
    memory.commit(num_blocks)
    runner = ModelRunner(load_model(checkpoint, spec, ops), ops, KVCache(memory))
    batch = Batch()
    batch.token_ids += tokens
    batch.positions += range(len(tokens))
    batch.slots += range(len(tokens))
    batch.query_starts.append(len(tokens))
    batch.context_lens.append(len(tokens))
    batch.block_tables.append(list(range(num_blocks)))
    batch.sample_rows = [SampleRow(len(tokens) - 1, len(tokens), SamplingParams())]
    with torch.inference_mode():
        return runner.logits(batch)[0]
