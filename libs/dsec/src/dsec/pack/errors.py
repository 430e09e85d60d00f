"""What is said of a package that is not taken."""

from __future__ import annotations

from dsec_common.errors import Detail, DsecError, ErrorCode


def refused(reason: str, message: str, **details: Detail) -> DsecError:
    """Return the error for a package that cannot be meant; ``reason`` is for programs."""
    return DsecError(ErrorCode.INVALID, message, details={"reason": reason, **details})


def untrusted(reason: str, message: str) -> DsecError:
    """Return the error for a package that is not signed as it has to be."""
    return DsecError(ErrorCode.DENIED, message, details={"reason": reason})
