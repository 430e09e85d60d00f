"""Whatever the order of messages, writes, crashes and clocks: no slice is ever leased twice."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from broker_world import START_S, Broker, World, heartbeat
from dsec_broker.config import BrokerConfig
from dsec_broker.effects import Revoke
from dsec_broker.record import Lease
from dsec_common.compute.model import GpuDemand
from dsec_common.wire.lease import GrantLease, LeaseGranted, LeasesUnlocked
from dsec_common.wire.node import NodeHeartbeat

A100 = "NVIDIA A100-SXM4-40GB"
GPUS = (A100, A100, "NVIDIA L40")
NODES = ("node-1", "node-2")
BROKERS = 4
SKEW_S = 60.0
"""The last broker's clock is so far ahead of the first one's."""

brokers = st.integers(0, BROKERS - 1)
nodes = st.sampled_from(NODES)
demands = st.builds(
    lambda cu, more, count: GpuDemand(min_cu=cu, max_cu=cu + more, count=count),
    st.sampled_from((3, 10, 35, 60, 100, 170)),
    st.sampled_from((0, 5)),
    st.sampled_from((0, 0, 1, 2)),
)


class Brokers(RuleBasedStateMachine):
    """Four brokers around one bucket, every step of each in any order."""

    @initialize()
    def begin(self) -> None:
        self.world = World(BROKERS, BrokerConfig(clock_skew_s=SKEW_S))
        for number, broker in enumerate(self.world.brokers):
            broker.ahead_s = SKEW_S * number / (BROKERS - 1)
        self.granted: dict[str, LeaseGranted] = {}
        self.told: dict[tuple[str, int], LeaseGranted] = {}
        self.asked: list[GrantLease] = []
        self.collected: set[int] = set()
        # Whom each was asked of last, and under which number.
        self.asking: dict[str, tuple[Broker, int]] = {}
        # Leases that somebody gave back or handed on.
        self.given_up: set[str] = set()
        self.was_lost = False
        self.tokens: dict[str, set[int]] = {node: set() for node in NODES}
        for node in NODES:
            self.world.see(heartbeat(node, *GPUS))

    def any_lease(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(sorted(self.granted) or ["node-1.nothing"]))

    @rule(broker=brokers, node=st.sampled_from(("", *NODES)), demand=demands)
    def grant(self, broker: int, node: str, demand: GpuDemand) -> None:
        # Named by its number: leases are named after it, and the same choices have to repeat.
        name = f"{len(self.asked):024}"
        asked = GrantLease(
            message_id=name, project="default", holder="h", demand=demand, node=node, ttl_s=50
        )
        self.asked.append(asked)
        self.ask(broker, asked)

    def ask(self, broker: int, asked: GrantLease) -> None:
        one = self.world.brokers[broker]
        self.asking[asked.message_id] = (one, one.ask(asked))

    @rule(broker=brokers, data=st.data())
    def grant_again(self, broker: int, data: st.DataObject) -> None:
        named = [asked for asked in self.asked if asked.node and self.may_ask_again(asked)]
        if named:
            self.ask(broker, named[data.draw(st.integers(0, len(named) - 1))])

    def may_ask_again(self, asked: GrantLease) -> bool:
        return True

    @rule(broker=brokers, data=st.data())
    def release(self, broker: int, data: st.DataObject) -> None:
        lease_id = self.any_lease(data)
        self.given_up.add(lease_id)
        self.world.brokers[broker].release(lease_id)

    @rule(broker=brokers, data=st.data())
    def renew(self, broker: int, data: st.DataObject) -> None:
        self.world.brokers[broker].renew(self.any_lease(data), 50)

    @rule(broker=brokers, data=st.data())
    def transfer(self, broker: int, data: st.DataObject) -> None:
        lease_id = self.any_lease(data)
        self.given_up.add(lease_id)
        self.world.brokers[broker].transfer(lease_id)

    @rule(broker=brokers, node=nodes, data=st.data())
    def unlock(self, broker: int, node: str, data: st.DataObject) -> None:
        lease_id = data.draw(st.sampled_from(["", self.any_lease(data)]))
        self.world.brokers[broker].unlock(node, lease_id)

    @rule(data=st.data(), lost=st.booleans())
    def serve(self, data: st.DataObject, lost: bool) -> None:
        if asking := [broker for broker in self.world.brokers if broker.store]:
            asking[data.draw(st.integers(0, len(asking) - 1))].serve(fail=lost)

    @rule(data=st.data())
    def hear(self, data: st.DataObject) -> None:
        if told := [broker for broker in self.world.brokers if broker.words]:
            told[data.draw(st.integers(0, len(told) - 1))].hear()

    @rule(broker=brokers)
    def settle(self, broker: int) -> None:
        one = self.world.brokers[broker]
        while one.words or one.store:
            if one.words:
                one.hear()
            else:
                one.serve()
            self.an_answered_grant_was_written_with_a_token_of_its_own()
            self.collect()

    def collect(self) -> None:
        """Take what brokers tell nodes."""

    @rule(broker=brokers, node=nodes)
    def watch(self, broker: int, node: str) -> None:
        self.world.brokers[broker].watch(node)

    @rule(broker=brokers)
    def sweep(self, broker: int) -> None:
        self.world.brokers[broker].sweep()

    @invariant()
    def no_part_of_a_card_is_in_two_leases(self) -> None:
        for record, _ in self.world.bucket.records.values():
            for card in record.cards:
                held = [
                    it for lease in record.leases for it in lease.slices if it.card == card.uuid
                ]
                assert sum(slice_.percent for slice_ in held) <= 100
                assert sum(slice_.memory_bytes for slice_ in held) <= card.memory_bytes

    @invariant()
    def an_answered_grant_was_written_with_a_token_of_its_own(self) -> None:
        ended = self.given_up | {
            lease.lease_id
            for broker in self.world.brokers
            for reply in broker.answers.values()
            if isinstance(reply, LeasesUnlocked)
            for lease in reply.leases
        }
        for broker in self.world.brokers:
            for request_id, reply in broker.answers.items():
                if request_id in self.collected or not isinstance(reply, LeaseGranted):
                    continue
                self.collected.add(request_id)
                known = self.told.get((reply.lease_id, reply.token))
                self.answered(reply)
                if known is not None:
                    assert reply.slices == known.slices  # the same lease, told again or late
                    continue
                if not self.was_lost:
                    assert reply.token not in self.tokens[reply.node]
                # By now it may have ended again; one write may hold both its grant and its end.
                written = self.world.bucket.granted.get((reply.lease_id, reply.token))
                assert written == reply.slices or reply.lease_id in ended
                self.tokens[reply.node].add(reply.token)
                self.granted[reply.lease_id] = reply
                self.told[reply.lease_id, reply.token] = reply

    def answered(self, lease: LeaseGranted) -> None:
        """Take an answer."""

    @invariant()
    def no_write_has_raised_an_alarm(self) -> None:
        for broker in self.world.brokers:
            assert not broker.alarms

    @invariant()
    def no_request_is_answered_twice(self) -> None:
        for broker in self.world.brokers:
            assert not broker.answers.keys() & broker.refusals.keys()


class Leases(Brokers):
    """Heartbeats that name anything at all."""

    @rule(seconds=st.sampled_from((0.5, 2, 60)))
    def wait(self, seconds: float) -> None:
        self.world.now += seconds
        for broker in self.world.brokers:
            for node in NODES:
                broker.see(heartbeat(node, *GPUS, sent_at=self.world.now))

    @rule(
        broker=brokers,
        node=nodes,
        age=st.sampled_from((0, 1, 5)),
        gpus=st.sampled_from((GPUS, GPUS, GPUS[:-1])),
        data=st.data(),
    )
    def heartbeat_with_leases(
        self, broker: int, node: str, age: float, gpus: tuple[str, ...], data: st.DataObject
    ) -> None:
        here = sorted(lease_id for lease_id, lease in self.granted.items() if lease.node == node)
        named = data.draw(st.sets(st.sampled_from(here))) if here else set()
        sent_at = max(START_S, self.world.now - age)
        beat = heartbeat(node, *gpus, sent_at=sent_at, lease_ids=tuple(sorted(named)))
        for _ in range(data.draw(st.sampled_from((1, 2)))):
            self.world.brokers[broker].see(beat)

    @rule(broker=brokers)
    def crash(self, broker: int) -> None:
        ahead_s = self.world.brokers[broker].ahead_s
        fresh = self.world.restart(broker)
        fresh.ahead_s = ahead_s
        for node in NODES:
            fresh.see(heartbeat(node, *GPUS, sent_at=self.world.now))


@dataclass
class Node:
    """What really lives on a node, and what of it is on its way."""

    ahead_s: float
    sandboxes: dict[str, LeaseGranted] = field(default_factory=dict)
    placements: dict[str, LeaseGranted] = field(default_factory=dict)
    sent_at: float = START_S


class Sandboxes(Brokers):
    """Nodes with sandboxes, which come late, and whose heartbeats come late, twice or never."""

    @initialize()
    def begin(self) -> None:
        super().begin()
        self.nodes = {
            name: Node(ahead_s) for name, ahead_s in zip(NODES, (0, -SKEW_S), strict=True)
        }
        self.on_their_way: list[NodeHeartbeat] = []
        self.revokes: list[Revoke] = []
        for node in NODES:
            self.grant(0, node, GpuDemand(min_cu=35, max_cu=35))
            self.settle(0)

    def may_ask_again(self, asked: GrantLease) -> bool:
        # A scheduler asks again when it will get no answer, and never once it has a lease.
        if f"{asked.node}.{asked.message_id}" in self.granted:
            return False
        broker, request_id = self.asking[asked.message_id]
        return broker not in self.world.brokers or request_id in broker.refusals

    def answered(self, lease: LeaseGranted) -> None:
        self.nodes[lease.node].placements[lease.lease_id] = lease

    def beat(self, name: str) -> NodeHeartbeat:
        node = self.nodes[name]
        node.sent_at = max(node.sent_at + 0.001, self.world.now + node.ahead_s)
        return heartbeat(name, *GPUS, sent_at=node.sent_at, lease_ids=tuple(node.sandboxes))

    @rule(node=nodes, data=st.data())
    def place(self, node: str, data: st.DataObject) -> None:
        there = self.nodes[node]
        if there.placements:
            lease_id = data.draw(st.sampled_from(sorted(there.placements)))
            there.sandboxes[lease_id] = there.placements.pop(lease_id)

    @rule(node=nodes, data=st.data())
    def end_a_sandbox(self, node: str, data: st.DataObject) -> None:
        if there := self.nodes[node].sandboxes:
            del there[data.draw(st.sampled_from(sorted(there)))]

    @rule(node=nodes)
    def send_a_heartbeat(self, node: str) -> None:
        self.on_their_way = [*self.on_their_way[-5:], self.beat(node)]

    @rule(broker=brokers, data=st.data())
    def hear_a_heartbeat(self, broker: int, data: st.DataObject) -> None:
        if self.on_their_way:
            number = data.draw(st.integers(0, len(self.on_their_way) - 1))
            self.world.brokers[broker].see(self.on_their_way[number])

    @rule()
    def revoke(self) -> None:
        if self.revokes:
            told = self.revokes.pop(0)
            self.nodes[told.node].sandboxes.pop(told.lease_id, None)

    @rule(seconds=st.sampled_from((0.5, 2, 60)))
    def wait(self, seconds: float) -> None:
        self.world.now += seconds
        for node in NODES:
            beat = self.beat(node)
            for broker in self.world.brokers:
                broker.see(beat)

    @rule(broker=brokers)
    def crash(self, broker: int) -> None:
        ahead_s = self.world.brokers[broker].ahead_s
        self.world.restart(broker).ahead_s = ahead_s

    @rule()
    def lose_the_bucket(self) -> None:
        self.was_lost = True
        self.world.lose_bucket()

    def collect(self) -> None:
        for broker in self.world.brokers:
            for told in broker.revoked:
                held = self.leases_of(told.node)
                assert told.lease_id not in held, "a sandbox with a lease is told that it has none"
                self.revokes.append(told)
            broker.revoked.clear()

    def leases_of(self, node: str) -> dict[str, Lease]:
        record, _ = self.world.bucket.read(node)
        return {lease.lease_id: lease for lease in record.leases} if record else {}

    @invariant()
    def only_what_has_ended_is_revoked(self) -> None:
        self.collect()

    def teardown(self) -> None:
        """When all is settled, each sandbox's slices are its lease's."""
        if not hasattr(self, "nodes"):
            return
        for _ in range(4):
            self.world.now += 1
            for name in NODES:
                beat = self.beat(name)
                for number, broker in enumerate(self.world.brokers):
                    self.settle(number)
                    broker.watch(name)
                    broker.see(beat)
                    self.settle(number)
            while self.revokes:
                self.revoke()
        for name, node in self.nodes.items():
            held = self.leases_of(name)
            for lease_id, placed in node.sandboxes.items():
                assert lease_id in held, "a sandbox uses what is not its own"
                assert held[lease_id].slices == placed.slices


LeasesTest = Leases.TestCase
LeasesTest.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
SandboxesTest = Sandboxes.TestCase
SandboxesTest.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
