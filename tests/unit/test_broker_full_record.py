"""The room in a node's record: what fills it, what never does, and who is told."""

from __future__ import annotations

import random

import msgspec
import pytest

from broker_world import Broker, World, heartbeat
from dsec_broker import room
from dsec_broker.config import BrokerConfig
from dsec_broker.errors import no_room
from dsec_broker.room import Room
from dsec_common.compute.model import (
    GpuDemand,
    ServiceClass,
)
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.wire.base import Message
from dsec_common.wire.lease import (
    HOLDER_CHARACTERS_MAX,
    UNLOCK_REASON_MAX,
    GrantLease,
    LeaseGranted,
    LeaseRenewed,
)
from dsec_common.wire.sandbox import AGENT_CHARACTERS_MAX

A100 = "NVIDIA A100-SXM4-40GB"
CARDS = 4
CONFIG = BrokerConfig(clock_skew_s=0.0)
METERS = BrokerConfig(kafka_bootstrap="kafka:9092", clock_skew_s=0.0, metering_interval_s=300.0)
NODE = "node-1"


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a record hold about a hundred leases."""
    for module, name, size in (
        ("room", "GRANT_BYTES_MAX", 64_000),
        ("room", "LATER_BYTES_MAX", 66_000),
        ("room", "RECORD_BYTES_MAX", 72_000),
        ("audit", "RECORD_BYTES_MAX", 72_000),
    ):
        monkeypatch.setattr(f"dsec_broker.{module}.{name}", size)


def world_of(*nodes: str, brokers: int = 1, config: BrokerConfig = CONFIG) -> World:
    world = World(brokers, config)
    for node in nodes or (NODE,):
        world.see(heartbeat(node, *[A100] * CARDS))
    return world


def answer(broker: Broker, request_id: int) -> Message:
    broker.settle()
    return broker.answers[request_id]


def filled(broker: Broker) -> list[LeaseGranted]:
    """Return the leases that fill the first node's record."""
    leases: list[LeaseGranted] = []
    while True:
        request_id = broker.grant(1.0, node=NODE, ttl_s=5000.0)
        broker.settle()
        if request_id in broker.refusals:
            return leases
        reply = broker.answers[request_id]
        assert isinstance(reply, LeaseGranted)
        leases.append(reply)


def size(world: World) -> int:
    return len(msgspec.msgpack.encode(world.record()))


def beat(broker: Broker, *lease_ids: str) -> None:
    """Have a heartbeat of the first node come that names these leases."""
    sent_at = broker.world.now
    broker.see(heartbeat(NODE, *[A100] * CARDS, sent_at=sent_at, lease_ids=lease_ids))
    broker.settle()


def test_a_full_record_is_a_refusal_that_says_what_to_do_and_changes_nothing() -> None:
    world = world_of()
    (broker,) = world.brokers
    leases = filled(broker)
    assert 50 < len(leases) < 100 * CARDS
    before = world.record()
    request_id = broker.grant(1.0, node=NODE)
    broker.settle()
    error = broker.refusals[request_id]
    assert str(error) == str(no_room(NODE, len(leases), 0))
    assert (error.code, error.retryable) == (ErrorCode.EXHAUSTED, True)
    assert world.record() == before
    # What was granted is answered again, and room that comes back is given away.
    again = broker.ask(
        GrantLease(
            project="default",
            holder="h",
            cu=1.0,
            node=NODE,
            message_id=leases[0].lease_id.partition(".")[2],
        )
    )
    assert isinstance(answer(broker, again), LeaseGranted)
    for lease in leases[:10]:
        broker.release(lease.lease_id)
    broker.settle()
    assert isinstance(answer(broker, broker.grant(1.0, node=NODE)), LeaseGranted)


def test_a_grant_on_any_node_goes_to_one_whose_record_has_room() -> None:
    world = world_of(NODE)
    (broker,) = world.brokers
    filled(broker)
    # The first has more units free.
    world.see(heartbeat("node-2", A100))
    reply = answer(broker, broker.grant(1.0))
    assert isinstance(reply, LeaseGranted)
    assert reply.node == "node-2"
    request_id = broker.grant(90.0)
    broker.grant(90.0)
    assert isinstance(answer(broker, request_id), LeaseGranted)
    last = broker.grant(90.0)
    broker.settle()
    error = broker.refusals[last]
    assert (error.code, error.retryable) == (ErrorCode.EXHAUSTED, True)
    assert "of 2 nodes 1 hold so many leases" in error.message


