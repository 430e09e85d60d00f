from __future__ import annotations

import pytest

from broker_world import START_S, Broker, World, heartbeat
from dsec_broker.config import BrokerConfig
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.wire.lease import LeaseGranted, LeaseReleased, LeaseRenewed

A100 = "NVIDIA A100-SXM4-40GB"


def world_with_node(*models: str, brokers: int = 1) -> World:
    world = World(brokers)
    world.see(heartbeat("node-1", *(models or (A100,))))
    return world


def granted(broker: Broker, cu: float, node: str = "node-1") -> LeaseGranted:
    request_id = broker.grant(cu, node=node)
    broker.settle()
    reply = broker.answers[request_id]
    assert isinstance(reply, LeaseGranted)
    return reply


def refused(broker: Broker, request_id: int) -> DsecError:
    broker.settle()
    return broker.refusals[request_id]


def test_a_heartbeat_makes_a_node_ready_with_its_units() -> None:
    world = world_with_node(A100, A100)
    info = world.brokers[0].core.node("node-1", world.at)
    assert (info.ready, info.cu_total, info.cu_allocated) == (True, 200.0, 0.0)


def test_heartbeats_that_say_nothing_lasting_write_nothing() -> None:
    world = world_with_node()
    revision = world.bucket.revision
    for second in range(5):
        world.now += 1
        world.see(heartbeat("node-1", A100, sent_at=START_S + second))
    assert world.bucket.revision == revision


def test_a_node_is_ready_only_while_its_heartbeats_come() -> None:
    world = world_with_node()
    world.now += 3.1
    broker = world.brokers[0]
    info = broker.core.node("node-1", world.at)
    assert not info.ready
    assert "no heartbeat for 3.1 s" in info.reason
    error = refused(broker, broker.grant(1, node="node-1"))
    assert (error.code, error.retryable) == (ErrorCode.UNAVAILABLE, True)


def test_a_draining_node_takes_no_lease() -> None:
    world = World()
    world.see(heartbeat("node-1", A100, draining=True))
    broker = world.brokers[0]
    assert "draining" in refused(broker, broker.grant(1, node="node-1")).message
    assert refused(broker, broker.grant(1)).code is ErrorCode.UNAVAILABLE


def test_a_grant_is_answered_only_once_it_is_written() -> None:
    world = world_with_node()
    broker = world.brokers[0]
    request_id = broker.grant(40, node="node-1")
    assert request_id not in broker.answers
    broker.settle()
    lease = broker.answers[request_id]
    assert isinstance(lease, LeaseGranted)
    assert lease.node == "node-1"
    assert lease.lease_id.startswith("node-1.")
    assert world.record().leases[0].lease_id == lease.lease_id


def test_grants_that_wait_for_a_write_go_into_the_next_one_together() -> None:
    world = world_with_node()
    broker = world.brokers[0]
    revision = world.bucket.revision
    requests = [broker.grant(1, node="node-1") for _ in range(50)]
    broker.settle()
    assert all(request_id in broker.answers for request_id in requests)
    assert world.bucket.revision == revision + 2


def test_tokens_grow_with_every_grant_even_on_another_broker_after_a_restart() -> None:
    world = world_with_node(brokers=2)
    tokens = [granted(world.brokers[0], 1).token, granted(world.brokers[1], 1).token]
    fresh = world.restart(0)
    fresh.see(heartbeat("node-1", A100))
    tokens.append(granted(fresh, 1).token)
    assert tokens == sorted(set(tokens))


def test_units_that_are_taken_are_refused_with_the_numbers() -> None:
    world = world_with_node()
    broker = world.brokers[0]
    granted(broker, 80)
    error = refused(broker, broker.grant(30, node="node-1"))
    assert (error.code, error.retryable) == (ErrorCode.EXHAUSTED, True)
    assert "20 of 100 Compute Units free, 30 were asked for" in error.message


def test_more_than_the_node_has_is_refused_for_good() -> None:
    world = world_with_node()
    error = refused(world.brokers[0], world.brokers[0].grant(101, node="node-1"))
    assert (error.code, error.retryable) == (ErrorCode.EXHAUSTED, False)


@pytest.mark.parametrize("cu", [0.0, -1.0, float("nan"), float("inf")])
def test_no_amount_is_invalid(cu: float) -> None:
    world = world_with_node()
    assert refused(world.brokers[0], world.brokers[0].grant(cu)).code is ErrorCode.INVALID


@pytest.mark.parametrize("ttl_s", [0.0, -1.0, float("nan"), 86_401.0])
def test_no_time_to_live_is_invalid(ttl_s: float) -> None:
    world = world_with_node()
    broker = world.brokers[0]
    lease = granted(broker, 1)
    for request_id in (broker.grant(1, ttl_s=ttl_s), broker.renew(lease.lease_id, ttl_s)):
        assert refused(broker, request_id).code is ErrorCode.INVALID


