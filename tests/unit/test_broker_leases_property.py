"""Whatever the order of messages, writes and crashes: no unit is ever leased twice."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from broker_world import START_S, World, heartbeat
from dsec_common.wire.lease import LeaseGranted

A100 = "NVIDIA A100-SXM4-40GB"
NODES = ("node-1", "node-2")
BROKERS = 3

brokers = st.integers(0, BROKERS - 1)
nodes = st.sampled_from(NODES)


class Leases(RuleBasedStateMachine):
    """Three brokers around one bucket, every step of each in any order."""

    @initialize()
    def begin(self) -> None:
        self.world = World(BROKERS)
        self.granted: dict[str, LeaseGranted] = {}
        self.tokens: dict[str, int] = {}
        self.collected: set[int] = set()
        for node in NODES:
            self.world.see(heartbeat(node, A100))

    @rule(broker=brokers, node=st.sampled_from(("", *NODES)), cu=st.sampled_from((10, 35, 60, 100)))
    def grant(self, broker: int, node: str, cu: float) -> None:
        self.world.brokers[broker].grant(cu, node=node, ttl_s=50)

    @rule(broker=brokers, data=st.data())
    def release(self, broker: int, data: st.DataObject) -> None:
        if self.granted:
            lease_id = data.draw(st.sampled_from(sorted(self.granted)))
            self.world.brokers[broker].release(lease_id)

    @rule(broker=brokers, data=st.data())
    def renew(self, broker: int, data: st.DataObject) -> None:
        if self.granted:
            lease_id = data.draw(st.sampled_from(sorted(self.granted)))
            self.world.brokers[broker].renew(lease_id, 50)

    @rule(broker=brokers, lost=st.booleans())
    def store(self, broker: int, lost: bool) -> None:
        if self.world.brokers[broker].store:
            self.world.brokers[broker].store_step(fail=lost)

    @rule(broker=brokers, node=nodes)
    def watch(self, broker: int, node: str) -> None:
        self.world.brokers[broker].watch(node)

    @rule(broker=brokers)
    def sweep(self, broker: int) -> None:
        self.world.brokers[broker].sweep()

    @rule(seconds=st.sampled_from((0.5, 2, 60)))
    def wait(self, seconds: float) -> None:
        self.world.now += seconds
        for broker in self.world.brokers:
            for node in NODES:
                broker.see(heartbeat(node, A100, sent_at=self.world.now))

    @rule(broker=brokers, node=nodes, age=st.sampled_from((0, 1, 5)), data=st.data())
    def heartbeat_with_leases(
        self, broker: int, node: str, age: float, data: st.DataObject
    ) -> None:
        here = sorted(lease_id for lease_id, lease in self.granted.items() if lease.node == node)
        named = data.draw(st.sets(st.sampled_from(here))) if here else set()
        sent_at = max(START_S, self.world.now - age)
        self.world.brokers[broker].see(
            heartbeat(node, A100, sent_at=sent_at, lease_ids=tuple(sorted(named)))
        )

    @rule(broker=brokers)
    def crash(self, broker: int) -> None:
        fresh = self.world.restart(broker)
        for node in NODES:
            fresh.see(heartbeat(node, A100, sent_at=self.world.now))

    @invariant()
    def never_more_units_than_there_are(self) -> None:
        for record, _ in self.world.bucket.records.values():
            assert record.cu_allocated <= record.cu_total + 1e-6

    @invariant()
    def an_answered_grant_was_written_with_a_token_of_its_own(self) -> None:
        for broker in self.world.brokers:
            for request_id, reply in broker.answers.items():
                if request_id in self.collected or not isinstance(reply, LeaseGranted):
                    continue
                self.collected.add(request_id)
                record, _ = self.world.bucket.read(reply.node)
                assert record is not None
                assert any(lease.lease_id == reply.lease_id for lease in record.leases)
                assert reply.token not in {
                    lease.token for lease in self.granted.values() if lease.node == reply.node
                }
                self.granted[reply.lease_id] = reply

    @invariant()
    def no_request_is_answered_twice(self) -> None:
        for broker in self.world.brokers:
            assert not broker.answers.keys() & broker.refusals.keys()


LeasesTest = Leases.TestCase
LeasesTest.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
