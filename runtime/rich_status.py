"""The one table between Baton's errors and gRPC status, in both directions.

Every error travels as a code, a message and google.rpc details: ErrorInfo always; BadRequest, ResourceInfo or
RetryInfo where they apply. `runtime.rpc` sends and receives them; nobody else builds a status. Texts are cut to
MAX_TEXT_BYTES, because a status must fit the 8 KiB of HTTP/2 headers that every client accepts.
"""

from __future__ import annotations

from collections.abc import Iterable

import grpc
from google.protobuf.any_pb2 import Any
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from runtime.errors import (
    Aborted,
    AlreadyExists,
    BatonError,
    CheckpointError,
    ConfigError,
    ContextLengthExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    Overloaded,
    PermissionDenied,
    SessionBusy,
    SessionLost,
    Unauthenticated,
    Unavailable,
)

DOMAIN = "baton"
DETAILS_KEY = "grpc-status-details-bin"
PUSHBACK_KEY = "grpc-retry-pushback-ms"
MAX_TEXT_BYTES = 640
MAX_METADATA_ENTRIES = 8
MAX_METADATA_BYTES = 128

CODES: dict[type[BatonError], grpc.StatusCode] = {
    InvalidArgument: grpc.StatusCode.INVALID_ARGUMENT,
    ContextLengthExceeded: grpc.StatusCode.INVALID_ARGUMENT,
    NotFound: grpc.StatusCode.NOT_FOUND,
    AlreadyExists: grpc.StatusCode.ALREADY_EXISTS,
    Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Unavailable: grpc.StatusCode.UNAVAILABLE,
    FailedPrecondition: grpc.StatusCode.FAILED_PRECONDITION,
    Aborted: grpc.StatusCode.ABORTED,
    Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    PermissionDenied: grpc.StatusCode.PERMISSION_DENIED,
}
"""Everything else is INTERNAL."""

_MESSAGE_ONLY: dict[str, type[BatonError]] = {
    error.reason: error
    for error in (
        AlreadyExists,
        FailedPrecondition,
        Aborted,
        SessionBusy,
        Unauthenticated,
        PermissionDenied,
        ConfigError,
        CheckpointError,
    )
}


def code_of(error: BatonError) -> grpc.StatusCode:
    """The gRPC code of an error, by its nearest class in CODES."""
    return next((CODES[cls] for cls in type(error).__mro__ if cls in CODES), grpc.StatusCode.INTERNAL)


def to_status(error: BatonError) -> tuple[grpc.StatusCode, str, tuple[tuple[str, str | bytes], ...]]:
    """(code, message, trailing metadata) to abort a call with."""
    code = code_of(error)
    message = _cut(error.message, MAX_TEXT_BYTES)
    entries = list(error.metadata.items())[:MAX_METADATA_ENTRIES]
    metadata = {_cut(key, MAX_METADATA_BYTES): _cut(value, MAX_METADATA_BYTES) for key, value in entries}
    details: list[Message] = [error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=metadata)]
    trailer: tuple[tuple[str, str | bytes], ...] = ()
    if isinstance(error, InvalidArgument):
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=_cut(error.field, MAX_METADATA_BYTES), description=_cut(error.description, MAX_TEXT_BYTES)
        )
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if isinstance(error, NotFound):
        name = _cut(error.name, MAX_METADATA_BYTES)
        details.append(error_details_pb2.ResourceInfo(resource_type=error.kind, resource_name=name))
    if isinstance(error, Overloaded | Unavailable):
        delay = error_details_pb2.RetryInfo()
        delay.retry_delay.FromMilliseconds(round(error.retry_after_s * 1000))
        details.append(delay)
        trailer = ((PUSHBACK_KEY, str(round(error.retry_after_s * 1000))),)
    status = status_pb2.Status(code=code.value[0], message=message)
    for detail in details:
        status.details.add().Pack(detail)
    return code, message, (*trailer, (DETAILS_KEY, status.SerializeToString()))


def from_status(
    code: grpc.StatusCode, message: str, trailing_metadata: Iterable[tuple[str, str | bytes]]
) -> BatonError:
    """The error that the far side raised; a status that Baton did not write becomes the class of nearest meaning.

    `metadata["code"]` of the result is the code's name.
    """
    details = _details(trailing_metadata)
    info = error_details_pb2.ErrorInfo()
    ours = any(detail.Unpack(info) for detail in details) and info.domain == DOMAIN
    error = _own_error(info, message, details) if ours else _foreign_error(code, message)
    error.metadata.update(info.metadata if ours else {})
    error.metadata["code"] = code.name
    return error


def _own_error(info: error_details_pb2.ErrorInfo, message: str, details: list[Any]) -> BatonError:
    if info.reason in (InvalidArgument.reason, ContextLengthExceeded.reason):
        bad = error_details_pb2.BadRequest()
        if any(detail.Unpack(bad) for detail in details) and bad.field_violations:
            violation = bad.field_violations[0]
            cls = ContextLengthExceeded if info.reason == ContextLengthExceeded.reason else InvalidArgument
            return cls(violation.field, violation.description)
    if info.reason in (NotFound.reason, SessionLost.reason):
        resource = error_details_pb2.ResourceInfo()
        if any(detail.Unpack(resource) for detail in details):
            if info.reason == SessionLost.reason:
                return SessionLost(resource.resource_name, message)
            return NotFound(resource.resource_type, resource.resource_name, message)
    if info.reason in (Overloaded.reason, Unavailable.reason):
        delay = error_details_pb2.RetryInfo()
        if any(detail.Unpack(delay) for detail in details):
            retry_after_s = delay.retry_delay.ToMilliseconds() / 1000
            return (Overloaded if info.reason == Overloaded.reason else Unavailable)(message, retry_after_s)
    return _MESSAGE_ONLY.get(info.reason, BatonError)(message)


def _foreign_error(code: grpc.StatusCode, message: str) -> BatonError:
    """What the gRPC library itself reports: no worker code ran, or it ran into a limit of the connection."""
    if code is grpc.StatusCode.UNAVAILABLE:
        return Unavailable(f"no connection, or it broke: is the service running at this address? ({message})")
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return InvalidArgument("message", message)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return Aborted("the time allowed for this call was over before its answer was complete")
    if code is grpc.StatusCode.CANCELLED:
        return Aborted(message or code.name)
    return BatonError(message or code.name)


def _details(trailing_metadata: Iterable[tuple[str, str | bytes]]) -> list[Any]:
    for key, value in trailing_metadata:
        if key == DETAILS_KEY and isinstance(value, bytes):
            try:
                return list(status_pb2.Status.FromString(value).details)
            except DecodeError:
                return []
    return []


def _cut(text: str, num_bytes: int) -> str:
    encoded = text.encode("utf-8", "replace")
    return text if len(encoded) <= num_bytes else encoded[: num_bytes - 3].decode("utf-8", "ignore") + "..."
