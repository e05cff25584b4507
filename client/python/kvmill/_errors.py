"""Exceptions: one class per code that a caller may want to tell apart, all of them an Error."""
from __future__ import annotations

import enum
from typing import Dict, Optional, Type


class Code(enum.IntEnum):
    """What went wrong; the numbers of google.rpc.Code."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


class Error(Exception):
    """Base of all errors of kvmill.

    Attributes:
        code: What went wrong. Branch on this or on the class, never on the text.
        message: For people.
        retry_after: Seconds to wait before the same is tried again; None when there is no hint.
    """

    def __init__(self, code: Code, message: str, retry_after: Optional[float] = None) -> None:
        super().__init__(code, message, retry_after)
        self.code = code
        self.message = message
        self.retry_after = retry_after

    def __str__(self) -> str:
        return f"{self.code.name}: {self.message}"


class InvalidArgumentError(Error, ValueError):
    """A request that cannot be right: a wrong shape, type, length, or a limit exceeded."""


class NotFoundError(Error, LookupError):
    """No such namespace; of a block: a miss."""


class FailedPreconditionError(Error):
    """Do not retry: the namespace is bound to another spec, the client is closed or of a parent process."""


class UnauthenticatedError(Error):
    """The daemon wants to know who calls: a certificate or a token was missing, or the token is nobody's."""


class PermissionDeniedError(Error, PermissionError):
    """Who calls may not do that."""


class ResourceExhaustedError(Error):
    """Full: wait `retry_after` seconds."""


class UnavailableError(Error, ConnectionError):
    """No daemon there, it died during the call, or it drains: retry later or elsewhere."""


class DeadlineExceededError(Error, TimeoutError):
    """The time ran out; the outcome is unknown."""


class CallCancelledError(Error):
    """The client was closed while the call ran; of a block: its pages were flushed, cancelled or unregistered before it
    was stored."""


class AbortedError(Error):
    """What was read in place may have been another block's: a lease is over, or the session ended."""


class DataLossError(Error):
    """Bytes are not what they should be."""


_CLASSES: Dict[int, Type[Error]] = {
    Code.INVALID_ARGUMENT: InvalidArgumentError,
    Code.OUT_OF_RANGE: InvalidArgumentError,
    Code.NOT_FOUND: NotFoundError,
    Code.PERMISSION_DENIED: PermissionDeniedError,
    Code.UNAUTHENTICATED: UnauthenticatedError,
    Code.FAILED_PRECONDITION: FailedPreconditionError,
    Code.RESOURCE_EXHAUSTED: ResourceExhaustedError,
    Code.UNAVAILABLE: UnavailableError,
    Code.DEADLINE_EXCEEDED: DeadlineExceededError,
    Code.CANCELLED: CallCancelledError,
    Code.ABORTED: AbortedError,
    Code.DATA_LOSS: DataLossError,
}


def error_of(code: int, message: str, retry_after_ms: int) -> Error:
    """The exception for a code; the native module calls it, too."""
    known = Code(code) if 0 <= code <= 16 else Code.UNKNOWN
    return _CLASSES.get(known, Error)(known, message, retry_after_ms / 1000 if retry_after_ms else None)
