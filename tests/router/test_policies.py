"""Every routing policy there is keeps the contract; least_loaded does what it says."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import grpc.aio
import pytest

import router.policies
from protos import inference_pb2, worker_pb2
from router.links import Incarnation
from router.policies import base
from runtime import plugins

FOLDER = Path(router.policies.__file__).parent
NAMES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem not in ("__init__", "base"))


def worker(worker_id: str, *, running: int = 0, tokens: int = 0, given: int = 0, given_tokens: int = 0) -> Incarnation:
    description = worker_pb2.DescribeResponse(worker_id=worker_id, role=inference_pb2.WORKER_ROLE_DECODE)
    incarnation = Incarnation("127.0.0.1:1", mock.create_autospec(grpc.aio.Channel, instance=True), description)
    incarnation.load.num_running, incarnation.load.num_queued_tokens = running, tokens
    incarnation.num_assigned, incarnation.num_assigned_tokens = given, given_tokens
    return incarnation


def test_there_is_a_policy() -> None:
    assert "least_loaded" in NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_policy_picks_one_of_the_candidates(name: str) -> None:
    policy = plugins.load("router.policies", name, "Policy")()
    assert isinstance(policy, base.Policy)
    crowd = [worker(f"w{i}", running=i % 3, tokens=100 * (i % 5), given=i % 2) for i in range(7)]
    for num_candidates in (1, 2, 7):
        candidates = tuple(crowd[:num_candidates])
        for _ in range(20):
            assert policy.pick_prefill(candidates) in candidates
            assert policy.pick_decode(candidates) in candidates


@pytest.mark.parametrize("name", NAMES)
def test_a_policy_changes_no_worker(name: str) -> None:
    policy = plugins.load("router.policies", name, "Policy")()
    candidates = [worker("a", running=1, given=2), worker("b", tokens=5, given_tokens=6)]
    before = [(w.num_assigned, w.num_assigned_tokens, w.load.SerializeToString()) for w in candidates]
    policy.pick_prefill(candidates)
    policy.pick_decode(candidates)
    assert [(w.num_assigned, w.num_assigned_tokens, w.load.SerializeToString()) for w in candidates] == before


def least_loaded() -> base.Policy:
    policy: base.Policy = plugins.load("router.policies", "least_loaded", "Policy")()
    return policy


def test_reported_load_counts() -> None:
    assert least_loaded().pick_decode([worker("a", running=3), worker("b", running=2)]).worker_id == "b"
    assert least_loaded().pick_prefill([worker("a", tokens=30), worker("b", tokens=20)]).worker_id == "b"


def test_what_was_given_since_the_last_report_counts() -> None:
    assert least_loaded().pick_decode([worker("a", given=3), worker("b", running=2)]).worker_id == "b"
    assert least_loaded().pick_prefill([worker("a", given_tokens=30), worker("b", tokens=20)]).worker_id == "b"


def test_equals_are_drawn() -> None:
    candidates = [worker("a"), worker("b")]
    assert {least_loaded().pick_decode(candidates).worker_id for _ in range(60)} == {"a", "b"}
    assert {least_loaded().pick_prefill(candidates).worker_id for _ in range(60)} == {"a", "b"}
