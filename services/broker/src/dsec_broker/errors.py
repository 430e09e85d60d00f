"""The broker's refusals, worded once."""

from __future__ import annotations

from collections.abc import Sequence

from dsec_broker.room import GRANT_BYTES_MAX
from dsec_common.compute.model import GpuDemand, Slice
from dsec_common.errors import DsecError, ErrorCode, invalid, not_found, unavailable
from dsec_common.wire.lease import HOLDER_CHARACTERS_MAX, UNLOCK_REASON_MAX
from dsec_common.wire.sandbox import AGENT_CHARACTERS_MAX


def bad_demand(demand: GpuDemand) -> DsecError:
    """Return the error for a grant of what makes no sense."""
    return invalid(demand.flaw, min_cu=demand.min_cu, max_cu=demand.max_cu)


def bad_ttl(ttl_s: float, most_s: float) -> DsecError:
    """Return the error for a life that is no time, or too long."""
    return invalid(
        f"a lease cannot live {ttl_s!r} s: ask for more than 0 and at most {most_s:g} s",
        ttl_s=ttl_s,
    )


def bad_limit(limit: int) -> DsecError:
    """Return the error for a page of fewer than no nodes."""
    return invalid(f"limit {limit} makes no sense: use 1 or more, or 0 for as many as fit")


def bad_reason(characters: int) -> DsecError:
    """Return the error for a reason that is a story."""
    return invalid(
        f"a reason of {characters} characters is too long: use at most {UNLOCK_REASON_MAX}",
        field="reason",
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


def lease_revoked(lease_id: str, reason: str) -> DsecError:
    """Return the error for a grant that is sent again after its lease was ended."""
    return DsecError(
        ErrorCode.EXPIRED,
        f"lease {lease_id} was granted and is gone: {reason}; ask for a new one",
        details={"lease_id": lease_id},
    )


def lease_of_another(lease_id: str) -> DsecError:
    """Return the error for a grant under an id that another project's lease has."""
    return DsecError(
        ErrorCode.CONFLICT,
        f"lease {lease_id} is another project's; send the request under a message id of its own",
        details={"lease_id": lease_id},
    )


def units_taken(
    node: str, demand: GpuDemand, free_cu: float, total_cu: float, *, possible: bool
) -> DsecError:
    """Return the error for a node with too little free; retryable unless it never has enough."""
    return DsecError(
        ErrorCode.EXHAUSTED,
        f"node {node} has {free_cu:g} of {total_cu:g} Compute Units free, {asked_text(demand)} "
        f"were asked for{'' if possible else ', which it has not even with nothing taken'}",
        retryable=possible,
        retry_after_s=1.0 if possible else 0.0,
        details={"node": node, "cu": demand.min_cu, "cu_free": free_cu, "cu_total": total_cu},
    )


def no_room(node: str, leases: int, untold: int) -> DsecError:
    """Return the error for a lease that the node's record cannot keep beside the others."""
    return DsecError(
        ErrorCode.EXHAUSTED,
        f"node {node} keeps no more leases than its {leases}, and {untold} segments that the log "
        f"has yet to take, of {GRANT_BYTES_MAX} bytes at most: let some end, ask for fewer and "
        "larger ones, or add a node",
        retryable=True,
        retry_after_s=1.0,
        details={
            "node": node,
            "leases": leases,
            "untold": untold,
            "record_bytes_max": GRANT_BYTES_MAX,
        },
    )


def bad_holder(characters: int) -> DsecError:
    """Return the error for a lease whose holder would fill its node's record."""
    return invalid(
        f"a holder or an agent of {characters} characters: use at most {HOLDER_CHARACTERS_MAX} for "
        f"a holder (the request's message_id), {AGENT_CHARACTERS_MAX} for an agent, all printable",
        field="holder",
    )


def slices_taken(node: str, slices: Sequence[Slice]) -> DsecError:
    """Return the error for a grant of just these slices, when they are not all free."""
    wanted = ", ".join(f"{slice_.percent} % of {slice_.place}" for slice_ in slices)
    return DsecError(
        ErrorCode.EXHAUSTED,
        f"node {node} cannot give just {wanted}: not all of that is free any more; look again",
        retryable=True,
        details={"node": node},
    )


def no_node_has(
    demand: GpuDemand, largest_cu: float, *, ready: int, possible: bool, full: int = 0
) -> DsecError:
    """Return the error for a grant on any node that none can give.

    Args:
        demand: what was asked for.
        largest_cu: of the nodes.
        ready: how many there are.
        possible: whether one could if nothing were held.
        full: how many give nothing because their records hold no further lease.
    """
    if not ready:
        return unavailable(
            "no node is ready: start sandboxd on a machine with GPUs, or wait for its heartbeat"
        )
    records = (
        f"; of {ready} nodes {full} hold so many leases that their records take no more "
        f"({GRANT_BYTES_MAX} bytes): end some, ask for fewer and larger ones, or add a node"
    )
    return DsecError(
        ErrorCode.EXHAUSTED,
        f"no node has {asked_text(demand)} Compute Units free"
        f"{'' if possible else ', even with nothing taken'}; the largest has {largest_cu:g} in all"
        f"{records if full else ''}",
        retryable=possible,
        retry_after_s=1.0 if possible else 0.0,
        details={"cu": demand.min_cu, "cu_largest": largest_cu},
    )


def asked_text(demand: GpuDemand) -> str:
    """Return a demand in words."""
    parts = [f"{demand.min_cu:g}"]
    if demand.count:
        parts.append(f"on {demand.count} cards")
    if demand.same_island:
        parts.append("of one NVLink island")
    if demand.models:
        parts.append(f"of model {' or '.join(demand.models)}")
    if demand.memory_bytes:
        parts.append(f"with {demand.memory_bytes} bytes of GPU memory")
    return " ".join(parts)


def not_the_nodes(lease_id: str, node: str) -> DsecError:
    """Return the answer for a node that speaks of another one's lease."""
    return DsecError(
        ErrorCode.DENIED,
        f"lease {lease_id} is on no GPU of node {node}",
        details={"lease_id": lease_id, "node": node},
    )
