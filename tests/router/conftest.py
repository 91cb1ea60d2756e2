"""Servers of the router's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from redis_process import RedisServer


@pytest.fixture
def own_valkey() -> Iterator[RedisServer]:
    """A server for one test that mistreats it."""
    server = RedisServer()
    server.start()
    yield server
    server.kill()
