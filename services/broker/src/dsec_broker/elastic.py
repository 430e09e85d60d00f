"""The elastic engine's decisions: which leases shrink or grow, and how many nodes there are to be.

Pure: it is told what is known of the cluster and answers what should be. The equations are in
:mod:`dsec_common.compute.conservation`; here they meet records and heartbeats.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

from dsec_broker.elastic_config import ElasticConfig
from dsec_broker.record import Lease, NodeRecord
from dsec_common.compute.conservation import Share, balance, nodes_for, rank_of
from dsec_common.compute.model import Card
from dsec_common.compute.resizing import bounds_of
from dsec_common.wire.node import NodeHeartbeat


class Plan(NamedTuple):
    """What keeps the conservation equation true.

    Attributes:
        targets: by node, the units that leases on it should have.
        missing_cu: what further nodes have to bring.
        allocated_cu: what is handed out now, on nodes that take leases.
        total_cu: what those nodes have.
    """

    targets: dict[str, dict[str, float]]
    missing_cu: float
    allocated_cu: float
    total_cu: float


def plan(records: Iterable[NodeRecord], config: ElasticConfig) -> Plan:
    """Return which leases are to shrink or grow, over all nodes that take leases."""
    shares: list[Share] = []
    free: dict[str, float] = {}
    total = 0.0
    node_of: dict[str, str] = {}
    for record in records:
        cards = {card.uuid: card for card in record.cards}
        node_cu = record.cu_total
        total += node_cu
        free[record.node] = max(0.0, node_cu - record.cu_allocated)
        for lease in record.leases:
            shares.append(_share(lease, record.node, cards))
            node_of[lease.lease_id] = record.node
    found = balance(
        shares,
        total,
        free,
        utilisation_factor=config.utilisation_factor,
        recovery_factor=config.recovery_factor,
    )
    targets: dict[str, dict[str, float]] = {}
    for lease_id, cu in found.targets.items():
        targets.setdefault(node_of[lease_id], {})[lease_id] = cu
    allocated = math.fsum(share.cu for share in shares)
    return Plan(targets, found.missing_cu, allocated, total)


def _share(lease: Lease, node: str, cards: dict[str, Card]) -> Share:
    bounds = bounds_of(lease.slices, cards, lease.demand)
    return Share(
        name=lease.lease_id,
        node=node,
        cu=bounds.cu,
        min_cu=bounds.least_cu,
        max_cu=bounds.most_cu,
        rank=rank_of(lease.service_class, lease.priority),
    )


# --- Nodes ------------------------------------------------------------------------------------


class ProvidedNode(NamedTuple):
    """A living node of the node provider.

    Attributes:
        cu: what it has.
        idle: it has neither a sandbox nor a lease.
        leaving: it takes nothing any more.
    """

    name: str
    cu: float
    idle: bool
    leaving: bool


class Fleet(NamedTuple):
    """How many nodes of the provider there are to be.

    Attributes:
        wanted: those that leave not counted.
        retire: nodes to be asked to take nothing any more, since they are not needed.
        leaving: nodes that have done so, or leave for another reason: to be ended.
    """

    wanted: int
    retire: tuple[str, ...] = ()
    leaving: tuple[str, ...] = ()


def provided(heartbeat: NodeHeartbeat, record: NodeRecord | None) -> ProvidedNode:
    """Return a node of the provider as its heartbeat and its record tell of it."""
    # Sandboxes that wait in pools are in nobody's hands, and not counted as allocated.
    idle = not heartbeat.allocated.sandboxes and not (record and record.leases)
    cu = record.cu_total if record else 0.0
    return ProvidedNode(heartbeat.node, cu, idle, heartbeat.draining)


def fleet(
    plan_: Plan,
    nodes: Sequence[ProvidedNode],
    long_idle: Collection[str],
    may_leave: Callable[[Collection[str], Collection[str]], Sequence[str]],
    config: ElasticConfig,
) -> Fleet:
    """Return how many nodes there are to be, and which are not needed any more.

    More when units are missing with every lease shrunk; fewer when a node has long been idle and
    the others, without it, are still used below the line up to which leases grow back.

    Args:
        plan_: of the same moment.
        nodes: the provider's that live.
        long_idle: those of them that have been idle for ``node_idle_s``.
        may_leave: the provider's word on which of the idle can go, the first to go first.
        config: constants.
    """
    leaving = tuple(sorted(node.name for node in nodes if node.leaving))
    staying = {node.name: node for node in nodes if not node.leaving}
    most = config.node_provider_max
    if plan_.missing_cu > 0:
        more = nodes_for(
            plan_.missing_cu,
            config.node_provider_cu,
            utilisation_factor=config.utilisation_factor,
        )
        return Fleet(min(max(most, len(staying)), len(staying) + more), (), leaving)
    names = [node.name for node in nodes]
    total = plan_.total_cu
    retire: list[str] = []
    for name in may_leave(names, {*long_idle, *leaving}):
        node = staying.get(name)
        if node is None:
            continue
        if len(staying) - len(retire) <= config.node_provider_min:
            break
        total -= node.cu
        if plan_.allocated_cu > total * config.recovery_factor:
            break
        retire.append(name)
    wanted = max(len(staying) - len(retire), config.node_provider_min)
    return Fleet(wanted, tuple(retire), leaving)
