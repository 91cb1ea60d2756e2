"""Files that are read again when they change: certificates, secrets, lists of tenants.

Owns when to look: at most once in LOOK_INTERVAL_S, by the file's identity, size and time of change, which also sees the
renamed links by which Kubernetes updates a mounted secret. The first reading must succeed; a later one that does not is
logged once, without any content, and what was read before stands. May be asked from several threads.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from runtime.errors import BatonError, ConfigError

LOG = logging.getLogger(__name__)
LOOK_INTERVAL_S = 1.0
Content = TypeVar("Content")
_Signature = tuple[tuple[int, int, int, int], ...]


class Watched(Generic[Content]):
    """What `parse` makes of some files, as they are now."""

    def __init__(
        self,
        paths: Sequence[Path],
        parse: Callable[[list[bytes]], Content],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`parse` gets the files' bytes and raises ConfigError for what cannot be used, quoting none of it."""
        self._paths = tuple(paths)
        self._parse = parse
        self._clock = clock
        self._signature = self._sign()
        self._value = parse([_read(path) for path in self._paths])
        self._looked_s = clock()

    @property
    def value(self) -> Content:
        """The content, which is read again where a file has changed."""
        now_s = self._clock()
        if now_s - self._looked_s >= LOOK_INTERVAL_S:
            self._looked_s = now_s
            self._look()
        return self._value

    def _look(self) -> None:
        """A file that changes while it is read differs from its signature, so it is read once more."""
        try:
            signature = self._sign()
            if signature == self._signature:
                return
            self._signature = signature
            self._value = self._parse([_read(path) for path in self._paths])
            LOG.info("read again: %s", ", ".join(map(str, self._paths)))
        except BatonError as error:
            LOG.error("what was read before stands: %s", error.message)

    def _sign(self) -> _Signature:
        signature = []
        for path in self._paths:
            try:
                status = path.stat()
            except OSError as error:
                raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
            signature.append((status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns))
        return tuple(signature)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
