"""The judge of all tests of this folder that have one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# The service that is judged is started as in the tests of the whole.
sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))
# Workers on real sockets.
sys.path.insert(0, str(Path(__file__).parents[1] / "tracer"))
# Drafts for a real model are made as for schedulers.
sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

from judging import Oracle


@pytest.fixture(scope="session")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Oracle]:
    """A process that has loaded its libraries when it is asked for the second time."""
    oracle = Oracle(tmp_path_factory.mktemp("oracle"))
    yield oracle
    oracle.close()
