"""Pages of the list of nodes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from dsec_broker.errors import bad_limit
from dsec_broker.record import Lease
from dsec_common.wire.lease import HeldLease, LeaseList, ListLeases, NodeLeases
from dsec_common.wire.node import ListNodes, NodeHeartbeat, NodeInfo, NodeList
from dsec_common.wire.sandbox import LISTING_PAGE_BYTES

#: Of what is shown of one node: the largest machine needs a part of it, and an answer holds it.
_NODE_BYTES: Final = 512 * 1024
_EPOCH_CHARACTERS: Final = 64


def for_projects(info: NodeInfo) -> NodeInfo:
    """Return what a project may see of a node: not which leases others hold there.

    A node that tells more than an answer could hold keeps nobody from seeing the others.
    """
    beat = msgspec.structs.replace(info.heartbeat, lease_ids=(), lease_resizes={})
    shown = msgspec.structs.replace(info, heartbeat=beat)
    size = len(msgspec.msgpack.encode(shown))
    if size <= _NODE_BYTES:
        return shown
    brief = NodeHeartbeat(
        node=beat.node,
        epoch=beat.epoch[:_EPOCH_CHARACTERS],
        capacity=beat.capacity,
        allocated=beat.allocated,
        draining=beat.draining,
        sent_at=beat.sent_at,
    )
    notes = (f"it tells {size} bytes of itself, most of which are not shown: look at its labels",)
    return msgspec.structs.replace(shown, heartbeat=brief, notes=notes)


def page_of(found: NodeList, asked: ListNodes) -> NodeList:
    """Return the nodes of ``found`` that the page asked for holds, one at least if there are any.

    The Compute Units stay those of the whole cluster.

    Raises:
        DsecError: ``invalid`` for a negative limit.
    """
    if asked.limit < 0:
        raise bad_limit(asked.limit)
    page: list[NodeInfo] = []
    left_bytes = LISTING_PAGE_BYTES
    rest = [info for info in found.nodes if info.node > asked.after]
    for info in rest:
        left_bytes -= len(msgspec.msgpack.encode(info))
        if page and (left_bytes < 0 or len(page) == asked.limit):
            break
        page.append(info)
    return msgspec.structs.replace(found, nodes=tuple(page), more=len(page) < len(rest))


def leases_page(found: Iterable[NodeLeases], asked: ListLeases) -> LeaseList:
    """Return the nodes after the one named, as many as fit, one at least if there are any."""
    page: list[NodeLeases] = []
    left_bytes = LISTING_PAGE_BYTES
    for node in found:
        if node.node <= asked.after:
            continue
        left_bytes -= len(msgspec.msgpack.encode(node))
        if page and left_bytes < 0:
            return LeaseList(nodes=tuple(page), more=True)
        page.append(node)
    return LeaseList(nodes=tuple(page))


def held_bytes(found: Iterable[NodeLeases], project: str) -> dict[str, int]:
    """Return by node how much it takes at most to tell of a project's leases there."""
    return {
        node.node: len(msgspec.msgpack.encode([it for it in node.leases if it.project == project]))
        for node in found
    }


def held(lease: Lease) -> HeldLease:
    """Return a lease as it is listed."""
    return HeldLease(
        lease_id=lease.lease_id,
        project=lease.project,
        holder=lease.holder,
        cu=lease.cu,
        granted_at=lease.granted_at,
        expires_at=lease.expires_at,
        token=lease.token,
        demand=lease.demand,
        service_class=lease.service_class,
        priority=lease.priority,
        slices=lease.slices,
        agent=lease.agent,
        ends_at=lease.ends_at,
    )
