"""How far these tests go: by default as far as every test run can afford, with `--deep` much further.

pytest tests/interleaving -s --deep --timeout 0 [--first-seed N]
"""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Known when this folder is named on the command line."""
    parser.addoption("--deep", action="store_true", help="explore all settings and ten times as many random walks")
    parser.addoption("--first-seed", type=int, default=0, help="seed of the first random walk")


@pytest.fixture
def deep(request: pytest.FixtureRequest) -> bool:
    """Whether there is time."""
    return bool(request.config.getoption("--deep", default=False))


@pytest.fixture
def first_seed(request: pytest.FixtureRequest) -> int:
    """Where random walks begin."""
    return int(request.config.getoption("--first-seed", default=0))
