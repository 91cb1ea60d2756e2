"""A certificate authority for tests: P-256 keys and X.509 certificates, made when they are needed.

So no key lies in the repository and nothing has to be installed. Slow, and not safe against anybody who measures time:
for tests alone. `Authority.issue` answers a key and a chain as PEM; `write` puts them, and the authority's own
certificate, into files.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import ipaddress
import secrets
from dataclasses import dataclass
from pathlib import Path

PRIME = 2**256 - 2**224 + 2**192 + 2**96 - 1
ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
BASE = (
    0x6B17D1F2E12C4247F8BCE6E563A440F277037D812DEB33A0F4A13945D898C296,
    0x4FE342E2FE1A7F9B8EE7EB4A7C0F9E162BCE33576B315ECECBB6406837BF51F5,
)
Point = tuple[int, int] | None

EC_PUBLIC_KEY, P256 = bytes.fromhex("06072a8648ce3d0201"), bytes.fromhex("06082a8648ce3d030107")
ECDSA_SHA256 = bytes.fromhex("06082a8648ce3d040302")
COMMON_NAME, ALT_NAME = bytes.fromhex("0603550403"), bytes.fromhex("0603551d11")
BASIC, KEY_USAGE = bytes.fromhex("0603551d13"), bytes.fromhex("0603551d0f")
SUBJECT_KEY, AUTHORITY_KEY = bytes.fromhex("0603551d0e"), bytes.fromhex("0603551d23")


@dataclass(frozen=True, slots=True)
class Issued:
    """A key and its certificate."""

    key: bytes
    """PEM."""
    certificate: bytes
    """PEM."""


@dataclass(frozen=True, slots=True)
class Files:
    """Where they were written."""

    key: Path
    certificate: Path
    authority: Path


class Authority:
    """One authority; two of them trust each other in nothing."""

    def __init__(self, name: str = "authority") -> None:
        self._name = name
        self._secret = _draw()
        self._public = _multiply(self._secret, BASE)
        extensions = [
            _extension(BASIC, _sequence(b"\x01\x01\xff"), is_critical=True),
            _extension(KEY_USAGE, b"\x03\x02\x02\x04", is_critical=True),
        ]
        self.certificate = self._signed(name, self._public, extensions)
        """PEM."""

    def issue(self, name: str, *alternatives: str) -> Issued:
        """A certificate for `name` and `alternatives`, host names or IP addresses, of servers and clients alike."""
        secret = _draw()
        public = _multiply(secret, BASE)
        names = _sequence(*(_general_name(each) for each in (name, *alternatives)))
        certificate = self._signed(name, public, [_extension(ALT_NAME, names)])
        body = [_der(4, secret.to_bytes(32, "big")), _der(0xA0, P256), _der(0xA1, _bits(_encode(public)))]
        return Issued(_pem("EC PRIVATE KEY", _sequence(_integer(1), *body)), certificate)

    def write(self, folder: Path, name: str, *alternatives: str) -> Files:
        """Issues into files `name`.key, `name`.crt and the authority's `name`.ca.crt of `folder`."""
        issued = self.issue(name, *alternatives)
        files = Files(folder / f"{name}.key", folder / f"{name}.crt", folder / f"{name}.ca.crt")
        files.key.write_bytes(issued.key)
        files.certificate.write_bytes(issued.certificate)
        files.authority.write_bytes(self.certificate)
        return files

    def _signed(self, subject: str, public: Point, extensions: list[bytes]) -> bytes:
        now = datetime.datetime.now(datetime.UTC)
        times = [now - datetime.timedelta(hours=1), now + datetime.timedelta(days=1)]
        validity = _sequence(*(_der(0x18, f"{each:%Y%m%d%H%M%S}Z".encode()) for each in times))
        algorithm = _sequence(ECDSA_SHA256)
        key = _sequence(_sequence(EC_PUBLIC_KEY, P256), _bits(_encode(public)))
        own = _der(4, _key_id(public))
        known = [_extension(SUBJECT_KEY, own), _extension(AUTHORITY_KEY, _sequence(_der(0x80, _key_id(self._public))))]
        body = _sequence(
            _der(0xA0, _integer(2)),
            _integer(secrets.randbits(63)),
            algorithm,
            _distinguished(self._name),
            validity,
            _distinguished(subject),
            key,
            _der(0xA3, _sequence(*extensions, *known)),
        )
        return _pem("CERTIFICATE", _sequence(body, algorithm, _bits(_sign(self._secret, body))))


# P-256


def _draw() -> int:
    return 1 + secrets.randbelow(ORDER - 1)


def _add(left: Point, right: Point) -> Point:
    if left is None or right is None:
        return left or right
    (x1, y1), (x2, y2) = left, right
    if x1 == x2:
        if (y1 + y2) % PRIME == 0:
            return None
        slope = (3 * x1 * x1 - 3) * pow(2 * y1, -1, PRIME)
    else:
        slope = (y2 - y1) * pow(x2 - x1, -1, PRIME)
    x3 = (slope * slope - x1 - x2) % PRIME
    return x3, (slope * (x1 - x3) - y1) % PRIME


def _multiply(scalar: int, point: Point) -> Point:
    total: Point = None
    while scalar:
        if scalar & 1:
            total = _add(total, point)
        point, scalar = _add(point, point), scalar >> 1
    return total


def _sign(secret: int, message: bytes) -> bytes:
    digest = int.from_bytes(hashlib.sha256(message).digest(), "big")
    nonce = _draw()
    point = _multiply(nonce, BASE)
    assert point is not None
    r = point[0] % ORDER
    return _sequence(_integer(r), _integer(pow(nonce, -1, ORDER) * (digest + r * secret) % ORDER))


def _encode(point: Point) -> bytes:
    assert point is not None
    return b"\x04" + point[0].to_bytes(32, "big") + point[1].to_bytes(32, "big")


def _key_id(point: Point) -> bytes:
    return hashlib.sha1(_encode(point)).digest()


# DER


def _der(tag: int, *parts: bytes) -> bytes:
    body = b"".join(parts)
    size = len(body)
    length = size.to_bytes(max(1, (size.bit_length() + 7) // 8), "big")
    return bytes([tag]) + (length if size < 128 else bytes([0x80 | len(length)]) + length) + body


def _sequence(*parts: bytes) -> bytes:
    return _der(0x30, *parts)


def _integer(value: int) -> bytes:
    return _der(2, value.to_bytes(value.bit_length() // 8 + 1, "big"))


def _bits(data: bytes) -> bytes:
    return _der(3, b"\x00", data)


def _distinguished(name: str) -> bytes:
    return _sequence(_der(0x31, _sequence(COMMON_NAME, _der(0x0C, name.encode()))))


def _extension(kind: bytes, value: bytes, is_critical: bool = False) -> bytes:
    return _sequence(kind, b"\x01\x01\xff" if is_critical else b"", _der(4, value))


def _general_name(name: str) -> bytes:
    try:
        return _der(0x87, ipaddress.ip_address(name).packed)
    except ValueError:
        return _der(0x82, name.encode())


def _pem(kind: str, body: bytes) -> bytes:
    text = base64.encodebytes(body).decode()
    return f"-----BEGIN {kind}-----\n{text}-----END {kind}-----\n".encode()
