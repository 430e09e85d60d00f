"""Leases on slices: which, whose, and that they add up."""

from __future__ import annotations

import math

import msgspec
import pytest

from broker_world import START_S, Broker, World, heartbeat
from dsec_broker.config import BrokerConfig
from dsec_broker.effects import Alarm, Effect, WriteRecord
from dsec_broker.events import HeartbeatSeen, RecordSeen, RecordWritten
from dsec_broker.state import BrokerState
from dsec_common.compute.model import GpuDemand, part_of_card
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.wire.lease import GrantLease, LeaseGranted, LeasesUnlocked

A100 = "NVIDIA A100-SXM4-40GB"


def world_with_node(*models: str, brokers: int = 1) -> World:
    world = World(brokers)
    world.see(heartbeat("node-1", *(models or (A100,))))
    return world


def granted(broker: Broker, cu: float) -> LeaseGranted:
    request_id = broker.grant(cu, node="node-1")
    broker.settle()
    reply = broker.answers[request_id]
    assert isinstance(reply, LeaseGranted)
    return reply


def refused(broker: Broker, request_id: int) -> DsecError:
    broker.settle()
    return broker.refusals[request_id]


def test_a_grant_names_slices_that_are_worth_what_was_asked_for() -> None:
    lease = granted(world_with_node().brokers[0], 34)
    assert [(it.card, it.percent, it.cu) for it in lease.slices] == [("GPU-0", 34, 34.0)]
    assert lease.cu == 34.0


def test_two_leases_share_no_part_of_a_card() -> None:
    world = world_with_node()
    first, second = granted(world.brokers[0], 60), granted(world.brokers[0], 40)
    assert first.slices[0].percent + second.slices[0].percent == 100
    assert world.record().cu_allocated == world.record().cu_total == 100


def test_slices_that_were_found_free_are_granted_as_they_are_or_not_at_all() -> None:
    world = world_with_node(A100, A100)
    broker = world.brokers[0]
    (card,) = (card for card in world.record().cards if card.uuid == "GPU-1")
    part = part_of_card(card, 30)
    asked = GrantLease(project="default", holder="h", cu=30, node="node-1", slices=(part,))
    first = broker.ask(asked)
    broker.settle()
    reply = broker.answers[first]
    assert isinstance(reply, LeaseGranted)
    assert reply.slices == (part,)
    most = GrantLease(
        project="default", holder="h", cu=80, node="node-1", slices=(part_of_card(card, 80),)
    )
    error = refused(broker, broker.ask(most))
    assert (error.code, error.retryable) == (ErrorCode.EXHAUSTED, True)


def test_the_same_request_asked_again_of_another_broker_is_the_same_lease() -> None:
    world = world_with_node(brokers=2)
    dead, other = world.brokers
    asked = GrantLease(project="default", holder="h", cu=60, node="node-1")
    dead.ask(asked)
    dead.store_step(fail=True)  # written; the broker dies before it answers
    again = other.ask(asked)
    other.settle()
    reply = other.answers[again]
    assert isinstance(reply, LeaseGranted)
    assert [lease.lease_id for lease in world.record().leases] == [reply.lease_id]


def test_the_same_request_for_any_node_finds_the_node_that_granted_it() -> None:
    world = World(2)
    for node in ("node-1", "node-2"):
        world.see(heartbeat(node, A100))
    dead, other = world.brokers
    asked = GrantLease(project="default", holder="h", cu=60)
    dead.ask(asked)
    dead.settle()
    for node in ("node-1", "node-2"):
        other.watch(node)
    again = other.ask(asked)
    other.settle()
    assert isinstance(other.answers[again], LeaseGranted)
    assert sum(len(world.record(node).leases) for node in ("node-1", "node-2")) == 1


def test_another_projects_request_with_the_same_id_gets_nothing_of_it() -> None:
    world = world_with_node()
    broker = world.brokers[0]
    asked = GrantLease(project="default", holder="h", cu=10, node="node-1")
    broker.ask(asked)
    broker.settle()
    error = refused(broker, broker.ask(msgspec.structs.replace(asked, project="other")))
    assert error.code is ErrorCode.CONFLICT


