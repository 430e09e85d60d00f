"""Where units come from when none are free: other capacity, and leases that yield."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from dsec_common.compute.conservation import rank_of
from dsec_common.compute.model import GpuDemand, ServiceClass, part_of_card
from dsec_scheduler.asks import (
    Ask,
    Asked,
    HeldUnits,
    RoundDue,
    TakeLeases,
    WaitingEffect,
    World,
)
from dsec_scheduler.queues import QueueRules, WaitingRoom
from dsec_scheduler.solving.problem import NodeCapacity
from waiting_room import Cluster, ask, node, realtime

# --- Other capacity ---------------------------------------------------------------------------


class Bursting(Cluster):
    """Four cards of the cluster's own, dearer ones, and two of other capacity."""

    def __init__(self, *used: float) -> None:
        super().__init__(node("own", cards=4), node("zother", cards=2, cu=65.0, model="L40"))
        for cu in used:
            self.come(ask(cu, project="before", may_use=lambda name: name == "own", needs="own"))

    def world(self) -> World:
        prices = {"A100": 1.8, "L40": 1.0}
        return replace(super().world(), others=frozenset({"zother"}), prices=prices)

    def nodes_of(self, one: Ask) -> list[str]:
        return [part.node for part in self.granted.get(one, ())]


def test_units_are_of_the_own_nodes_first_though_others_are_cheaper() -> None:
    cluster = Bursting(100.0, 100.0, 100.0)
    cluster.come(below := ask(30.0), above := ask(30.0), urgent := realtime(30.0))
    assert cluster.nodes_of(below) == ["own"]
    assert cluster.nodes_of(above) == ["zother"]
    assert cluster.nodes_of(urgent) == ["own"]


def test_above_the_burst_line_other_capacity_takes_work_first_in_rounds_too() -> None:
    cluster = Bursting(100.0, 100.0, 100.0, 25.0)
    blocked = ask(1000.0)
    cluster.come(blocked, one := ask(60.0), two := ask(70.0), urgent := realtime(5.0))
    assert cluster.nodes_of(urgent) == ["own"]
    cluster.round()
    assert cluster.nodes_of(one) == ["zother"]
    # What does not fit there has the cluster's own.
    assert cluster.nodes_of(two) == ["own"]


def test_what_finds_no_room_on_the_own_nodes_has_other_capacity_below_the_line() -> None:
    cluster = Bursting(90.0, 90.0, 60.0, 60.0)
    blocked = ask(1000.0)
    on_one_card = GpuDemand(min_cu=50.0, max_cu=50.0, count=1)
    cluster.come(blocked, one := ask(demands=(on_one_card,)))
    cluster.round()
    assert cluster.nodes_of(one) == ["zother"]


# --- Leases that yield ------------------------------------------------------------------------


def elastic(
    least: float, cu: float = 100.0, service_class: ServiceClass = ServiceClass.BATCH
) -> HeldUnits:
    """Return a lease on the first card of n1 that agreed to have as little as ``least``."""
    card = node("n1").cards[0]
    return HeldUnits(
        cu=cu,
        since=0.0,
        slices=(part_of_card(card, int(cu)),),
        demand=GpuDemand(min_cu=least, max_cu=cu),
        rank=rank_of(service_class, 0),
    )


def full_world(*leases: HeldUnits) -> World:
    """Return a world of two cards of which the second is held by what gives nothing."""
    of_two = node("n1", cards=2)
    other = HeldUnits(cu=100.0, since=0.0, slices=(part_of_card(of_two.cards[1], 100),))
    held = tuple(it for lease in (*leases, other) for it in lease.slices)
    return World(
        nodes=(NodeCapacity(of_two.node, of_two.cards, held),), leases={"n1": (*leases, other)}
    )


def taken(effects: Sequence[WaitingEffect]) -> list[TakeLeases]:
    return [effect for effect in effects if isinstance(effect, TakeLeases)]


def test_leases_yield_to_a_realtime_ask_in_the_moment_it_comes() -> None:
    room = WaitingRoom(QueueRules(realtime_share=0.0))
    one = realtime(60.0)
    (effect,) = taken(room.handle(Asked(one, full_world(elastic(40.0)), 0.0)))
    assert effect.makes_room
    assert [part.node for part in effect.parts] == ["n1"]
    assert [it.percent for part in effect.parts for it in part.slices] == [60]


@pytest.mark.parametrize(
    ("one", "lease"),
    [
        (realtime(61.0), elastic(40.0)),
        (realtime(10.0), elastic(100.0)),
        (ask(60.0), elastic(40.0)),
        (ask(60.0, service_class=ServiceClass.BATCH, priority=9), elastic(40.0)),
        (realtime(60.0), elastic(40.0, service_class=ServiceClass.REALTIME)),
        (realtime(60.0, may_use=lambda _: False, needs="other"), elastic(40.0)),
    ],
    ids=["below its promise", "all promised", "standard", "batch", "an equal", "another node"],
)
def test_no_lease_yields_more_than_it_agreed_to_nor_to_anybody_else(
    one: Ask, lease: HeldUnits
) -> None:
    room = WaitingRoom(QueueRules(realtime_share=0.0))
    world = full_world(lease)
    assert not taken(room.handle(Asked(one, world, 0.0)))
    assert not taken(room.handle(RoundDue(world, 1.0)))


def test_leases_yield_in_a_round_before_others_have_their_turn() -> None:
    room = WaitingRoom(QueueRules(realtime_share=0.0))
    world = full_world(elastic(40.0))
    room.handle(Asked(first := realtime(90.0), world, 0.0))
    room.handle(Asked(second := realtime(50.0), world, 1.0))
    room.handle(Asked(ask(5.0), world, 1.0))
    (effect,) = room.handle(RoundDue(world, 2.0))
    assert isinstance(effect, TakeLeases)
    assert effect.makes_room
    assert effect.ask_id == second.ask_id
    assert room.get(first.ask_id)


def test_a_node_yields_to_one_ask_in_a_round() -> None:
    room = WaitingRoom(QueueRules(realtime_share=0.0))
    world = full_world(elastic(100.0))
    pair = [realtime(20.0), realtime(20.0)]
    for one in pair:
        assert not taken(room.handle(Asked(one, world, 0.0)))
    effects = taken(room.handle(RoundDue(full_world(elastic(40.0)), 2.0)))
    assert [it.ask_id for it in effects] == [pair[0].ask_id]


def test_what_is_free_for_others_turn_is_not_taken_by_having_leases_yield() -> None:
    pool_and_common = [node("n1"), node("n2")]
    lease = elastic(20.0, cu=50.0)
    pool = part_of_card(pool_and_common[1].cards[0], 100)
    world = World(
        nodes=(
            NodeCapacity("n1", pool_and_common[0].cards, lease.slices),
            NodeCapacity("n2", pool_and_common[1].cards, (pool,)),
        ),
        leases={"n1": (lease,)},
    )
    room = WaitingRoom(QueueRules(realtime_share=0.5))
    room.handle(Asked(ask(90.0), world, 0.0))
    assert not taken(room.handle(Asked(realtime(40.0), world, 0.0)))
