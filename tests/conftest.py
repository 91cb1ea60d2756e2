"""What concerns a whole run: which tests run beside which, and what was measured on the way.

`make test` runs four processes. Each takes one of PARTS, and then, file by file, what is left, longest first as far as
is known. The first part shares systems that are slow to start; the next two wait for processes, sockets and clocks,
which takes long but not much of the cores; the fourth and what is left computes, by one thread. Whoever computes has a
lower priority, so that limits of time hold beside it.
Without `-n` all run in one process, one after another, in the same order.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import PurePath
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist import is_xdist_worker
from xdist.scheduler import LoadScopeScheduling

PARTS = {
    "systems": {"e2e"},
    "waiting": {"baton", "doors", "faults", "runtime"},
    "waiting too": {"kvstore", "router", "tracer"},
    "the real model": {"test_real_model_oracle"},
    "engines on NPUs": {"test_npu_engine", "test_npu_verification"},
    "texts": {"text"},
}
"""Folders and files whose tests stay together. Those of texts share tokenizers that are slow to make."""
COMPUTING = {"engine", "interleaving", "model", "npu", "text"}
NICENESS = 10
MEASURED: pytest.StashKey[list[str]] = pytest.StashKey()
IS_NICE: pytest.StashKey[bool] = pytest.StashKey()

# A process that gives way to another says nothing of how long an example takes.
# Where a test does not say how many examples it wants, 25: `make soak` plays others, as many as there is time for.
settings.register_profile(
    "beside others",
    settings.default,
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("beside others")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[MEASURED] = []
    config.stash[IS_NICE] = False


def part_of(path: PurePath) -> str:
    """What a test in this file stays together with."""
    return next((part for part, names in PARTS.items() if path.parent.name in names or path.stem in names), path.stem)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The parts first, since they take longest; then those that compute models."""
    order = {part: place for place, part in enumerate(PARTS)}
    items.sort(key=lambda item: order.get(part_of(item.path), len(order) + (item.path.parent.name != "model")))


class PartsScheduling(LoadScopeScheduling):
    """Gives out parts and files, in the order of the tests."""

    def _split_scope(self, nodeid: str) -> str:
        return part_of(PurePath(nodeid.partition("::")[0]))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> PartsScheduling:
    return PartsScheduling(config, log)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Who computes gives way to the others, and so does what it starts. It never waits again: what is left computes."""
    stash = item.config.stash
    if is_xdist_worker(item.session) and item.path.parent.name in COMPUTING and not stash[IS_NICE]:
        os.nice(NICENESS)
        stash[IS_NICE] = True


@pytest.fixture(scope="session")
def measured(pytestconfig: pytest.Config) -> Callable[[str], None]:
    """Notes a line for the summary."""
    return pytestconfig.stash[MEASURED].append


def pytest_sessionfinish(session: pytest.Session) -> None:
    """One of several processes hands its lines on."""
    if is_xdist_worker(session):
        session.config.workeroutput["measured"] = session.config.stash[MEASURED]  # type: ignore[attr-defined]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Takes them over; a process that crashed has left none."""
    node.config.stash[MEASURED] += vars(node).get("workeroutput", {}).get("measured", [])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Times and near-ties, which have no limit that a busy machine would keep, are shown."""
    if config.stash[MEASURED]:
        terminalreporter.section("measured end to end")
        for line in config.stash[MEASURED]:
            terminalreporter.write_line(line)
