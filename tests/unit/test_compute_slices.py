"""Slices of cards: what serves a demand best, exactly conserved, found by look-up."""

from __future__ import annotations

import math
import sys
from types import FrameType
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsec_common.compute.model import (
    Card,
    CardMode,
    GpuDemand,
    MigInstance,
    Slice,
    fit,
    percent_for,
)
from dsec_common.compute.slice_pool import SlicePool

if TYPE_CHECKING:
    from _typeshed import TraceFunction

GIB = 1024**3


def a100(number: int = 0, *, island: str = "", mode: CardMode = CardMode.MPS) -> Card:
    return Card(
        uuid=f"A100-{number}",
        model="A100",
        cu=100.0,
        memory_bytes=40 * GIB,
        island=island,
        mode=mode,
    )


def l40(number: int = 0) -> Card:
    return Card(uuid=f"L40-{number}", model="L40", cu=65.0, memory_bytes=48 * GIB)


def mig_card() -> Card:
    instances = tuple(
        MigInstance(uuid=f"MIG-{cu}", cu=cu, memory_bytes=int(cu) * GIB) for cu in (14.0, 42.0)
    )
    return Card(uuid="A100-9", model="A100", cu=100.0, mode=CardMode.MIG, mig=instances)


def want(cu: float, max_cu: float = 0.0, **more: object) -> GpuDemand:
    return GpuDemand(min_cu=cu, max_cu=max_cu or cu, **more)  # type: ignore[arg-type]


def given_for(cards: list[Card], demand: GpuDemand, *held: Slice) -> dict[str, int]:
    found = fit(cards, held, demand)
    assert found is not None
    return {slice_.place: slice_.percent for slice_ in found}


def test_a_demand_gets_whole_percents_that_are_no_less_than_it_asked_for() -> None:
    (slice_,) = fit([l40()], (), want(10)) or ()
    assert slice_.percent == 16
    assert slice_.cu == pytest.approx(10.4)
    assert slice_.memory_bytes == 48 * GIB * 16 // 100


def test_the_fullest_card_with_room_is_filled_and_whole_ones_stay_whole() -> None:
    cards = [a100(0), a100(1), a100(2)]
    held = [Slice(card="A100-1", percent=60, cu=60.0), Slice(card="A100-2", percent=30, cu=30.0)]
    assert given_for(cards, want(40), *held) == {"A100-1": 40}
    assert given_for(cards, want(50), *held) == {"A100-2": 50}
    assert given_for(cards, want(80), *held) == {"A100-0": 80}


def test_what_one_card_cannot_give_comes_from_as_few_as_possible_in_equal_parts() -> None:
    cards = [a100(number) for number in range(4)]
    assert given_for(cards, want(150)) == {"A100-0": 75, "A100-1": 75}


def test_so_many_cards_as_were_asked_for_are_distinct() -> None:
    cards = [a100(number) for number in range(3)]
    assert given_for(cards, want(30, count=3)) == dict.fromkeys(("A100-0", "A100-1", "A100-2"), 10)
    assert fit(cards, (), want(30, count=4)) is None


def test_cards_of_one_island_are_taken_together() -> None:
    cards = [a100(0, island="x"), a100(1, island="y"), a100(2, island="y"), a100(3)]
    assert given_for(cards, want(200, same_island=True)) == {"A100-1": 100, "A100-2": 100}
    assert fit(cards, (), want(300, same_island=True)) is None


def test_only_the_models_that_were_named_are_given() -> None:
    assert given_for([a100(), l40()], want(10, models=("L40",))) == {"L40-0": 16}
    assert fit([a100()], (), want(10, models=("L40",))) is None


def test_as_much_as_there_is_room_for_is_given_between_least_and_most() -> None:
    held = Slice(card="A100-0", percent=92, cu=92.0)
    assert given_for([a100()], want(7, 10)) == {"A100-0": 10}
    assert given_for([a100()], want(7, 10), held) == {"A100-0": 8}
    assert fit([a100()], [held], want(9, 10)) is None


def test_memory_is_a_dimension_of_its_own() -> None:
    (slice_,) = fit([a100()], (), want(10, memory_bytes=30 * GIB)) or ()
    assert (slice_.percent, slice_.memory_bytes) == (10, 30 * GIB)
    assert fit([a100()], [slice_], want(10, memory_bytes=11 * GIB)) is None
    assert fit([a100()], [slice_], want(30)) is None, "30 % of the threads bring 12 GiB"
    assert fit([a100()], [slice_], want(30, memory_bytes=10 * GIB)) is not None


def test_a_card_that_cannot_be_divided_is_given_whole_or_not_at_all() -> None:
    card = a100(mode=CardMode.WHOLE)
    (slice_,) = fit([card], (), want(10)) or ()
    assert (slice_.kind, slice_.percent, slice_.cu) == (CardMode.WHOLE, 100, 100.0)
    assert fit([card], [slice_], want(1)) is None
    assert given_for([card, a100(1)], want(10)) == {"A100-1": 10}, (
        "nothing is wasted when it need not"
    )


def test_the_smallest_mig_instance_that_is_enough_is_given() -> None:
    assert given_for([mig_card()], want(10)) == {"MIG-14.0": 100}
    taken = Slice(card="A100-9", kind=CardMode.MIG, mig_uuid="MIG-14.0", cu=14.0)
    assert given_for([mig_card()], want(10), taken) == {"MIG-42.0": 100}
    assert fit([mig_card()], (), want(50)) is None


