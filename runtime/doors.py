"""Who may call a process, and what a process shows where it calls.

Owns the cluster credential (a secret from a file, mutual TLS, or both), bearer tokens in gRPC metadata, and the rule
that what asks for no credential listens on loopback alone. Who a *client* is, and which tenant, is the router's
business (`router.tenants`). Invariants: a call is refused before its first message is read; no text here, and no log,
quotes what a caller or a file has given.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from hmac import compare_digest
from pathlib import Path
from typing import Any, Protocol

import grpc
import grpc.aio

from runtime.errors import ConfigError
from runtime.tls import ClientTls, TlsFiles, check_files
from runtime.watched import Watched

BEARER_KEY = "authorization"
BEARER_PREFIX = "Bearer "
MIN_SECRET_CHARACTERS = 16
Metadata = Iterable[tuple[str, str | bytes]] | None


class Door(Protocol):
    """Decides who comes in, by what every call carries."""

    def admits(self, metadata: Metadata) -> bool:
        """Whether a call with this metadata may go on."""
        ...


class Secret:
    """A secret from a file, one a line: the first is shown, each is accepted, so that it can be changed while all run.

    Lines that are empty or begin with "#" are left out.
    """

    def __init__(self, path: Path) -> None:
        """ConfigError when the file cannot be read or has no secret of at least MIN_SECRET_CHARACTERS."""
        self._lines = Watched([path], lambda contents: _secrets(path, contents[0]))

    @property
    def shown(self) -> str:
        """The one to show."""
        return self._lines.value[0]

    def admits(self, metadata: Metadata) -> bool:
        """Whether the call carries one of them."""
        given = bearer_of(metadata)
        return given is not None and any(compare_digest(given.encode(), line.encode()) for line in self._lines.value)


@dataclass(frozen=True, slots=True)
class Pass:
    """What a process shows where it calls, and whom it believes."""

    tls: ClientTls | None = None
    """None: the connection is not encrypted."""
    bearer: Callable[[], str] | None = None
    """The token that every call carries; None: no token."""


NO_PASS = Pass()


class ClusterOptions(Protocol):
    """The options that routers and workers share; see their configuration."""

    @property
    def cluster_secret_file(self) -> Path | None: ...
    @property
    def cluster_tls_cert_file(self) -> Path | None: ...
    @property
    def cluster_tls_key_file(self) -> Path | None: ...
    @property
    def cluster_tls_ca_file(self) -> Path | None: ...
    @property
    def cluster_tls_server_name(self) -> str | None: ...


@dataclass(frozen=True, slots=True)
class Cluster:
    """What the processes of one deployment show each other."""

    tls: TlsFiles
    """Certificates, of servers and callers alike."""
    door: Secret | None
    """What callers must carry; None: nothing but a certificate, where there are any."""
    calling: Pass
    """What to call the others with."""


def open_cluster(options: ClusterOptions) -> Cluster:
    """Reads what the options name. ConfigError where that cannot be used."""
    tls = TlsFiles(
        options.cluster_tls_cert_file,
        options.cluster_tls_key_file,
        options.cluster_tls_ca_file,
        options.cluster_tls_server_name,
    )
    secret = None if options.cluster_secret_file is None else Secret(options.cluster_secret_file)
    calling = Pass(None if tls.ca_file is None else ClientTls(tls), None if secret is None else lambda: secret.shown)
    return Cluster(tls, secret, calling)


def check_cluster(options: ClusterOptions) -> None:
    """ConfigError unless the files that one connection needs are named together."""
    check_files(
        "--cluster-tls", options.cluster_tls_cert_file, options.cluster_tls_key_file, options.cluster_tls_ca_file
    )
    if options.cluster_tls_cert_file is not None and options.cluster_tls_ca_file is None:
        raise ConfigError("--cluster-tls-ca-file: is needed with --cluster-tls-cert-file, got none")
    if options.cluster_tls_server_name is not None and options.cluster_tls_ca_file is None:
        raise ConfigError("--cluster-tls-server-name: needs --cluster-tls-ca-file, got none")


def check_exposure(host: str, has_door: bool, allow_anonymous: bool, remedy: str) -> None:
    """ConfigError for an address that others may reach while anyone may call; `remedy` names options against that."""
    if not (has_door or allow_anonymous or is_loopback(host)):
        raise ConfigError(
            f"--host: {host} can be reached from elsewhere and nothing is asked of callers; give {remedy}, or "
            "--allow-anonymous where nobody else can connect"
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches that address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def bearer_of(metadata: Metadata) -> str | None:
    """The token that a call carries; None where there is none, or more than one."""
    given = [value for key, value in metadata or () if key == BEARER_KEY]
    if len(given) != 1 or not isinstance(given[0], str) or not given[0].startswith(BEARER_PREFIX):
        return None
    return given[0].removeprefix(BEARER_PREFIX)


def bearer_metadata(token: str) -> tuple[tuple[str, str], ...]:
    """Metadata that carries a token."""
    return ((BEARER_KEY, BEARER_PREFIX + token),)


def read_token(path: Path) -> str:
    """The token in a file. ConfigError for a file without one."""
    try:
        token = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        raise ConfigError(f"{path}: cannot be read as a token") from None
    check_token(token, str(path))
    return token


def check_token(token: str, source: str) -> None:
    """ConfigError for what cannot be a token."""
    if not token or not all("!" <= character <= "~" for character in token):
        raise ConfigError(f"{source}: a token is needed, of printable ASCII without spaces")


def _secrets(path: Path, content: bytes) -> tuple[str, ...]:
    try:
        lines = [line.strip() for line in content.decode("ascii").splitlines()]
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: a secret in ASCII is needed") from None
    found = tuple(line for line in lines if line and not line.startswith("#"))
    if not found or min(map(len, found)) < MIN_SECRET_CHARACTERS:
        raise ConfigError(f"{path}: a secret of at least {MIN_SECRET_CHARACTERS} characters a line is needed")
    for line in found:
        check_token(line, str(path))
    return found


class BearerChannel(grpc.aio.Channel):
    """A channel whose calls all carry a token. (An interceptor of the library would wrap every call in a task of its
    own, whose end by cancellation looks different.)"""

    def __init__(self, inner: grpc.aio.Channel, bearer: Callable[[], str]) -> None:
        self._inner = inner
        self._bearer = bearer

    def unary_unary(self, *arguments: Any, **options: Any) -> Any:
        """As the library's."""
        return self._carrying(self._inner.unary_unary(*arguments, **options))

    def unary_stream(self, *arguments: Any, **options: Any) -> Any:
        """As the library's."""
        return self._carrying(self._inner.unary_stream(*arguments, **options))

    def stream_unary(self, *arguments: Any, **options: Any) -> Any:
        """As the library's."""
        return self._carrying(self._inner.stream_unary(*arguments, **options))

    def stream_stream(self, *arguments: Any, **options: Any) -> Any:
        """As the library's."""
        return self._carrying(self._inner.stream_stream(*arguments, **options))

    def _carrying(self, method: Any) -> Callable[..., Any]:
        def call(*arguments: Any, metadata: Iterable[tuple[str, str]] | None = None, **options: Any) -> Any:
            carried = (*(metadata or ()), *bearer_metadata(self._bearer()))
            return method(*arguments, metadata=carried, **options)

        return call

    async def __aenter__(self) -> BearerChannel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        """As the library's."""
        await self._inner.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """As the library's."""
        return self._inner.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """As the library's."""
        await self._inner.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """As the library's."""
        await self._inner.channel_ready()
