"""KV that moves beside a handoff, in every order and with every fault: lent by decode for a turn, and handed off by a
decode worker that drains. Answers are right, and nobody holds anything in the end, whatever becomes of it."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from every_order import Wandering
from injected_faults import Setting, single_faults
from playing import Fault, Play
from whole_system import Ask, Size

NUM_RUNS = 150
FIRST = Ask(b"abcde", 5, session_id="one")
SECOND = Ask(b"abcde" + bytes(FIRST.expected()[0]) + b"xyz", 2, session_id="one", delay_s=2.0)
SHORT_LEASES = {"kv_lease_ttl_s": 0.5}
LENT = Setting(
    "a turn on lent KV",
    [FIRST, SECOND],
    Size(1, 2, SHORT_LEASES, has_probes=False, router={"turn_placement": "lent", "local_turn_max_tokens": 0}),
)
MOVED = Setting("a session that moves", [FIRST, SECOND], Size(0, 2, decode=SHORT_LEASES, has_probes=False))


def fetches(play: Play) -> Counter[tuple[str, str]]:
    """Who fetched from whom, by pool."""
    found: Counter[tuple[str, str]] = Counter()
    for name in {event[:4] for event in play.events if event[2] == "KVTransfer/Fetch"}:
        reader, owner = name[0], play.system.name_of(name[1])
        found[reader.partition("-")[0], owner.partition("-")[0]] += 1
    return found


def run(setting: Setting, *faults: Fault, **options: Any) -> Counter[tuple[str, str]]:
    """Plays one; answers who fetched from whom."""
    play = setting.play(*faults, **options)
    play.run()
    return fetches(play)


def drains(setting: Setting) -> list[Fault]:
    """A worker drains, with patience, at each event of a run."""
    return [
        fault for fault in single_faults(setting) if fault.name.startswith("decode") and fault.name.endswith("drains")
    ]


def test_prefill_takes_what_decode_lends_whatever_fails(deep: bool, first_seed: int) -> None:
    assert run(LENT)["prefill", "decode"] == 1, "nothing was lent where nothing fails"
    faults = list(single_faults(LENT))
    chosen = faults if deep else random.Random(first_seed).sample(faults, NUM_RUNS)
    total = sum((run(LENT, fault) for fault in chosen), Counter[tuple[str, str]]())
    print(f"\n{LENT.name}: {len(chosen)} of {len(faults)} faults, fetches {dict(total)}")
    assert total["prefill", "decode"] > len(chosen) // 2


def test_what_is_lent_in_any_order(deep: bool, first_seed: int) -> None:
    for seed in range(first_seed, first_seed + (10 if deep else 1) * NUM_RUNS):
        draws = random.Random(seed)
        run(LENT, chooser=Wandering(draws, 0.01, 0.2, 0.5), splits_jobs=draws.random() < 0.5, seed=seed)


def test_a_session_moves_whatever_fails_beside_the_drain(deep: bool, first_seed: int) -> None:
    draws, found = random.Random(first_seed), drains(MOVED)
    assert any(run(MOVED, fault)["decode", "decode"] for fault in found), (
        "no session was moved where nothing else fails"
    )
    others = list(single_faults(MOVED))
    total: Counter[tuple[str, str]] = Counter()
    num_runs = (10 if deep else 1) * NUM_RUNS
    for _ in range(num_runs):
        fault, other = draws.choice(found), draws.choice(others)
        other = Fault(other.name, fault.index + draws.randrange(30), other.strike, other.may_fail, other.is_logged)
        total += run(MOVED, fault, other)
    print(f"\n{MOVED.name}: {num_runs} pairs of faults, fetches {dict(total)}")
    assert total["decode", "decode"] > 0
