"""The cluster as arrays.

A *place* is what one slice can come from: a card that MPS divides by percent, a card that is given
whole, or a MIG instance. Whatever depends only on a place's *kind* is computed once for each
request and kind and spread over the places by index.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dsec_common.compute.model import (
    WHOLE_PERCENT,
    Card,
    CardMode,
    MigInstance,
    Slice,
    all_of_instance,
    part_of_card,
)
from dsec_scheduler.solving import objective
from dsec_scheduler.solving.problem import NodeCapacity

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]

#: More percent than any place has.
IMPOSSIBLE: Final = WHOLE_PERCENT + 1
#: Of equally dear places the first is a little cheaper: cards fill up one after the other.
_ORDER: Final = 1e-6


class Kind(NamedTuple):
    """What places have in common. Only a card in MPS mode can be taken in part."""

    model: str
    cu: float
    price: float
    memory_bytes: int
    mode: CardMode


class Option(NamedTuple):
    """One way to place one request: so many percent and bytes of each of these places."""

    places: tuple[int, ...]
    percent: int
    memory_bytes: int
    cost: float


class Places:
    """All healthy places of all nodes, and what of them is free.

    Attributes:
        kinds: the distinct kinds; ``kind`` says which one each place is of.
        free: percent of each place; :meth:`take` and :meth:`give` change it, and ``memory``.
        factor: what the money for a place is multiplied by, before what is taken of it comes off.
            It is made of what was free at first, so that costs do not depend on the order in which
            places are taken.
        whole_card: places that are not MIG instances; only such are combined.
        together_max: the most cards of one kind that any node has.
    """

    def __init__(self, nodes: Sequence[NodeCapacity], prices: Mapping[str, float]) -> None:
        self.node_names = [node.node for node in nodes]
        self._parts: list[tuple[Card, MigInstance | None]] = []
        kinds: dict[Kind, int] = {}
        islands: dict[tuple[int, str], int] = {}
        rows: list[tuple[int, int, int, int, int]] = []
        for number, node in enumerate(nodes):
            held = _held(node.held)
            for card, instance in _parts(node.cards):
                part = card if instance is None else instance
                kind = Kind(
                    card.model, part.cu, prices.get(card.model, 1.0), part.memory_bytes, card.mode
                )
                percent, memory_bytes = held.get(part.uuid, (0, 0))
                free = WHOLE_PERCENT - percent
                if percent and kind.mode is not CardMode.MPS:
                    free = 0
                island = -1
                if card.island and instance is None:
                    island = islands.setdefault((number, card.island), len(islands))
                self._parts.append((card, instance))
                left_bytes = part.memory_bytes - memory_bytes
                kind_number = kinds.setdefault(kind, len(kinds))
                rows.append((number, kind_number, max(0, free), max(0, left_bytes), island))
        table = np.array(rows, dtype=np.int64).reshape(-1, 5)
        self.kinds = list(kinds)
        self.node, self.kind, self.free, self.memory, self._island = table.T.copy()
        self.kind_cu: Floats = np.array([kind.cu for kind in kinds], dtype=np.float64)
        self.kind_price: Floats = np.array([kind.price for kind in kinds], dtype=np.float64)
        self.divisible: Flags = np.array([kind.mode is CardMode.MPS for kind in kinds], dtype=bool)
        self.whole_card: Flags = np.array([mig is None for _, mig in self._parts], dtype=bool)
        self._by_node_and_kind: Integers = self.node * max(1, len(kinds)) + self.kind
        self._by_island: Integers = self._by_node_and_kind * (len(islands) + 1) + self._island + 1
        together = self._by_node_and_kind[self.whole_card]
        self.together_max = int(np.bincount(together).max()) if together.size else 0
        rank = np.empty(len(rows))
        rank[np.argsort(self.free, kind="stable")] = np.arange(len(rows)) / max(1, len(rows))
        left = objective.FRAGMENTATION * self.free / WHOLE_PERCENT
        self.factor: Floats = 1 + left + _ORDER * rank

    def __len__(self) -> int:
        return len(self._parts)

    def freest_together(self) -> Integers:
        """Return, for each kind and count, the most percent free on so many cards of one node."""
        table = np.zeros((len(self.kinds), self.together_max + 1), dtype=np.int64)
        cards = np.flatnonzero(self.whole_card)
        groups = self._by_node_and_kind[cards]
        order = np.lexsort((-self.free[cards], groups))
        cards, groups = cards[order], groups[order]
        starts = np.flatnonzero(np.diff(groups, prepend=-1))
        rank = np.arange(len(cards)) - np.repeat(starts, np.diff(starts, append=len(cards))) + 1
        np.maximum.at(table, (self.kind[cards], rank), self.free[cards])
        return table

    @property
    def on_island(self) -> Flags:
        """Which places have NVLink peers."""
        return self._island >= 0

    @property
    def proportional(self) -> bool:
        """Whether the memory that goes with what is free of each place is free too."""
        total = np.array([kind.memory_bytes for kind in self.kinds], dtype=np.int64)[self.kind]
        return bool((self.memory >= total * self.free // WHOLE_PERCENT).all())

    def groups(self, *, same_island: bool) -> Integers:
        """Return a number for each place; those with the same may serve one request together."""
        return self._by_island if same_island else self._by_node_and_kind

    def find(self, slices: Sequence[Slice]) -> tuple[int, ...] | None:
        """Return the places that slices are of, or None when one is not there."""
        index = {self._uuid(place): place for place in range(len(self))}
        found = tuple(index.get(slice_.place, -1) for slice_ in slices)
        return None if -1 in found else found

    def fits(self, option: Option) -> bool:
        """Return whether what the option takes is free."""
        free, memory = self.free, self.memory
        return all(
            free[place] >= option.percent and memory[place] >= option.memory_bytes
            for place in option.places
        )

    def take(self, option: Option) -> None:
        """Take what the option takes."""
        for place in option.places:
            self.free[place] -= option.percent
            self.memory[place] -= option.memory_bytes

    def give(self, option: Option) -> None:
        """Give back what the option took."""
        for place in option.places:
            self.free[place] += option.percent
            self.memory[place] += option.memory_bytes

    def node_of(self, option: Option) -> str:
        """Return the node of the option's places."""
        return self.node_names[int(self.node[option.places[0]])]

    def cut(self, option: Option) -> tuple[Slice, ...]:
        """Return the option as slices that a lease can name."""
        return tuple(self._cut(place, option) for place in option.places)

    def _cut(self, place: int, option: Option) -> Slice:
        card, instance = self._parts[place]
        if instance is not None:
            return all_of_instance(card, instance)
        return part_of_card(card, option.percent, option.memory_bytes)

    def _uuid(self, place: int) -> str:
        card, instance = self._parts[place]
        return card.uuid if instance is None else instance.uuid


def _held(slices: Sequence[Slice]) -> dict[str, tuple[int, int]]:
    held: dict[str, tuple[int, int]] = {}
    for slice_ in slices:
        percent, memory_bytes = held.get(slice_.place, (0, 0))
        held[slice_.place] = (percent + slice_.percent, memory_bytes + slice_.memory_bytes)
    return held


def _parts(cards: Sequence[Card]) -> Iterator[tuple[Card, MigInstance | None]]:
    """Yield all healthy places that are worth anything."""
    for card in cards:
        if not card.healthy:
            continue
        if card.mode is CardMode.MIG:
            yield from ((card, instance) for instance in card.mig if instance.cu > 0)
        elif card.cu > 0:
            yield card, None