def test_another_broker_that_has_not_heard_goes_to_another_node_too() -> None:
    world = world_of(NODE, "node-2", brokers=2)
    first, late = world.brokers
    # The late one has nothing of the first node's leases: it is told by the bucket.
    for _ in filled(first):
        pass
    reply = answer(late, late.grant(1.0))
    assert isinstance(reply, LeaseGranted)
    assert reply.node == "node-2"


def test_the_index_has_nothing_while_the_record_is_full() -> None:
    world = world_of()
    (broker,) = world.brokers
    leases = filled(broker)
    books = broker.core._books(NODE)
    assert books is not None
    assert books.is_full
    assert books.pool.find(GpuDemand(min_cu=1.0, max_cu=1.0)) is None
    assert books.pool.free_cu == 0.0
    assert not books.pool.has(leases[0].slices)
    (listed,) = broker.core.leases(broker.at)
    assert listed.full
    assert "its record holds no more" in broker.core.node(NODE, broker.at).notes[-1]
    broker.unlock()
    broker.settle()
    beat(broker)
    (listed,) = broker.core.leases(broker.at)
    assert not listed.full


def test_urgent_work_has_no_lease_shrink_for_it_where_the_record_is_full() -> None:
    world = world_of()
    (broker,) = world.brokers
    elastic = GrantLease(
        project="default",
        holder="h",
        demand=GpuDemand(min_cu=1.0, max_cu=100.0),
        node=NODE,
        service_class=ServiceClass.BATCH,
    )
    for _ in range(CARDS - 1):
        broker.ask(elastic)
        elastic = msgspec.structs.replace(elastic, message_id=f"next-{world.next_id()}")
    broker.settle()
    filled(broker)
    before = world.record()
    urgent = GrantLease(
        project="default",
        holder="h",
        cu=90.0,
        node=NODE,
        service_class=ServiceClass.REALTIME,
    )
    request_id = broker.ask(urgent)
    broker.settle()
    assert broker.refusals[request_id].code is ErrorCode.EXHAUSTED
    assert world.record() == before


def test_no_lease_shrinks_for_one_that_there_is_no_room_for_beside_its_segment() -> None:
    world = world_of(config=METERS)
    (broker,) = world.brokers
    elastic = GrantLease(
        project="default",
        holder="h",
        demand=GpuDemand(min_cu=CARDS, max_cu=100.0 * CARDS, count=CARDS),
        node=NODE,
        service_class=ServiceClass.BATCH,
    )
    urgent = GrantLease(
        project="default", holder="h", cu=90.0, node=NODE, service_class=ServiceClass.REALTIME
    )
    lease = answer(broker, broker.ask(elastic))
    assert isinstance(lease, LeaseGranted)
    # What the node says of itself leaves room for a lease, but for nothing beside it.
    label = "r" * (room_left(broker) - 50)
    said = heartbeat(NODE, *[A100] * CARDS, lease_ids=(lease.lease_id,))
    broker.see(msgspec.structs.replace(said, labels={"rack": label}))
    broker.settle()
    assert 0 <= room_left(broker) < 100
    before = world.record()
    request_id = broker.ask(urgent)
    broker.settle()
    assert broker.refusals[request_id].code is ErrorCode.EXHAUSTED
    assert world.record() == before


def room_left(broker: Broker) -> int:
    """Return how much the first node's record has room for, beside one more lease."""
    books = broker.core._books(NODE)
    assert books is not None
    return books._room.for_grants - books._largest_bytes


def test_leases_are_resized_only_while_a_record_has_room_to_tell_of_it() -> None:
    world = world_of(config=METERS)
    (broker,) = world.brokers
    broker.log_refuses = True
    asked = GrantLease(
        project="default",
        holder="h",
        demand=GpuDemand(min_cu=1.0, max_cu=40.0),
        node=NODE,
    )
    lease = answer(broker, broker.ask(asked))
    assert isinstance(lease, LeaseGranted)
    for turn in range(500):
        world.now += 1.0
        broker.resize({lease.lease_id: (2.0, 40.0)[turn % 2]})
        broker.settle()
    assert 50 < world.lease(lease.lease_id).resizes < 500
    broker.release(lease.lease_id)
    broker.settle()
    assert not world.record().leases


