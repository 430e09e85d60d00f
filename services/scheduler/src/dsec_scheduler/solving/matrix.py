"""What each request would need and cost in each place."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from dsec_common.compute.model import WHOLE_PERCENT, CardMode
from dsec_scheduler.solving import objective
from dsec_scheduler.solving.grid import (
    IMPOSSIBLE,
    Flags,
    Floats,
    Integers,
    Option,
    Places,
)
from dsec_scheduler.solving.problem import Waiting

_TOLERANCE: Final = 1e-9
#: Ways to choose cards of one group for one request that are looked at when all are asked for.
_CHOICES_MAX: Final = 12


class Matrix:
    """The requests as arrays, by row, and their costs.

    Attributes:
        waiting: what leaving each row waiting costs.
        weight: each row's urgency.
        one: rows that one slice may serve.
        spread: rows that only several slices of some kind can serve.
        takes: for each row and kind, whether it takes such a model.
        declined: for each row and kind, whether that is too dear for it yet.
        percent: of one place of each kind that a row needs when one slice is to serve it;
            ``IMPOSSIBLE`` where none can.
    """

    def __init__(self, requests: Sequence[Waiting], places: Places) -> None:
        self.requests = requests
        self._places = places
        price = places.kind_price
        demands = [request.demand for request in requests]
        self._cu = np.array([demand.min_cu for demand in demands], dtype=np.float64)
        self._memory = np.array([demand.memory_bytes for demand in demands], dtype=np.int64)
        self._kind_memory = np.array([kind.memory_bytes for kind in places.kinds], dtype=np.int64)
        self._look_at_memory = bool(self._memory.any()) or not places.proportional
        self._hours = np.array([objective.hours(request) for request in requests])
        self.weight: Floats = np.array([objective.urgency(request) for request in requests])
        self.one: Flags = np.array([demand.count <= 1 for demand in demands], dtype=bool)
        self._only = self._confined()
        self.takes = self._models()
        cheapest, dearest = float(price.min()), float(price.max())
        limits = np.array(
            [
                objective.price_limit(one.service_class, one.waited_s, cheapest, dearest)
                for one in requests
            ]
        )
        self.declined: Flags = price[None, :] > limits[:, None] + _TOLERANCE
        self.percent: Integers = self._percent(np.arange(len(requests)), 1)
        several = np.array([demand.count == 0 for demand in demands], dtype=bool)
        too_small = (self.percent == IMPOSSIBLE) & self.takes & ~self.declined
        self.spread: Flags = ~self.one | (several & too_small.any(axis=1))
        self.percent[~self.one] = IMPOSSIBLE
        self._money = self.percent / WHOLE_PERCENT * (places.kind_cu * price) * self._hours[:, None]
        self._taken = self._money * (objective.FRAGMENTATION / WHOLE_PERCENT * self.percent)
        # Where all is free of charge a place must be worth something all the same.
        most = (dearest or 1.0) * float(self._hours.max())
        self.waiting: Floats = self._dearest() + self.weight * self._cu * most

    def _dearest(self) -> Floats:
        """Return the most that each row costs on any kind of card, however little is left of it.

        Who needs several cards may get up to one card's units more than were asked for.
        """
        worth, price = self._places.kind_cu, self._places.kind_price
        counts = np.array([max(1, request.demand.count) for request in self.requests])
        units = np.zeros(self.takes.shape)
        for count in np.unique(counts).tolist():
            rows = np.flatnonzero(counts == count)
            percent = self._percent(rows, count, any_price=True)
            alike = count * percent / WHOLE_PERCENT * worth
            several = self._cu[rows, None] + worth
            units[rows] = np.where(percent <= WHOLE_PERCENT, alike, several)
        money = np.where(self.takes, units * price, 0.0).max(axis=1) * self._hours
        dearest: Floats = money * (1 + objective.FRAGMENTATION)
        return dearest

    def _confined(self) -> dict[int, Flags]:
        """Return the places that rows are confined to, for those that are."""
        names = np.array(self._places.node_names, dtype=object)
        return {
            row: np.isin(names, list(request.nodes))[self._places.node]
            for row, request in enumerate(self.requests)
            if request.nodes is not None
        }

    def _models(self) -> Flags:
        kinds = self._places.kinds
        rows = {
            models: [not models or kind.model in models for kind in kinds]
            for models in {request.demand.models for request in self.requests}
        }
        return np.array([rows[request.demand.models] for request in self.requests], dtype=bool)

    def _percent(self, rows: Integers, count: int, *, any_price: bool = False) -> Integers:
        """Return the percent of each kind that the rows need on each of ``count`` places."""
        places = self._places
        share = WHOLE_PERCENT / count * self._cu[rows, None] / places.kind_cu
        needed = np.clip(np.ceil(np.minimum(share, IMPOSSIBLE) - _TOLERANCE), 1, IMPOSSIBLE)
        percent = needed.astype(np.int64)
        percent[(percent < WHOLE_PERCENT) & ~places.divisible] = WHOLE_PERCENT
        percent[~self.takes[rows]] = IMPOSSIBLE
        if not any_price:
            percent[self.declined[rows]] = IMPOSSIBLE
        return percent

    def part(self, row: int, count: int, *, any_price: bool = False) -> tuple[Integers, Integers]:
        """Return percent and bytes of each kind that a row needs on each of ``count`` places."""
        percent = self._percent(np.array([row]), count, any_price=any_price)[0]
        each = -(-int(self._memory[row]) // count)
        memory_bytes = np.full_like(percent, each)
        if not each:
            memory_bytes = self._kind_memory * np.minimum(percent, WHOLE_PERCENT) // WHOLE_PERCENT
        return percent, memory_bytes

    def counts(self, row: int) -> range:
        """Return over how many places, more than one, the row may be spread."""
        count = self.requests[row].demand.count
        if count:
            return range(count, count + 1) if count > 1 else range(0)
        return range(2, self._places.together_max + 1)

    def all_counts(self, row: int) -> list[int]:
        """Return over how many places the row may be spread."""
        return [*([1] if self.one[row] else ()), *self.counts(row)]

    def own(self, row: int) -> Flags:
        """Return the places of the nodes that the row may go to."""
        return self._only.get(row, np.ones(len(self._places), dtype=np.bool_))

    def room(self, row: int, count: int, *, any_price: bool = False) -> Flags:
        """Return the places that have room for one of ``count`` parts of the row."""
        places = self._places
        percent, memory_bytes = self.part(row, count, any_price=any_price)
        room: Flags = np.less_equal(percent[places.kind], places.free)
        room &= memory_bytes[places.kind] <= places.memory
        if (only := self._only.get(row)) is not None:
            room &= only
        if count > 1:
            room &= places.whole_card
            if self.requests[row].demand.same_island:
                room &= places.on_island
        return room

    def fits_one(self, places: Places | None) -> Flags:
        """Return which rows one slice of what is free could serve, whatever its price.

        Rows confined to some nodes are told not to: they want a closer look.

        Args:
            places: what is free; None when everything is.
        """
        freest = np.full(len(self._places.kinds), WHOLE_PERCENT, dtype=np.int64)
        widest = self._kind_memory
        if places is not None:
            freest, widest = np.zeros_like(freest), np.zeros_like(freest)
            np.maximum.at(freest, places.kind, places.free)
            np.maximum.at(widest, places.kind, places.memory)
        every = np.arange(len(self.requests))
        percent = self._percent(every, 1, any_price=True)
        enough = (percent <= freest) & (self._memory[:, None] <= widest)
        fits: Flags = self.one & np.any(enough, axis=1)
        fits[list(self._only)] = False
        return fits

    def fits_several(self, rows: Integers) -> Flags:
        """Return which rows several cards of one node have the units for, memory apart."""
        table = self._places.freest_together()
        counts = np.array([self.requests[row].demand.count for row in rows.tolist()])
        fits = np.zeros(rows.size, dtype=np.bool_)
        for count in range(2, table.shape[1]):
            some = np.flatnonzero(((counts == 0) | (counts == count)) & ~fits)
            fits[some] = (self._percent(rows[some], count) <= table[:, count]).any(axis=1)
        return fits

    def groups(self, row: int) -> Integers:
        """Return a number for each place; those with the same may serve the row together."""
        return self._places.groups(same_island=self.requests[row].demand.same_island)

    # --- Costs --------------------------------------------------------------------------------

    def singles(self, rows: Integers, slots: Integers) -> Floats:
        """Return the cost of each of the rows in each of the slots; ``inf`` where it has no room.

        Args:
            rows: requests.
            slots: places; one may be there several times.
        """
        places = self._places
        kinds = places.kind[slots]
        cost = np.take(self._money[rows], kinds, axis=1)
        cost *= places.factor[slots]
        cost -= np.take(self._taken[rows], kinds, axis=1)
        full = np.take(self.percent[rows], kinds, axis=1) > places.free[slots]
        if self._look_at_memory:
            full |= np.take(self._bytes(rows), kinds, axis=1) > places.memory[slots]
        for index, row in enumerate(rows.tolist() if self._only else ()):
            if (only := self._only.get(row)) is not None:
                full[index] |= ~only[slots]
        cost[full] = np.inf
        return cost

    def _bytes(self, rows: Integers) -> Integers:
        asked = self._memory[rows, None]
        percent = np.minimum(self.percent[rows], WHOLE_PERCENT)
        along: Integers = np.where(asked > 0, asked, self._kind_memory * percent // WHOLE_PERCENT)
        return along

    def option(self, row: int, places: tuple[int, ...]) -> Option:
        """Return the row's option that takes these places of one kind, free or not."""
        kind_number = int(self._places.kind[places[0]])
        kind = self._places.kinds[kind_number]
        percent, memory_bytes = self.part(row, len(places))
        needed = int(percent[kind_number])
        money = needed / WHOLE_PERCENT * kind.cu * kind.price * float(self._hours[row])
        taken = objective.FRAGMENTATION * needed / WHOLE_PERCENT
        return Option(
            places,
            needed,
            kind.memory_bytes if kind.mode is not CardMode.MPS else int(memory_bytes[kind_number]),
            sum(money * (float(self._places.factor[place]) - taken) for place in places),
        )

    def combinations(self, row: int) -> list[Option]:
        """Return the row's option of several cards of one node and kind, for each of those.

        Its cards are as few as will do there, and the fullest that have room, so that whole ones
        stay whole.
        """
        places, groups = self._places, self.groups(row)
        options: dict[int, Option] = {}
        for count in self.counts(row):
            found = np.flatnonzero(self.room(row, count))
            found = found[np.lexsort((found, places.free[found], groups[found]))]
            starts = np.flatnonzero(np.diff(groups[found], prepend=-1))
            sizes = np.diff(starts, append=len(found))
            for start in starts[sizes >= count].tolist():
                group = int(groups[found[start]])
                if group not in options:
                    some = tuple(found[start : start + count].tolist())
                    options[group] = self.option(row, some)
        return list(options.values())

    def choices(self, row: int, among: Flags) -> Iterator[Option]:
        """Yield the row's options within some places: single ones, and ways to choose cards.

        Of very many ways to choose, those of the fullest cards.
        """
        places, groups = self._places, self.groups(row)
        if self.one[row]:
            for place in np.flatnonzero(among & self.room(row, 1)).tolist():
                yield self.option(row, (place,))
        for count in self.counts(row):
            room = among & self.room(row, count)
            for group in np.unique(groups[room]):
                members = np.flatnonzero(room & (groups == group))
                members = members[np.argsort(places.free[members], kind="stable")]
                chosen = itertools.combinations(members.tolist(), count)
                for some in itertools.islice(chosen, _CHOICES_MAX):
                    yield self.option(row, some)

    def least(self, rows: Integers) -> Floats:
        """Return what each of the rows costs at least, were it alone with what is free.

        For those that several slices may serve that is a bound: exactly its units, where cheapest.
        """
        every = np.arange(len(self._places))
        least: Floats = self.singles(rows, every).min(axis=1)
        usable = self.takes[rows] & ~self.declined[rows]
        price = np.where(usable, self._places.kind_price, np.inf).min(axis=1)
        bound = np.where(self.spread[rows], self._cu[rows] * price * self._hours[rows], np.inf)
        return np.minimum(np.minimum(least, bound), self.waiting[rows])
