"""Whoever names a lease that is gone hears of it, however early it ended and whoever knows."""

from __future__ import annotations

import pytest

from broker_world import START_S, Broker, World, heartbeat
from dsec_broker.config import BrokerConfig
from dsec_broker.effects import ReadRecord
from dsec_broker.events import StoreFailed
from dsec_broker.revoking import REVOKES_MAX
from dsec_common.errors import ErrorCode, unavailable
from dsec_common.wire.lease import GrantLease, LeaseGranted
from dsec_common.wire.node import NodeHeartbeat

A100 = "NVIDIA A100-SXM4-40GB"
ASKED = GrantLease(
    message_id="0" * 26, project="default", holder="h", cu=60, node="node-1", ttl_s=100
)


def world_with_node(brokers: int = 1) -> World:
    world = World(brokers)
    world.see(heartbeat("node-1", A100))
    return world


def granted(broker: Broker, asked: GrantLease = ASKED) -> str:
    request_id = broker.ask(asked)
    broker.settle()
    reply = broker.answers[request_id]
    assert isinstance(reply, LeaseGranted)
    return reply.lease_id


def beat(world: World, *lease_ids: str) -> NodeHeartbeat:
    world.now += 1
    return heartbeat("node-1", A100, sent_at=world.now, lease_ids=lease_ids)


def told(broker: Broker) -> list[str]:
    return [revoke.lease_id for revoke in broker.revoked]


def test_a_lease_unlocked_before_a_heartbeat_named_it_is_lost_to_its_sandbox() -> None:
    world = world_with_node(brokers=2)
    lease_id = granted(world.brokers[0])
    world.brokers[0].unlock()
    world.brokers[0].settle()
    world.see(beat(world))  # its sandbox is still on its way
    world.see(beat(world, lease_id))
    for broker in world.brokers:
        assert told(broker) == [lease_id]
        assert "by force: stuck" in broker.revoked[0].reason


def test_a_lease_transferred_before_a_heartbeat_named_it_is_lost_to_its_sandbox() -> None:
    world = world_with_node()
    (broker,) = world.brokers
    lease_id = granted(broker)
    broker.transfer(lease_id, holder="another")
    broker.settle()
    world.see(beat(world, lease_id))
    assert told(broker) == [lease_id]
    assert "transferred to another" in broker.revoked[0].reason


@pytest.mark.parametrize("is_swept", [False, True])
def test_a_lease_that_ran_out_before_a_heartbeat_named_it_is_lost_to_its_sandbox(
    is_swept: bool,
) -> None:
    world = world_with_node()
    (broker,) = world.brokers
    lease_id = granted(broker)
    world.now += 101
    if is_swept:
        broker.sweep()
    else:
        world.see(beat(world))
        granted(broker, GrantLease(project="default", holder="h", cu=60, node="node-1", ttl_s=100))
    broker.settle()
    world.see(beat(world, lease_id))
    assert told(broker) == [lease_id]


def test_a_lease_given_back_while_its_sandbox_lives_is_lost_to_it() -> None:
    world = world_with_node()
    (broker,) = world.brokers
    lease_id = granted(broker)
    broker.release(lease_id)
    broker.settle()
    world.see(beat(world, lease_id))
    assert told(broker) == [lease_id]


def test_a_lease_that_another_broker_has_just_written_is_not_revoked() -> None:
    world = world_with_node(brokers=2)
    writer, behind = world.brokers
    lease_id = granted(writer)
    behind.see(beat(world, lease_id))
    assert behind.store == [ReadRecord(node="node-1")]
    behind.settle()
    assert told(behind) == []
    assert world.lease(lease_id).confirmed_at == world.now


def test_a_heartbeat_is_not_judged_by_a_read_that_began_before_it_came() -> None:
    world = world_with_node(brokers=2)
    writer, behind = world.brokers
    behind.unlock(project="nobodys")
    behind.serve()  # the read is done, and its word on its way
    lease_id = granted(writer)
    behind.see(beat(world, lease_id))
    behind.settle()
    assert told(behind) == []
    assert world.lease(lease_id).confirmed_at == world.now


