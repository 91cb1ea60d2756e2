"""A scripted router for tests of what talks to one."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from fake_router import FakeRouter, serving


@pytest.fixture
async def router() -> FakeRouter:
    return FakeRouter()


@pytest.fixture
async def address(router: FakeRouter) -> AsyncIterator[str]:
    async with serving(router) as address:
        yield address
