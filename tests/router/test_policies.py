"""Every routing policy there is keeps the contract, and each does what it says."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import grpc.aio
import pytest

import router.policies
from protos import inference_pb2, worker_pb2
from router.links import Incarnation
from router.policies import base
from router.policies.base import Wanted
from router.policies.prefix_affinity import PREFIX_TOKENS
from runtime import plugins

FOLDER = Path(router.policies.__file__).parent
NAMES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem not in ("__init__", "base"))


NUM_SEATS = 64


def worker(
    worker_id: str, *, running: int = 0, tokens: int = 0, given: int = 0, given_tokens: int = 0, seats: int = NUM_SEATS
) -> Incarnation:
    description = worker_pb2.DescribeResponse(
        worker_id=worker_id, role=inference_pb2.WORKER_ROLE_DECODE, num_seats=seats
    )
    incarnation = Incarnation("127.0.0.1:1", mock.create_autospec(grpc.aio.Channel, instance=True), description)
    incarnation.load.num_running, incarnation.load.num_queued_tokens = running, tokens
    incarnation.num_assigned, incarnation.num_assigned_tokens = given, given_tokens
    return incarnation


def policy_of(name: str) -> base.Policy:
    policy: base.Policy = plugins.load("router.policies", name, "Policy")()
    return policy


PLAIN = Wanted(range(100))


def test_the_files_are_the_policies() -> None:
    assert NAMES == ["least_loaded", "prefix_affinity", "session_affinity"]


@pytest.mark.parametrize("name", NAMES)
def test_a_policy_picks_one_of_the_candidates(name: str) -> None:
    policy = policy_of(name)
    assert isinstance(policy, base.Policy)
    crowd = [worker(f"w{i}", running=i % 3, tokens=100 * (i % 5), given=i % 2) for i in range(7)]
    for num_candidates in (1, 2, 7):
        candidates = tuple(crowd[:num_candidates])
        for number in range(20):
            wanted = Wanted(range(number, 100), bytes([number]) * (number % 2), crowd[0] if number % 3 else None)
            assert policy.pick_prefill(candidates, wanted) in candidates
            assert policy.pick_decode(candidates, wanted) in candidates


@pytest.mark.parametrize("name", NAMES)
def test_a_policy_picks_somebody_though_all_are_full(name: str) -> None:
    candidates = [worker(f"w{i}", running=4, tokens=10**6, seats=4) for i in range(3)]
    wanted = Wanted(range(9), b"session", candidates[0])
    assert policy_of(name).pick_decode(candidates, wanted) in candidates
    assert policy_of(name).pick_prefill(candidates, wanted) in candidates


@pytest.mark.parametrize("name", NAMES)
def test_a_policy_changes_no_worker(name: str) -> None:
    candidates = [worker("a", running=1, given=2), worker("b", tokens=5, given_tokens=6)]
    before = [(w.num_assigned, w.num_assigned_tokens, w.load.SerializeToString()) for w in candidates]
    policy_of(name).pick_prefill(candidates, PLAIN)
    policy_of(name).pick_decode(candidates, PLAIN)
    assert [(w.num_assigned, w.num_assigned_tokens, w.load.SerializeToString()) for w in candidates] == before


def pick_decode(name: str, *candidates: Incarnation, wanted: Wanted = PLAIN) -> str:
    return policy_of(name).pick_decode(candidates, wanted).worker_id


def pick_prefill(name: str, *candidates: Incarnation, wanted: Wanted = PLAIN) -> str:
    return policy_of(name).pick_prefill(candidates, wanted).worker_id


@pytest.mark.parametrize("name", ["least_loaded", "session_affinity"])
def test_reported_load_counts(name: str) -> None:
    assert pick_decode(name, worker("a", running=3), worker("b", running=2)) == "b"
    assert pick_prefill(name, worker("a", tokens=30), worker("b", tokens=20)) == "b"


@pytest.mark.parametrize("name", ["least_loaded", "session_affinity"])
def test_what_was_given_since_the_last_report_counts(name: str) -> None:
    assert pick_decode(name, worker("a", given=3), worker("b", running=2)) == "b"
    assert pick_prefill(name, worker("a", given_tokens=30), worker("b", tokens=20)) == "b"


def test_of_two_drawn_the_less_loaded() -> None:
    """The most loaded is never picked, and every other one is."""
    candidates = [worker(str(load), running=load, tokens=load) for load in range(4)]
    assert {pick_decode("least_loaded", *candidates) for _ in range(200)} == {"0", "1", "2"}
    assert {pick_prefill("least_loaded", *candidates) for _ in range(200)} == {"0", "1", "2"}


def test_a_session_goes_to_its_holder_while_that_has_room() -> None:
    idle, holder = worker("idle"), worker("holder", running=3)
    wanted = Wanted(range(100), b"session", holder)
    assert pick_decode("session_affinity", idle, holder, wanted=wanted) == "holder"
    full = worker("holder", running=3, seats=3)
    assert pick_decode("session_affinity", idle, full, wanted=Wanted(range(9), b"session", full)) == "idle"
    busy = worker("holder", running=40)
    others = [worker(name, running=4) for name in "abc"]
    assert pick_decode("session_affinity", busy, *others, wanted=Wanted(range(9), b"session", busy)) in "abc"


@pytest.mark.parametrize("name", ["session_affinity", "prefix_affinity"])
def test_without_a_holder_all_routers_agree_and_a_worker_that_goes_moves_nobody_else(name: str) -> None:
    candidates = [worker(f"w{i}") for i in range(4)]
    keys = [Wanted([number] * 40, number.to_bytes(16, "big")) for number in range(40)]
    first = [pick_decode(name, *candidates, wanted=wanted) for wanted in keys]
    assert first == [pick_decode(name, *reversed(candidates), wanted=wanted) for wanted in keys]
    assert len(set(first)) == 4
    left = [pick_decode(name, *candidates[1:], wanted=wanted) for wanted in keys]
    assert all(after == before for before, after in zip(first, left, strict=True) if before != "w0")
    prefill = [pick_prefill(name, *candidates, wanted=wanted) for wanted in keys]
    assert prefill == [pick_prefill(name, *reversed(candidates), wanted=wanted) for wanted in keys]


def test_prompts_that_begin_alike_go_together() -> None:
    candidates = [worker(f"w{i}") for i in range(4)]
    shared = list(range(PREFIX_TOKENS))
    picked = {pick_decode("prefix_affinity", *candidates, wanted=Wanted([*shared, end])) for end in range(20)}
    assert len(picked) == 1
    others = {pick_decode("prefix_affinity", *candidates, wanted=Wanted([end, *shared])) for end in range(40)}
    assert len(others) == 4


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("num_requests", [100, 240])
def test_one_system_prompt_does_not_overload_one_worker(name: str, num_requests: int) -> None:
    """As many sessions, all of one beginning and held by one worker, over four: no more than 1.3 of the mean each."""
    candidates = [worker(f"w{i}") for i in range(4)]
    system_prompt = list(range(1000))
    for number in range(num_requests):
        wanted = Wanted([*system_prompt, number], number.to_bytes(16, "big"), candidates[0])
        policy_of(name).pick_decode(candidates, wanted).num_assigned += 1
        policy_of(name).pick_prefill(candidates, wanted).num_assigned_tokens += len(wanted.token_ids)
    assert max(each.num_assigned for each in candidates) <= 1.3 * num_requests / 4
    tokens = [each.num_assigned_tokens for each in candidates]
    assert max(tokens) <= 1.3 * sum(tokens) / 4


def test_a_long_prompt_may_wait_for_what_it_has_in_common_and_no_longer() -> None:
    candidates = [worker(f"w{i}") for i in range(4)]
    wanted = Wanted(range(1000))
    home = policy_of("prefix_affinity").pick_prefill(candidates, wanted)
    home.load.num_queued_tokens = 1000
    assert policy_of("prefix_affinity").pick_prefill(candidates, wanted) is home
    home.load.num_queued_tokens = 1001
    assert policy_of("prefix_affinity").pick_prefill(candidates, wanted) is not home
