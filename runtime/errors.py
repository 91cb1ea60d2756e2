"""One exception class per meaning. `runtime.rpc` is the one place that turns them into gRPC status.

Messages are for the caller: they name the field, the limit and the value, and presume no knowledge of the inside.
"""

from __future__ import annotations


class BatonError(Exception):
    """Root of all errors that Baton raises on purpose."""

    reason = "INTERNAL"
    """Machine-readable, upper snake case; stands in ErrorInfo."""

    def __init__(self, message: str, **metadata: object) -> None:
        super().__init__(message)
        self.message = message
        self.metadata = {key: str(value) for key, value in metadata.items()}


class InvalidArgument(BatonError):
    """The caller's request can never succeed as it is."""

    reason = "INVALID_ARGUMENT"

    def __init__(self, field: str, message: str, **metadata: object) -> None:
        super().__init__(f"{field}: {message}", **metadata)
        self.field = field
        self.description = message


class ContextLengthExceeded(InvalidArgument):
    """Prompt, or prompt and output, do not fit the model's context or the KV pool."""

    reason = "CONTEXT_LENGTH_EXCEEDED"


class NotFound(BatonError):
    """A named thing (model, attempt, session) does not exist."""

    reason = "NOT_FOUND"

    def __init__(self, kind: str, name: str, message: str) -> None:
        super().__init__(message, kind=kind, name=name)
        self.kind = kind
        self.name = name


class SessionLost(NotFound):
    """Nobody knows the session any more, or only an older turn of it: send the whole conversation."""

    reason = "SESSION_LOST"

    def __init__(self, session_id: str, message: str) -> None:
        super().__init__("session", session_id, message)


class AlreadyExists(BatonError):
    """An attempt or request of this id is in flight, or its KV was fetched already."""

    reason = "ALREADY_EXISTS"


class Overloaded(BatonError):
    """A bounded queue is full; trying again later may succeed."""

    reason = "OVERLOADED"

    def __init__(self, message: str, retry_after_s: float, **metadata: object) -> None:
        super().__init__(message, **metadata)
        self.retry_after_s = retry_after_s


class Unavailable(BatonError):
    """Nobody can serve this now: no ready worker, draining, or a worker was lost too often."""

    reason = "UNAVAILABLE"

    def __init__(self, message: str, retry_after_s: float = 1.0, **metadata: object) -> None:
        super().__init__(message, **metadata)
        self.retry_after_s = retry_after_s


class Unauthenticated(BatonError):
    """The caller has not shown who it is, or nobody of that name is known here. The text never quotes what it gave."""

    reason = "UNAUTHENTICATED"


class PermissionDenied(BatonError):
    """The caller is known, and this is not for it."""

    reason = "PERMISSION_DENIED"


class FailedPrecondition(BatonError):
    """Two parts do not fit: other fingerprint, layout, epoch or role."""

    reason = "FAILED_PRECONDITION"


class Aborted(BatonError):
    """The request was ended on the server's side."""

    reason = "ABORTED"


class SessionBusy(Aborted):
    """Another turn of the session ran at the same time; what this one said is no part of the session."""

    reason = "SESSION_BUSY"


class ConfigError(BatonError):
    """A flag, environment variable or configuration file cannot be used."""

    reason = "CONFIG"


class CheckpointError(BatonError):
    """A model folder or file cannot be used; the message names the file and, where there is one, the tensor."""

    reason = "CHECKPOINT"
