"""The scheduler's refusals, worded once."""

from __future__ import annotations

from typing import Final

from dsec_common.errors import Detail, DsecError, ErrorCode, invalid, unavailable
from dsec_common.wire.sandbox import Limits

_MIB: Final = 1024**2


def bad_limit(name: str, value: float, rule: str) -> DsecError:
    """Return the error for a limit that no sandbox can have."""
    return invalid(f"limits.{name} is {value!r}: {rule}", field=f"limits.{name}")


def bad_field(name: str, value: object, rule: str) -> DsecError:
    """Return the error for a field of a request that makes no sense."""
    text = repr(value)
    shown = text if len(text) <= 60 else text[:60] + "…"  # noqa: PLR2004  what reads well
    return invalid(f"{name} is {shown}: {rule}", field=name)


def no_nodes(known: int, draining: int) -> DsecError:
    """Return the error for a cluster without a node to place on."""
    if draining:
        return unavailable(
            f"all {draining} nodes are draining; start another node, or end a drain",
            nodes_known=known,
        )
    silent = f" ({known} known nodes are silent)" if known else ""
    return unavailable(
        f"no node has sent a heartbeat lately{silent}; start dsec-sandboxd on a machine and check "
        "that it is connected to this NATS",
        nodes_known=known,
    )


def all_full(nodes: int, limits: Limits, retry_after_s: float) -> DsecError:
    """Return the error for nodes that could hold the sandbox, but not now."""
    return DsecError(
        ErrorCode.EXHAUSTED,
        f"{_count(nodes)} could hold {_size(limits)}, but none has room now; wait, or end "
        "sandboxes that are done",
        retry_after_s=retry_after_s,
        details={"nodes": nodes},
    )


def too_large(limits: Limits, node: str, cpus: float, memory_bytes: int) -> DsecError:
    """Return the error for a sandbox that no node could hold even if it were empty."""
    return DsecError(
        ErrorCode.EXHAUSTED,
        f"no node could ever hold {_size(limits)}: the largest, {node}, hands out {cpus:g} cpus "
        f"and {memory_bytes / _MIB:,.0f} MiB of memory in all; ask for less",
        retryable=False,
        details={"node": node, "cpus": cpus, "memory_bytes": memory_bytes},
    )


def no_gpus(cu: float) -> DsecError:
    """Return the error for Compute Units in a cluster without GPUs."""
    return DsecError(
        ErrorCode.EXHAUSTED,
        f"limits.cu is {cu:g}, but no node has a GPU; ask for 0, or add a node with one",
        retryable=False,
        details={"cu": cu},
    )


def out_of_attempts(attempts: int, last: DsecError, retry_after_s: float) -> DsecError:
    """Return the error for a request that several nodes refused, each for a reason of its own."""
    code = ErrorCode.EXHAUSTED if last.code is ErrorCode.EXHAUSTED else ErrorCode.UNAVAILABLE
    details: dict[str, Detail] = {**last.details, "attempts": attempts}
    return DsecError(
        code,
        f"{_count(attempts)} refused the sandbox; the last said: {last.message}",
        retry_after_s=last.retry_after_s or retry_after_s,
        details=details,
    )


def out_of_time(timeout_s: float, last: DsecError | None) -> DsecError:
    """Return the error for a request whose time ran out before a node had made the sandbox."""
    because = f"; the last node said: {last.message}" if last else ""
    return DsecError(
        ErrorCode.TIMEOUT,
        f"no node made the sandbox within {timeout_s:g} s{because}. Allow more time, or try again",
        details={"timeout_s": timeout_s},
    )


def key_conflict() -> DsecError:
    """Return the error for an idempotency key that was used with other arguments."""
    return DsecError(
        ErrorCode.CONFLICT,
        "this idempotency_key was used with other arguments; use a new key for another sandbox",
        details={"field": "idempotency_key"},
    )


class NodeLostError(DsecError):
    """An attempt's node fell silent or was started again; what it made may be there or not."""

    def __init__(self, node: str) -> None:
        super().__init__(
            ErrorCode.UNAVAILABLE,
            f"node {node} was lost during the creation: it fell silent or was started again",
            details={"node": node},
        )


def _count(nodes: int) -> str:
    return "1 node" if nodes == 1 else f"{nodes} nodes"


def _size(limits: Limits) -> str:
    return f"a sandbox of {limits.cpus:g} cpus and {limits.memory_bytes / _MIB:,.0f} MiB of memory"
