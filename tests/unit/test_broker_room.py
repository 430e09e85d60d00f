"""A node's record stays one message of the bus, whatever is asked and whatever the log refuses."""

from __future__ import annotations

import msgspec
import pytest

from broker_world import World, heartbeat
from dsec_broker.config import BrokerConfig
from dsec_broker.events import UnlockAsked
from dsec_broker.room import GRANT_BYTES_MAX, RECORD_BYTES_MAX
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.wire.base import encode
from dsec_common.wire.lease import UNLOCK_REASON_MAX, GrantLease, LeaseGranted
from dsec_common.wire.sandbox import AGENT_CHARACTERS_MAX

INTERVAL_S = 300.0
CONFIG = BrokerConfig(
    kafka_bootstrap="kafka:9092",
    clock_skew_s=0.0,
    metering_interval_s=INTERVAL_S,
    lease_ttl_max_s=10_000_000.0,
)
TTL_S = 1_000_000.0
LONG_NAME = "\N{GRINNING FACE}" * AGENT_CHARACTERS_MAX
"""Of an agent, so that fewer leases and segments fill a record."""


@pytest.fixture
def world() -> World:
    """A node on whose cards there are more slices than its record could name."""
    world = World(1, CONFIG)
    world.see(heartbeat("node-1", *["NVIDIA A100"] * 24))
    return world


def granted(world: World, number: int, agent: str = "") -> tuple[list[str], list[DsecError]]:
    """Ask for so many leases at once; return the ids of those granted, and the refusals."""
    broker = world.brokers[0]
    grant = GrantLease(
        project="default", holder=4 * agent, cu=1.0, node="node-1", ttl_s=TTL_S, agent=agent
    )
    asked = [
        broker.ask(msgspec.structs.replace(grant, message_id=f"lease{world.next_id()}"))
        for _ in range(number)
    ]
    broker.settle()
    answers = [broker.answers[it] for it in asked if it in broker.answers]
    leases = [it.lease_id for it in answers if isinstance(it, LeaseGranted)]
    return leases, [broker.refusals[it] for it in asked if it in broker.refusals]


def size(world: World) -> int:
    return len(encode(world.record()))


def unlocked(world: World, reason: str, lease_id: str = "") -> DsecError | None:
    broker = world.brokers[0]
    request = world.next_id()
    broker.handle(
        UnlockAsked(
            request_id=request,
            project="default",
            node="node-1",
            lease_id=lease_id,
            reason=reason,
            at=broker.at,
        )
    )
    broker.settle()
    return broker.refusals.get(request)


def test_a_lease_that_the_record_cannot_keep_is_refused_and_another_can_have_its_room(
    world: World,
) -> None:
    leases, refusals = granted(world, 2_000)
    assert len(leases) + len(refusals) == 2_000
    assert refusals
    assert {(it.code, it.retryable) for it in refusals} == {(ErrorCode.EXHAUSTED, True)}
    assert f"than its {len(leases)}," in refusals[0].message
    assert [it.lease_id for it in world.record().leases] == leases
    for lease_id in leases[:2]:
        world.brokers[0].release(lease_id)
    world.brokers[0].settle()
    again, refused = granted(world, 2)
    assert len(again) == 2
    assert not refused


def test_all_leases_of_a_full_record_can_be_metered_and_then_end_while_the_log_takes_nothing(
    world: World,
) -> None:
    leases, refusals = granted(world, 1_000, LONG_NAME)
    assert refusals
    broker = world.brokers[0]
    broker.log_refuses = True
    for _ in range(5):
        world.now += INTERVAL_S + 1
        broker.sweep()
        broker.settle()
        assert size(world) <= RECORD_BYTES_MAX
    # Those for whose segments there is no room wait for the log.
    assert 100 < len(world.record().untold) < len(leases)
    for lease_id in leases:
        broker.release(lease_id)
    broker.settle()
    assert world.record().leases == ()
    assert size(world) <= RECORD_BYTES_MAX


def test_a_lease_is_told_of_in_one_segment_for_the_time_in_which_the_log_took_nothing(
    world: World,
) -> None:
    (lease_id,), _ = granted(world, 1)
    broker = world.brokers[0]
    began_ms = round(world.now * 1000)
    broker.log_refuses = True
    for _ in range(10):
        world.now += INTERVAL_S + 1
        broker.sweep()
        broker.settle()
    broker.log_refuses = False
    broker.sweep()
    broker.settle()
    broker.release(lease_id)
    broker.settle()
    first, second = world.told
    assert (first.from_ms, second.to_ms) == (began_ms, round(world.now * 1000))
    assert (first.to_ms, first.number, second.number) == (second.from_ms, 1, 2)
    assert second.last


def test_leases_that_come_and_go_while_the_log_takes_nothing_are_refused_before_the_record_is_full(
    world: World,
) -> None:
    broker = world.brokers[0]
    broker.log_refuses = True
    while True:
        leases, refusals = granted(world, 100, LONG_NAME)
        for lease_id in leases:
            broker.release(lease_id)
        broker.settle()
        assert size(world) <= RECORD_BYTES_MAX
        if refusals:
            break
    assert "segments that the log has yet to take" in refusals[0].message
    broker.log_refuses = False
    world.now += 60.0
    world.see(heartbeat("node-1", *["NVIDIA A100"] * 24, sent_at=world.now))
    for _ in range(2):
        broker.sweep()
        broker.settle()
    assert size(world) < GRANT_BYTES_MAX
    assert granted(world, 1)[0]


def test_an_unlock_whose_reason_does_not_fit_so_often_ends_all_and_is_told_in_short_to_some(
    world: World,
) -> None:
    leases, _ = granted(world, 2_000)
    long = "\N{GRINNING FACE}" * UNLOCK_REASON_MAX
    assert unlocked(world, long) is None
    record = world.record()
    assert record.leases == ()
    assert len(record.revoked) == len(leases)
    assert {long in it.reason for it in record.revoked} == {True, False}
    assert size(world) <= RECORD_BYTES_MAX
