"""TLS on both sides of a connection, from PEM files.

Owns the step from files to gRPC's credentials. A server reads its files again for every new connection once they have
changed; a client for every new channel, and Baton's processes open a new channel after each loss. Without files there
is no TLS, and the functions here answer None.
"""

from __future__ import annotations

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
    """What a server listens with. ConfigError for files that cannot be read."""
    if files.cert_file is None or files.key_file is None:
        return None
    paths = [files.key_file, files.cert_file, *([] if files.ca_file is None else [files.ca_file])]
    watched = Watched(paths, _configuration)
    first = watched.value
    # Called for every connection, in a thread of the library.
    return grpc.dynamic_ssl_server_credentials(first, lambda: watched.value, files.ca_file is not None)


def channel_credentials(files: TlsFiles) -> grpc.ChannelCredentials | None:
    """What a client connects with. ConfigError for files that cannot be read."""
    if files.ca_file is None:
        return None
    own: list[bytes | None] = [None, None]
    if files.key_file is not None and files.cert_file is not None:
        own = [_read(files.key_file), _read(files.cert_file)]
    return grpc.ssl_channel_credentials(_read(files.ca_file), own[0], own[1])


def channel_options(files: TlsFiles) -> list[tuple[str, int | str]]:
    """Channel arguments that belong to them."""
    return [] if files.server_name is None else [("grpc.ssl_target_name_override", files.server_name)]


def _configuration(contents: list[bytes]) -> grpc.ServerCertificateConfiguration:
    key, certificate, *authorities = contents
    if b"PRIVATE KEY" not in key or b"CERTIFICATE" not in certificate:
        raise ConfigError("TLS: a key and a certificate in PEM are needed, one of them is something else")
    root = authorities[0] if authorities else None
    return grpc.ssl_server_certificate_configuration([(key, certificate)], root)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
