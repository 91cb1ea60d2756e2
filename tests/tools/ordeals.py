"""Long ordeals of the whole system, each replayable by its seed. Run from the repository root:

    python tests/tools/ordeals.py chaos --minutes 10 [--pause-s 4] [--model smollm2] [--speculation ngram] [--ways ...]
    python tests/tools/ordeals.py rolling [--model smollm2]
    python tests/tools/ordeals.py cancels --num 10000
    python tests/tools/ordeals.py handoffs --num 10000

`--seed N` plays one again. Each prints one JSON object and exits non-zero when something happened that must not.
`make test` runs short forms, `make soak` plays chaos for minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "faults"))
sys.path.insert(0, str(Path(__file__).parents[1] / "router"))
sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))

import chaos_ways
from chaos_run import Settings, play_tracer
from corrupted_handoffs import corrupt_many
from many_cancels import cancel_many

KINDS = ("chaos", "rolling", "cancels", "handoffs")


def main() -> None:
    """Plays what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--minutes", type=float, default=2.0, help="chaos: how long there is misfortune")
    parser.add_argument("--pause-s", type=float, default=4.0, help="chaos: mean pause between the faults of a pool")
    parser.add_argument(
        "--only", choices=("kill", "stop", "cut", "drain"), help="chaos: the one kind of fault there is"
    )
    parser.add_argument("--clients", type=int, default=12, help="chaos, rolling: requests at once")
    parser.add_argument("--num", type=int, default=10_000, help="cancels, handoffs that are tampered with: how many")
    parser.add_argument(
        "--model", choices=("tracer", "smollm2"), default="tracer", help="chaos, rolling: what is served"
    )
    parser.add_argument("--speculation", default="none", help="chaos, rolling: who drafts for the decode workers")
    parser.add_argument("--ways", choices=("auto", "namespaces", "proxies"), default="auto", help="chaos: what is cut")
    given = parser.parse_args()
    seed = random.SystemRandom().randrange(2**32) if given.seed is None else given.seed
    began_s = time.monotonic()
    report = _whole_system(given, seed) if given.kind in ("chaos", "rolling") else _within_one_process(given, seed)
    print(
        json.dumps(
            {"ordeal": given.kind, "seed": seed, "took_s": round(time.monotonic() - began_s), **report}, indent=2
        )
    )
    sys.exit(1 if report.get("violations") else 0)


def _whole_system(given: argparse.Namespace, seed: int) -> dict[str, Any]:
    has_networks = given.ways == "namespaces" or (given.ways == "auto" and chaos_ways.may_have_own_network())
    if has_networks:
        chaos_ways.in_own_network()
    ways = chaos_ways.Namespaces() if has_networks else chaos_ways.Proxies()
    is_rolling = given.kind == "rolling"
    settings = Settings(
        seed,
        60 * given.minutes,
        given.pause_s,
        given.clients,
        given.model,
        only=given.only,
        is_rolling=is_rolling,
        speculation=given.speculation,
    )
    play = play_tracer
    if given.model == "smollm2":
        from chaos_model import play_model as play  # brings torch
    return {"ways": type(ways).__name__.lower(), **asyncio.run(play(settings, ways)).report()}


def _within_one_process(given: argparse.Namespace, seed: int) -> dict[str, Any]:
    logging.disable(logging.WARNING)  # each attempt that fails is one
    if given.kind == "cancels":
        cancels = asyncio.run(cancel_many(given.num, seed))
        phases = dict(cancels.phases.most_common())
        return {
            "cancelled_as": phases,
            "finished": cancels.num_finished,
            "empty_after_s": round(cancels.empty_after_s, 3),
        }
    found = {name: asyncio.run(corrupt_many(given.num // 2, seed, name)) for name in ("grpc", "shm")}
    return {
        name: {
            "handoffs": each.num_handoffs,
            "tampered_and_counted": each.done.total(),
            "how": dict(each.done),
            "found_by": dict(each.checks),
        }
        for name, each in found.items()
    }


if __name__ == "__main__":
    main()
