"""Records of workers and sessions in a store that processes share. One file a store; its name is its registration.

Owns the step from a URL to a store. Adding one is adding a file with a class `Store` (see base.py) whose name is the
scheme of its URLs.
"""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote, urlsplit

from kvstore.metadata.base import OP_TIMEOUT_S, MetadataStore
from runtime import plugins
from runtime.doors import read_token
from runtime.errors import ConfigError

_OVER_TLS = {"rediss": "redis"}  # schemes of the same store over TLS


def available() -> list[str]:
    """The names of all stores, sorted."""
    return plugins.available(__name__)


def open_store(url: str, op_timeout_s: float = OP_TIMEOUT_S, password_file: Path | None = None) -> MetadataStore:
    """The store at a URL: redis://host:port/db, rediss://... (TLS), memory:// (this process alone).

    `password_file` holds the password that goes with it. Connects on first use, so it succeeds while the store is away.
    Raises ConfigError for a URL that no store takes.
    """
    scheme, separator, _ = url.partition("://")
    name = _OVER_TLS.get(scheme, scheme)
    if not separator or name not in available():
        known = ", ".join(f"{each}://" for each in sorted({*available(), *_OVER_TLS}))
        raise ConfigError(f"metadata store: a URL begins with one of {known}; got {_without_secrets(url)!r}")
    if password_file is not None:
        url = _with_password(url, read_token(password_file))
    store: MetadataStore = plugins.load(__name__, name, "Store")(url, op_timeout_s)
    return store


def _with_password(url: str, password: str) -> str:
    scheme, _, rest = url.partition("://")
    user, _, place = rest.rpartition("@")
    return f"{scheme}://{user.partition(':')[0]}:{quote(password, safe='')}@{place}"


def _without_secrets(url: str) -> str:
    """The URL without user and password, for messages."""
    return url if "@" not in url else f"{urlsplit(url).scheme}://...@{url.rpartition('@')[2]}"
