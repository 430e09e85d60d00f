"""The refusals of a node, each worded once: what, where, and what to do."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import structlog

from dsec_common.errors import DsecError, ErrorCode, from_os_error, invalid, not_found

if TYPE_CHECKING:
    from dsec_sandboxd.records import SandboxRecord

_log: Final = structlog.get_logger(__name__)


def no_such_sandbox(sandbox_id: str) -> DsecError:
    """Return the answer for an id that is not the caller's; it never says whose it may be."""
    return not_found(
        f"there is no sandbox {sandbox_id} in this project; list the sandboxes to see which are "
        "there",
        what="sandbox",
        sandbox_id=sandbox_id,
    )


def sandbox_ended(node: str, record: SandboxRecord) -> DsecError:
    """Return the answer for a sandbox that is over, with the cause that is kept after it."""
    cause = record.end_cause.value if record.end_cause else "deleting"
    detail = f": {record.end_detail}" if record.end_detail else ""
    # One that is still being taken apart has no such time yet.
    ended_at = {"ended_at": record.ended_at} if record.ended_at else {}
    return DsecError(
        ErrorCode.EXPIRED,
        f"sandbox {node}.{record.local} has ended ({cause}{detail}); create another",
        details={
            "what": "sandbox",
            "sandbox_id": f"{node}.{record.local}",
            "end_cause": cause,
            "end_detail": record.end_detail,
            **ended_at,
        },
    )


def still_creating(sandbox_id: str) -> DsecError:
    """Return the answer for a request that came before the sandbox was ready."""
    return DsecError(
        ErrorCode.UNAVAILABLE,
        f"sandbox {sandbox_id} is still being created; wait for the answer to its creation",
        retry_after_s=0.05,
        details={"sandbox_id": sandbox_id},
    )


def node_busy(node: str, sandboxes: int) -> DsecError:
    """Return the answer of a node that cannot be retired."""
    return DsecError(
        ErrorCode.CONFLICT,
        f"node {node} has {sandboxes} sandboxes and goes on; retire it when they have ended",
        details={"node": node, "sandboxes": sandboxes},
    )


def node_draining(node: str) -> DsecError:
    """Return the answer of a node that is stopping."""
    return DsecError(
        ErrorCode.UNAVAILABLE,
        f"node {node} is stopping and takes no more work; another node may",
        retry_after_s=1.0,
        details={"node": node, "reason": "draining"},
    )


def node_full(node: str, what: str, wanted: float, free: float) -> DsecError:
    """Return the refusal of a placement for which there is no room now."""
    return DsecError(
        ErrorCode.EXHAUSTED,
        f"node {node} has {_count(free)} {what} free and {_count(wanted)} are asked for; try "
        "another node, or later",
        retry_after_s=1.0,
        details={"node": node, "resource": what, "wanted": wanted, "free": free},
    )


def node_too_small(node: str, what: str, wanted: float, total: float) -> DsecError:
    """Return the refusal of a placement that this node could never hold."""
    return DsecError(
        ErrorCode.EXHAUSTED,
        f"node {node} has {_count(total)} {what} in all and {_count(wanted)} are asked for; ask "
        "for less, or add a larger node",
        retryable=False,
        details={"node": node, "resource": what, "wanted": wanted, "total": total},
    )


def placement_lapsed(node: str, local: str, late_s: float) -> DsecError:
    """Return the answer for a placement whose time was over before its sandbox was ready."""
    return DsecError(
        ErrorCode.TIMEOUT,
        f"the placement of sandbox {node}.{local} lapsed {late_s:.3f} s ago, before it was ready; "
        "nothing of it stays. Allow more time, or try a node with less to do",
        details={"node": node, "sandbox_id": f"{node}.{local}"},
    )


def placement_conflict(node: str, local: str) -> DsecError:
    """Return the refusal of a second placement under an id that is taken."""
    return DsecError(
        ErrorCode.CONFLICT,
        f"the id {node}.{local} belongs to another placement; choose a fresh one",
        details={"node": node, "sandbox_id": f"{node}.{local}"},
    )


def rolled_back(what: str) -> DsecError:
    """Return the answer for what was going on in a sandbox that was put back to a snapshot."""
    return DsecError(
        ErrorCode.CONFLICT,
        f"{what} was ended by a rollback: its sandbox was put back to a snapshot meanwhile; look "
        "at what is there now, and begin anew",
        retryable=False,
        details={"reason": "rolled_back"},
    )


def invalid_field(field: str, message: str) -> DsecError:
    """Return the refusal of one field of a request."""
    return invalid(f"{field}: {message}", field=field)


def _count(number: float) -> str:
    """Return a number that people can read: all digits of bytes, no more than needed of cpus."""
    return f"{number:,.0f}" if number == int(number) else f"{number:g}"


def as_dsec_error(operation: str, error: BaseException) -> DsecError:
    """Return any failure as an error for a caller; what is unexpected is logged."""
    if isinstance(error, DsecError):
        return error
    if isinstance(error, OSError):
        return from_os_error(operation, error)
    if isinstance(error, asyncio.CancelledError):
        return DsecError(
            ErrorCode.UNAVAILABLE, f"{operation} was interrupted: the node is stopping"
        )
    _log.error("unexpected", operation=operation, exc_info=error)
    return DsecError(
        ErrorCode.INTERNAL,
        f"{operation} failed unexpectedly ({type(error).__name__}); the node's log says why",
    )