@pytest.mark.parametrize(
    "demand",
    [
        GpuDemand(min_cu=math.nan, max_cu=1.0),
        GpuDemand(min_cu=2.0, max_cu=1.0),
        GpuDemand(min_cu=1.0, max_cu=math.inf),
        GpuDemand(min_cu=1.0, max_cu=1.0, count=-1),
        GpuDemand(min_cu=1.0, max_cu=1.0, memory_bytes=-1),
    ],
)
def test_a_demand_that_makes_no_sense_is_invalid(demand: GpuDemand) -> None:
    broker = world_with_node().brokers[0]
    asked = GrantLease(project="default", holder="h", demand=demand, node="node-1")
    assert refused(broker, broker.ask(asked)).code is ErrorCode.INVALID


def test_a_refusal_says_what_was_asked_for_in_full() -> None:
    broker = world_with_node().brokers[0]
    demand = GpuDemand(min_cu=80, max_cu=80, count=2, same_island=True, models=("A100",))
    asked = GrantLease(project="default", holder="h", demand=demand, node="node-1")
    error = refused(broker, broker.ask(asked))
    assert "80 on 2 cards of one NVLink island of model A100" in error.message
    assert not error.retryable


# --- Transfer, force, fences ----------------------------------------------------------------------


def test_a_transferred_lease_keeps_its_slices_under_a_new_id_and_a_larger_token() -> None:
    world = world_with_node()
    broker = world.brokers[0]
    old = granted(broker, 60)
    request = broker.transfer(old.lease_id, "sandbox-2")
    broker.settle()
    new = broker.answers[request]
    assert isinstance(new, LeaseGranted)
    assert (new.slices, new.lease_id != old.lease_id) == (old.slices, True)
    assert new.token > old.token
    assert [lease.holder for lease in world.record().leases] == ["sandbox-2"]
    broker.release(old.lease_id)  # whatever the old holder still does
    broker.settle()
    assert world.lease(new.lease_id).slices == old.slices


@pytest.mark.parametrize(
    ("holds_s", "ends_in_s"), [(600.0, 600.0), (0.0, None), (float("inf"), None), (-1.0, None)]
)
def test_a_lease_says_when_its_holder_is_expected_to_end_and_a_transferred_one_does_not(
    holds_s: float, ends_in_s: float | None
) -> None:
    world = world_with_node()
    broker = world.brokers[0]
    asked = GrantLease(project="default", holder="", cu=10, node="node-1", holds_s=holds_s)
    request = broker.ask(asked)
    broker.settle()
    old = broker.answers[request]
    assert isinstance(old, LeaseGranted)
    lease = world.lease(old.lease_id)
    assert lease.ends_at == (0.0 if ends_in_s is None else lease.granted_at + ends_in_s)
    broker.transfer(old.lease_id, "sandbox-2")
    broker.settle()
    assert [it.ends_at for it in world.record().leases] == [0.0]


def test_a_transfer_that_is_asked_for_again_is_the_same() -> None:
    world = world_with_node()
    broker = world.brokers[0]
    old = granted(broker, 60)
    for _ in range(2):
        request = broker.transfer(old.lease_id, local="once")
        broker.settle()
        assert isinstance(broker.answers[request], LeaseGranted)
    assert len(world.record().leases) == 1


def test_what_has_ended_cannot_be_transferred() -> None:
    world = world_with_node()
    broker = world.brokers[0]
    lease = granted(broker, 60)
    broker.release(lease.lease_id)
    broker.settle()
    assert refused(broker, broker.transfer(lease.lease_id)).code is ErrorCode.EXPIRED


def unlocked(broker: Broker, request_id: int) -> list[str]:
    broker.settle()
    reply = broker.answers[request_id]
    assert isinstance(reply, LeasesUnlocked)
    return [lease.lease_id for lease in reply.leases]


def test_force_ends_one_lease_or_all_of_a_project_and_nobody_elses() -> None:
    world = world_with_node(brokers=2)
    broker, other = world.brokers
    first, second = granted(broker, 10), granted(broker, 10)
    theirs = broker.grant(10, node="node-1", project="other")
    broker.settle()
    assert theirs in broker.answers
    assert unlocked(other, other.unlock(lease_id=first.lease_id)) == [first.lease_id]
    assert unlocked(other, other.unlock()) == [second.lease_id], "though it has heard of none"
    assert [lease.project for lease in world.record().leases] == ["other"]


