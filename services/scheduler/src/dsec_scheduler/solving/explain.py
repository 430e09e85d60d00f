"""Why a request was left waiting: the first constraint that stands in its way."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from functools import cached_property

import numpy as np

from dsec_common.compute.model import WHOLE_PERCENT
from dsec_scheduler.solving.grid import Flags, Integers, Places
from dsec_scheduler.solving.matrix import Matrix
from dsec_scheduler.solving.problem import Constraint, Unplaced, Waiting

Why = tuple[Constraint, str]


def invalid(request: Waiting) -> Unplaced | None:
    """Return why the request's figures cannot be meant, or None when they can."""
    if flaw := request.demand.flaw:
        return Unplaced(request.request_id, Constraint.INVALID, flaw)
    for name in ("waited_s", "duration_s", "share"):
        value = getattr(request, name)
        if not 0 <= value < math.inf:
            reason = f"{name} {value!r} is no number of at least 0"
            return Unplaced(request.request_id, Constraint.INVALID, reason)
    return None


class Explainer:
    """Says why rows have no place.

    Most of those that wait could be served by one slice of an empty card: that is seen for all rows
    at once. The others are looked into one by one, once for each demand.
    """

    def __init__(
        self,
        matrix: Matrix,
        places: Places,
        emptied: Callable[[], Places],
        incomplete: AbstractSet[str],
    ) -> None:
        self._matrix = matrix
        self._emptied = emptied
        self._incomplete = incomplete
        self._known: dict[tuple[object, ...], Why | None] = {}
        self._fits_empty = matrix.fits_one(None)
        self._fits_now = matrix.fits_one(places)

    @cached_property
    def _empty_places(self) -> Places:
        return self._emptied()

    @cached_property
    def _empty(self) -> Matrix:
        return Matrix(self._matrix.requests, self._empty_places)

    def why(self, row: int) -> Unplaced:
        """Return why this row has no place."""
        request = self._matrix.requests[row]
        never = None
        if not self._fits_empty[row]:
            key = (request.demand, request.nodes)
            if key not in self._known:
                self._known[key] = self._why_never(row)
            never = self._known[key]
        constraint, reason = never or self._why_now(row)
        return Unplaced(request.request_id, constraint, reason)

    def _why_never(self, row: int) -> Why | None:
        """Return what keeps the row out of an empty cluster, or None."""
        return self._why_no_card(row) or self._why_too_few(row) or self._why_too_much(row)

    def _why_no_card(self, row: int) -> Why | None:
        request, places, own = self._matrix.requests[row], self._empty_places, self._empty.own(row)
        if not own.any():
            names = ", ".join(sorted(request.nodes or ())) or "no node"
            return Constraint.NODES, f"it may only go to {names}, which has no healthy card"
        if (own & self._empty.takes[row][places.kind]).any():
            return None
        there = ", ".join(sorted({places.kinds[kind].model for kind in places.kind[own]}))
        wanted = " or ".join(request.demand.models)
        return Constraint.MODEL, f"no card is a {wanted}; there are {there}"

    def _why_too_few(self, row: int) -> Why | None:
        demand, places = self._matrix.requests[row].demand, self._empty_places
        if demand.count <= 1:
            return None
        cards = self._usable(row) & places.whole_card
        most = _most(places.groups(same_island=False)[cards])
        if most < demand.count:
            reason = f"{demand.count} cards of one model; no node has more than {most}"
            return Constraint.COUNT, reason
        most = _most(places.groups(same_island=True)[cards & places.on_island])
        if demand.same_island and most < demand.count:
            reason = f"{demand.count} cards on one island; none has more than {most}"
            return Constraint.ISLAND, reason
        return None

    def _why_too_much(self, row: int) -> Why | None:
        demand, places = self._matrix.requests[row].demand, self._empty_places
        if self._could(self._empty, row):
            return None
        groups, usable = self._empty.groups(row), self._usable(row)
        for count in self._empty.all_counts(row):
            percent = self._empty.part(row, count, any_price=True)[0][places.kind]
            if _most(groups[usable & (percent <= WHOLE_PERCENT)]) >= count:
                reason = f"{demand.memory_bytes} bytes of GPU memory; no node has so much in cards"
                return Constraint.TOO_MUCH_MEMORY, reason
        cu = float(np.bincount(groups[usable], places.kind_cu[places.kind[usable]]).max())
        reason = f"{demand.min_cu:g} CU on cards of one model; no node has more than {cu:g}"
        return Constraint.TOO_MANY_CU, reason

    def _usable(self, row: int) -> Flags:
        usable: Flags = self._empty.takes[row][self._empty_places.kind]
        return usable & self._empty.own(row)

    def _why_now(self, row: int) -> Why:
        matrix, request = self._matrix, self._matrix.requests[row]
        if request.gang in self._incomplete:
            return Constraint.GANG, f"there is no room for all of gang {request.gang} at once"
        if self._fits_now[row] and matrix.declined[row].any():
            reason = "what is free is dearer than it pays yet; it waits for something cheaper"
            return Constraint.PRICE, reason
        return Constraint.CAPACITY, f"{request.demand.min_cu:g} CU are not free on any node"

    @staticmethod
    def _could(matrix: Matrix, row: int) -> bool:
        """Return whether the row fits what is free in the matrix, whatever the price."""
        groups = matrix.groups(row)
        return any(
            _most(groups[matrix.room(row, count, any_price=True)]) >= count
            for count in matrix.all_counts(row)
        )


def _most(groups: Integers) -> int:
    return int(np.bincount(groups).max()) if groups.size else 0


def all_without_cards(requests: Sequence[Waiting]) -> list[Unplaced]:
    """Return why nobody can be placed where there is no card at all."""
    reason = "no node has a healthy card that is worth any Compute Units"
    return [Unplaced(request.request_id, Constraint.NO_CARDS, reason) for request in requests]
