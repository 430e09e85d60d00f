"""The broker's refusals, worded once."""

from __future__ import annotations

from dsec_common.errors import DsecError, ErrorCode, invalid, not_found, unavailable


def bad_amount(units: float) -> DsecError:
    """Return the error for a grant of nothing, or of no number."""
    return invalid(f"cannot lease {units!r} Compute Units: ask for more than 0", cu=units)


def bad_ttl(ttl_s: float, most_s: float) -> DsecError:
    """Return the error for a life that is no time, or too long."""
    return invalid(
        f"a lease cannot live {ttl_s!r} s: ask for more than 0 and at most {most_s:g} s",
        ttl_s=ttl_s,
    )


def node_unknown(node: str) -> DsecError:
    """Return the error for a node that never sent a heartbeat."""
    return not_found(
        f"no node {node!r} has ever sent a heartbeat; `dsec node list` shows those that have",
        node=node,
    )


def node_not_ready(node: str, reason: str) -> DsecError:
    """Return the error for a node that takes no lease now."""
    return unavailable(f"node {node} takes no lease: {reason}", node=node)


def lease_gone(lease_id: str) -> DsecError:
    """Return the error for a lease that ended or never was."""
    return DsecError(
        ErrorCode.EXPIRED,
        f"lease {lease_id} has ended or was never granted; ask for a new one",
        details={"lease_id": lease_id},
    )


def units_taken(node: str, asked: float, free: float, total: float) -> DsecError:
    """Return the error for a node with too few free units; never retryable beyond its total."""
    return DsecError(
        ErrorCode.EXHAUSTED,
        f"node {node} has {free:g} of {total:g} Compute Units free, {asked:g} were asked for",
        retryable=asked <= total,
        retry_after_s=1.0 if asked <= total else 0.0,
        details={"node": node, "cu": asked, "cu_free": free, "cu_total": total},
    )


def no_node_has(asked: float, largest: float, *, ready: int) -> DsecError:
    """Return the error for a grant on any node that none can give."""
    if not ready:
        return unavailable(
            "no node is ready: start sandboxd on a machine with GPUs, or wait for its heartbeat"
        )
    possible = asked <= largest
    return DsecError(
        ErrorCode.EXHAUSTED,
        f"no node has {asked:g} Compute Units free; the largest has {largest:g} in all",
        retryable=possible,
        retry_after_s=1.0 if possible else 0.0,
        details={"cu": asked, "cu_largest": largest},
    )
