"""Servers of the router's tests."""

from __future__ import annotations

import logging
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


@pytest.fixture(autouse=True)
def no_forgotten_errors(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Every error that a task ended with was looked at."""
    yield
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR and record.name == "asyncio"]