@pytest.mark.parametrize("config", [CONFIG, METERS])
def test_leases_are_renewed_named_moved_and_ended_in_a_full_record(config: BrokerConfig) -> None:
    world = world_of(config=config)
    (broker,) = world.brokers
    broker.log_refuses = True
    leases = filled(broker)
    world.now += 1.0
    beat(broker, *(lease.lease_id for lease in leases))
    assert all(lease.confirmed_at for lease in world.record().leases)
    for lease in leases:
        assert isinstance(answer(broker, broker.renew(lease.lease_id, 9000.0)), LeaseRenewed)
    # Of each one that moves something is left until the node does not name it any more.
    moved = [
        answer(broker, broker.transfer(lease.lease_id, "h" * HOLDER_CHARACTERS_MAX))
        for lease in leases[:4]
    ]
    assert len(world.record().revoked) == len(moved) == 4
    before = size(world)
    for lease in leases[4:8]:
        broker.release(lease.lease_id)
        broker.settle()
        assert size(world) < before
    reason = "é" * UNLOCK_REASON_MAX
    broker.unlock(reason=reason)
    broker.settle()
    record = world.record()
    assert not record.leases
    assert size(world) <= room.RECORD_BYTES_MAX
    # The first have all of their reason, the others what there is room for.
    reasons = {it.reason for it in record.revoked[4:]}
    assert reasons == {
        "its lease was unlocked by force",
        f"its lease was unlocked by force: {reason}",
    }


def test_more_transfers_than_a_record_holds_are_refused_until_the_node_has_heard() -> None:
    world = world_of()
    (broker,) = world.brokers
    leases = filled(broker)
    beat(broker, *(lease.lease_id for lease in leases))
    current = [lease.lease_id for lease in leases]
    refused = 0
    for _ in range(2):
        for at, lease_id in enumerate(current):
            request_id = broker.transfer(lease_id)
            broker.settle()
            if request_id in broker.refusals:
                error = broker.refusals[request_id]
                assert (error.code, error.retryable) == (ErrorCode.EXHAUSTED, True)
                assert world.lease(lease_id).lease_id == lease_id
                refused += 1
            else:
                reply = broker.answers[request_id]
                assert isinstance(reply, LeaseGranted)
                current[at] = reply.lease_id
    assert refused
    world.now += 1.0
    beat(broker, *current)
    assert isinstance(answer(broker, broker.transfer(current[-1])), LeaseGranted)


def test_what_is_new_of_a_node_stays_out_of_a_record_without_room_for_it() -> None:
    world = world_of()
    (broker,) = world.brokers
    leases = filled(broker)
    named = tuple(lease.lease_id for lease in leases)
    for label, is_kept in (("r" * 1000, True), ("r" * 20_000, False)):
        world.now += 1.0
        said = heartbeat(NODE, *[A100] * CARDS, sent_at=world.now, lease_ids=named)
        broker.see(msgspec.structs.replace(said, labels={"rack": label}))
        broker.settle()
        assert (world.record().heartbeat.labels == {"rack": label}) is is_kept
    assert len(world.record().leases) == len(leases)
    assert all(lease.confirmed_at for lease in world.record().leases)


def test_what_is_held_is_told_in_parts_that_a_full_record_has_room_for() -> None:
    world = world_of(config=METERS)
    (broker,) = world.brokers
    began = world.now
    leases = filled(broker)
    world.now += 400.0
    sweeps = 0
    while len({it.lease_id for it in world.told}) < len(leases):
        broker.sweep()
        broker.settle()
        world.now += 10.0
        sweeps += 1
    assert sweeps > 1
    broker.unlock()
    broker.settle()
    for lease in leases:
        told = sorted(
            (it for it in world.told if it.lease_id == lease.lease_id), key=lambda it: it.number
        )
        assert [it.number for it in told] == list(range(1, len(told) + 1))
        assert sum(it.lasted_ms for it in told) == round((world.now - began) * 1000)
        assert told[-1].last


def test_a_log_that_takes_nothing_stops_grants_and_nothing_else() -> None:
    world = world_of(config=METERS)
    (broker,) = world.brokers
    broker.log_refuses = True
    refusal = None
    held: list[str] = []
    for _ in range(500):
        beat(broker)
        request_id = broker.grant(1.0, node=NODE)
        broker.settle()
        if refusal := broker.refusals.get(request_id):
            break
        reply = broker.answers[request_id]
        assert isinstance(reply, LeaseGranted)
        held.append(reply.lease_id)
        world.now += 1.0
        broker.release(held.pop())
        broker.settle()
    assert refusal is not None
    assert "segments that the log has yet to take" in refusal.message
    broker.log_refuses = False
    world.now += 20.0
    broker.sweep()
    beat(broker)
    assert isinstance(answer(broker, broker.grant(1.0, node=NODE)), LeaseGranted)


