"""Every test that takes `deployed` runs for each variant of the deployment."""

from __future__ import annotations

import pytest
from manifests import VARIANTS, Variant, variant


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kubectl", help="a kubectl, whose rendering is compared with ours")


@pytest.fixture(params=list(VARIANTS))
def deployed(request: pytest.FixtureRequest) -> Variant:
    return variant(request.param)
