"""A card that two nodes name counts once, for the same node whichever broker is asked."""

from __future__ import annotations

import msgspec
import pytest

from broker_world import Broker, World, heartbeat
from dsec_common.wire.lease import LeaseGranted
from dsec_common.wire.node import NodeHeartbeat

A100 = "NVIDIA A100-SXM4-40GB"


def same(node: str, world: World, *lease_ids: str) -> NodeHeartbeat:
    """Return a heartbeat of a node that names the card of node-1."""
    beat = heartbeat("node-1", A100, sent_at=world.now, lease_ids=lease_ids)
    return msgspec.structs.replace(beat, node=node)


def units(broker: Broker) -> dict[str, float]:
    found = broker.core.nodes(broker.at).nodes
    return {info.node: info.cu_total for info in found}


def in_records(world: World) -> dict[str, float]:
    return {node: record.cu_total for node, (record, _) in world.bucket.records.items()}


def pass_time(world: World, seconds: float, *nodes: str) -> None:
    world.now += seconds
    for node in nodes:
        world.see(same(node, world))


def test_the_card_counts_for_the_node_that_had_it_first_and_the_other_says_why_not() -> None:
    world = World(2)
    for node in ("node-1", "another", "node-1", "another"):
        world.see(same(node, world))
    for broker in world.brokers:
        assert units(broker) == in_records(world) == {"node-1": 100, "another": 0}
        (note,) = broker.core.node("another", broker.at).notes
        assert note.startswith("GPU-0: CU 0, node node-1 has it")
        refused = broker.grant(10, node="another")
        broker.settle()
        assert refused in broker.refusals


def test_a_broker_that_has_just_started_says_the_same_whoever_it_hears_first() -> None:
    world = World()
    world.see(same("node-1", world))
    world.see(same("another", world))
    fresh = world.restart(0)
    for node in ("another", "node-1"):
        fresh.see(same(node, world))
        fresh.settle()
    assert units(fresh) == in_records(world) == {"node-1": 100, "another": 0}


def test_of_two_records_written_at_once_the_first_by_name_keeps_the_card() -> None:
    world = World(2)
    one, two = world.brokers
    one.see(same("node-1", world))
    two.see(same("another", world))
    one.settle()
    two.settle()
    assert in_records(world) == {"node-1": 100, "another": 100}
    for broker in world.brokers:
        for node in ("node-1", "another"):
            broker.watch(node)
    pass_time(world, 1, "node-1", "another")
    pass_time(world, 1, "another", "node-1")
    for broker in world.brokers:
        assert units(broker) == in_records(world) == {"node-1": 0, "another": 100}


def test_a_card_that_moved_counts_where_it_is_once_its_old_node_names_it_no_more() -> None:
    world = World()
    world.see(same("node-1", world))
    world.see(same("another", world))
    world.see(heartbeat("node-1"))
    pass_time(world, 1, "another")
    assert in_records(world) == {"node-1": 0, "another": 100}


def test_the_card_of_a_node_that_died_counts_for_the_one_that_names_it_soon_after() -> None:
    world = World(2)
    world.see(same("node-1", world))
    world.see(same("another", world))
    pass_time(world, 29, "another")
    assert in_records(world) == {"node-1": 100, "another": 0}
    for _ in range(2):
        pass_time(world, 2, "another")
        for broker in world.brokers:
            broker.watch("node-1")
    assert in_records(world) == {"node-1": 0, "another": 100}
    pass_time(world, 1, "node-1", "another")
    for broker in world.brokers:
        assert units(broker) == in_records(world) == {"node-1": 0, "another": 100}


def test_a_silent_nodes_card_stays_its_own_while_a_lease_is_on_it() -> None:
    world = World()
    (broker,) = world.brokers
    world.see(same("node-1", world))
    world.see(same("another", world))
    request_id = broker.grant(10, node="node-1", ttl_s=200)
    broker.settle()
    lease = broker.answers[request_id]
    assert isinstance(lease, LeaseGranted)
    for _ in range(3):
        pass_time(world, 40, "another")
    assert in_records(world) == {"node-1": 100, "another": 0}
    broker.release(lease.lease_id)
    broker.settle()
    for _ in range(2):
        pass_time(world, 1, "another")
    assert in_records(world) == {"node-1": 0, "another": 100}


def test_a_node_known_only_from_an_earlier_life_does_not_lose_its_card_at_the_start() -> None:
    world = World()
    world.see(same("node-1", world))
    fresh = world.restart(0)
    pass_time(world, 29, "another")
    assert in_records(world) == {"node-1": 100, "another": 0}
    fresh.see(same("node-1", world))
    fresh.settle()
    pass_time(world, 5, "another")
    assert in_records(world) == {"node-1": 100, "another": 0}


def test_a_node_that_is_forgotten_leaves_its_cards() -> None:
    world = World()
    (broker,) = world.brokers
    world.see(same("node-1", world))
    world.see(same("another", world))
    world.now += 86_401
    broker.sweep()
    broker.settle()
    pass_time(world, 1, "another")
    pass_time(world, 1, "another")
    assert in_records(world)["another"] == 100


@pytest.mark.parametrize("first", ["node-1", "another"])
def test_disputes_write_no_record_again_and_again(first: str) -> None:
    world = World(2)
    world.see(same(first, world))
    pass_time(world, 1, "node-1", "another")
    revision = world.bucket.revision
    for _ in range(5):
        pass_time(world, 1, "node-1", "another")
    assert world.bucket.revision == revision
