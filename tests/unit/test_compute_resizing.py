"""A lease on other percents of the same cards."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from dsec_common.compute.model import Card, CardMode, GpuDemand, Slice, part_of_card
from dsec_common.compute.resizing import Bounds, bounds_of, resized

GIB = 1 << 30
A100 = Card(uuid="a", model="A100", cu=100.0, memory_bytes=40 * GIB)
L40 = Card(uuid="l", model="L40", cu=65.0, memory_bytes=48 * GIB)


def cu_of(slices: tuple[Slice, ...]) -> float:
    return math.fsum(slice_.cu for slice_ in slices)


def test_ten_units_become_seven_and_ten_again_with_the_memory_that_goes_with_them() -> None:
    demand = GpuDemand(min_cu=7, max_cu=10)
    ten = (part_of_card(A100, 10),)
    assert bounds_of(ten, {"a": A100}, demand) == Bounds(7, 10, 10)
    seven = resized(ten, {"a": A100}, demand, 7)
    assert (seven[0].percent, seven[0].cu) == (7, 7)
    assert seven[0].memory_bytes == 40 * GIB * 7 // 100
    assert resized(seven, {"a": A100}, demand, 10) == ten


def test_memory_that_was_asked_for_stays() -> None:
    demand = GpuDemand(min_cu=7, max_cu=10, memory_bytes=2 * GIB)
    ten = (part_of_card(A100, 10, 2 * GIB),)
    assert resized(ten, {"a": A100}, demand, 0)[0].memory_bytes == 2 * GIB


def test_whole_cards_and_instances_do_not_change() -> None:
    demand = GpuDemand(min_cu=7, max_cu=100)
    for mode in (CardMode.WHOLE, CardMode.MIG):
        slices = (Slice(card="a", kind=mode, cu=100),)
        cards = {"a": A100.__class__(uuid="a", model="A100", cu=100, mode=mode)}
        assert bounds_of(slices, cards, demand) == Bounds(100, 100, 100)
        assert resized(slices, cards, demand, 7) == slices
    gone = (Slice(card="gone", percent=10, cu=10),)
    assert resized(gone, {"a": A100}, demand, 7) == gone


def test_several_cards_give_equal_parts() -> None:
    cards = {uuid: Card(uuid=uuid, model="A100", cu=100.0) for uuid in "ab"}
    demand = GpuDemand(min_cu=20, max_cu=60, count=2)
    slices = tuple(part_of_card(card, 30) for card in cards.values())
    assert bounds_of(slices, cards, demand) == Bounds(20, 60, 60)
    assert [slice_.percent for slice_ in resized(slices, cards, demand, 41)] == [20, 20]


@given(
    st.integers(1, 100),
    st.floats(0.5, 65),
    st.floats(1, 4),
    st.floats(0, 200),
)
def test_what_comes_out_is_within_the_bounds_and_no_more_than_was_said(
    percent: int, min_cu: float, factor: float, cu: float
) -> None:
    demand = GpuDemand(min_cu=min_cu, max_cu=min_cu * factor)
    slices = (part_of_card(L40, percent),)
    bounds = bounds_of(slices, {"l": L40}, demand)
    after = resized(slices, {"l": L40}, demand, cu)
    assert bounds.least_cu <= bounds.cu <= bounds.most_cu
    assert 1 <= after[0].percent <= 100
    assert cu_of(after) >= min_cu - 1e-6
    assert cu_of(after) <= max(cu, cu_of(resized(slices, {"l": L40}, demand, 0))) + 1e-6
    assert resized(after, {"l": L40}, demand, cu) == after
