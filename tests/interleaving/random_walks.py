"""Larger cases, drawn from a seed: several requests that share prefixes and compete for few blocks and seats, over
systems of any shape, in any order of events, with up to two faults at once.

`walk(seed, directory)` makes one; the same seed makes the same walk. Pool files go to the directory.
"""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

from every_order import Wandering
from injected_faults import (
    LIES,
    Strike,
    break_leases,
    cancel,
    crash,
    cut_off,
    drain,
    evict,
    is_answer,
    lie,
    pass_time,
)
from memory_network import Lane
from playing import Fault, Play
from whole_system import Ask, Size, System

from protos import inference_pb2

PROMPTS = (b"ab", b"abc", b"abcde", b"abcdexy", b"abcdexyz", b"vwxyz")
PRIORITIES = (inference_pb2.PRIORITY_LOW, inference_pb2.PRIORITY_NORMAL, inference_pb2.PRIORITY_HIGH)
MAX_FAULTS = 2


def walk(seed: int, directory: Path, num_faults: int | None = None) -> Play:
    """A run that nobody has thought of."""
    draws = random.Random(seed)
    size = _size(draws, directory)
    asks = [_ask(draws) for _ in range(draws.randint(1, 4))]
    count = draws.randint(0, MAX_FAULTS) if num_faults is None else num_faults
    faults = [_fault(draws, size) for _ in range(count)]
    return Play(
        asks,
        Wandering(
            draws, draws.choice((0.0, 0.01, 0.05)), draws.choice((0.0, 0.2, 0.5)), draws.choice((0.0, 0.5, 0.95))
        ),
        faults,
        size,
        splits_jobs=draws.random() < 0.5,
        seed=seed,
        asks_again=True,
    )


def _size(draws: random.Random, directory: Path) -> Size:
    is_shared = draws.random() < 0.3
    both: dict[str, Any] = {
        "kv_transports": ("shm", "grpc") if is_shared else ("grpc",),
        "kv_shared_memory_dir": str(directory) if is_shared else "none",
        "max_num_seqs": draws.randint(1, 4),
        "chunk_size": draws.choice((2, 4, 8)),
        "kv_lease_ttl_s": draws.choice((0.5, 5.0)),
    }
    num_blocks = draws.choice((8, 10, 16, 32))
    return Size(
        num_prefill=draws.choice((0, 1, 2, 2)),
        num_decode=draws.choice((1, 2, 2)),
        prefill={**both, "num_kv_blocks": draws.choice((8, 16))},
        decode={**both, "num_kv_blocks": num_blocks, "max_batch_size": draws.choice((None, 1, 2))},
        router={
            "local_prefill_max_tokens": draws.choice((0, 0, 0, 3)),
            "local_turn_max_tokens": draws.choice((0, 2, 3, 256)),
            "turn_placement": draws.choice(("fixed", "lent", "lent", "measured")),
            "policy": draws.choice(("least_loaded", "prefix_affinity", "session_affinity", "session_affinity")),
        },
    )


def _ask(draws: random.Random) -> Ask:
    ask = Ask(draws.choice(PROMPTS), draws.randint(1, 6))
    text = ask.expected()[1]
    stop = draws.choice(text) if text and draws.random() < 0.3 else ""
    return Ask(
        ask.prompt,
        ask.num_tokens,
        stop,
        draws.choice(PRIORITIES),
        timeout_s=draws.choice((None, None, None, 0.5, 2.0)),
        delay_s=draws.choice((0.0, 0.0, 0.02, 0.3)),
        session_id=draws.choice(("", "", "one", "one", "other")),
    )


def _fault(draws: random.Random, size: Size) -> Fault:
    name = draws.choice(
        [f"prefill-{i}" for i in range(size.num_prefill)] + [f"decode-{i}" for i in range(size.num_decode)]
    )
    kinds: dict[str, Strike] = {
        f"{name} dies": partial(crash, name),
        f"{name} vanishes": partial(crash, name, silent=True),
        f"{name} drains": partial(drain, name, draws.choice((0.0, 1.0, 20.0))),
        f"{name} is cut off": partial(cut_off, name, draws.choice((0.5, 1.0, 5.0))),
        f"{name} gives all back": partial(evict, name),
        "some call breaks": partial(_break_some_call, draws),
        "some call stalls": partial(_stall_some_call, draws),
        "some message lies": partial(_lie_somehow, draws),
        "time is lost": partial(pass_time, draws.choice((0.06, 1.1, 3.5))),
        "the clients go": cancel,
        "the router dies": partial(crash, "router"),
    }
    if name.startswith("prefill"):
        kinds[f"{name} breaks its leases"] = partial(break_leases, name)
    kind = draws.choice(list(kinds))
    index = int(draws.expovariate(1 / 30))
    return Fault(kind, index, kinds[kind], may_fail=kind in ("the clients go", "the router dies"))


def _break_some_call(draws: random.Random, system: System, lane: Lane) -> None:
    draws.choice(_calls(system)).break_()


def _stall_some_call(draws: random.Random, system: System, lane: Lane) -> None:
    # A worker's streams share a connection: one whose reports stall alone while it refuses calls is no worker of ours.
    draws.choice([call for call in _calls(system) if call.name[2] != "Worker/Watch"]).stall()


def _calls(system: System) -> list[Any]:
    """Those between the router and its workers and among these; what a client's own call does is its own affair."""
    calls = [call for call in system.network.calls if call.caller is not system.client]
    return sorted(calls, key=lambda call: call.name)


def _lie_somehow(draws: random.Random, system: System, lane: Lane) -> None:
    for each in system.network.arriving():
        for change in LIES.get(each.key[2], {}).values() if is_answer(each) else ():
            lie(each.key[2], change, system, each)
            return
