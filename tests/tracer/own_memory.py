"""The CPU declared to be a device with memory of its own, so that tracer workers swap sequences out to host memory.

The pool is this machine's memory as before, but whole from the start; all else is as on any device. Decode workers can
be made to expect short answers, so that what they admit outgrows its pool.
"""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from decode_svc.scheduler import DecodeScheduler
from engine import loading
from engine.lengths import OutputLengths
from kvstore.layout import KVLayout
from kvstore.memory import PoolMemory
from kvstore.swap import SwapCopy, SwapSpace


def declare_own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """For workers that are started from now on."""
    size = SimpleNamespace(free=1 << 30, total=1 << 30)
    monkeypatch.setattr(loading._Tracer, "device_bytes", lambda _: size)
    monkeypatch.setattr(loading._Tracer, "open_device_memory", _open_device_memory)


def _open_device_memory(_: Any, layout: KVLayout, num_blocks: int) -> PoolMemory:
    memory = PoolMemory(layout, num_blocks)
    memory.commit(num_blocks)
    return memory


def expect_little(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Decode workers that are started from now on expect one more token of every answer. Answers a count of the blocks
    that are swapped, by direction."""
    make, copy = DecodeScheduler.__init__, SwapSpace.copy
    num_blocks: Counter[str] = Counter()

    def expecting_little(scheduler: DecodeScheduler, *args: Any, **options: Any) -> None:
        make(scheduler, *args, **{**options, "lengths": OutputLengths(prior_tokens=1)})

    def count(space: SwapSpace, each: SwapCopy) -> None:
        num_blocks[each.direction] += len(each.block_ids)
        copy(space, each)

    monkeypatch.setattr(DecodeScheduler, "__init__", expecting_little)
    monkeypatch.setattr(SwapSpace, "copy", count)
    return num_blocks
