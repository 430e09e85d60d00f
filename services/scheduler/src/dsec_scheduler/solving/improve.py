"""Improvement: exchanges around the requests that pay most above the least they could pay.

Rounds decide one layer of slots after the other, so a large request may find all cards cut up, and
a long one the cheap cards taken. What a request pays above the least it could pay, alone with what
was free, is its *regret*. For each of the greatest regrets the best exchange is looked for: it
takes its place, those that stand in its way move elsewhere or wait, and all of that must cost less
than before. Gangs stay as they are.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np

from dsec_scheduler.solving.grid import Floats, Integers, Option, Places
from dsec_scheduler.solving.matrix import Matrix
from dsec_scheduler.solving.rounds import Placed

#: An answer this near to what nobody can beat is left alone.
_GAP: Final = 2e-3
#: Requests, the most urgent first, that are looked at.
_LOOKED_AT_MAX: Final = 2048
#: Of those so many, the greatest regrets first, are exchanged in one pass, and passes.
_TRIED_MAX: Final = 48
_PASSES_MAX: Final = 3
#: Places that are tried for one request; who stands in the way of one there, and how many leave.
_PLACES_TRIED: Final = 10
_IN_THE_WAY_MAX: Final = 8
_LEAVE_MAX: Final = 3
_LEAST_SAVING: Final = 1e-9


class Improver:
    """Makes an answer cheaper without ever making it dearer. It is made before places are taken."""

    def __init__(
        self,
        matrix: Matrix,
        places: Places,
        gangs: Mapping[str, Sequence[int]],
        expired: Callable[[], bool],
    ) -> None:
        self._matrix = matrix
        self._places = places
        self._expired = expired
        self._in_gang = {row for rows in gangs.values() for row in rows}
        urgent = np.argsort(-matrix.weight, kind="stable")
        self._rows: Integers = np.sort(urgent[:_LOOKED_AT_MAX])
        self._least = matrix.least(self._rows)
        self._at: dict[int, list[int]] = {}
        self._emptied = self._memory_emptied = places.free
        self._dearness: Floats = np.zeros(0)

    def is_good(self, placed: Placed) -> bool:
        """Return whether the answer is as good as it can be told to be."""
        costs = np.array([self._cost(row, placed) for row in self._rows.tolist()])
        return float((costs - self._least).sum()) <= _GAP * float(costs.sum())

    def improve(self, placed: Placed) -> bool:
        """Change ``placed`` for the better; return whether it came to its end in time."""
        self._look_at(placed)
        for _ in range(_PASSES_MAX):
            changed = False
            for row in self._regretful(placed):
                if self._expired():
                    return False
                changed |= self._exchange(row, placed)
            if not changed:
                break
        return True

    def _look_at(self, placed: Placed) -> None:
        """Note who is where, and what would be free if all who may leave had left.

        The latter stays as it is whoever moves.
        """
        self._at = {}
        self._emptied = self._places.free.copy()
        self._memory_emptied = self._places.memory.copy()
        for row, option in placed.items():
            for place in option.places:
                self._at.setdefault(place, []).append(row)
                if row not in self._in_gang:
                    self._emptied[place] += option.percent
                    self._memory_emptied[place] += option.memory_bytes
        self._dearness = np.zeros(len(self._places))
        for place in self._at:
            self._weigh(place, placed)

    def _weigh(self, place: int, placed: Placed) -> None:
        """Note what a percent of the place is worth to whom it is worth least."""
        rows = self._at.get(place, ())
        losses = (self._loss(row, placed) / placed[row].percent for row in rows)
        self._dearness[place] = min(losses, default=0.0)

    def _cost(self, row: int, placed: Placed) -> float:
        return placed[row].cost if row in placed else float(self._matrix.waiting[row])

    def _regretful(self, placed: Placed) -> list[int]:
        rows = self._rows
        costs = np.array([self._cost(row, placed) for row in rows.tolist()])
        regret = costs - self._least
        order = rows[np.argsort(-regret, kind="stable")][: int((regret > 0).sum())]
        return [row for row in order.tolist() if row not in self._in_gang][:_TRIED_MAX]

    # --- One exchange -------------------------------------------------------------------------

    def _exchange(self, row: int, placed: Placed) -> bool:
        """Do the most promising exchange for the row; undo it and say so if it saves nothing."""
        before = self._cost(row, placed)
        own = self._leave(row, placed)
        option, leaving = self._most_promising(row, placed)
        if option is not None:
            before += sum(placed[other].cost for other in leaving)
            former = {other: self._leave(other, placed) for other in leaving}
            self._enter(row, option, placed)
            after = option.cost + sum(self._settle(other, placed) for other in leaving)
            if after < before - _LEAST_SAVING * before:
                return True
            for other in (row, *leaving):
                self._leave(other, placed)
            for other, old in former.items():
                self._enter(other, old, placed)
        self._enter(row, own, placed)
        return False

    def _most_promising(self, row: int, placed: Placed) -> tuple[Option | None, tuple[int, ...]]:
        """Return the cheapest option, with what those in its way lose when they all must wait."""
        best: tuple[Option | None, tuple[int, ...]] = (None, ())
        least = math.inf
        for option in self._wanted(row):
            leaving = self._who_leaves(option, placed)
            if leaving is None:
                continue
            total = option.cost + sum(self._loss(other, placed) for other in leaving)
            if total < least:
                least, best = total, (option, leaving)
        return best

    def _loss(self, row: int, placed: Placed) -> float:
        return float(self._matrix.waiting[row]) - placed[row].cost

    def _wanted(self, row: int) -> list[Option]:
        """Return the row's likeliest options if all who may leave a place had left it."""
        matrix, places = self._matrix, self._places
        free, memory = places.free, places.memory
        places.free, places.memory = self._emptied, self._memory_emptied
        try:
            cost = matrix.singles(np.array([row]), np.arange(len(places)))[0]
            cost += np.maximum(0, matrix.percent[row][places.kind] - free) * self._dearness
            likeliest = np.argsort(cost, kind="stable")[:_PLACES_TRIED]
            options = [
                matrix.option(row, (place,))
                for place in likeliest.tolist()
                if cost[place] < matrix.waiting[row]
            ]
            if matrix.spread[row] or not options:
                options += matrix.combinations(row)[:_PLACES_TRIED]
        finally:
            places.free, places.memory = free, memory
        return options

    def _who_leaves(self, option: Option, placed: Placed) -> tuple[int, ...] | None:
        """Return whose leaving makes room for the option at the least loss; None if nobody's."""
        leaving: dict[int, None] = {}
        for place in option.places:
            percent = option.percent - int(self._places.free[place])
            memory_bytes = option.memory_bytes - int(self._places.memory[place])
            if percent <= 0 and memory_bytes <= 0:
                continue
            there = sorted(
                (row for row in self._at.get(place, ()) if row not in self._in_gang),
                key=lambda row: (self._loss(row, placed), row),
            )[:_IN_THE_WAY_MAX]
            enough = [
                some
                for count in range(1, _LEAVE_MAX + 1)
                for some in itertools.combinations(there, count)
                if sum(placed[row].percent for row in some) >= percent
                and sum(placed[row].memory_bytes for row in some) >= memory_bytes
            ]
            if not enough:
                return None
            least = min(enough, key=lambda some: sum(self._loss(row, placed) for row in some))
            leaving.update(dict.fromkeys(least))
        return tuple(leaving)

    # --- Moves --------------------------------------------------------------------------------

    def _leave(self, row: int, placed: Placed) -> Option | None:
        option = placed.pop(row, None)
        if option is not None:
            self._places.give(option)
            for place in option.places:
                self._at[place].remove(row)
                self._weigh(place, placed)
        return option

    def _enter(self, row: int, option: Option | None, placed: Placed) -> None:
        if option is not None:
            self._places.take(option)
            placed[row] = option
            for place in option.places:
                self._at.setdefault(place, []).append(row)
                self._weigh(place, placed)

    def _settle(self, row: int, placed: Placed) -> float:
        """Put the row where it is cheapest now; return what it costs, there or waiting."""
        matrix = self._matrix
        cost = matrix.singles(np.array([row]), np.arange(len(self._places)))[0]
        place = int(cost.argmin())
        options = [matrix.option(row, (place,))] if np.isfinite(cost[place]) else []
        if matrix.spread[row] or not options:
            options += matrix.combinations(row)
        options = [option for option in options if option.cost < matrix.waiting[row]]
        self._enter(row, min(options, key=lambda option: option.cost, default=None), placed)
        return self._cost(row, placed)
