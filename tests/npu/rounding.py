"""Tokens of two ways to compute the same in 16 bits: equal, but where rounding decides between two of them.

Which way a sum in 16 bits rounds depends on the CPU that plays the device, so that two right ways part at near-ties
here and not there. Owns what a near-tie is: logits so near to each other in float32 that a few last places of the
largest one tell which is first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from model_driver import Driver
from same_answers import margin

from engine.model_runner import ModelRunner
from engine.request import SamplingParams

LAST_PLACES = 3
"""Of the largest logit: each of both is off by less than half a place for its own sake, and by what comes from layers
before."""


def assert_same_up_to_rounding(
    said: Sequence[list[int]],
    expected: Sequence[list[int]],
    prompts: Sequence[list[int]],
    exact: Callable[[], ModelRunner],
    sampling: SamplingParams,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """`exact` loads the model in float32; asked only where answers part. At most every second of them may, or one."""
    assert len(said) == len(expected) == len(prompts) and all(map(len, expected))
    parted = [index for index, tokens in enumerate(said) if tokens != expected[index]]
    assert len(parted) <= max(1, len(prompts) // 2), f"{said} instead of {expected}"
    if not parted:
        return
    runner = exact()
    for index in parted:
        mine, other = said[index], expected[index]
        assert len(mine) == len(other)
        place = next(place for place, token in enumerate(mine) if token != other[place])
        prefix = [*prompts[index], *mine[:place]]
        logits = Driver(runner, [len(prefix)]).logits(0, prefix, len(prefix), [len(prefix) - 1])
        # Drawn tokens: a probability changes by no more of itself than a logit does, and it is at most 1.
        bound = LAST_PLACES * torch.finfo(dtype).eps * 2 ** math.floor(math.log2(float(logits.abs().max())))
        found = margin(runner, prefix, sampling, mine[place], other[place])
        assert found < bound, f"answer {index} parts at {place} by {found}: {mine} instead of {other}"
