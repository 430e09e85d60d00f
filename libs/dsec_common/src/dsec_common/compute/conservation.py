"""Conservation: what is handed out stays below a part of what there is.

    sum(allocated_i) <= total x utilisation_factor

The rest is the room in which a surge of important work is met. Above the line, leases that may
shrink do so, the least important first and never below what they were promised (10 CU to 7); what
that does not bring is asked for as nodes. Well below it they grow back, the most important first.
Between the two lines nothing moves, so that leases do not swing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple, TypeAlias

from dsec_common.compute.model import ServiceClass

UTILISATION_FACTOR: Final = 0.85
"""The part of all Compute Units that may be handed out before leases shrink."""
RECOVERY_FACTOR: Final = 0.80
"""The part up to which shrunk leases grow back; below :data:`UTILISATION_FACTOR`."""
BURST_FACTOR: Final = 0.80
"""The use of the cluster's own units above which other capacity takes work."""

CAPACITY_LABEL: Final = "capacity"
BURST: Final = "burst"
PROVIDER_LABEL: Final = "provider"
"""By it a node says which node provider it is of."""

_TOLERANCE: Final = 1e-9
"""Sums of units such as 0.1 are not exact."""

_IMPORTANCE: Final = {
    ServiceClass.BATCH: 0,
    ServiceClass.STANDARD: 1,
    ServiceClass.REALTIME: 2,
}

Rank: TypeAlias = tuple[int, int]
"""How important a lease is: the smaller shrinks for the larger, and equals for each other never."""


def rank_of(service_class: ServiceClass, priority: int) -> Rank:
    """Return how important a lease is: by its class, then by its priority."""
    return _IMPORTANCE[service_class], priority


class Share(NamedTuple):
    """What one lease has, and between what it may move.

    Attributes:
        name: the lease's id.
        node: where its units are; it grows only into what is free there.
        cu: what it has now.
        min_cu: what it was promised; equal to ``cu`` for one that cannot shrink.
        max_cu: what it asked for at most; equal to ``cu`` for one that cannot grow.
        rank: its importance; the smallest shrinks first and grows back last.
    """

    name: str
    node: str
    cu: float
    min_cu: float
    max_cu: float
    rank: tuple[int, ...] = ()


class Balance(NamedTuple):
    """What keeps the equation true.

    Attributes:
        targets: the units of each lease that should have others than now.
        missing_cu: what is still above the line when every lease has shrunk as far as it may.
    """

    targets: dict[str, float]
    missing_cu: float = 0.0


def balance(
    shares: Iterable[Share],
    total_cu: float,
    free_cu: Mapping[str, float],
    *,
    utilisation_factor: float = UTILISATION_FACTOR,
    recovery_factor: float = RECOVERY_FACTOR,
) -> Balance:
    """Return which leases shrink or grow so that the equation holds, and what is missing for it.

    Total, and deterministic: the same leases in another order give the same answer. Only as much
    moves as is needed, so the last lease touched may keep more than its minimum.

    Args:
        shares: every lease.
        total_cu: all units that there are.
        free_cu: by node, the units that no lease holds.
        utilisation_factor: the line above which leases shrink, as a part of ``total_cu``.
        recovery_factor: the line up to which they grow back.
    """
    ordered = sorted(shares, key=lambda share: (share.rank, share.name))
    allocated = math.fsum(share.cu for share in ordered)
    over = allocated - total_cu * utilisation_factor
    if over > _TOLERANCE:
        targets, left = _shrink(ordered, over)
        return Balance(targets, left)
    room = total_cu * recovery_factor - allocated
    if room > _TOLERANCE:
        return Balance(_grow(ordered, room, dict(free_cu)))
    return Balance({})


def _shrink(ordered: list[Share], over: float) -> tuple[dict[str, float], float]:
    targets: dict[str, float] = {}
    for share in ordered:
        if over <= _TOLERANCE:
            break
        given = min(share.cu - share.min_cu, over)
        if given > _TOLERANCE:
            targets[share.name] = share.cu - given
            over -= given
    return targets, max(0.0, over) if over > _TOLERANCE else 0.0


def _grow(ordered: list[Share], room: float, free: dict[str, float]) -> dict[str, float]:
    targets: dict[str, float] = {}
    for share in reversed(ordered):
        if room <= _TOLERANCE:
            break
        taken = min(share.max_cu - share.cu, room, free.get(share.node, 0.0))
        if taken > _TOLERANCE:
            targets[share.name] = share.cu + taken
            room -= taken
            free[share.node] -= taken
    return targets


def nodes_for(
    missing_cu: float, node_cu: float, *, utilisation_factor: float = UTILISATION_FACTOR
) -> int:
    """Return how many nodes of ``node_cu`` units make the equation true again.

    A node brings ``node_cu x utilisation_factor``, since it too is not to be filled. One without
    units brings nothing, so none is asked for.
    """
    if missing_cu <= _TOLERANCE or node_cu <= 0:
        return 0
    return math.ceil(missing_cu / (node_cu * utilisation_factor) - _TOLERANCE)


def is_other_capacity(labels: Mapping[str, str]) -> bool:
    """Return whether a node with these labels is not of the cluster's own capacity.

    It is for bursts, or of a node provider.
    """
    return labels.get(CAPACITY_LABEL) == BURST or PROVIDER_LABEL in labels


def bursts(used: float, total: float, burst_factor: float = BURST_FACTOR) -> bool:
    """Return whether other capacity takes work: the cluster's own is used above the line.

    A cluster that has nothing of its own always does.
    """
    return used > total * burst_factor or total <= 0
