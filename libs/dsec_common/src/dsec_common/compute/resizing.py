"""Giving a lease more or fewer Compute Units where it is: the same cards, other percents.

Only what MPS divides can change: a whole card or a MIG instance is all or nothing. Memory that was
asked for stays; memory that goes with the units goes with them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from dsec_common.compute.model import (
    WHOLE_PERCENT,
    Card,
    CardMode,
    GpuDemand,
    Slice,
    cu_of,
    part_of_card,
    percent_for,
)

_TOLERANCE: Final = 1e-9
"""Quotients such as 100 x 6.5 / 65 are not exact."""


class Bounds(NamedTuple):
    """Between what a lease may move, and what it has; all equal for one that cannot."""

    least_cu: float
    cu: float
    most_cu: float


def bounds_of(slices: Sequence[Slice], cards: Mapping[str, Card], demand: GpuDemand) -> Bounds:
    """Return how far a lease on these slices may shrink and grow by what was asked for.

    It never shrinks when it has less than was promised to it, nor grows when it has more.

    Args:
        slices: what the lease holds.
        cards: the node's, by uuid.
        demand: what it was granted for.
    """
    cu = math.fsum(slice_.cu for slice_ in slices)
    percents = _percents(slices, cards, demand)
    if percents is None:
        return Bounds(cu, cu, cu)
    least, most = percents
    whole_cu = math.fsum(cards[slice_.card].cu for slice_ in slices)
    return Bounds(min(cu, cu_of(least, whole_cu)), cu, max(cu, cu_of(most, whole_cu)))


def resized(
    slices: Sequence[Slice], cards: Mapping[str, Card], demand: GpuDemand, cu: float
) -> tuple[Slice, ...]:
    """Return the slices with the most whole percents that are no more than ``cu`` in all.

    Never less than the demand's minimum, nor more than its maximum, whatever ``cu`` is; unchanged
    when they cannot change. Whether there is room for more is the caller's to find out.
    """
    percents = _percents(slices, cards, demand)
    if percents is None:
        return tuple(slices)
    least, most = percents
    whole_cu = math.fsum(cards[slice_.card].cu for slice_ in slices)
    asked = math.floor(min(WHOLE_PERCENT * cu / whole_cu, WHOLE_PERCENT) + _TOLERANCE)
    percent = max(least, min(asked, most))
    each_bytes = -(-demand.memory_bytes // len(slices))
    return tuple(part_of_card(cards[slice_.card], percent, each_bytes) for slice_ in slices)


def least_of(
    slices: Sequence[Slice], cards: Mapping[str, Card], demand: GpuDemand
) -> tuple[Slice, ...] | None:
    """Return the slices of a lease that has what was promised to it and no more.

    None for one that has nothing beyond that to give.
    """
    fewest = resized(slices, cards, demand, 0.0)
    return fewest if math.fsum(it.cu for it in fewest) < math.fsum(it.cu for it in slices) else None


def _percents(
    slices: Sequence[Slice], cards: Mapping[str, Card], demand: GpuDemand
) -> tuple[int, int] | None:
    """Return the least and the most percent of each of the slices; None when they cannot change."""
    for slice_ in slices:
        card = cards.get(slice_.card)
        if card is None or card.mode is not CardMode.MPS or slice_.kind is not CardMode.MPS:
            return None
        if card.cu <= 0:
            return None
    if not slices or demand.flaw:
        return None
    # All of one lease's cards are of one model and give equal parts.
    each_cu = cards[slices[0].card].cu
    least = percent_for(demand.min_cu / len(slices), each_cu)
    most = min(percent_for(demand.max_cu / len(slices), each_cu), WHOLE_PERCENT)
    return least, max(least, most)
