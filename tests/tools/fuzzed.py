"""Messages that nobody would send: protobufs filled at random, then broken, framed and named wrongly.

`Corpus` fills requests of every method with values at the edges and, where it was told what is right, with that, so
that a part of them gets far; `calls` breaks them in bytes, frames and headers. Everything comes from one seed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from google.protobuf import message_factory
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from raw_http2 import MAX_BATCH_BYTES, Call, call_headers, framed

NUM_EACH = 300
"""Messages of each method that are made once and broken again and again."""
MAX_MESSAGE_BYTES = 8_000
MAX_CALLS = 120
EDGES = (0, 1, 2, 15, 16, 17, 127, 128, 255, 256, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)
FLOATS = (0.0, -0.0, 1.0, 0.5, -1.0, 1e-45, 3.4e38, float("inf"), float("-inf"), float("nan"))
TEXTS = (
    "",
    "a",
    "tracer",
    "\u6f22\U0001f3c3" * 5,
    "x" * 300,
    "../../etc/passwd",
    "127.0.0.1:1",
    "%s%n",
    "\x00\x07",
    "{}[]",
)
Known = Mapping[str, Sequence[Any]]
"""Right values by the name of their field."""


@dataclass(slots=True)
class Corpus:
    """Requests of some methods."""

    methods: Mapping[str, type[Message]]
    """The class of the request by path."""
    known: Known
    """See the module."""
    rng: random.Random
    """Where everything comes from."""
    messages: dict[str, list[bytes]] = field(init=False)
    """Serialized, by path."""

    def __post_init__(self) -> None:
        self.messages = {
            path: [self._filled(cls).SerializeToString()[:MAX_MESSAGE_BYTES] for _ in range(NUM_EACH)]
            for path, cls in self.methods.items()
        }

    def _filled(self, cls: type[Message], depth: int = 0) -> Message:
        made = cls()
        share = self.rng.choice((0.3, 0.7, 1.0))
        for each in cls.DESCRIPTOR.fields:
            if self.rng.random() < share and depth < 4:
                self._fill(made, each, depth)
        return made

    def _fill(self, made: Message, each: FieldDescriptor, depth: int) -> None:
        right = self.known.get(each.name)
        if right is not None and self.rng.random() < 0.9:
            value = self.rng.choice(right)
            if isinstance(value, Message):
                getattr(made, each.name).CopyFrom(value)
            elif each.is_repeated:
                getattr(made, each.name).extend(value)
            else:
                setattr(made, each.name, value)
            return
        if each.message_type is not None and each.message_type.GetOptions().map_entry:
            return
        if each.is_repeated:
            values = [self._value(each, depth) for _ in range(self.rng.choice((0, 1, 3, 40)))]
            getattr(made, each.name).extend(value for value in values if value is not None)
        elif each.message_type is not None:
            getattr(made, each.name).CopyFrom(self._value(each, depth))
        else:
            setattr(made, each.name, self._value(each, depth))

    def _value(self, each: FieldDescriptor, depth: int) -> Any:
        if each.message_type is not None:
            return self._filled(message_factory.GetMessageClass(each.message_type), depth + 1)
        if each.cpp_type in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
            return self.rng.choice(FLOATS)
        if each.type == FieldDescriptor.TYPE_BYTES:
            return self.rng.randbytes(self.rng.choice((0, 1, 15, 16, 16, 16, 17, 300)))
        if each.type == FieldDescriptor.TYPE_STRING:
            return self.rng.choice(TEXTS)
        if each.type == FieldDescriptor.TYPE_BOOL:
            return self.rng.random() < 0.5
        if each.cpp_type == FieldDescriptor.CPPTYPE_ENUM:
            return self.rng.choice((0, 1, 2, 3, 4, 99, -1))
        bits = {
            FieldDescriptor.CPPTYPE_INT32: 31,
            FieldDescriptor.CPPTYPE_INT64: 63,
            FieldDescriptor.CPPTYPE_UINT32: 32,
        }
        limit = 2 ** bits.get(each.cpp_type, 64)
        return self.rng.choice([edge for edge in EDGES if edge < limit])


def broken(message: bytes, rng: random.Random) -> bytes:
    """The message with some bytes changed, lost, doubled or from elsewhere."""
    data = bytearray(message)
    for _ in range(rng.choice((1, 1, 2, 8))):
        kind, at = rng.randrange(6), rng.randrange(len(data) + 1)
        if kind == 0 and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del data[at:]
        elif kind == 2:
            data[at:at] = rng.randbytes(rng.choice((1, 4, 40)))
        elif kind == 3:
            data[at:at] = data[at : at + 30]
        elif kind == 4:
            data[at:at] = b"\xff" * rng.choice((1, 5, 10))
        else:
            del data[at : at + rng.choice((1, 5))]
    return bytes(data[:MAX_MESSAGE_BYTES])


def body_of(message: bytes, rng: random.Random) -> tuple[bytes, bool]:
    """The message as gRPC frames it, one in eight times not quite so; and whether it is whole. The library never ends a
    call of which a message is missing: that is left to the caller."""
    kind = rng.randrange(56)
    wrong = {
        0: lambda: framed(message, length=len(message) + 5),
        1: lambda: framed(message, length=2**32 - 1),
        2: lambda: framed(message, length=max(0, len(message) - 1)),
        3: lambda: framed(message, flag=1),
        4: lambda: framed(message, flag=7),
        5: lambda: message,
        6: lambda: framed(message)[: rng.randrange(5)],
    }
    return (wrong[kind](), False) if kind in wrong else (framed(message), True)


def odd_headers(path: str, token: str | None, rng: random.Random) -> bytes:
    """Headers that are not quite those of a call."""
    return rng.choice(
        (
            lambda: call_headers(path + "x", token),
            lambda: call_headers(path.rpartition("/")[0], token),
            lambda: call_headers("/" + path, token),
            lambda: call_headers(path, token, **{"grpc-timeout": rng.choice(("0n", "99999999H", "x", "-1S", "1"))}),
            lambda: call_headers(path, token, **{"grpc-encoding": rng.choice(("gzip", "identity", "none-such"))}),
            lambda: call_headers(path, token, **{"traceparent": rng.choice(("00-0-0-0", "x" * 500, ""))}),
            lambda: call_headers(path, token, **{"x-long": "y" * 5000}),
            lambda: call_headers(path, token, **{"authorization": "Bearer x"}),
            lambda: call_headers(path, token, **{"x-bin": "!!!"}),
        )
    )()


def calls(
    corpus: Corpus, tokens: Sequence[str | None], rng: random.Random, lingering: Sequence[str] = ()
) -> Iterator[tuple[str, Call]]:
    """A batch: as many calls as fit, each with its path; those at `lingering` paths may never end by themselves."""
    paths = list(corpus.messages)
    num_bytes = 0
    for _ in range(MAX_CALLS):
        path, token = rng.choice(paths), rng.choice(tokens)
        message = rng.choice(corpus.messages[path])
        if rng.random() < 0.6:
            message = broken(message, rng)
        body, is_whole = body_of(message, rng)
        num_bytes += len(body)
        if num_bytes > MAX_BATCH_BYTES:
            return
        headers = call_headers(path, token) if rng.random() < 0.98 else odd_headers(path, token, rng)
        yield path, Call(headers, body, leaves=rng.random() < 0.1, lingers=path in lingering or not is_whole)