def test_a_node_nobody_heard_of_is_not_found() -> None:
    world = world_with_node()
    error = refused(world.brokers[0], world.brokers[0].grant(1, node="node-9"))
    assert error.code is ErrorCode.NOT_FOUND


def test_a_released_lease_frees_its_units_and_may_be_released_again() -> None:
    world = world_with_node()
    broker = world.brokers[0]
    lease = granted(broker, 100)
    for _ in range(2):
        request_id = broker.release(lease.lease_id)
        broker.settle()
        assert isinstance(broker.answers[request_id], LeaseReleased)
    granted(broker, 100)


def test_a_broker_that_has_not_heard_of_a_lease_still_releases_it() -> None:
    world = world_with_node(brokers=2)
    lease = granted(world.brokers[0], 100)
    request_id = world.brokers[1].release(lease.lease_id)
    world.brokers[1].settle()
    assert isinstance(world.brokers[1].answers[request_id], LeaseReleased)
    assert world.record().leases == ()


def test_a_broker_that_has_not_heard_of_a_release_still_grants_the_units() -> None:
    world = world_with_node(brokers=2)
    lease = granted(world.brokers[0], 100)
    world.brokers[1].watch("node-1")
    world.brokers[0].release(lease.lease_id)
    world.brokers[0].settle()
    granted(world.brokers[1], 100)


def test_two_brokers_cannot_grant_the_same_units() -> None:
    world = world_with_node(brokers=2)
    one, two = world.brokers
    first, second = one.grant(60, node="node-1"), two.grant(60, node="node-1")
    two.settle()
    one.settle()
    assert second in two.answers
    assert one.refusals[first].code is ErrorCode.EXHAUSTED
    assert world.record().cu_allocated == 60


def test_a_lease_runs_out_and_its_units_are_free_at_once() -> None:
    world = world_with_node()
    broker = world.brokers[0]
    lease = granted(broker, 100)
    world.now = lease.expires_at + 1
    world.see(heartbeat("node-1", A100, sent_at=world.now))
    assert refused(broker, broker.renew(lease.lease_id)).code is ErrorCode.EXPIRED
    granted(broker, 100)


def test_units_of_a_lease_that_has_run_out_are_not_told_as_taken_before_the_sweep() -> None:
    world = world_with_node()
    broker = world.brokers[0]
    lease = granted(broker, 100)
    assert broker.core.nodes(world.at).cu_allocated == 100
    world.now = lease.expires_at
    assert broker.core.nodes(world.at).cu_allocated == 0
    assert len(world.record().leases) == 1


def test_the_sweep_removes_what_has_run_out() -> None:
    world = world_with_node()
    broker = world.brokers[0]
    granted(broker, 100)
    world.now += 101
    broker.sweep()
    broker.settle()
    assert world.record().leases == ()


def test_a_renewed_lease_lives_longer_and_never_shorter() -> None:
    world = world_with_node()
    broker = world.brokers[0]
    lease = granted(broker, 100)
    world.now += 50
    ends = []
    for ttl_s in (200.0, 10.0):
        request_id = broker.renew(lease.lease_id, ttl_s)
        broker.settle()
        renewed = broker.answers[request_id]
        assert isinstance(renewed, LeaseRenewed)
        ends.append(renewed.expires_at)
    assert ends == [world.now + 200, world.now + 200]


def test_a_heartbeat_that_names_a_lease_keeps_it_alive() -> None:
    world = world_with_node()
    broker = world.brokers[0]
    lease = granted(broker, 100)
    for _ in range(100):
        world.now += 60
        world.see(heartbeat("node-1", A100, sent_at=world.now, lease_ids=(lease.lease_id,)))
        broker.sweep()
        broker.settle()
    assert world.lease(lease.lease_id).expires_at > world.now


def test_keeping_a_lease_alive_writes_twice_per_lifetime_not_every_second() -> None:
    world = world_with_node()
    lease = granted(world.brokers[0], 100)
    revision = world.bucket.revision
    for _ in range(1800):
        world.now += 1
        world.see(heartbeat("node-1", A100, sent_at=world.now, lease_ids=(lease.lease_id,)))
    assert world.bucket.revision - revision <= 3


def test_a_lease_ends_with_its_sandbox() -> None:
    world = world_with_node()
    lease = granted(world.brokers[0], 100)
    world.see(heartbeat("node-1", A100, sent_at=START_S + 1, lease_ids=(lease.lease_id,)))
    world.see(heartbeat("node-1", A100, sent_at=START_S + 2))
    assert world.record().leases == ()


