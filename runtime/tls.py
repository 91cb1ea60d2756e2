"""TLS on both sides of a connection, from PEM files.

Owns the step from files to gRPC's credentials. A server uses files that have changed from its next connection on, a
caller from its next channel on, and Baton's processes open a new channel after each loss. Files that do not fit are
refused at the start, and left alone later: what was read before stands.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

from runtime.errors import ConfigError
from runtime.watched import Watched


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Who one side of a connection is and whom it believes."""

    cert_file: Path | None = None
    """Its certificate, with the chain up to the authority, PEM."""
    key_file: Path | None = None
    """That certificate's key, PEM."""
    ca_file: Path | None = None
    """Authorities that sign the other side's certificate, PEM. At a server: callers must have one."""
    server_name: str | None = None
    """The name that a server's certificate must carry; None: that of the address."""


NO_TLS = TlsFiles()


def check_files(flag: str, cert_file: Path | None, key_file: Path | None, ca_file: Path | None) -> None:
    """ConfigError, naming the options `flag`-cert-file and so on, unless certificate and key come together, and an
    authority only with them."""
    if (cert_file is None) != (key_file is None):
        missing = "cert" if cert_file is None else "key"
        raise ConfigError(f"{flag}-{missing}-file: certificate and key are needed together, got one of them")
    if ca_file is not None and cert_file is None:
        raise ConfigError(f"{flag}-cert-file: is needed where callers are to be verified, got none")


def server_credentials(files: TlsFiles) -> grpc.ServerCredentials | None:
    """What a server listens with; None without a certificate. ConfigError for files that cannot be used."""
    if files.cert_file is None:
        return None
    watched = Watched(_paths(files), lambda contents: _configuration(files, contents))
    first = watched.value
    # Called for every connection, in a thread of the library.
    return grpc.dynamic_ssl_server_credentials(first, lambda: watched.value, files.ca_file is not None)


class ClientTls:
    """TLS as a caller has it."""

    def __init__(self, files: TlsFiles) -> None:
        """ConfigError for files that cannot be used."""
        self._server_name = files.server_name
        self._credentials = Watched(_paths(files), lambda contents: _channel_credentials(files, contents))

    @property
    def credentials(self) -> grpc.ChannelCredentials:
        """What to connect with now."""
        return self._credentials.value

    @property
    def channel_options(self) -> list[tuple[str, int | str]]:
        """Channel arguments that belong to it."""
        return [] if self._server_name is None else [("grpc.ssl_target_name_override", self._server_name)]


def _paths(files: TlsFiles) -> list[Path]:
    """Key, certificate and authorities, as far as there are any."""
    return [path for path in (files.key_file, files.cert_file, files.ca_file) if path is not None]


def _configuration(files: TlsFiles, contents: list[bytes]) -> grpc.ServerCertificateConfiguration:
    _check(files)
    key, certificate, *authorities = contents
    return grpc.ssl_server_certificate_configuration([(key, certificate)], authorities[0] if authorities else None)


def _channel_credentials(files: TlsFiles, contents: list[bytes]) -> grpc.ChannelCredentials:
    _check(files)
    *own, authorities = contents
    key, certificate = own or (None, None)
    return grpc.ssl_channel_credentials(authorities, key, certificate)


def _check(files: TlsFiles) -> None:
    """ConfigError unless they are PEM and the key is the certificate's: of that gRPC says little, and late."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        if files.cert_file is not None:
            # Without a password the library would ask for one on the terminal.
            context.load_cert_chain(files.cert_file, files.key_file, password="")
        if files.ca_file is not None:
            context.load_verify_locations(files.ca_file)
    except (OSError, ValueError) as error:
        names = ", ".join(map(str, _paths(files)))
        raise ConfigError(f"TLS: {names}: are no key, certificate and authority that fit: {error}") from None
