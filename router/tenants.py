"""Who a client is: bearer tokens and client certificates, mapped to tenants by a file, read again when it changes.

The file is TOML with a table for each tenant; it holds hashes of tokens, never tokens. Without a file everybody is
ANYONE, who may see everything. A tenant's name is part of every prefix hash and session key; it comes from here and
nothing a client sends can choose it. Invariants: a token or a certificate name belongs to one tenant; names that begin
with RESERVED_PREFIX are the router's own; no error or log quotes a token.

    [acme]
    token_sha256 = ["9f86d081884c7d65..."]   # `baton token acme` makes a token and this line
    certificate_names = ["client.acme.example"]
    max_num_running = 16
    max_num_queued = 64
    operator = false
"""

from __future__ import annotations

import re
import time
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import grpc.aio

from runtime.doors import Metadata, bearer_of
from runtime.errors import ConfigError, PermissionDenied, Unauthenticated
from runtime.watched import Watched

Context = grpc.aio.ServicerContext[Any, Any]
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
TOKEN_HASH = re.compile(r"[0-9a-f]{64}")
RESERVED_PREFIX = "baton."
NAME_KEYS = ("x509_subject_alternative_name", "x509_common_name")


@dataclass(frozen=True, slots=True)
class Tenant:
    """One tenant and what it may have of this router."""

    name: str
    """Part of every prefix hash and session key; empty for ANYONE alone."""
    max_num_running: int | None = None
    """Most of its requests that are at workers; further ones wait. None: no limit of its own."""
    max_num_queued: int | None = None
    """Most of its requests that wait; further ones are refused. None: no limit of its own."""
    operator: bool = False
    """Whether it may see the workers."""


ANYONE = Tenant("", operator=True)
"""The only tenant of a router that asks nobody who they are."""


@dataclass(frozen=True, slots=True)
class _Directory:
    by_token: dict[str, Tenant] = field(default_factory=dict)
    """By hash."""
    by_certificate: dict[str, Tenant] = field(default_factory=dict)
    """By name."""


class Tenants:
    """The tenants of a router; its door."""

    def __init__(
        self, path: Path | None, takes_certificates: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`takes_certificates`: every caller has one that was verified. ConfigError for a file that cannot be used."""
        self._takes_certificates = takes_certificates
        self._directory = None if path is None else Watched([path], lambda each: _read(path, each[0]), clock)

    def admits(self, metadata: Metadata) -> bool:
        """Whether a call may go on by what it carries; where its certificate may say who it is, `of` decides."""
        if self._directory is None or self._takes_certificates:
            return True
        return self._by_token(self._directory.value, metadata) is not None

    def of(self, context: Context) -> Tenant:
        """The tenant of a call. Raises Unauthenticated where there is none."""
        if self._directory is None:
            return ANYONE
        directory, metadata = self._directory.value, context.invocation_metadata()
        found = self._by_token(directory, metadata)
        if found is None and self._takes_certificates and bearer_of(metadata) is None:
            shown = context.auth_context()
            names = {name.decode("utf-8", "replace") for key in NAME_KEYS for name in shown.get(key, ())}
            among = {directory.by_certificate[name] for name in names & directory.by_certificate.keys()}
            # A certificate of two tenants is nobody's: which of them is meant cannot be known.
            found = among.pop() if len(among) == 1 else None
        if found is None:
            what = "token or certificate" if self._takes_certificates else "token"
            raise Unauthenticated(f"the {what} of a tenant of this router is needed, and was not shown")
        return found

    def operator(self, context: Context) -> Tenant:
        """The tenant of a call that shows more than its own. Raises Unauthenticated or PermissionDenied."""
        tenant = self.of(context)
        if not tenant.operator:
            raise PermissionDenied(
                f"tenant: {tenant.name} is no operator of this router, so it may not see its workers"
            )
        return tenant

    def _by_token(self, directory: _Directory, metadata: Metadata) -> Tenant | None:
        token = bearer_of(metadata)
        # Looked up by its hash, so the time it takes says nothing of how much of a guess was right.
        return None if token is None else directory.by_token.get(hash_token(token))


def hash_token(token: str) -> str:
    """What the file has of a token. One round will do: tokens are drawn, not chosen, and cannot be guessed."""
    return sha256(token.encode()).hexdigest()


def check_name(name: str) -> None:
    """ConfigError for what cannot name a tenant."""
    if not NAME.fullmatch(name) or name.startswith(RESERVED_PREFIX):
        raise ConfigError(
            "the name of a tenant has at most 64 letters, digits, dots, dashes and underscores, begins with a letter "
            f"or digit, and not with {RESERVED_PREFIX!r}"
        )


def _read(path: Path, content: bytes) -> _Directory:
    """The directory in a file. Its text may hold what should not be there, so errors name places and quote nothing."""
    try:
        tables = tomllib.loads(content.decode("utf-8"))
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        place = re.search(r"\(at .*\)$", str(error))
        raise ConfigError(f"{path}: is not TOML {place.group() if place else ''}") from None
    directory = _Directory()
    for number, (name, table) in enumerate(tables.items(), 1):
        try:
            if not isinstance(table, dict):
                # Its key may be a token, where someone thought that tokens are mapped to names.
                raise ConfigError("every entry must be a table, [name of a tenant]")
            check_name(name)
            _add(directory, name, table)
        except ConfigError as error:
            raise ConfigError(f"{path}: entry {number}: {error.message}") from None
    if not directory.by_token and not directory.by_certificate:
        raise ConfigError(f"{path}: no tenant has a token_sha256 or a certificate_name, so nobody could call")
    return directory


def _add(directory: _Directory, name: str, table: dict[str, Any]) -> None:
    known = ("token_sha256", "certificate_names", "max_num_running", "max_num_queued", "operator")
    if table.keys() - set(known):
        raise ConfigError(f"tenant {name}: there may be {', '.join(known)}, and nothing else")
    tenant = Tenant(
        name,
        _limit(name, table, "max_num_running", 1),
        _limit(name, table, "max_num_queued", 0),
        table.get("operator", False),
    )
    if not isinstance(tenant.operator, bool):
        raise ConfigError(f"tenant {name}: operator must be true or false")
    hashes, names = _texts(name, table, "token_sha256"), _texts(name, table, "certificate_names")
    if not all(map(TOKEN_HASH.fullmatch, hashes)):
        raise ConfigError(
            f"tenant {name}: token_sha256 must have 64 lower-case hexadecimal digits; tokens do not go here"
        )
    for words, owners in ((hashes, directory.by_token), (names, directory.by_certificate)):
        for word in words:
            if word in owners:
                raise ConfigError(f"tenant {name}: shares a token or a certificate name with {owners[word].name}")
            owners[word] = tenant


def _limit(name: str, table: dict[str, Any], key: str, minimum: int) -> int | None:
    value = table.get(key)
    if value is not None and (type(value) is not int or value < minimum):
        raise ConfigError(f"tenant {name}: {key} must be a whole number, at least {minimum}")
    return value


def _texts(name: str, table: dict[str, Any], key: str) -> list[str]:
    values = table.get(key, [])
    if not isinstance(values, list) or not all(isinstance(value, str) and value for value in values):
        raise ConfigError(f"tenant {name}: {key} must be a list of texts")
    return values
