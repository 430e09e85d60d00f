"""Leases that shrink and grow, and how many nodes there are to be."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import msgspec
import pytest

from broker_world import START_S, Broker, World, heartbeat
from dsec_broker.config import BrokerConfig
from dsec_broker.elastic import Fleet, Plan, ProvidedNode, fleet, plan
from dsec_broker.elastic_orders import NodeOrders
from dsec_common.compute.model import GpuDemand, ServiceClass
from dsec_common.errors import ErrorCode
from dsec_common.wire.lease import GrantLease, LeaseGranted

A100 = "NVIDIA A100-SXM4-40GB"
BATCH, STANDARD, REALTIME = ServiceClass.BATCH, ServiceClass.STANDARD, ServiceClass.REALTIME


def world_with_node(*models: str, brokers: int = 1) -> World:
    world = World(brokers)
    world.see(heartbeat("node-1", *(models or (A100,))))
    return world


def ask(
    min_cu: float,
    max_cu: float,
    service_class: ServiceClass = BATCH,
    *,
    node: str = "node-1",
    priority: int = 0,
) -> GrantLease:
    return GrantLease(
        project="default",
        holder="",
        node=node,
        demand=GpuDemand(min_cu=min_cu, max_cu=max_cu),
        service_class=service_class,
        priority=priority,
    )


def granted(broker: Broker, asked: GrantLease) -> LeaseGranted:
    request_id = broker.ask(asked)
    broker.settle()
    reply = broker.answers[request_id]
    assert isinstance(reply, LeaseGranted)
    return reply


def confirm(world: World, *leases: LeaseGranted, resizes: dict[str, int] | None = None) -> None:
    world.now += 1
    beat = heartbeat(
        "node-1", A100, sent_at=world.now, lease_ids=tuple(lease.lease_id for lease in leases)
    )
    world.see(msgspec.structs.replace(beat, lease_resizes=resizes or {}))


# --- Shares -----------------------------------------------------------------------------------


def test_a_lease_of_ten_units_shrinks_to_seven_and_its_node_is_told() -> None:
    world = world_with_node()
    broker = world.brokers[0]
    lease = granted(broker, ask(7, 10))
    confirm(world, lease)
    broker.resize({lease.lease_id: 7.0})
    assert broker.resized == []  # not before it is so
    broker.settle()
    (told,) = broker.resized
    assert (told.lease_id, told.cu, told.resizes) == (lease.lease_id, 7, 1)
    assert told.resize_reason == "full"
    assert world.record().cu_allocated == 7
    assert granted(broker, ask(93, 93)).cu == 93


def test_no_lease_shrinks_below_what_was_promised_or_grows_above_what_was_asked_for() -> None:
    world = world_with_node()
    broker = world.brokers[0]
    lease = granted(broker, ask(7, 10))
    for target, cu in ((0.0, 7), (500.0, 10)):
        broker.resize({lease.lease_id: target, "node-1.gone": 1.0})
        broker.settle()
        assert world.lease(lease.lease_id).cu == cu


def test_a_lease_does_not_grow_into_what_another_holds() -> None:
    world = world_with_node()
    broker = world.brokers[0]
    lease = granted(broker, ask(10, 50))
    broker.resize({lease.lease_id: 10.0})
    broker.settle()
    other = granted(broker, ask(80, 80))
    broker.resize({lease.lease_id: 50.0})
    broker.settle()
    assert world.lease(lease.lease_id).cu == 10
    # What one gives in the same change the other finds.
    broker.release(other.lease_id)
    flexible = granted(broker, ask(10, 90))
    broker.resize({lease.lease_id: 50.0, flexible.lease_id: 50.0})
    broker.settle()
    assert (world.lease(lease.lease_id).cu, world.lease(flexible.lease_id).cu) == (50, 50)


def test_two_brokers_that_shrink_the_same_lease_shrink_it_once() -> None:
    world = world_with_node(brokers=2)
    first, second = world.brokers
    lease = granted(first, ask(7, 10))
    second.watch("node-1")
    first.resize({lease.lease_id: 7.0})
    second.resize({lease.lease_id: 7.0})
    first.settle()
    second.settle()
    assert (world.lease(lease.lease_id).cu, world.lease(lease.lease_id).resizes) == (7, 1)


def test_a_node_is_told_with_each_heartbeat_until_it_has_heard() -> None:
    world = world_with_node()
    broker = world.brokers[0]
    lease = granted(broker, ask(7, 10))
    broker.resize({lease.lease_id: 7.0})
    broker.settle()
    # No sandbox lives on it yet: the node would not know what is meant.
    assert broker.resized == []
    confirm(world, lease)
    confirm(world, lease)
    assert [told.resizes for told in broker.resized] == [1, 1]
    confirm(world, lease, resizes={lease.lease_id: 1})
    assert len(broker.resized) == 2


# --- Room for what is more important ----------------------------------------------------------


def test_real_time_work_finds_room_at_once_on_a_node_that_is_full() -> None:
    world = world_with_node()
    broker = world.brokers[0]
    batch = [granted(broker, ask(7, 10)) for _ in range(10)]
    confirm(world, *batch)
    revision = world.bucket.revision
    lease = granted(broker, ask(6, 10, REALTIME))
    assert lease.cu == 6
    assert world.bucket.revision == revision + 1  # one write for all of it
    # Two gave three each, and the other eight nothing.
    assert sorted(world.lease(it.lease_id).cu for it in batch) == [7] * 2 + [10] * 8
    assert {told.resize_reason for told in broker.resized} == {"room for realtime work"}


def test_the_least_important_give_first_and_nobody_more_than_is_needed() -> None:
    world = world_with_node(A100, A100)
    broker = world.brokers[0]
    low = granted(broker, ask(10, 50, priority=-1))
    batch = granted(broker, ask(10, 50))
    standard = granted(broker, ask(10, 100, STANDARD))
    assert granted(broker, ask(20, 20, REALTIME)).cu == 20
    assert [world.lease(it.lease_id).cu for it in (low, batch, standard)] == [10, 50, 100]
    assert granted(broker, ask(60, 60, REALTIME)).cu == 60
    assert [world.lease(it.lease_id).cu for it in (low, batch, standard)] == [10, 10, 100]


def test_equals_make_no_room_for_each_other_and_a_promise_is_kept() -> None:
    world = world_with_node()
    broker = world.brokers[0]
    first = granted(broker, ask(50, 100))
    for asked in (ask(10, 10), ask(60, 60, REALTIME)):
        request_id = broker.ask(asked)
        broker.settle()
        assert broker.refusals[request_id].code is ErrorCode.EXHAUSTED
        assert world.lease(first.lease_id).cu == 100


def test_a_request_for_any_node_goes_where_room_can_be_made() -> None:
    world = World()
    for node in ("node-1", "node-2"):
        world.see(heartbeat(node, A100))
    broker = world.brokers[0]
    granted(broker, ask(95, 95, REALTIME, node="node-1"))
    granted(broker, ask(50, 100, BATCH, node="node-2"))
    assert granted(broker, ask(40, 40, REALTIME, node="")).node == "node-2"


# --- The balance ------------------------------------------------------------------------------


def test_the_plan_shrinks_batch_leases_over_all_nodes_until_the_equation_holds() -> None:
    world = World()
    for node in ("node-1", "node-2"):
        world.see(heartbeat(node, A100))
    broker = world.brokers[0]
    batch = granted(broker, ask(20, 100, BATCH, node="node-1"))
    granted(broker, ask(10, 90, REALTIME, node="node-2"))
    records = list(broker.core.ready_records(world.at))
    found = plan(records, BrokerConfig())
    assert found.targets == {"node-1": {batch.lease_id: pytest.approx(80)}}
    assert (found.missing_cu, found.allocated_cu, found.total_cu) == (0, 190, 200)
    for node, targets in found.targets.items():
        broker.resize(targets, node)
        broker.settle()
    settled = plan(broker.core.ready_records(world.at), BrokerConfig())
    assert settled.targets == {}
    assert settled.allocated_cu == pytest.approx(170)


def test_a_silent_node_counts_neither_as_there_nor_as_taken() -> None:
    world = world_with_node()
    broker = world.brokers[0]
    granted(broker, ask(1, 90))
    world.now += 10
    assert plan(broker.core.ready_records(world.at), BrokerConfig()).total_cu == 0


# --- Nodes ------------------------------------------------------------------------------------

CONFIG = BrokerConfig(node_provider_cu=100, node_provider_max=4)


def any_of(nodes: Collection[str], idle: Collection[str]) -> Sequence[str]:
    del nodes
    return sorted(idle)


def provided(*names: str, idle: bool = True, leaving: bool = False) -> list[ProvidedNode]:
    return [ProvidedNode(name, 100, idle, leaving) for name in names]


def state(missing: float, allocated: float, total: float) -> Plan:
    return Plan({}, missing, allocated, total)


def test_missing_units_ask_for_nodes_up_to_the_most() -> None:
    assert fleet(state(1, 0, 0), [], (), any_of, CONFIG) == Fleet(1)
    assert fleet(state(200, 0, 0), provided("a"), (), any_of, CONFIG) == Fleet(4)
    assert fleet(state(999, 0, 0), provided("a"), (), any_of, CONFIG) == Fleet(4)


def test_idle_nodes_are_given_up_while_the_others_suffice() -> None:
    nodes = provided("a", "b", "c")
    assert fleet(state(0, 100, 400), nodes, (), any_of, CONFIG) == Fleet(3)
    found = fleet(state(0, 100, 400), nodes, {"a", "b", "c"}, any_of, CONFIG)
    assert found == Fleet(1, ("a", "b"))
    # With only 80 % of what is left in use: one at most.
    assert fleet(state(0, 160, 400), nodes, {"a", "b"}, any_of, CONFIG) == Fleet(1, ("a", "b"))
    assert fleet(state(0, 161, 400), nodes, {"a", "b"}, any_of, CONFIG) == Fleet(2, ("a",))


def test_nodes_that_leave_are_ended_and_no_longer_counted() -> None:
    nodes = provided("a") + provided("b", leaving=True)
    assert fleet(state(0, 0, 100), nodes, {"a", "b"}, any_of, CONFIG) == Fleet(0, ("a",), ("b",))
    # A surge that comes back while a node leaves: another is ordered.
    assert fleet(state(50, 0, 100), nodes, (), any_of, CONFIG) == Fleet(2, (), ("b",))


def test_the_fewest_nodes_of_a_provider_always_run() -> None:
    config = BrokerConfig(node_provider_min=2, node_provider_max=4)
    assert fleet(state(0, 0, 0), [], (), any_of, config) == Fleet(2)
    nodes = provided("a", "b", "c")
    found = fleet(state(0, 0, 900), nodes, {"a", "b", "c"}, any_of, config)
    assert found == Fleet(2, ("a",))


def test_a_node_may_leave_once_it_has_idled_without_a_break() -> None:
    orders = NodeOrders(CONFIG)
    looks = [(0.0, True), (299.0, True), (299.5, False), (300.0, True), (599.0, True)]
    for now_s, idle in looks:
        assert orders.wish(state(0, 0, 100), provided("a", idle=idle), any_of, now_s) == Fleet(1)
    assert orders.next_idle_s(599.0) == 600
    assert orders.wish(state(0, 0, 100), provided("a"), any_of, 600) == Fleet(0, ("a",))
    assert orders.next_idle_s(600) == math.inf
    # It says that it has work after all, and its time begins anew.
    orders.busy("a")
    assert orders.wish(state(0, 0, 100), provided("a"), any_of, 601) == Fleet(1)
    assert orders.next_idle_s(601) == 901


def test_an_order_is_given_once_and_again_when_its_nodes_do_not_come() -> None:
    orders = NodeOrders(CONFIG)
    wish = Fleet(2)
    assert orders.is_due(wish, [], 0)
    orders.given(*orders.order(wish, ()), 0)
    assert not orders.is_due(wish, [], 60)
    assert orders.is_due(wish, provided("a"), 61)
    assert not orders.is_due(wish, provided("a", "b"), 61)
    # Of two that were to leave one did not agree: it is still wanted.
    assert orders.order(Fleet(1, ("a", "b"), ("c",)), ["b"]) == (2, ("b", "c"))


def test_nodes_of_a_provider_are_known_by_their_label_and_idle_without_work() -> None:
    world = World()
    beat = msgspec.structs.replace(heartbeat("more-1", A100), labels={"provider": "local"})
    world.see(beat)
    world.see(heartbeat("node-1", A100))
    core = world.brokers[0].core
    assert list(core.provided("local", world.at)) == [ProvidedNode("more-1", 100, True, False)]
    granted(world.brokers[0], ask(1, 1, node="more-1"))
    assert [node.idle for node in core.provided("local", world.at)] == [False]
    assert list(core.provided("webhook", world.at)) == []
    world.see(msgspec.structs.replace(beat, draining=True, sent_at=START_S + 1))
    assert [node.leaving for node in core.provided("local", world.at)] == [True]


@pytest.mark.parametrize(
    "settings",
    [
        {"utilisation_factor": 1.1},
        {"recovery_factor": 0.9},
        {"recovery_factor": 0.0},
        {"utilisation_factor": float("nan")},
        {"burst_factor": -0.1},
        {"node_provider_min": 9},
        {"node_provider_cu": 0.0},
        {"elastic_interval_s": 0.0},
    ],
)
def test_constants_that_balance_nothing_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        BrokerConfig(**settings)


# --- Which node -------------------------------------------------------------------------------


def cluster(labels: dict[str, str]) -> Broker:
    """Return a broker that knows a node of the cluster's own, and another with these labels."""
    world = World()
    world.see(heartbeat("own", A100))
    world.see(msgspec.structs.replace(heartbeat("other", A100), labels=labels))
    return world.brokers[0]


