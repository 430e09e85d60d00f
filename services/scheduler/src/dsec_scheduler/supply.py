"""What is free on which cards while a round goes on, and the best place for one ask. No I/O."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, TypeAlias

from dsec_common.compute.conservation import bursts
from dsec_common.compute.model import Card, Slice, fit
from dsec_scheduler.asks import Ask, Part
from dsec_scheduler.solving.problem import NodeCapacity

_TOLERANCE: Final = 1e-9

Cards: TypeAlias = frozenset[tuple[str, str]]
"""Some cards, by node and uuid: a node that names another's cards harms itself only."""


def all_cards(nodes: Iterable[NodeCapacity]) -> Cards:
    """Return every card there is."""
    return frozenset((node.node, card.uuid) for node in nodes for card in node.cards)


def pool_of(nodes: Sequence[NodeCapacity], share: float) -> Cards:
    """Return the cards that only realtime requests get: whole ones, at most ``share`` of all.

    Every scheduler that knows the same nodes says the same: the last nodes by name give theirs.
    """
    cards = [
        (node.node, card.uuid)
        for node in sorted(nodes, key=lambda it: it.node)
        for card in sorted(node.cards, key=lambda it: it.uuid)
        if card.healthy
    ]
    count = math.floor(share * len(cards) + _TOLERANCE)
    return frozenset(cards[len(cards) - count :])


class Supply:
    """The cards of all nodes and what is taken of them, to be taken from."""

    def __init__(self, nodes: Iterable[NodeCapacity]) -> None:
        self._cards: dict[str, tuple[Card, ...]] = {}
        self._held: dict[str, list[Slice]] = {}
        self._free_cu: dict[tuple[str, str], float] = {}
        self._allowed: dict[object, frozenset[str]] = {}
        for node in nodes:
            self._cards[node.node] = node.cards
            self._held[node.node] = list(node.held)
            for card in node.cards:
                self._free_cu[node.node, card.uuid] = card.cu_total
            for held in node.held:
                self._count(node.node, held)

    def _count(self, node: str, held: Slice) -> None:
        # A card that fell off may still be under lease.
        key = node, held.card
        if key in self._free_cu:
            self._free_cu[key] = max(self._free_cu[key] - held.cu, 0.0)

    def take(self, parts: Iterable[Part]) -> None:
        """Count slices as taken."""
        for part in parts:
            self._held[part.node] += part.slices
            for held in part.slices:
                self._count(part.node, held)

    def give_back(self, parts: Iterable[Part]) -> None:
        """Count them as free again."""
        for part in parts:
            for held in part.slices:
                self._held[part.node].remove(held)
                self._free_cu[part.node, held.card] += held.cu

    def free_cu(self, cards: Iterable[tuple[str, str]]) -> float:
        """Return the free units of some cards."""
        return math.fsum(self._free_cu[card] for card in cards)

    def in_turn(
        self, cards: Cards, others: frozenset[str], burst_factor: float, *, own_first: bool
    ) -> tuple[Cards, ...]:
        """Return which of some cards are to be tried first, and then all of them.

        The cluster's own come before other capacity; above the burst line it is the other way
        round, unless ``own_first``.
        """
        other = frozenset(card for card in cards if card[0] in others)
        if not other or other == cards:
            return (cards,)
        whole = {card.uuid: card.cu_total for of in self._cards.values() for card in of}
        own = [card for card in self._free_cu if card[0] not in others]
        total_cu = math.fsum(whole[uuid] for _, uuid in own)
        bursting = bursts(total_cu - self.free_cu(own), total_cu, burst_factor)
        return (other if bursting and not own_first else cards - other, cards)

    def nodes_for(self, ask: Ask) -> frozenset[str] | None:
        """Return the nodes that an ask may go to; None for all."""
        if ask.may_use is None:
            return None
        known = self._allowed.get(ask.needs)
        if known is None:
            known = frozenset(node for node in self._cards if ask.may_use(node))
            self._allowed[ask.needs] = known
        return known

    def capacities(self, cards: Cards) -> tuple[NodeCapacity, ...]:
        """Return the nodes with those of their cards only."""
        found = []
        for node, of_node in self._cards.items():
            some = tuple(card for card in of_node if (node, card.uuid) in cards)
            if some:
                own = {card.uuid for card in some}
                held = tuple(it for it in self._held[node] if it.card in own)
                found.append(NodeCapacity(node, some, held))
        return tuple(found)

    def by_node(self, cards: Cards) -> Iterator[tuple[str, Cards]]:
        """Yield each node with those of some cards that are its own."""
        for node, of_node in self._cards.items():
            own = cards & {(node, card.uuid) for card in of_node}
            if own:
                yield node, own

    def keep_for(
        self, ask: Ask, cards: Cards, kept: frozenset[str] = frozenset()
    ) -> frozenset[str]:
        """Return the nodes to keep for an ask, so that it fits once they are empty; none if never.

        Those ``kept`` already stay so; of the others those come first that are emptiest.
        """
        empty = Supply(NodeCapacity(it.node, it.cards) for it in self.capacities(cards))
        usable = self.nodes_for(ask)

        def emptiness(node: NodeCapacity) -> tuple[bool, float, str]:
            return node.node not in kept, -self.free_cu(all_cards([node])), node.node

        chosen: set[str] = set()
        for demand in ask.demands:
            one = Ask(0, "", "", (demand,), 0.0)
            for node in sorted(empty.capacities(cards), key=emptiness):
                if usable is not None and node.node not in usable:
                    continue
                parts = place_alone(one, empty, all_cards([node]), {})
                if parts:
                    empty.take(parts)
                    chosen.add(node.node)
                    break
            else:
                return frozenset()
        return frozenset(chosen)


def place_alone(
    ask: Ask,
    supply: Supply,
    cards: Cards,
    prices: Mapping[str, float],
    price_limit: float = math.inf,
) -> tuple[Part, ...]:
    """Return the cheapest place for an ask that goes before all others, or nothing.

    Of places that cost the same the fullest node is taken. The members of a gang are placed one
    after the other; the supply is left as it was. Cards whose unit costs more than ``price_limit``
    for an hour are not taken.
    """
    usable = supply.nodes_for(ask)
    parts: list[Part] = []
    for demand in ask.demands:
        best: tuple[tuple[float, float, str], Part] | None = None
        for node in supply.capacities(cards):
            if usable is not None and node.node not in usable:
                continue
            free = supply.free_cu(all_cards([node]))
            some = [card for card in node.cards if prices.get(card.model, 1.0) <= price_limit]
            slices = fit(some, node.held, demand) if free >= demand.min_cu - _TOLERANCE else None
            if slices is None:
                continue
            models = {card.uuid: card.model for card in node.cards}
            cost = math.fsum(prices.get(models[it.card], 1.0) * it.cu for it in slices)
            key = (cost, free, node.node)
            if best is None or key < best[0]:
                best = key, Part(node.node, slices)
        if best is None:
            supply.give_back(parts)
            return ()
        supply.take([best[1]])
        parts.append(best[1])
    supply.give_back(parts)
    return tuple(parts)