def test_a_lease_whose_sandbox_is_still_being_made_is_kept() -> None:
    world = world_with_node()
    lease = granted(world.brokers[0], 100)
    world.see(heartbeat("node-1", A100, sent_at=START_S + 1))
    assert world.lease(lease.lease_id)


def test_a_heartbeat_that_arrives_late_ends_no_lease() -> None:
    world = world_with_node(brokers=2)
    quick, slow = world.brokers
    lease = granted(quick, 100)
    quick.see(heartbeat("node-1", A100, sent_at=START_S + 2, lease_ids=(lease.lease_id,)))
    quick.settle()
    slow.watch("node-1")
    slow.see(heartbeat("node-1", A100, sent_at=START_S + 1))
    slow.settle()
    assert world.lease(lease.lease_id)


def test_a_grant_for_any_node_takes_the_one_with_the_most_room() -> None:
    world = World()
    world.see(heartbeat("node-1", A100))
    world.see(heartbeat("node-2", A100, A100))
    assert granted(world.brokers[0], 30, node="").node == "node-2"
    assert granted(world.brokers[0], 65, node="").node == "node-2"


def test_a_grant_for_any_node_goes_on_when_another_broker_was_faster() -> None:
    world = World(2)
    for node in ("node-1", "node-2"):
        world.see(heartbeat(node, A100))
    one, two = world.brokers
    first, second = one.grant(100), two.grant(100)
    for broker in (two, one):
        broker.settle()
    nodes = set()
    for broker, request_id in ((one, first), (two, second)):
        lease = broker.answers[request_id]
        assert isinstance(lease, LeaseGranted)
        nodes.add(lease.node)
    assert nodes == {"node-1", "node-2"}


def test_a_grant_for_any_node_names_the_largest_when_none_can_hold_it() -> None:
    world = world_with_node()
    broker = world.brokers[0]
    error = refused(broker, broker.grant(500))
    assert (error.code, error.retryable) == (ErrorCode.EXHAUSTED, False)
    assert "the largest has 100" in error.message
    granted(broker, 100)
    assert refused(broker, broker.grant(50)).retryable


def test_a_restarted_broker_knows_the_leases_of_its_earlier_life() -> None:
    world = world_with_node()
    granted(world.brokers[0], 100)
    broker = world.restart(0)
    info = broker.core.node("node-1", world.at)
    assert (info.ready, info.cu_allocated) == (False, 100)
    broker.see(heartbeat("node-1", A100))
    assert refused(broker, broker.grant(1, node="node-1")).code is ErrorCode.EXHAUSTED


def test_a_store_that_fails_is_told_to_who_asked_and_the_next_one_succeeds() -> None:
    world = world_with_node()
    broker = world.brokers[0]
    request_id = broker.grant(60, node="node-1")
    broker.store_step(fail=True)
    assert broker.refusals[request_id].code is ErrorCode.UNAVAILABLE
    # The write had taken effect: its units stay taken until they run out.
    assert refused(broker, broker.grant(60, node="node-1")).code is ErrorCode.EXHAUSTED
    granted(broker, 40)


def test_leases_outlive_the_loss_of_the_bucket() -> None:
    world = world_with_node(brokers=2)
    lease = granted(world.brokers[0], 60)
    world.lose_bucket()
    granted(world.brokers[0], 40)
    assert world.record().cu_allocated == 100
    assert world.lease(lease.lease_id)


def test_a_node_silent_for_long_is_forgotten_unless_it_has_leases() -> None:
    world = World(config=BrokerConfig(node_forget_s=10))
    world.see(heartbeat("node-1", A100))
    world.see(heartbeat("node-2", A100))
    broker = world.brokers[0]
    request_id = broker.grant(1, node="node-2", ttl_s=1000)
    broker.settle()
    assert request_id in broker.answers
    world.now += 11
    broker.sweep()
    assert [info.node for info in broker.core.nodes(world.at).nodes] == ["node-2"]
    assert set(world.bucket.records) == {"node-2"}


def test_a_node_known_only_from_an_earlier_life_is_forgotten_too() -> None:
    world = World(config=BrokerConfig(node_forget_s=10))
    world.see(heartbeat("node-1", A100))
    broker = world.restart(0)
    broker.sweep()
    assert broker.core.nodes(world.at).nodes[0].ready is False
    world.now += 11
    broker.sweep()
    assert broker.core.nodes(world.at).nodes == ()


def test_the_inventory_is_sorted_and_summed() -> None:
    world = World()
    for node in ("node-2", "node-1"):
        world.see(heartbeat(node, A100))
    granted(world.brokers[0], 30, node="node-2")
    found = world.brokers[0].core.nodes(world.at)
    assert [info.node for info in found.nodes] == ["node-1", "node-2"]
    assert (found.cu_total, found.cu_allocated) == (200, 30)
