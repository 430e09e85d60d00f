"""The slices of one node that are free, indexed by size, so that a grant is a look-up.

Every way to cut a card is there before anyone asks: a card that MPS divides can give any whole
percent that it has free, and a MIG instance is a slice that the driver has made. Cards of one model
stand in a *shelf*, by how many percent they have free; a bit for each percent says which rows of
the shelf hold any. To find the fullest card with room for 12 % is to find the lowest bit from 12
upwards, whether the node has one card or a hundred, and one lease on them or thousands. Taking and
giving back move a card from one row to another.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from dsec_common.compute.model import (
    WHOLE_PERCENT,
    Card,
    CardMode,
    GpuDemand,
    MigInstance,
    Slice,
    all_of_instance,
    cu_of,
    memory_of,
    part_of_card,
    percent_for,
)

_DIGITS: Final = 6
"""Differences of units below this many decimals are none."""


class _Place:
    """A card, or a MIG instance of one, and what of it is free; below 0 when more is held."""

    __slots__ = ("card", "free_bytes", "free_percent", "instance", "shelves")

    def __init__(self, card: Card, instance: MigInstance | None = None) -> None:
        self.card = card
        self.instance = instance
        self.free_percent = WHOLE_PERCENT
        self.free_bytes = card.memory_bytes if instance is None else instance.memory_bytes
        self.shelves: list[_Shelf] = []

    @property
    def uuid(self) -> str:
        return self.card.uuid if self.instance is None else self.instance.uuid

    @property
    def worth(self) -> float:
        return self.card.cu if self.instance is None else self.instance.cu

    @property
    def rest(self) -> int:
        """The percent that can be given: of what cannot be divided, all or none."""
        if self.card.mode is CardMode.MPS or self.free_percent == WHOLE_PERCENT:
            return max(0, self.free_percent)
        return 0

    def has_memory(self, percent: int, memory_bytes: int) -> bool:
        """Return whether the memory asked for, or else what goes with the percent, is free."""
        wanted = memory_bytes or memory_of(percent, self.card.memory_bytes)
        return wanted <= self.free_bytes

    def cut(self, percent: int, memory_bytes: int) -> Slice:
        if self.instance is not None:
            return all_of_instance(self.card, self.instance)
        if self.card.mode is CardMode.WHOLE:
            # Nobody else can use the rest of its memory.
            memory_bytes = self.card.memory_bytes
        return part_of_card(self.card, percent, memory_bytes)


class _Shelf:
    """Places of one kind by the percent that they have free: rows of uuids, in order."""

    __slots__ = ("cu", "divisible", "mask", "model", "rows")

    def __init__(self, model: str, cu: float, *, divisible: bool) -> None:
        self.model = model
        self.cu = cu
        self.divisible = divisible
        self.mask = 0
        self.rows: list[list[str]] = [[] for _ in range(WHOLE_PERCENT + 1)]

    def add(self, place: _Place) -> None:
        row = self.rows[place.rest]
        insort(row, place.uuid)
        self.mask |= 1 << place.rest

    def remove(self, place: _Place) -> None:
        row = self.rows[place.rest]
        row.pop(bisect_left(row, place.uuid))
        if not row:
            self.mask &= ~(1 << place.rest)

    def from_fullest(self, percent: int) -> Iterator[str]:
        """Yield the places with so many percent free, those with the least free first."""
        left = self.mask >> percent << percent
        while left:
            lowest = left & -left
            yield from self.rows[lowest.bit_length() - 1]
            left ^= lowest


class _Choice(NamedTuple):
    """A way to serve a demand; the least of several is the best."""

    wasted_cu: float
    missing_cu: float
    untouched: int
    left_percent: int
    uuids: tuple[str, ...]
    percent: int
    memory_bytes: int


class SlicePool:
    """What is free of one node's cards, kept up to date by :meth:`take` and :meth:`give`.

    A slice of a card that is not there, or not there any more, is remembered and counts nowhere.

    Attributes:
        closed: nothing is to be had, whatever no lease holds: for a reason that is not the cards'.
    """

    def __init__(self, cards: Iterable[Card], held: Iterable[Slice] = ()) -> None:
        self._places: dict[str, _Place] = {}
        self._shelves: dict[tuple[str, float, bool], _Shelf] = {}
        self._islands: dict[tuple[str, float, bool, str], _Shelf] = {}
        self._instances: dict[tuple[str, float], _Shelf] = {}
        self._free_cu: float | None = None
        self.closed = False
        for card in cards:
            self._add(card)
        for slice_ in held:
            self.take((slice_,))

    def _add(self, card: Card) -> None:
        if card.mode is CardMode.MIG:
            for instance in card.mig:
                place = self._places[instance.uuid] = _Place(card, instance)
                if card.healthy and instance.cu > 0:
                    self._shelve(place, self._instances, (card.model, instance.cu))
            return
        place = self._places[card.uuid] = _Place(card)
        if not card.healthy or card.cu <= 0:
            return
        kind = (card.model, card.cu, card.mode is CardMode.MPS)
        self._shelve(place, self._shelves, kind)
        if card.island:
            self._shelve(place, self._islands, (*kind, card.island))

    def _shelve(self, place: _Place, shelves: dict, key: tuple) -> None:  # type: ignore[type-arg]
        shelf = shelves.get(key)
        if shelf is None:
            divisible = place.card.mode is CardMode.MPS
            shelf = shelves[key] = _Shelf(key[0], key[1], divisible=divisible)
        shelf.add(place)
        place.shelves.append(shelf)

    # --- Changing -----------------------------------------------------------------------------

    def take(self, slices: Iterable[Slice]) -> None:
        """Count the slices as held."""
        for slice_ in slices:
            self._move(slice_, -1)

    def give(self, slices: Iterable[Slice]) -> None:
        """Count the slices as free again."""
        for slice_ in slices:
            self._move(slice_, 1)

    def _move(self, slice_: Slice, sign: int) -> None:
        place = self._places.get(slice_.place)
        if place is None:
            return
        self._free_cu = None
        for shelf in place.shelves:
            shelf.remove(place)
        place.free_percent += sign * slice_.percent
        place.free_bytes += sign * slice_.memory_bytes
        for shelf in place.shelves:
            shelf.add(place)

    # --- Asking -------------------------------------------------------------------------------

    def find(self, demand: GpuDemand) -> tuple[Slice, ...] | None:
        """Return the slices that serve the demand best, as :func:`~.model.fit` says; take none."""
        if self.closed or demand.flaw:
            return None
        counts = (demand.count,) if demand.count else range(1, len(self._places) + 1)
        for count in counts:
            best = min(self._choices(demand, count), default=None)
            if best is not None:
                return tuple(
                    self._places[uuid].cut(best.percent, best.memory_bytes) for uuid in best.uuids
                )
        return None

    def has(self, slices: Iterable[Slice]) -> bool:
        """Return whether all of just these slices are to be had, healthy, and distinct."""
        return not self.closed and self.has_free(slices)

    def has_free(self, slices: Iterable[Slice]) -> bool:
        """Return the same of a pool that is closed as if it were not."""
        wanted = list(slices)
        taken: list[Slice] = []
        try:
            for slice_ in wanted:
                place = self._places.get(slice_.place)
                if place is None or not place.shelves or not _is_cut_of(slice_, place):
                    return False
                self._move(slice_, -1)
                taken.append(slice_)
            return True
        finally:
            self.give(taken)

    @property
    def free_cu(self) -> float:
        """The Compute Units that are to be had, counted once after each change."""
        if self.closed:
            return 0.0
        if self._free_cu is None:
            self._free_cu = math.fsum(
                cu_of(place.rest, place.worth) for place in self._places.values() if place.shelves
            )
        return self._free_cu

    def free(self) -> dict[str, tuple[int, int]]:
        """Return percent and bytes that no lease holds, by card or MIG instance."""
        return {
            uuid: (place.free_percent, place.free_bytes) for uuid, place in self._places.items()
        }

    def _choices(self, demand: GpuDemand, count: int) -> Iterator[_Choice]:
        """Yield the best way in each shelf to serve the demand on just so many cards."""
        shelves: Iterable[_Shelf]
        if count == 1:
            shelves = (*self._shelves.values(), *self._instances.values())
        else:
            shelves = (self._islands if demand.same_island else self._shelves).values()
        memory_bytes = -(-demand.memory_bytes // count)
        for shelf in shelves:
            if demand.models and shelf.model not in demand.models:
                continue
            least = percent_for(demand.min_cu / count, shelf.cu)
            if least > WHOLE_PERCENT:
                continue
            most = min(percent_for(demand.max_cu / count, shelf.cu), WHOLE_PERCENT)
            if not shelf.divisible:
                least = most = WHOLE_PERCENT
            found = self._walk(shelf, count, most, memory_bytes)
            if found is None and least < most:
                most = self._most_that_fits(shelf, count, least, most, memory_bytes)
                found = self._walk(shelf, count, most, memory_bytes) if most else None
            if found is not None:
                yield self._weigh(demand, shelf, found, most, memory_bytes)

    def _walk(
        self, shelf: _Shelf, count: int, percent: int, memory_bytes: int
    ) -> tuple[str, ...] | None:
        """Return the fullest places of the shelf with room for so much each."""
        found: list[str] = []
        for uuid in shelf.from_fullest(percent):
            place = self._places[uuid]
            if place.instance is not None:
                has_memory = memory_bytes <= place.free_bytes
            else:
                has_memory = place.has_memory(percent, memory_bytes)
            if has_memory:
                found.append(uuid)
                if len(found) == count:
                    return tuple(found)
        return None

    def _most_that_fits(
        self, shelf: _Shelf, count: int, least: int, most: int, memory_bytes: int
    ) -> int:
        """Return the most percent below ``most`` that so many places can give, or 0."""
        caps = []
        for uuid in shelf.from_fullest(least):
            place = self._places[uuid]
            cap = min(place.rest, most - 1)
            while cap >= least and not place.has_memory(cap, memory_bytes):
                cap -= 1
            if cap >= least:
                caps.append(cap)
        caps.sort(reverse=True)
        return caps[count - 1] if len(caps) >= count else 0

    def _weigh(
        self, demand: GpuDemand, shelf: _Shelf, found: tuple[str, ...], percent: int, each: int
    ) -> _Choice:
        given = len(found) * shelf.cu * percent / WHOLE_PERCENT
        rests = [self._places[uuid].rest for uuid in found]
        wasted = 0.0 if shelf.divisible else max(0.0, given - demand.max_cu)
        return _Choice(
            wasted_cu=round(wasted, _DIGITS),
            missing_cu=round(max(0.0, demand.max_cu - given), _DIGITS),
            untouched=rests.count(WHOLE_PERCENT),
            left_percent=sum(rests) - percent * len(rests),
            uuids=found,
            percent=percent,
            memory_bytes=each,
        )


def _is_cut_of(slice_: Slice, place: _Place) -> bool:
    """Return whether the slice is one that could be cut from what is free of the place."""
    if not 0 < slice_.percent <= place.rest or not 0 <= slice_.memory_bytes <= place.free_bytes:
        return False
    cut = place.cut(slice_.percent, slice_.memory_bytes)
    return slice_ == cut