def test_a_sick_card_gives_nothing() -> None:
    sick = Card(uuid="GPU-0", model="A100", cu=100.0, healthy=False)
    assert fit([sick], (), want(1)) is None
    assert SlicePool([sick]).free_cu == 0.0


@pytest.mark.parametrize(
    "demand",
    [
        GpuDemand(min_cu=math.nan, max_cu=math.nan),
        GpuDemand(min_cu=-1.0, max_cu=1.0),
        GpuDemand(min_cu=0.0, max_cu=1.0),
        GpuDemand(min_cu=5.0, max_cu=1.0),
        GpuDemand(min_cu=1.0, max_cu=math.inf),
        GpuDemand(min_cu=1.0, max_cu=math.nan),
        GpuDemand(min_cu=1.0, max_cu=1.0, count=-1),
        GpuDemand(min_cu=1.0, max_cu=1.0, count=10**9),
        GpuDemand(min_cu=1.0, max_cu=1.0, memory_bytes=-1),
    ],
)
def test_what_makes_no_sense_says_why_and_gets_nothing(demand: GpuDemand) -> None:
    assert demand.flaw
    assert fit([a100()], (), demand) is None


@pytest.mark.parametrize("cu", [1e300, 1e9, 100.000001])
def test_more_than_there_is_gets_nothing(cu: float) -> None:
    assert fit([a100()], (), want(cu)) is None


def test_the_least_thinkable_amount_is_one_percent() -> None:
    assert percent_for(1e-300, 100.0) == 1
    assert given_for([a100()], want(1e-300)) == {"A100-0": 1}


def test_just_these_slices_are_free_or_not() -> None:
    pool = SlicePool([a100()])
    (half,) = pool.find(want(50)) or ()
    assert pool.has((half, half))
    assert not pool.has((half, half, half)), "together they are more than the card"
    assert not pool.has((Slice(card="other"),))
    assert not pool.has((Slice(card="A100-0", percent=50, cu=99.0, memory_bytes=1),)), (
        "forged units"
    )
    pool.take((half,))
    assert not pool.has((Slice(card="A100-0", percent=100, cu=100.0, memory_bytes=40 * GIB),))


demands = st.builds(
    lambda cu, more, count, memory_gib, island: GpuDemand(
        min_cu=cu, max_cu=cu + more, count=count, memory_bytes=memory_gib * GIB, same_island=island
    ),
    st.floats(0.01, 250),
    st.floats(0, 100),
    st.integers(0, 3),
    st.integers(0, 60),
    st.booleans(),
)


@given(st.lists(st.tuples(demands, st.booleans()), max_size=40))
@settings(max_examples=150, deadline=None)
def test_held_and_free_are_all_there_is_after_any_takings_and_givings(
    turns: list[tuple[GpuDemand, bool]],
) -> None:
    cards = [
        a100(0, island="x"),
        a100(1, island="x"),
        l40(),
        a100(2, mode=CardMode.WHOLE),
        mig_card(),
    ]
    pool = SlicePool(cards)
    empty = pool.free()
    held: list[tuple[Slice, ...]] = []
    for demand, gives_back in turns:
        if gives_back and held:
            pool.give(held.pop(0))
        found = pool.find(demand)
        everything = [slice_ for lease in held for slice_ in lease]
        assert found == fit(cards, everything, demand), (
            "kept up to date, it says the same as made anew"
        )
        if found is None:
            continue
        assert sum(slice_.cu for slice_ in found) >= demand.min_cu - 1e-6
        assert sum(slice_.memory_bytes for slice_ in found) >= demand.memory_bytes
        assert len({slice_.card for slice_ in found}) == (demand.count or len(found))
        assert pool.has(found)
        pool.take(found)
        held.append(found)
        for place, (percent, size) in pool.free().items():
            mine = [slice_ for lease in held for slice_ in lease if slice_.place == place]
            assert percent + sum(slice_.percent for slice_ in mine) == empty[place][0]
            assert size + sum(slice_.memory_bytes for slice_ in mine) == empty[place][1]
            assert percent >= 0
            assert size >= 0
    for lease in held:
        pool.give(lease)
    assert pool.free() == empty


def lines_run(pool: SlicePool, demand: GpuDemand) -> int:
    """Return how many lines of Python one grant runs."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> TraceFunction:
        del frame, argument
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        found = pool.find(demand)
        assert found is not None
        pool.take(found)
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("demand", [want(1), want(30), want(1, memory_bytes=GIB)])
def test_a_grant_on_2000_units_is_no_more_work_than_on_100(demand: GpuDemand) -> None:
    small = SlicePool([a100()])
    large = SlicePool([a100(number) for number in range(20)])
    assert lines_run(large, demand) <= lines_run(small, demand)


def test_a_grant_beside_a_thousand_leases_is_no_more_work_than_on_an_empty_node() -> None:
    pool = SlicePool([a100(number) for number in range(20)])
    first = lines_run(pool, want(1))
    for _ in range(1000):
        pool.take(pool.find(want(1)) or ())
    assert lines_run(pool, want(1)) <= first + 5, "but for a row of the shelf that becomes empty"
