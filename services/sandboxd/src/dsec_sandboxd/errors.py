"""The refusals of a node, each worded once: what, where, and what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dsec_common.errors import DsecError, ErrorCode, invalid, not_found

if TYPE_CHECKING:
    from dsec_sandboxd.records import SandboxRecord


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
    return DsecError(
        ErrorCode.EXPIRED,
        f"sandbox {node}.{record.local} has ended ({cause}{detail}); create another",
        details={
            "what": "sandbox",
            "sandbox_id": f"{node}.{record.local}",
            "end_cause": cause,
            "end_detail": record.end_detail,
            "ended_at": record.ended_at,
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


def invalid_field(field: str, message: str) -> DsecError:
    """Return the refusal of one field of a request."""
    return invalid(f"{field}: {message}", field=field)


def _count(number: float) -> str:
    """Return a number that people can read: all digits of bytes, no more than needed of cpus."""
    return f"{number:,.0f}" if number == int(number) else f"{number:g}"
