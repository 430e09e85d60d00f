"""Rounds of assignment: each gives every slot to at most one request, at the least cost.

A card with room for several requests is there as several slots, counted by what a typical request
needs. When those that were assigned to a card are too much for it together, the dearest to leave
waiting come first and the others wait for the next round, which knows what is left. It ends when a
round places nobody: then nobody who waits fits anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import numpy as np
from scipy.optimize import linear_sum_assignment

from dsec_common.compute.model import WHOLE_PERCENT
from dsec_scheduler.solving.grid import IMPOSSIBLE, Floats, Integers, Option, Places
from dsec_scheduler.solving.matrix import Matrix

#: Who has which option, by row.
Placed = dict[int, Option]

#: Slots of one card in one round at most.
_SLOTS_MAX: Final = 16
#: A round with more entries in its matrix than this squared is dealt out to several assignments:
#: the time of one grows with the cube of its size at worst.
_BLOCK: Final = 256
#: Requests for several cards that are looked at in one round.
_SEVERAL_MAX: Final = 64


class Rounds:
    """Places requests in rounds until nobody who waits fits anywhere, or the time is over."""

    def __init__(self, matrix: Matrix, places: Places, expired: Callable[[], bool]) -> None:
        self._matrix = matrix
        self._places = places
        self._expired = expired
        self._widened = ~matrix.one

    def place(self, rows: Integers, placed: Placed) -> bool:
        """Add to ``placed`` as many of the rows as have room, and take their places.

        Returns:
            Whether it came to its end in time.
        """
        rows = rows[np.argsort(-self._matrix.weight[rows], kind="stable")]
        turn = fruitless = 0
        while rows.size:
            before = rows.size
            rows, several = self._hopeful(rows)
            slots = self._slots(rows)
            blocks = max(1, math.ceil(math.sqrt(rows.size * slots.size) / _BLOCK))
            dealt = (np.arange(rows.size) + turn) % blocks
            for index, row in enumerate(rows.tolist()):
                if several.get(row):
                    cheapest = min(several[row], key=lambda option: option.cost)
                    dealt[index] = self._places.node[cheapest.places[0]] % blocks
            for block in range(blocks):
                if self._expired():
                    return False
                here = slots[self._places.node[slots] % blocks == block]
                self._place_block(rows[dealt == block], here, several, placed)
            rows = rows[[row not in placed for row in rows.tolist()]]
            fruitless = 0 if rows.size < before else fruitless + 1
            turn += 1
            if fruitless >= blocks:
                if not self._widen(rows):
                    break
                fruitless = 0
        return True

    def _hopeful(self, rows: Integers) -> tuple[Integers, dict[int, list[Option]]]:
        """Return the rows that may still fit, and the options of those that may take several."""
        matrix, places = self._matrix, self._places
        freest = np.zeros(len(places.kinds), dtype=np.int64)
        np.maximum.at(freest, places.kind, places.free)
        keep = (matrix.percent[rows] <= freest).any(axis=1) & ~self._widened[rows]
        several: dict[int, list[Option]] = {}
        wider = np.flatnonzero(~keep | matrix.spread[rows])
        for index in wider[matrix.fits_several(rows[wider])].tolist():
            row = int(rows[index])
            if len(several) == _SEVERAL_MAX:
                keep[index] = True  # its turn comes in a later round
            else:
                several[row] = matrix.combinations(row)
                keep[index] |= bool(several[row])
        return rows[keep], several

    def _widen(self, rows: Integers) -> bool:
        """Let rows that fit no single place, for want of memory, try several; say if any may."""
        one = rows[~self._widened[rows]]
        self._widened[one] = True
        return any(self._matrix.counts(row) for row in one.tolist())

    def _slots(self, rows: Integers) -> Integers:
        """Return the places with room, each as often as a typical row would fit there."""
        matrix, places = self._matrix, self._places
        free = np.flatnonzero(places.free > 0)
        needed = matrix.percent[rows]
        typical = np.full(len(places.kinds), WHOLE_PERCENT)
        for kind in range(len(places.kinds)):
            possible = needed[:, kind][needed[:, kind] < IMPOSSIBLE]
            if possible.size:
                typical[kind] = np.median(possible)
        times = places.free[free] // np.maximum(1, typical[places.kind[free]])
        return np.repeat(free, np.clip(times, 1, min(_SLOTS_MAX, max(1, rows.size))))

    def _place_block(
        self,
        rows: Integers,
        slots: Integers,
        several: dict[int, list[Option]],
        placed: Placed,
    ) -> None:
        """Assign the rows to the slots at the least cost, and take what is free for all of them."""
        if not rows.size or not slots.size:
            return
        matrix, places = self._matrix, self._places
        gain = matrix.singles(rows, slots)
        anchors = self._anchor(rows, slots, several, gain)
        gain -= matrix.waiting[rows, None]
        np.minimum(gain, 0, out=gain)
        chosen_rows, chosen_slots = linear_sum_assignment(gain)
        wanted = gain[chosen_rows, chosen_slots] < 0
        for index, slot in zip(
            chosen_rows[wanted].tolist(), chosen_slots[wanted].tolist(), strict=True
        ):
            row = int(rows[index])
            option = anchors.get((index, slot)) or matrix.option(row, (int(slots[slot]),))
            if places.fits(option):
                places.take(option)
                placed[row] = option

    def _anchor(
        self,
        rows: Integers,
        slots: Integers,
        several: dict[int, list[Option]],
        cost: Floats,
    ) -> dict[tuple[int, int], Option]:
        """Write the cost of each option of several cards into the slot of its first card."""
        anchors: dict[tuple[int, int], Option] = {}
        if not several:
            return anchors
        first = dict(zip(slots[::-1].tolist(), range(slots.size - 1, -1, -1), strict=True))
        for index, row in enumerate(rows.tolist()):
            for option in several.get(row, ()):
                slot = first.get(option.places[0])
                if slot is not None:
                    cost[index, slot] = option.cost
                    anchors[index, slot] = option
        return anchors
