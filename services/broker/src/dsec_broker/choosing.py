"""In which order nodes are tried for a lease on any of them: own capacity, cost, room. Pure."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from dsec_common.compute.conservation import bursts, is_other_capacity
from dsec_common.compute.cost import Offer
from dsec_common.compute.model import GpuDemand, ServiceClass
from dsec_common.compute.units import DEFAULT_PRICE

if TYPE_CHECKING:
    from dsec_broker.books import Books
    from dsec_common.wire.lease import GrantLease
    from dsec_common.wire.node import NodeHeartbeat


class Candidate(NamedTuple):
    """A node that takes leases."""

    name: str
    books: Books
    heartbeat: NodeHeartbeat

    @property
    def is_other(self) -> bool:
        """Whether it is not of the cluster's own capacity: for bursts, or of a node provider."""
        return is_other_capacity(self.heartbeat.labels)


def in_order(
    candidates: Iterable[Candidate],
    asked: GrantLease,
    prices: Mapping[str, float],
    burst_factor: float,
) -> list[Candidate]:
    """Return the nodes, the first to be tried first.

    The cluster's own nodes come before other capacity. Above the burst line it is the other way
    round, but for real-time work. Then the cheapest comes first, and of equally cheap ones those
    with the most free units, within a factor of two in another order for each request: brokers that
    all took the very emptiest would get in each other's way at its record.

    Args:
        candidates: nodes that take leases.
        asked: by whom and for what.
        prices: of a unit for an hour, by model.
        burst_factor: the line.
    """
    found = list(candidates)
    own = [it.books for it in found if not it.is_other]
    total_cu = math.fsum(books.cu_total for books in own)
    used_cu = total_cu - math.fsum(books.pool.free_cu for books in own)
    urgent = asked.service_class is ServiceClass.REALTIME
    others_first = not urgent and bursts(used_cu, total_cu, burst_factor)
    demand = asked.wanted

    def key(candidate: Candidate) -> tuple[bool, float, int, int, str]:
        cost = _offer(candidate, demand, prices).cost
        turn = candidate.is_other is not others_first
        emptiness = math.frexp(candidate.books.pool.free_cu)[1]
        spread = zlib.crc32(f"{asked.message_id} {candidate.name}".encode())
        return turn, cost, -emptiness, spread, candidate.name

    return sorted(found, key=key)


def _offer(candidate: Candidate, demand: GpuDemand, prices: Mapping[str, float]) -> Offer:
    """Return what the demand costs for an hour on the node's cheapest cards that it may have."""
    models = {
        card.model
        for card in candidate.books.cards
        if card.healthy and (not demand.models or card.model in demand.models)
    }
    price = min((prices.get(model, DEFAULT_PRICE) for model in models), default=math.inf)
    return Offer(candidate.name, cu=demand.max_cu, cost_per_cu_hour=price)
