"""What leases held is told exactly once, to the millisecond, whichever broker dies when."""

from __future__ import annotations

import itertools
import random

import pytest

from broker_world import World, heartbeat
from dsec_broker.config import BrokerConfig
from dsec_broker.listing import held
from dsec_common.compute.model import GpuDemand
from dsec_common.metering import MICRO, LeaseSegment
from dsec_common.wire.lease import GrantLease, LeaseGranted

CONFIG = BrokerConfig(
    kafka_bootstrap="kafka:9092", clock_skew_s=0.0, metering_interval_s=300.0, prices={"A100": 2.0}
)


def granted(world: World, cu: float, *, ttl_s: float = 10_000.0) -> LeaseGranted:
    broker = world.brokers[0]
    broker.see(heartbeat("node-1", "NVIDIA A100", sent_at=world.now))
    asked = GrantLease(
        project="team",
        holder="",
        demand=GpuDemand(min_cu=5.0, max_cu=cu),
        node="node-1",
        ttl_s=ttl_s,
        agent="coder",
    )
    request = broker.ask(asked)
    broker.settle()
    reply = broker.answers[request]
    assert isinstance(reply, LeaseGranted)
    return reply


def told_once(world: World) -> dict[str, list[LeaseSegment]]:
    """Return by lease what was told of it, each number once."""
    known: dict[str, dict[int, LeaseSegment]] = {}
    for segment in world.told:
        earlier = known.setdefault(segment.lease_id, {}).setdefault(segment.number, segment)
        assert earlier == segment
    return {lease: [kept[number] for number in sorted(kept)] for lease, kept in known.items()}


def check(segments: list[LeaseSegment]) -> None:
    """Return if segments follow each other from the first to the last."""
    assert [it.number for it in segments] == list(range(1, len(segments) + 1))
    for before, after in itertools.pairwise(segments):
        assert after.from_ms == before.to_ms
    assert [it.last for it in segments] == [False] * (len(segments) - 1) + [True]


@pytest.fixture
def world() -> World:
    world = World(2, CONFIG)
    world.see(heartbeat("node-1", "NVIDIA A100"))
    return world


def test_a_lease_that_is_given_back_is_told_of_with_all_that_it_held(world: World) -> None:
    began = world.now
    lease = granted(world, 50.0)
    world.now += 12.345
    world.brokers[0].release(lease.lease_id)
    world.brokers[0].settle()
    ((segment,),) = told_once(world).values()
    check([segment])
    assert (segment.from_ms, segment.lasted_ms) == (round(began * 1000), 12_345)
    assert segment.cu_micro == round(lease.cu * MICRO)
    assert segment.cost_micro_per_hour == round(2.0 * lease.cu * MICRO)
    assert (segment.project, segment.agent, segment.node) == ("team", "coder", "node-1")


def test_a_change_of_what_is_held_ends_one_segment_and_begins_the_next(world: World) -> None:
    lease = granted(world, 50.0)
    world.now += 10.0
    world.brokers[0].resize({lease.lease_id: 30.0})
    world.brokers[0].settle()
    world.now += 5.0
    world.brokers[0].release(lease.lease_id)
    world.brokers[0].settle()
    (segments,) = told_once(world).values()
    check(segments)
    assert [it.lasted_ms for it in segments] == [10_000, 5_000]
    assert segments[0].cu_micro > segments[1].cu_micro


@pytest.mark.parametrize(("named", "then"), [("", "coder"), ("writer", "writer")])
def test_a_lease_that_is_handed_on_is_billed_to_whom_it_is_held_for(
    world: World, named: str, then: str
) -> None:
    lease = granted(world, 50.0)
    broker = world.brokers[0]
    world.now += 10.0
    request = broker.transfer(lease.lease_id, agent=named)
    broker.settle()
    handed_on = broker.answers[request]
    assert isinstance(handed_on, LeaseGranted)
    assert [held(it).agent for it in world.record().leases] == [then]
    world.now += 5.0
    broker.release(handed_on.lease_id)
    broker.settle()
    told = told_once(world)
    assert [(it.agent, it.lasted_ms) for it in told[lease.lease_id]] == [("coder", 10_000)]
    assert [(it.agent, it.lasted_ms) for it in told[handed_on.lease_id]] == [(then, 5_000)]


