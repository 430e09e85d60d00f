"""Whatever the order of messages, writes, crashes and clocks: no slice is ever leased twice."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from broker_world import START_S, World, heartbeat
from dsec_broker.config import BrokerConfig
from dsec_common.compute.model import GpuDemand
from dsec_common.wire.lease import GrantLease, LeaseGranted, LeasesUnlocked

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


class Leases(RuleBasedStateMachine):
    """Four brokers around one bucket, every step of each in any order."""

    @initialize()
    def begin(self) -> None:
        self.world = World(BROKERS, BrokerConfig(clock_skew_s=SKEW_S))
        for number, broker in enumerate(self.world.brokers):
            broker.ahead_s = SKEW_S * number / (BROKERS - 1)
        self.granted: dict[str, LeaseGranted] = {}
        self.asked: list[GrantLease] = []
        self.collected: set[tuple[int, int]] = set()
        self.tokens: dict[str, set[int]] = {node: set() for node in NODES}
        for node in NODES:
            self.world.see(heartbeat(node, *GPUS))

    def any_lease(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(sorted(self.granted) or ["node-1.nothing"]))

    def ended_by_force(self) -> set[tuple[str, int]]:
        return {
            (lease.lease_id, lease.token)
            for broker in self.world.brokers
            for reply in broker.answers.values()
            if isinstance(reply, LeasesUnlocked)
            for lease in reply.leases
        }

    @rule(broker=brokers, node=st.sampled_from(("", *NODES)), demand=demands)
    def grant(self, broker: int, node: str, demand: GpuDemand) -> None:
        # Named by its number: leases are named after it, and the same choices have to repeat.
        name = f"{len(self.asked):024}"
        asked = GrantLease(
            message_id=name, project="default", holder="h", demand=demand, node=node, ttl_s=50
        )
        self.asked.append(asked)
        self.world.brokers[broker].ask(asked)

    @rule(broker=brokers, data=st.data())
    def grant_again(self, broker: int, data: st.DataObject) -> None:
        named = [asked for asked in self.asked if asked.node]
        if named:
            self.world.brokers[broker].ask(data.draw(st.sampled_from(named)))

    @rule(broker=brokers, data=st.data())
    def release(self, broker: int, data: st.DataObject) -> None:
        self.world.brokers[broker].release(self.any_lease(data))

    @rule(broker=brokers, data=st.data())
    def renew(self, broker: int, data: st.DataObject) -> None:
        self.world.brokers[broker].renew(self.any_lease(data), 50)

    @rule(broker=brokers, data=st.data())
    def transfer(self, broker: int, data: st.DataObject) -> None:
        self.world.brokers[broker].transfer(self.any_lease(data))

    @rule(broker=brokers, node=nodes, data=st.data())
    def unlock(self, broker: int, node: str, data: st.DataObject) -> None:
        lease_id = data.draw(st.sampled_from(["", self.any_lease(data)]))
        self.world.brokers[broker].unlock(node, lease_id)

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
        for number, broker in enumerate(self.world.brokers):
            for request_id, reply in broker.answers.items():
                if (number, request_id) in self.collected or not isinstance(reply, LeaseGranted):
                    continue
                self.collected.add((number, request_id))
                known = self.granted.get(reply.lease_id)
                if known is not None and reply.token == known.token:
                    assert reply.slices == known.slices  # the same lease, told again
                    continue
                assert reply.token not in self.tokens[reply.node]
                assert known is None or reply.token > known.token
                # One write may hold a grant and the end by force that was asked for after it.
                if (reply.lease_id, reply.token) not in self.ended_by_force():
                    assert self.world.lease(reply.lease_id).token == reply.token
                self.tokens[reply.node].add(reply.token)
                self.granted[reply.lease_id] = reply

    @invariant()
    def no_write_has_raised_an_alarm(self) -> None:
        for broker in self.world.brokers:
            assert not broker.alarms

    @invariant()
    def no_request_is_answered_twice(self) -> None:
        for broker in self.world.brokers:
            assert not broker.answers.keys() & broker.refusals.keys()


LeasesTest = Leases.TestCase
LeasesTest.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
