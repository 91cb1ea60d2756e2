"""What concerns a whole run: which tests run beside which, and what was measured on the way.

`make test` runs three processes. Each takes one of PARTS, and then, file by file, what is left. The first part shares
systems that are slow to start; the second waits for processes, sockets and clocks, which takes long but not much of the
cores; the third computes, by one thread. Whoever computes has a lower priority, so that limits of time hold beside it.
Without `-n` all run in one process, one after another, in the same order.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist import is_xdist_worker

PARTS = {
    "systems": {"e2e"},
    "waiting": {"baton", "faults", "kvstore", "router", "runtime", "tracer"},
    "models": {"model"},
    "texts": {"text"},
}
"""Folders whose tests stay together. Those of texts share tokenizers that are slow to make."""
COMPUTING = {"engine", "interleaving", "model", "text"}
NICENESS = 10
MEASURED: pytest.StashKey[list[str]] = pytest.StashKey()
IS_NICE: pytest.StashKey[bool] = pytest.StashKey()

# A process that gives way to another says nothing of how long an example takes.
settings.register_profile(
    "beside others", settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("beside others")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[MEASURED] = []
    config.stash[IS_NICE] = False


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What stays together, and the parts first, since they take longest."""
    order = {part: place for place, part in enumerate(PARTS)}
    parts = {item: next((p for p in PARTS if item.path.parent.name in PARTS[p]), item.path.stem) for item in items}
    for item, part in parts.items():
        item.add_marker(pytest.mark.xdist_group(part))
    items.sort(key=lambda item: order.get(parts[item], len(order)))


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
