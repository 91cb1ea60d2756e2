"""The transports that tests run over; one that cannot be had on this machine is skipped, and says why."""

from __future__ import annotations

import pytest

from kvstore import transport
from kvstore.transport.mooncake import import_engine
from runtime.errors import ConfigError


def why_no_mooncake() -> str:
    """What the engine lacks on this machine; empty where it runs."""
    try:
        import_engine()
    except ConfigError as error:
        return error.message
    return ""


WHY_NO_MOONCAKE = why_no_mooncake()
needs_mooncake = pytest.mark.skipif(bool(WHY_NO_MOONCAKE), reason=WHY_NO_MOONCAKE)
TRANSPORTS = [
    pytest.param(name, marks=[needs_mooncake] if name == "mooncake" else [], id=name) for name in transport.available()
]
"""To parametrise over."""
