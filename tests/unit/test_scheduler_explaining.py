"""Why something waits for Compute Units, and what would change that."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dsec_common.compute.model import Card, GpuDemand, ServiceClass, part_of_card
from dsec_common.wire.waiting import WaitingExplained
from dsec_scheduler.asks import Ask, Asked, HeldUnits, RoundDue, TakeLeases, World
from dsec_scheduler.explaining import explain
from dsec_scheduler.fair_share import Quota
from dsec_scheduler.queues import QueueRules, WaitingRoom
from dsec_scheduler.solving.objective import PATIENCE, SLA_S
from dsec_scheduler.solving.problem import NodeCapacity


def card(uuid: str, model: str = "A100", island: str = "0") -> Card:
    return Card(uuid=uuid, model=model, cu=100.0, memory_bytes=80 << 30, island=island)


def node(name: str, *cards: Card, taken: int = 0) -> NodeCapacity:
    """Return a node of whose first card so many percent are taken."""
    held = (part_of_card(cards[0], taken),) if taken else ()
    return NodeCapacity(name, cards, held)


def ask(cu: float, **changes: Any) -> Ask:
    demand = {name: changes.pop(name) for name in list(changes) if name in DEMAND}
    demands = (GpuDemand(min_cu=cu, max_cu=cu, **demand),)
    fields: dict[str, Any] = {"ask_id": 1, "request_id": "r", "project": "a", "demands": demands}
    return Ask(**{**fields, "asked_at": 0.0, **changes})


DEMAND = ("count", "same_island", "models", "memory_bytes")


def why(one: Ask, *nodes: NodeCapacity, quotas: tuple[Quota, ...] = ()) -> WaitingExplained:
    room = WaitingRoom(QueueRules(quotas=quotas))
    world = World(nodes=nodes)
    effects = room.handle(Asked(one, world, 0.0))
    assert not [it for it in effects if isinstance(it, TakeLeases)], "it did not have to wait"
    return explain(one, room, world, 10.0, 1000.0)


def test_what_is_not_free_is_told_with_what_would_start_now() -> None:
    told = why(ask(40.0, same_island=True, models=("A100",)), node("n1", card("c"), taken=70))
    assert told.constraint == "capacity"
    assert told.reason == "waits for 40 CU on one island of A100: 30 free on n1"
    assert told.startable_cu == 30.0
    assert told.would_change[0] == "would start now with --max-cu 30"
    assert told.waited_s == 10.0


def test_what_holds_the_units_is_told_by_node_and_age() -> None:
    one = ask(100.0)
    room = WaitingRoom(QueueRules())
    leases = {"n1": (HeldUnits(40.0, 280.0), HeldUnits(30.0, 900.0))}
    world = World(nodes=(node("n1", card("c"), taken=70),), leases=leases)
    room.handle(Asked(one, world, 0.0))
    told = explain(one, room, world, 10.0, 1000.0)
    assert told.would_change[-2] == "2 leases on n1 hold 70 CU, the oldest for 12 min"


def ending(percent: int, ends_at: float = 0.0, of: str = "c") -> HeldUnits:
    """Return a lease on so many percent of a card."""
    part = part_of_card(card(of), percent)
    return HeldUnits(cu=float(percent), since=0.0, slices=(part,), ends_at=ends_at)


def explained(one: Ask, *leases: HeldUnits) -> WaitingExplained:
    """Return why an ask waits on one card of which these leases have parts, at Unix time 1000."""
    held = tuple(it for lease in leases for it in lease.slices)
    world = World(nodes=(NodeCapacity("n1", (card("c"),), held),), leases={"n1": leases})
    room = WaitingRoom(QueueRules())
    room.handle(Asked(one, world, 0.0))
    return explain(one, room, world, 10.0, 1000.0)


def test_when_enough_comes_back_is_told_by_the_ends_of_leases() -> None:
    leases = (ending(30, 1100.0), ending(20, 1000.0 + 720.0), ending(40, 5000.0), ending(10))
    for cu, at, told in (
        (30.0, 1100.0, "2 min"),
        (45.0, 1720.0, "12 min"),
        (90.0, 5000.0, "67 min"),
    ):
        found = explained(ask(cu), *leases)
        assert found.expected_at == at
        assert found.would_change[-1] == (
            f"enough is expected back in {told}, who goes before it apart"
        )


def test_a_node_whose_record_is_full_is_named() -> None:
    one = ask(40.0)
    room = WaitingRoom(QueueRules())
    world = World(nodes=(node("n1", card("c"), taken=100),), full=frozenset({"n1"}))
    assert not room.handle(Asked(one, world, 0.0))
    told = explain(one, room, world, 10.0, 1000.0)
    assert told.constraint == "capacity"
    assert any("n1 holds as many leases as its record takes" in it for it in told.would_change)


def test_ends_that_are_not_known_or_were_wrong_are_told_as_not_known() -> None:
    found = explained(ask(60.0), ending(50, 1100.0), ending(25, 900.0), ending(25))
    assert found.expected_at == 0.0
    assert found.would_change[-1] == (
        "when enough comes back is not known: 2 of 3 leases do not say when they end"
    )


@pytest.mark.parametrize(
    ("demand", "constraint"),
    [
        ({"models": ("H100",)}, "model"),
        ({"count": 3}, "count"),
        ({"count": 2, "same_island": True}, "island"),
        ({"memory_bytes": 1 << 50}, "too_much_memory"),
    ],
)
def test_what_no_node_could_ever_give_is_told(demand: dict[str, Any], constraint: str) -> None:
    told = why(ask(90.0, **demand), node("n1", card("c1"), card("c2", island="1")))
    assert told.constraint == constraint
    assert told.would_change


def test_more_than_the_largest_node_is_told_with_what_that_has() -> None:
    told = why(ask(1000.0), node("n1", card("c1"), card("c2")))
    assert told.constraint == "too_many_cu"
    assert "the most of one is 200 CU" in told.reason


def test_a_node_without_room_for_the_rest_is_no_place() -> None:
    told = why(ask(50.0, may_use=lambda _: False), node("n1", card("c1")))
    assert told.constraint == "nodes"


def test_a_quota_is_named() -> None:
    quotas = (Quota(name="a", cu_max=40.0),)
    told = why(ask(50.0), node("n1", card("c1")), quotas=quotas)
    assert (told.constraint, told.quota) == ("quota", "a")


def test_who_waits_behind_others_is_told_how_many() -> None:
    room = WaitingRoom(QueueRules())
    world = World(nodes=(node("n1", card("c1"), taken=50),))
    first, second = ask(100.0), ask(60.0, ask_id=2, asked_at=1.0)
    third = ask(50.0, ask_id=3, asked_at=2.0)
    for one in (first, second, third):
        room.handle(Asked(one, world, 2.0))
    told = explain(third, room, world, 3.0, 1000.0)
    assert (told.constraint, told.ahead) == ("turn", 2)


def test_nodes_that_are_kept_for_what_starves_are_told_to_others() -> None:
    room = WaitingRoom(QueueRules(starving_s=5.0))
    world = World(nodes=(node("n1", card("c1"), taken=50),))
    starving, other = ask(100.0), ask(60.0, ask_id=2, asked_at=99.0, project="b")
    for one in (starving, other):
        room.handle(Asked(one, world, 99.0))
    room.handle(RoundDue(world, 100.0))
    told = explain(starving, room, world, 100.0, 1000.0)
    assert "n1 is kept for it: it has waited longest" in told.would_change


def test_a_gang_is_told_as_one() -> None:
    one = replace(ask(100.0), demands=(GpuDemand(min_cu=100.0, max_cu=100.0),) * 3)
    told = why(one, node("n1", card("c1")))
    assert told.constraint == "gang"
    assert "300 CU for 3 sandboxes at once" in told.reason


def test_realtime_is_told_of_the_cards_of_all() -> None:
    one = ask(40.0, service_class=ServiceClass.REALTIME)
    told = why(one, node("n1", card("c"), taken=70))
    assert told.service_class is ServiceClass.REALTIME
    assert told.startable_cu == 30.0


def test_batch_work_that_waits_for_cheaper_cards_is_told_so_and_for_how_long() -> None:
    room = WaitingRoom(QueueRules())
    nodes = (node("dear", card("d")), node("cheap", card("c", model="L40"), taken=100))
    world = World(nodes=nodes, prices={"A100": 1.8, "L40": 1.0})
    one = ask(50.0, service_class=ServiceClass.BATCH)
    effects = room.handle(Asked(one, world, 0.0))
    assert not [it for it in effects if isinstance(it, TakeLeases)]
    told = explain(one, room, world, 60.0, 1000.0)
    assert told.constraint == "price"
    left_min = (PATIENCE * SLA_S[ServiceClass.BATCH] - 60.0) / 60
    assert told.would_change[0] == f"in {left_min:.0f} min it takes whatever is free"
    later = explain(one, room, world, PATIENCE * SLA_S[ServiceClass.BATCH], 1000.0)
    assert later.constraint == "turn"
