"""Room for realtime work, by what less important leases have beyond their promise. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from dsec_common.compute.conservation import Rank, rank_of
from dsec_common.compute.model import Slice, fit
from dsec_common.compute.resizing import least_of
from dsec_scheduler.asks import Ask, HeldUnits, Part, World
from dsec_scheduler.solving.problem import NodeCapacity
from dsec_scheduler.supply import Supply, all_cards, place_alone


def places_that_yield(
    asks: Iterable[Ask], world: World, supply: Supply, kept: frozenset[str] = frozenset()
) -> Iterator[tuple[Ask, tuple[Part, ...]]]:
    """Yield asks that find nothing free, each with where it fits once leases have yielded.

    Only what a lease agreed to give is given: it never has less than its ``min_cu``, and gives
    nothing to what is no more important than itself. A node yields to one ask at most, since the
    broker may find other slices for it than are found here.

    Args:
        asks: in their turn.
        world: whose leases are to yield.
        supply: what is free of it. A node that has something free that will do is left alone: its
            turn decides who gets that.
        kept: nodes that are not to be touched.
    """
    yielded: dict[Rank, list[tuple[NodeCapacity, NodeCapacity]]] = {}
    in_vain: set[object] = set()
    spent = set(kept)
    for ask in asks:
        rank = rank_of(ask.service_class, ask.priority)
        key = (rank, ask.demands, ask.needs)
        if key in in_vain:
            continue
        if rank not in yielded:
            nodes = supply.capacities(all_cards(world.nodes))
            yielded[rank] = list(_yielded(nodes, world, rank))
        givers = [
            then for now, then in yielded[rank] if now.node not in spent and not _has_room(ask, now)
        ]
        parts = place_alone(ask, Supply(givers), all_cards(givers), world.prices)
        if parts:
            spent |= {part.node for part in parts}
            yield ask, parts
        else:
            in_vain.add(key)


def _has_room(ask: Ask, node: NodeCapacity) -> bool:
    return any(fit(node.cards, node.held, demand) is not None for demand in ask.demands)


def _yielded(
    nodes: Iterable[NodeCapacity], world: World, rank: Rank
) -> Iterator[tuple[NodeCapacity, NodeCapacity]]:
    """Yield the nodes that have something to give, as they are and when all has been given."""
    for node in nodes:
        held = _held_then(node, world.leases.get(node.node, ()), rank)
        if held is not None:
            yield node, replace(node, held=held)


def _held_then(
    node: NodeCapacity, leases: Iterable[HeldUnits], rank: Rank
) -> tuple[Slice, ...] | None:
    cards = {card.uuid: card for card in node.cards}
    held, gives = list(node.held), False
    for lease in leases:
        if lease.rank >= rank or lease.demand is None:
            continue
        fewer = least_of(lease.slices, cards, lease.demand)
        if fewer is not None:
            gives = True
            for slice_ in lease.slices:
                held.remove(slice_)
            held += fewer
    return tuple(held) if gives else None