def test_a_node_is_told_of_a_lost_lease_until_it_names_it_no_more() -> None:
    world = world_with_node(brokers=2)
    broker, other = world.brokers
    lease = granted(broker, 60)
    named = (lease.lease_id,)
    world.see(heartbeat("node-1", A100, sent_at=START_S + 1, lease_ids=named))
    broker.unlock()
    broker.settle()
    granted(broker, 100)  # free at once
    other.watch("node-1")
    for second in (2, 3):
        world.see(heartbeat("node-1", A100, sent_at=START_S + second, lease_ids=named))
    for one in world.brokers:
        assert [told.lease_id for told in one.revoked] == [lease.lease_id] * 2
        assert "by force: stuck" in one.revoked[0].reason
    world.see(heartbeat("node-1", A100, sent_at=START_S + 4))
    assert world.record().revoked == ()


def test_a_lease_that_ran_out_while_its_node_was_away_is_lost_to_its_sandbox() -> None:
    world = world_with_node()
    broker = world.brokers[0]
    lease = granted(broker, 60)
    named = (lease.lease_id,)
    world.see(heartbeat("node-1", A100, sent_at=START_S + 1, lease_ids=named))
    world.now += 2000
    broker.sweep()
    broker.settle()
    world.see(heartbeat("node-1", A100, sent_at=START_S + 2000, lease_ids=named))
    world.see(heartbeat("node-1", A100, sent_at=START_S + 2001, lease_ids=named))
    assert {told.lease_id for told in broker.revoked} == {lease.lease_id}


def test_a_broker_whose_clock_is_a_minute_ahead_ends_no_lease_early() -> None:
    world = World(2, BrokerConfig(clock_skew_s=60.0))
    world.see(heartbeat("node-1", A100))
    right, ahead = world.brokers
    ahead.ahead_s = 60.0
    lease = granted(right, 100)
    world.now += 99.0
    world.see(heartbeat("node-1", A100, sent_at=world.now))
    ahead.watch("node-1")
    ahead.sweep()
    ahead.settle()
    assert world.lease(lease.lease_id)
    renewal = right.renew(lease.lease_id)
    right.settle()
    assert renewal in right.answers


def test_a_heartbeat_that_was_overtaken_says_nothing() -> None:
    world = world_with_node()
    broker = world.brokers[0]
    broker.see(heartbeat("node-1", A100, A100, sent_at=START_S + 3))
    broker.settle()
    broker.see(heartbeat("node-1", A100, sent_at=START_S + 2))
    broker.settle()
    assert broker.core.node("node-1", world.at).cu_total == 200


def test_a_card_that_fell_off_takes_its_slices_with_it_and_brings_them_back() -> None:
    world = world_with_node(A100, A100)
    broker = world.brokers[0]
    lease = granted(broker, 200)
    world.see(heartbeat("node-1", A100, sent_at=START_S + 1))
    assert refused(broker, broker.grant(10, node="node-1")).code is ErrorCode.EXHAUSTED
    world.see(heartbeat("node-1", A100, A100, sent_at=START_S + 2))
    assert refused(broker, broker.grant(10, node="node-1")).code is ErrorCode.EXHAUSTED
    assert world.lease(lease.lease_id)
    assert not broker.alarms


# --- Conservation ---------------------------------------------------------------------------------


def test_a_record_that_does_not_add_up_raises_an_alarm_with_the_next_write() -> None:
    world = world_with_node()
    broker = world.brokers[0]
    lease = granted(broker, 60)
    record, revision = world.bucket.read("node-1")
    assert record is not None
    twice = msgspec.structs.replace(world.lease(lease.lease_id), lease_id="node-1.ghost")
    broken = msgspec.structs.replace(record, leases=(*record.leases, twice))
    world.bucket.records["node-1"] = (broken, revision + 1)
    world.bucket.revision += 1
    core = BrokerState(world.config)
    told: list[Effect] = []
    core.handle(RecordSeen(node="node-1", record=broken, revision=revision + 1, at=world.at))
    beat = heartbeat("node-1", A100, sent_at=START_S + 1, lease_ids=(lease.lease_id,))
    for effect in core.handle(HeartbeatSeen(heartbeat=beat, at=world.at)):
        assert isinstance(effect, WriteRecord)
        told = core.handle(RecordWritten(node="node-1", revision=revision + 2, at=world.at))
    (alarm,) = (effect for effect in told if isinstance(effect, Alarm))
    assert any("120 percent allocated + -20 free is not 100" in it for it in alarm.violations)
