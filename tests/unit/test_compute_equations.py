"""The three equations: conservation, state consistency, cost."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec_common.compute.conservation import Balance, Share, balance, bursts, nodes_for
from dsec_common.compute.consistency import Behind, judge, required_version_ms
from dsec_common.compute.cost import Offer, cheapest, total_cost

BATCH, STANDARD, REALTIME = (0, 0), (1, 0), (2, 0)


def share(
    name: str, cu: float, bounds: tuple[float, float], rank: tuple[int, int] = BATCH
) -> Share:
    return Share(name=name, node="n", cu=cu, min_cu=bounds[0], max_cu=bounds[1], rank=rank)


# --- Conservation -----------------------------------------------------------------------------


def test_above_the_line_a_batch_lease_goes_from_ten_units_to_seven() -> None:
    shares = [share("pay", 78, (20, 78), REALTIME), share("report", 10, (7, 10))]
    assert balance(shares, 100, {"n": 12}) == Balance({"report": 7})


def test_at_the_line_and_just_below_it_nothing_moves() -> None:
    for used in (80, 82.5, 85):
        shares = [share("a", used, (1, 100))]
        assert balance(shares, 100, {"n": 100 - used}) == Balance({})


def test_the_least_important_shrink_first_and_only_as_far_as_needed() -> None:
    shares = [
        share("batch-1", 30, (10, 30)),
        share("batch-2", 30, (10, 30)),
        share("standard", 30, (10, 30), STANDARD),
        share("high", 10, (1, 10), (0, 5)),
    ]
    # Fifteen above the line: the first gives fifteen, nobody else anything.
    assert balance(shares, 100, {}).targets == {"batch-1": 15}
    # Sixty-six above: both batch leases to their minimum, then the one of high priority, then the
    # standard one; what is still above the line is missing.
    found = balance(shares, 40, {})
    assert found.targets == {"batch-1": 10, "batch-2": 10, "high": 1, "standard": 13}
    assert found.missing_cu == 0
    assert balance(shares, 30, {}) == Balance(
        {"batch-1": 10, "batch-2": 10, "high": 1, "standard": 10}, 31 - 30 * 0.85
    )


def test_after_the_surge_leases_grow_back_the_most_important_first() -> None:
    shares = [share("batch", 10, (10, 30)), share("standard", 10, (10, 30), STANDARD)]
    assert balance(shares, 56, {"n": 36}).targets == {"standard": 30, "batch": pytest.approx(14.8)}
    assert balance(shares, 100, {"n": 80}).targets == {"standard": 30, "batch": 30}


def test_a_lease_grows_only_into_what_is_free_on_its_node() -> None:
    shares = [share("a", 10, (10, 50)), share("b", 10, (10, 50))]
    assert balance(shares, 1000, {"n": 15}).targets == {"b": 25}
    assert balance(shares, 1000, {}).targets == {}


@given(
    st.lists(
        st.tuples(
            st.floats(0.1, 100),
            st.floats(0, 1),
            st.floats(1, 3),
            st.sampled_from([BATCH, STANDARD, REALTIME]),
        ),
        max_size=12,
    ),
    st.floats(0, 1000),
    st.floats(0, 500),
)
def test_the_equation_holds_or_every_lease_is_at_its_minimum(
    drawn: list[tuple[float, float, float, tuple[int, int]]], total: float, free: float
) -> None:
    shares = [
        share(str(number), cu, (cu * least, cu * most), rank)
        for number, (cu, least, most, rank) in enumerate(drawn)
    ]
    found = balance(shares, total, {"n": free})
    after = {one.name: found.targets.get(one.name, one.cu) for one in shares}
    before = math.fsum(one.cu for one in shares)
    used = math.fsum(after.values())
    assert used <= max(total * 0.85, 0.0) + found.missing_cu + 1e-6
    for one in shares:
        assert one.min_cu - 1e-9 <= after[one.name] <= one.max_cu + 1e-9
        if found.missing_cu:
            assert after[one.name] == pytest.approx(one.min_cu, abs=1e-6)
    if used > before:
        assert used <= total * 0.80 + 1e-6
        assert used - before <= free + 1e-6
    # Nothing swings: what came out stays as it is.
    settled = [one._replace(cu=after[one.name]) for one in shares]
    again = balance(settled, total, {"n": max(0.0, free - (used - before))}).targets
    assert all(abs(again[name] - after[name]) < 1e-6 for name in again)
    # The order in which leases are told does not matter.
    shuffled = random.Random(1).sample(shares, len(shares))  # noqa: S311  an order, no secret
    assert balance(shuffled, total, {"n": free}) == found


@pytest.mark.parametrize(
    ("missing", "node_cu", "nodes"),
    [
        (0, 100, 0),
        (-5, 100, 0),
        (1, 100, 1),
        (85, 100, 1),
        (85.5, 100, 2),
        (300, 195, 2),
        (9, 0, 0),
    ],
)
def test_as_many_nodes_as_bring_the_missing_units(
    missing: float, node_cu: float, nodes: int
) -> None:
    assert nodes_for(missing, node_cu) == nodes


def test_other_capacity_takes_work_above_four_fifths() -> None:
    assert not bursts(80, 100)
    assert bursts(80.1, 100)
    assert bursts(0, 0)
    assert not bursts(90, 100, 0.95)


# --- State consistency ------------------------------------------------------------------------


def test_an_agent_is_consistent_from_fifty_milliseconds_after_its_newest_dependency() -> None:
    dependencies = {"orders": 1_000, "prices": 1_200}
    assert required_version_ms(dependencies) == 1_250
    assert judge(1_250, dependencies) is None
    assert judge(1_249, dependencies) == Behind(1_249, 1_250, "prices")
    assert judge(1_200, dependencies, clock_tolerance_ms=0) is None


def test_an_agent_that_depends_on_nothing_is_always_consistent() -> None:
    assert judge(0, {}) is None


def test_the_reason_names_the_dependency_and_what_to_synchronise_to() -> None:
    found = judge(7, {"b": 100, "a": 100})
    assert found is not None
    assert found.reason == "its state of 7 is behind a: synchronise to 150"


@given(st.integers(0, 10**13), st.dictionaries(st.text(max_size=3), st.integers(0, 10**13)))
def test_a_synchronised_agent_is_consistent(version: int, dependencies: dict[str, int]) -> None:
    found = judge(version, dependencies)
    if found is not None:
        assert found.required_ms > version
        assert judge(found.required_ms, dependencies) is None
        assert judge(found.required_ms - 1, dependencies) is not None


# --- Cost -------------------------------------------------------------------------------------


def test_the_cheaper_card_is_taken_and_the_dearer_when_only_it_is_in_time() -> None:
    a100 = Offer("a100", cu=20, cost_per_cu_hour=1.8, duration_s=1800)
    l40 = Offer("l40", cu=20, cost_per_cu_hour=1.0, wait_s=3.0, duration_s=1800)
    assert (a100.cost, l40.cost) == (18, 10)
    assert cheapest([a100, l40]) == l40
    assert cheapest([a100, l40], sla_s=0.1) == a100
    assert cheapest([l40], sla_s=0.1) is None
    assert total_cost([a100, l40]) == 28


def test_of_equally_cheap_offers_the_first_to_begin_is_taken() -> None:
    late, soon = Offer("a", 10, 1.0, wait_s=2.0), Offer("b", 10, 1.0, wait_s=1.0)
    assert cheapest([late, soon]) == soon
    assert cheapest([late, soon._replace(name="0", wait_s=2.0)]) == soon._replace(
        name="0", wait_s=2.0
    )