@pytest.mark.parametrize("labels", [{"capacity": "burst"}, {"provider": "local"}])
def test_other_capacity_takes_work_above_four_fifths_and_when_nothing_else_fits(
    labels: dict[str, str],
) -> None:
    broker = cluster(labels)
    assert granted(broker, ask(80, 80, node="")).node == "own"
    # At the line it is the own node's turn still, but it has too little.
    assert granted(broker, ask(30, 30, node="")).node == "other"
    assert granted(broker, ask(1, 1, node="")).node == "own"
    assert granted(broker, ask(1, 1, node="")).node == "other"
    # Real-time work stays at home for as long as there is room.
    assert granted(broker, ask(1, 1, REALTIME, node="")).node == "own"


def test_the_cheapest_node_that_can_give_it_is_taken() -> None:
    world = World()
    world.see(heartbeat("dear", A100, A100))
    world.see(heartbeat("cheap", "NVIDIA L40"))
    broker = world.brokers[0]
    assert granted(broker, ask(20, 20, node="")).node == "cheap"
    assert granted(broker, ask(60, 60, node="")).node == "dear"
    only = msgspec.structs.replace(
        ask(10, 10, node=""), demand=GpuDemand(min_cu=10, max_cu=10, models=("A100",))
    )
    assert granted(broker, only).node == "dear"


def test_prices_that_are_configured_go_before_the_built_in_ones() -> None:
    world = World(config=BrokerConfig(clock_skew_s=0.0, prices={"A100": 0.5}))
    world.see(heartbeat("first", A100))
    world.see(heartbeat("second", "NVIDIA L40"))
    assert granted(world.brokers[0], ask(20, 20, node="")).node == "first"