@pytest.mark.parametrize(
    ("holder", "agent"),
    [
        ("h" * (HOLDER_CHARACTERS_MAX + 1), ""),
        ("\x00", ""),
        ("h", "a" * (AGENT_CHARACTERS_MAX + 1)),
    ],
)
def test_a_holder_that_would_fill_a_record_is_invalid(holder: str, agent: str) -> None:
    world = world_of()
    (broker,) = world.brokers
    asked = GrantLease(project="default", holder=holder, agent=agent, cu=1.0, node=NODE)
    refused = [broker.ask(asked), broker.ask(msgspec.structs.replace(asked, node=""))]
    lease = answer(broker, broker.grant(1.0, node=NODE))
    assert isinstance(lease, LeaseGranted)
    refused.append(broker.transfer(lease.lease_id, holder, agent=agent))
    broker.settle()
    assert {broker.refusals[it].code for it in refused} == {ErrorCode.INVALID}


class Random:
    """Brokers that are asked for anything, in any order.

    Attributes:
        grants: requests for leases.
        others: all others.
    """

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)  # noqa: S311  a test
        self.world = world_of(brokers=2, config=METERS)
        self.grants: list[tuple[Broker, int]] = []
        self.others: list[tuple[Broker, int]] = []

    def ids(self) -> list[str]:
        return [lease.lease_id for lease in self.world.record().leases]

    def step(self) -> None:
        broker = self.chance.choice(self.world.brokers)
        broker.log_refuses = self.chance.random() < 0.7
        steps = (self.end_some, self.say, self.resize, self.unlock, self.wait)
        step = self.chance.choice((self.grant,) * 6 + steps)
        step(broker)
        if self.chance.random() < 0.7:
            broker.settle()

    def grant(self, broker: Broker) -> None:
        for _ in range(self.chance.randrange(12)):
            asked = GrantLease(
                project="p" * self.chance.randrange(1, 63),
                holder="é" * self.chance.randrange(HOLDER_CHARACTERS_MAX),
                agent="a" * self.chance.randrange(AGENT_CHARACTERS_MAX),
                demand=GpuDemand(min_cu=1.0, max_cu=self.chance.choice((1.0, 40.0))),
                node=NODE,
                service_class=self.chance.choice(list(ServiceClass)),
                ttl_s=2000.0,
            )
            self.grants.append((broker, broker.ask(asked)))

    def end_some(self, broker: Broker) -> None:
        some = self.chance.choice(self.ids() or ["node-1.none"])
        verb = self.chance.choice((broker.release, broker.renew))
        self.others.append((broker, verb(some)))

    def say(self, broker: Broker) -> None:
        beat(broker, *self.ids())

    def resize(self, broker: Broker) -> None:
        broker.resize(dict.fromkeys(self.ids(), 2.0))

    def unlock(self, broker: Broker) -> None:
        leases = self.world.record().leases
        project = leases[0].project if leases else "p"
        reason = "é" * self.chance.randrange(UNLOCK_REASON_MAX)
        self.others.append((broker, broker.unlock(project=project, reason=reason)))

    def wait(self, _: Broker) -> None:
        self.world.now += self.chance.choice((1.0, 10.0, 301.0))
        for broker in self.world.brokers:
            beat(broker, *self.ids())
            broker.sweep()

    def refusals(self, asked: list[tuple[Broker, int]]) -> list[DsecError]:
        return [broker.refusals[it] for broker, it in asked if it in broker.refusals]


@pytest.mark.parametrize("seed", range(4))
def test_whatever_happens_nothing_but_room_for_new_leases_runs_out(seed: int) -> None:
    """The brokers' invariants say after each step that a record is not too large."""
    play = Random(seed)
    for _ in range(400):
        play.step()
        assert size(play.world) <= Room(play.world.record()).taken
    for broker in play.world.brokers:
        broker.settle()
    refused = play.refusals(play.grants)
    assert {error.code for error in refused} == {ErrorCode.EXHAUSTED}
    assert any("keeps no more leases" in error.message for error in refused)
    assert {error.code for error in play.refusals(play.others)} <= {ErrorCode.EXPIRED}