def test_a_lease_that_lasts_is_told_of_now_and_then(world: World) -> None:
    lease = granted(world, 50.0)
    for _ in range(70):
        world.now += 10.0
        for broker in world.brokers:
            broker.sweep()
            broker.settle()
            broker.watch("node-1")
    world.brokers[0].release(lease.lease_id)
    world.brokers[0].settle()
    (segments,) = told_once(world).values()
    check(segments)
    assert len(segments) == 3
    assert sum(it.lasted_ms for it in segments) == 700_000


def test_what_a_broker_did_not_live_to_tell_another_tells(world: World) -> None:
    lease = granted(world, 50.0)
    first, second = world.brokers
    first.log_refuses = True
    world.now += 7.0
    first.release(lease.lease_id)
    first.settle()
    assert world.told == []
    second.watch("node-1")
    second.sweep()
    assert world.told == []  # whoever wrote it may be about to tell
    world.now += 11.0
    second.sweep()
    ((segment,),) = told_once(world).values()
    assert segment.lasted_ms == 7_000
    second.sweep()
    second.settle()
    assert world.record().untold == ()


def test_what_was_told_leaves_the_record_with_the_next_write(world: World) -> None:
    for _ in range(20):
        lease = granted(world, 50.0)
        world.now += 1.0
        world.brokers[0].release(lease.lease_id)
        world.brokers[0].settle()
    assert len(world.record().untold) <= 2
    assert len(told_once(world)) == 20


def test_a_node_is_not_forgotten_before_what_was_held_on_it_is_told(world: World) -> None:
    lease = granted(world, 50.0)
    for broker in world.brokers:
        broker.log_refuses = True
    world.brokers[0].release(lease.lease_id)
    world.brokers[0].settle()
    world.now += 10 * CONFIG.node_forget_s
    for _ in range(3):
        world.brokers[0].sweep()
        world.brokers[0].settle()
    assert world.record().untold
    world.brokers[0].log_refuses = False
    for _ in range(3):
        world.brokers[0].sweep()
        world.brokers[0].settle()
    assert not world.bucket.records
    assert len(told_once(world)) == 1


@pytest.mark.parametrize("seed", range(30))
def test_whatever_happens_the_sums_are_what_was_held(seed: int) -> None:  # noqa: C901  one case per event
    chance = random.Random(seed)  # noqa: S311  the same each time
    world = World(3, CONFIG)
    world.see(heartbeat("node-1", "NVIDIA A100"))
    living: dict[str, float] = {}
    began: dict[str, int] = {}
    ended: dict[str, int] = {}
    for _ in range(120):
        world.now += chance.choice([0.001, 1.0, 30.0])
        broker = chance.choice(world.brokers)
        broker.watch("node-1")
        broker.see(heartbeat("node-1", "NVIDIA A100", sent_at=world.now))
        broker.settle()
        match chance.randrange(6):
            case 0:
                demand = GpuDemand(min_cu=5.0, max_cu=chance.choice([5.0, 20.0]))
                request = broker.ask(
                    GrantLease(
                        project="team", holder="", demand=demand, node="node-1", ttl_s=10_000.0
                    )
                )
                broker.settle()
                reply = broker.answers.get(request)
                if isinstance(reply, LeaseGranted):
                    living[reply.lease_id] = reply.cu
                    began[reply.lease_id] = round(world.now * 1000)
            case 1 if living:
                lease_id = chance.choice(sorted(living))
                broker.release(lease_id)
                broker.settle()
                del living[lease_id]
                ended[lease_id] = round(world.now * 1000)
            case 2 if living:
                broker.resize({chance.choice(sorted(living)): chance.choice([5.0, 10.0])})
                broker.settle()
            case 3:
                world.restart(world.brokers.index(broker))
            case 4:
                broker.log_refuses = not broker.log_refuses
            case _:
                broker.sweep()
                broker.settle()
    last = world.restart(0)
    for lease_id in sorted(living):
        last.release(lease_id)
        last.settle()
        ended[lease_id] = round(world.now * 1000)
    world.now += 60.0
    for _ in range(2):
        last.sweep()
        last.settle()
    told = told_once(world)
    assert told
    assert set(told) == {lease_id for lease_id in began if ended[lease_id] >= began[lease_id]}
    for lease_id, segments in told.items():
        check(segments)
        assert segments[0].from_ms == began[lease_id]
        assert segments[-1].to_ms == ended[lease_id]
