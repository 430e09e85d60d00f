"""The closed set of errors that reaches a caller unchanged.

Every failure of the platform is a :class:`DsecError`. It names what failed, where, and what to do;
its code decides whether a retry can help. Nothing else crosses a process boundary: the bus maps any
other exception to ``internal`` at the edge.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

Detail = str | int | float | bool | None
"""A value in an error's details: flat, so that any language can read it."""


class ErrorCode(StrEnum):
    """Why a request failed. New codes need an ADR: clients branch on them."""

    INVALID = "invalid"
    NOT_FOUND = "not_found"
    CONFLICT = "conflict"
    EXHAUSTED = "exhausted"
    UNAVAILABLE = "unavailable"
    DENIED = "denied"
    TIMEOUT = "timeout"
    COMMAND_TIMEOUT = "command_timeout"
    OOM = "oom"
    LAYER_ERROR = "layer_error"
    EXPIRED = "expired"
    UNSUPPORTED = "unsupported"
    INTERNAL = "internal"


MAY_HAVE_HAPPENED: Final = "may_have_happened"
"""True in the details of an error that leaves open whether the request was carried out; False where
it is sure that it was not."""

NOBODY_SERVES: Final = "nobody_serves"
"""The ``reason`` in the details when no process took the request: nothing was done."""

#: The ADR-32 service error code (an HTTP-like number) that each error is sent with.
STATUS_OF: Final[dict[ErrorCode, int]] = {
    ErrorCode.INVALID: 400,
    ErrorCode.DENIED: 403,
    ErrorCode.NOT_FOUND: 404,
    ErrorCode.CONFLICT: 409,
    ErrorCode.EXPIRED: 410,
    ErrorCode.COMMAND_TIMEOUT: 422,
    ErrorCode.OOM: 422,
    ErrorCode.LAYER_ERROR: 422,
    ErrorCode.EXHAUSTED: 429,
    ErrorCode.INTERNAL: 500,
    ErrorCode.UNSUPPORTED: 501,
    ErrorCode.UNAVAILABLE: 503,
    ErrorCode.TIMEOUT: 504,
}

_RETRYABLE: Final = frozenset({ErrorCode.EXHAUSTED, ErrorCode.UNAVAILABLE, ErrorCode.TIMEOUT})

TEXT_CHARACTERS_MAX: Final = 4096
"""Of an error's message, and of each text in its details; what is longer ends with ``…``."""


class DsecError(Exception):
    """A failure with a code from the closed set.

    Args:
        code: which kind of failure.
        message: what failed, where, and what to do, in one or two sentences. It may quote what a
            caller named, which may be as long as a message, and an error is sent and logged several
            times over: hence :data:`TEXT_CHARACTERS_MAX`.
        retryable: whether the same request may succeed later; by default what the code implies.
        retry_after_s: seconds to wait before a retry; 0 means the caller chooses.
        details: flat facts for programs (ids, limits, paths inside the sandbox, errno names).
    """

    def __init__(
        self,
        code: ErrorCode,
        message: str,
        *,
        retryable: bool | None = None,
        retry_after_s: float = 0.0,
        details: dict[str, Detail] | None = None,
    ) -> None:
        message = _shortened(message)
        super().__init__(message)
        self.code = code
        self.message = message
        self.retryable = code in _RETRYABLE if retryable is None else retryable
        self.retry_after_s = retry_after_s
        self.details: dict[str, Detail] = {
            name: _shortened(value) if isinstance(value, str) else value
            for name, value in (details or {}).items()
        }

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"

    def __repr__(self) -> str:
        return f"DsecError({self.code.value!r}, {self.message!r}, details={self.details!r})"


def _shortened(text: str) -> str:
    return text if len(text) <= TEXT_CHARACTERS_MAX else f"{text[: TEXT_CHARACTERS_MAX - 1]}…"


def invalid(message: str, **details: Detail) -> DsecError:
    """Return the error for a request that can never succeed as it stands."""
    return DsecError(ErrorCode.INVALID, message, details=details)


def not_found(message: str, **details: Detail) -> DsecError:
    """Return the error for a thing that does not exist in the caller's project."""
    return DsecError(ErrorCode.NOT_FOUND, message, details=details)


def unavailable(message: str, *, retry_after_s: float = 1.0, **details: Detail) -> DsecError:
    """Return the error for a part that is not reachable now; a retry may help."""
    return DsecError(ErrorCode.UNAVAILABLE, message, retry_after_s=retry_after_s, details=details)


def from_os_error(operation: str, error: OSError, path: str = "") -> DsecError:
    """Return the error for a failed kernel call, naming operation, path and errno."""
    import errno as errno_names  # noqa: PLC0415  only failures pay for the table

    name = errno_names.errorcode.get(error.errno or 0, "EUNKNOWN")
    where = f" on {path}" if path else ""
    codes = {
        "ENOENT": ErrorCode.NOT_FOUND,
        "ENOSPC": ErrorCode.EXHAUSTED,
        "EMFILE": ErrorCode.EXHAUSTED,
    }
    return DsecError(
        codes.get(name, ErrorCode.INTERNAL),
        f"{operation}{where} failed: {name} ({error.strerror})",
        details={"operation": operation, "path": path, "errno": name},
    )
