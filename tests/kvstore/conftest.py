"""A real Redis or Valkey server that a test may kill, freeze and start again."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# The server that tests may mistreat is that of the router's tests.
sys.path.insert(0, str(Path(__file__).parents[1] / "router"))

from redis_process import RedisServer


@pytest.fixture(scope="session")
def shared_redis() -> Iterator[RedisServer]:
    """A server for tests that leave it running; they must not rely on it being empty."""
    server = RedisServer()
    server.start()
    yield server
    server.kill()


@pytest.fixture
def own_redis() -> Iterator[RedisServer]:
    """A server for one test that mistreats it."""
    server = RedisServer()
    server.start()
    yield server
    server.kill()
