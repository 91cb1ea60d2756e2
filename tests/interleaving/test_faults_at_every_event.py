"""Each kind of fault before each event of a request, one at a time, and pairs of them by chance."""

from __future__ import annotations

import random
from collections import Counter
from itertools import product

import grpc
from injected_faults import TIGHT, Setting, late_jobs, single_faults
from playing import Fault
from whole_system import Ask, Size

SHORT_LEASES = {"kv_lease_ttl_s": 0.5}
BASE = Setting("two and two", size=Size(prefill=SHORT_LEASES, has_probes=False))
DEEP = (
    TIGHT,
    Setting("two and two, with probes", size=Size(prefill=SHORT_LEASES)),
    Setting("a stop string in the first token", [Ask(num_tokens=4, stop=Ask().expected()[1][0])]),
    Setting("a stop string in the second token", [Ask(num_tokens=4, stop=Ask().expected()[1][1])]),
    Setting("decode alone", size=Size(num_prefill=0)),
    Setting("one and one", size=Size(num_prefill=1, num_decode=1, prefill=SHORT_LEASES)),
    Setting("two that share a prefix", [Ask(), Ask(b"abcdex", 3)], Size(num_prefill=1)),
)
NUM_PAIRS = 120
NUM_STARTS = 60


def test_whatever_fails_wherever_it_fails_the_answer_is_right_and_nothing_is_held(deep: bool) -> None:
    for setting in (BASE, *(DEEP if deep else ())):
        num_by_attempts = Counter(setting.play(fault).run().num_attempts for fault in single_faults(setting))
        total = sum(num_by_attempts.values())
        print(f"\n{setting.name}: {total} runs, by attempts of the answered ones: {dict(num_by_attempts)}")
        assert num_by_attempts[2] > total // 8, "the faults have become too mild"


def test_a_thread_that_is_late_writes_into_nobody_elses_blocks(deep: bool) -> None:
    num_runs = 0
    for fault in late_jobs(TIGHT, step=1 if deep else 4):
        TIGHT.play(fault).run()
        num_runs += 1
    print(f"\n{TIGHT.name}: {num_runs} runs")
    assert num_runs > 0


def test_a_deadline_that_passes_anywhere_ends_everything() -> None:
    setting = Setting("with a deadline", [Ask(timeout_s=1.0)], BASE.size)
    for fault in single_faults(setting):
        if fault.name == "a second is lost":
            play = setting.play(fault)
            play.run()
            (reply,) = play.system.replies
            assert reply.code is grpc.StatusCode.DEADLINE_EXCEEDED or reply.finish is not None


def test_a_fault_while_workers_are_found_and_proved(deep: bool, first_seed: int) -> None:
    setting = Setting("from the start", size=Size(prefill=SHORT_LEASES), counts_start=True)
    # A worker whose threads fail while it starts does not start, and says so.
    spared = ("for good", "fails")
    faults = [each for each in single_faults(setting) if not (each.may_fail or each.name.endswith(spared))]
    num_runs = 10 * NUM_STARTS if deep else NUM_STARTS
    for fault in random.Random(first_seed).sample(faults, num_runs):
        setting.play(fault).run()
    print(f"\n{setting.name}: {num_runs} out of {len(faults)} faults")


def test_two_faults_at_once(deep: bool, first_seed: int) -> None:
    draws, num_runs = random.Random(first_seed), 10 * NUM_PAIRS if deep else NUM_PAIRS
    faults = [fault for fault in single_faults(BASE) if not fault.may_fail]
    for _ in range(num_runs):
        pair: list[Fault] = draws.sample(faults, 2)
        BASE.play(*pair).run()
    print(f"\n{num_runs} pairs out of {len(faults)} faults")


def test_a_worker_that_refuses_while_its_reports_are_late_dies_once() -> None:
    """The lone decode worker breaks one call after the other before the router can know that it is gone."""
    setting = Setting("one and one", size=Size(num_prefill=1, num_decode=1, prefill=SHORT_LEASES))
    faults = list(single_faults(setting))
    stalls = [each for each in faults if each.index == 0 and each.name.endswith("stalls")]
    silences = [[each for each in stalls if name in each.name] for name in ("Watch", "Attach")]
    drains = [each for each in faults if each.name == "decode-0 drains without patience"]
    num_by_attempts = Counter(
        setting.play(*both, drained).run().num_attempts for both in product(*silences) for drained in drains
    )
    assert max(num_by_attempts) > 3, "nothing was tried as often as three deaths would allow"
