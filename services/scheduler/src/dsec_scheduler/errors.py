"""The scheduler's refusals, worded once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from dsec_common.errors import MAY_HAVE_HAPPENED, Detail, DsecError, ErrorCode, invalid, unavailable
from dsec_common.wire.node import UPLINK, Resources
from dsec_common.wire.sandbox import Limits
from dsec_common.wire.waiting import WaitingExplained

_MIB: Final = 1024**2
_NAMED_MAX: Final = 5


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


def too_large(limits: Limits, node: str, most: Resources) -> DsecError:
    """Return the error for a sandbox that no node could hold even if it were empty."""
    return DsecError(
        ErrorCode.EXHAUSTED,
        f"no node could ever hold {_size(limits)}: the largest, {node}, gives one at most "
        f"{most.cpus:g} cpus and {most.memory_bytes / _MIB:,.0f} MiB of memory; ask for less",
        retryable=False,
        details={"node": node, "cpus": most.cpus, "memory_bytes": most.memory_bytes},
    )


def snapshot_node_away(snapshot: str, node: str) -> DsecError:
    """Return the refusal when the one node that has the snapshot takes no sandboxes now."""
    return DsecError(
        ErrorCode.UNAVAILABLE,
        f"the snapshot {snapshot} is on node {node}, which does not answer or is stopping; see "
        "`dsec node list`, or pack snapshots as layers to have them on every node",
        retry_after_s=1.0,
        details={"node": node, "snapshot_id": snapshot},
    )


def layer_not_looked_for(
    missing: DsecError, full: Sequence[str], silent: Sequence[str], retry_after_s: float
) -> DsecError:
    """Return the error for a layer that may be in a store whose nodes could not be asked.

    It may be asked again: what a recipe built, or a snapshot became, is in one node's store only.
    """
    named = [f"{', '.join(nodes)} {what}" for nodes, what in _why_not_asked(full, silent) if nodes]
    return DsecError(
        ErrorCode.NOT_FOUND,
        f"{missing.message}. Not every layer store was looked in: {'; '.join(named)}. A layer that "
        "was built or packed is in the store of its node only: try again when that has room, give "
        "the nodes one store (layers_backend), or build it there, too",
        retryable=True,
        retry_after_s=retry_after_s,
        details={**missing.details, "nodes_not_asked": len(full) + len(silent)},
    )


def _why_not_asked(
    full: Sequence[str], silent: Sequence[str]
) -> tuple[tuple[Sequence[str], str], ...]:
    return (
        (full[:_NAMED_MAX], "could not take it"),
        (silent[:_NAMED_MAX], "do not answer"),
    )


def no_uplink(missing: Mapping[str, Mapping[str, str]]) -> DsecError:
    """Return the error for a network that no node can give, from what each node lacks."""
    reasons = {node: lacks[UPLINK] for node, lacks in missing.items() if UPLINK in lacks}
    node, why = next(iter(sorted(reasons.items())), ("", "no usable node has one"))
    return DsecError(
        ErrorCode.UNSUPPORTED,
        f"the network policy needs what lies outside, and no node leads there ({node}: {why}); "
        "start one with an uplink (`dsec up --uplink`, network_uplink=auto), or ask for network "
        "'none'",
        details={"reason": "uplink", "nodes": len(reasons)},
    )


def no_gpus(cu: float) -> DsecError:
    """Return the error for Compute Units in a cluster without GPUs."""
    return DsecError(
        ErrorCode.EXHAUSTED,
        f"{cu:g} Compute Units are asked for, but no node has a GPU; ask for none, or add a node "
        "with one",
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


def no_turn(timeout_s: float, retry_after_s: float) -> DsecError:
    """Return the error for a request whose time ran out in the line; nothing was done."""
    return DsecError(
        ErrorCode.EXHAUSTED,
        f"the nodes were busy with other sandboxes for {timeout_s:g} s; try again a little later, "
        "or add nodes",
        retry_after_s=retry_after_s,
    )


def too_many_wait(waiting: int, retry_after_s: float) -> DsecError:
    """Return the error for a request that finds no place in the queues for Compute Units."""
    return DsecError(
        ErrorCode.EXHAUSTED,
        f"{waiting} requests wait for Compute Units here, or as many of this project as one may "
        "have; try again later, or use the durable queue",
        retry_after_s=retry_after_s,
        details={"waiting": waiting},
    )


def no_units(timeout_s: float, why: WaitingExplained | None, retry_after_s: float) -> DsecError:
    """Return the error for a request whose units did not come free in its time.

    Without a ``why`` there was no time to look for it: very many waited.
    """
    if why is None:
        return DsecError(
            ErrorCode.EXHAUSTED,
            f"no Compute Units within {timeout_s:g} s; `dsec sandbox explain` tells why while a "
            "request waits",
            retry_after_s=retry_after_s,
        )
    hint = f"; {why.would_change[0]}" if why.would_change else ""
    details: dict[str, Detail] = {"constraint": why.constraint, "ahead": why.ahead}
    if why.startable_cu:
        details["startable_cu"] = why.startable_cu
    if why.quota:
        details["quota"] = why.quota
    return DsecError(
        ErrorCode.EXHAUSTED,
        f"no Compute Units within {timeout_s:g} s: {why.reason}{hint}",
        retry_after_s=retry_after_s,
        details=details,
    )


def cancelled(request_id: str) -> DsecError:
    """Return what is told to who waits for a request that was given up."""
    return DsecError(
        ErrorCode.CONFLICT,
        f"request {request_id} was cancelled while it waited",
        retryable=False,
        details={"request_id": request_id},
    )


def already_begun(request_id: str, sandbox_id: str) -> DsecError:
    """Return what is told to who gives up a request that does not wait any more."""
    return DsecError(
        ErrorCode.CONFLICT,
        f"request {request_id} waits no more: sandbox {sandbox_id} is being made for it, or has "
        "been; delete that",
        retryable=False,
        details={"request_id": request_id, "sandbox_id": sandbox_id},
    )


def not_waiting(request_id: str) -> DsecError:
    """Return the error for a question about what does not wait at any scheduler."""
    return DsecError(
        ErrorCode.NOT_FOUND,
        f"no request {request_id} of this project waits here: it has its sandbox, was refused, or "
        "was never heard of",
        details={"request_id": request_id},
    )


def failed_unexpectedly() -> DsecError:
    """Return the error for a defect of the scheduler's own."""
    return DsecError(
        ErrorCode.INTERNAL, "creating the sandbox failed unexpectedly; the scheduler's log says why"
    )


def stopping() -> DsecError:
    """Return what is told to who waits at a scheduler that stops."""
    return unavailable(
        "this scheduler is stopping and nothing was granted; ask again, another takes it"
    )


def outcome_lost(sandbox_id: str) -> DsecError:
    """Return the error for a first command that ran, or did not, without anyone left who knows."""
    return DsecError(
        ErrorCode.UNAVAILABLE,
        f"what came of the first command of sandbox {sandbox_id} is lost; it may have run: look "
        "into the sandbox, or create another with a fresh key",
        retryable=False,
        details={"sandbox_id": sandbox_id, MAY_HAVE_HAPPENED: True},
    )


def command_not_over(sandbox_id: str, timeout_s: float) -> DsecError:
    """Return the error for a first command whose end did not become known in time."""
    return DsecError(
        ErrorCode.TIMEOUT,
        f"the first command of sandbox {sandbox_id} was not known to have ended within "
        f"{timeout_s:g} s; ask again with the same key, or inspect the sandbox",
        details={"sandbox_id": sandbox_id, "timeout_s": timeout_s},
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