def test_a_broker_that_writes_all_the_time_still_looks_for_what_it_does_not_know() -> None:
    world = world_with_node()
    (broker,) = world.brokers
    lease_id = granted(broker)
    broker.release(lease_id)
    broker.settle()
    broker.grant(10, node="node-1")
    broker.see(beat(world, lease_id))  # comes while the write is outstanding
    broker.settle()
    assert told(broker) == [lease_id]


def test_a_broker_that_has_just_started_tells_of_what_ended_before() -> None:
    world = world_with_node()
    lease_id = granted(world.brokers[0])
    world.brokers[0].release(lease_id)
    world.brokers[0].settle()
    fresh = world.restart(0)
    world.see(beat(world, lease_id))
    assert told(fresh) == [lease_id]


def test_nothing_is_revoked_while_the_bucket_cannot_be_read() -> None:
    world = world_with_node()
    (broker,) = world.brokers
    broker.see(beat(world, "node-1.unknown"))
    assert broker.store.pop() == ReadRecord(node="node-1")
    broker.handle(StoreFailed(node="node-1", error=unavailable("gone"), at=broker.at))
    assert told(broker) == []
    world.see(beat(world, "node-1.unknown"))
    assert told(broker) == ["node-1.unknown"]


def test_a_lost_bucket_is_written_again_before_any_lease_counts_as_gone() -> None:
    world = world_with_node(brokers=2)
    knows, knows_nothing = world.brokers
    lease_id = granted(knows)
    world.lose_bucket()
    world.see(beat(world, lease_id, "node-1.other"))
    assert world.lease(lease_id)
    world.see(beat(world, lease_id, "node-1.other"))
    assert set(told(knows)) == set(told(knows_nothing)) == {"node-1.other"}


def test_a_node_that_names_thousands_of_leases_is_told_of_some_and_kept_is_none() -> None:
    world = world_with_node(brokers=2)
    broker, other = world.brokers
    lease_id = granted(broker)
    lies = tuple(f"node-{number % 3}.{number}" for number in range(5000))
    world.see(beat(world, *lies, lease_id))
    before = world.record()
    world.see(beat(world, *lies, lease_id))
    assert world.record() == before
    assert before.revoked == ()
    assert [lease.lease_id for lease in before.leases] == [lease_id]
    for one in (broker, other):
        assert told(one) == [*lies[:REVOKES_MAX]] * 2
        assert {revoke.node for revoke in one.revoked} == {"node-1"}


def test_a_node_that_names_anothers_lease_neither_prolongs_nor_ends_it() -> None:
    world = world_with_node()
    (broker,) = world.brokers
    lease_id = granted(broker)
    before = world.record()
    world.now += 1
    world.see(heartbeat("node-2", A100, sent_at=world.now, lease_ids=(lease_id,)))
    world.see(heartbeat("node-2", A100, sent_at=world.now + 1, lease_ids=(lease_id,)))
    assert world.record() == before
    assert {revoke.node for revoke in broker.revoked} == {"node-2"}


def test_a_grant_sent_again_after_its_lease_was_ended_by_force_is_refused() -> None:
    world = world_with_node()
    (broker,) = world.brokers
    granted(broker)
    broker.unlock()
    broker.settle()
    request_id = broker.ask(ASKED)
    broker.settle()
    refusal = broker.refusals[request_id]
    assert refusal.code is ErrorCode.EXPIRED
    assert "by force: stuck" in refusal.message


def test_what_was_never_named_is_remembered_until_its_time_is_over() -> None:
    world = World(config=BrokerConfig(clock_skew_s=60.0))
    world.see(heartbeat("node-1", A100))
    (broker,) = world.brokers
    granted(broker)
    broker.unlock()
    broker.settle()
    world.now = START_S + 158
    world.see(beat(world))
    assert len(world.record().revoked) == 1
    world.see(beat(world))
    assert world.record().revoked == ()


def test_a_grant_sent_again_is_not_answered_from_what_another_broker_has_ended() -> None:
    world = world_with_node(brokers=2)
    behind, other = world.brokers
    lease_id = granted(behind)
    other.release(lease_id)
    other.settle()
    request_id = behind.ask(ASKED)
    assert request_id not in behind.answers
    behind.settle()
    again = behind.answers[request_id]
    assert isinstance(again, LeaseGranted)
    assert world.lease(lease_id).token == again.token
    request_id = behind.renew(lease_id, 1.0)
    assert request_id not in behind.answers, "though it changes nothing"
