"""Small problems as one mixed integer programme (HiGHS): exact, where that is quick."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from dsec_common.compute.model import WHOLE_PERCENT
from dsec_scheduler.solving.grid import Floats, Option, Places
from dsec_scheduler.solving.matrix import Matrix
from dsec_scheduler.solving.rounds import Placed

#: Programmes with more options than this are left to the exchanges.
_OPTIONS_MAX: Final = 400
#: Branches of one programme; what is best by then counts. By number, not by time: deterministic.
_BRANCHES_MAX: Final = 200
_GAP: Final = 1e-3


def cheapest(
    matrix: Matrix, places: Places, gangs: Mapping[str, Sequence[int]], left_s: float
) -> Placed | None:
    """Return the best placement of all rows in what is free; None where that would take long.

    Args:
        matrix: the requests.
        places: nothing of them may be taken for these requests yet.
        gangs: rows that are placed together or not at all.
        left_s: what is best after so long counts.
    """
    count = len(matrix.requests)
    if count > _OPTIONS_MAX or left_s <= 0:
        return None
    everywhere = np.ones(len(places), dtype=bool)
    options = (
        (row, option)
        for row in range(count)
        for option in matrix.choices(row, everywhere)
        if option.cost < matrix.waiting[row]
    )
    variables = list(itertools.islice(options, _OPTIONS_MAX + 1))
    if len(variables) > _OPTIONS_MAX:
        return None
    if not variables:
        return {}
    gains = np.array([option.cost - matrix.waiting[row] for row, option in variables])
    limits = [_room(variables, places, count)]
    if (whole := _gangs_whole(variables, gangs)) is not None:
        limits.append(whole)
    result = milp(
        gains / np.abs(gains).max(),
        integrality=np.ones(len(variables), dtype=np.int64),
        bounds=Bounds(0, 1),
        constraints=limits,
        options={"time_limit": left_s, "node_limit": _BRANCHES_MAX, "mip_rel_gap": _GAP},
    )
    if result.x is None:
        return None
    taken = np.flatnonzero(result.x > 0.5)  # noqa: PLR2004  integral but for rounding
    return dict(variables[at] for at in taken.tolist())


def _room(variables: Sequence[tuple[int, Option]], places: Places, count: int) -> LinearConstraint:
    """Return: one option a row, and of a place no more than is free."""
    entries: list[tuple[int, int, float]] = []
    for column, (row, option) in enumerate(variables):
        entries.append((row, column, 1.0))
        for place in option.places:
            entries.append((count + 2 * place, column, option.percent / WHOLE_PERCENT))
            memory = option.memory_bytes / max(1, int(places.memory[place]))
            entries.append((count + 2 * place + 1, column, memory))
    upper = np.ones(count + 2 * len(places))
    upper[count::2] = places.free / WHOLE_PERCENT
    return _constraint(entries, (upper.size, len(variables)), -np.inf, upper)


def _gangs_whole(
    variables: Sequence[tuple[int, Option]], gangs: Mapping[str, Sequence[int]]
) -> LinearConstraint | None:
    """Return: of each gang as much of one member as of the first."""
    entries: list[tuple[int, int, float]] = []
    line = 0
    for first, *others in gangs.values():
        for member in others:
            entries += [
                (line, column, 1.0 if row == member else -1.0)
                for column, (row, _) in enumerate(variables)
                if row in {member, first}
            ]
            line += 1
    if not line:
        return None
    return _constraint(entries, (line, len(variables)), 0, np.zeros(line))


def _constraint(
    entries: Sequence[tuple[int, int, float]], shape: tuple[int, int], lower: float, upper: Floats
) -> LinearConstraint:
    lines, columns, values = zip(*entries, strict=True) if entries else ((), (), ())
    return LinearConstraint(csr_array((values, (lines, columns)), shape=shape), lower, upper)
