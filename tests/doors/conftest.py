"""Systems of this folder are those of the router's tests; what starts real processes is of the end-to-end tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "router"))
sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

from authority import Authority


@pytest.fixture(scope="session")
def authority() -> Authority:
    """Trusted by everybody who trusts anybody."""
    return Authority()


@pytest.fixture(scope="session")
def stranger() -> Authority:
    """Trusted by nobody."""
    return Authority("stranger")
