"""Placement on a simulated cluster: whatever happens, each request ends once, and counts right."""

from __future__ import annotations

import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from dsec_common.errors import DsecError, ErrorCode
from dsec_common.wire.node import NodeHeartbeat, Resources
from dsec_common.wire.sandbox import CreateSandbox, Limits, SandboxCreated
from dsec_scheduler.config import SchedulerConfig
from dsec_scheduler.effects import Effect, Place, Refuse, Resolve, Succeed
from dsec_scheduler.events import (
    CreateAsked,
    Event,
    HeartbeatSeen,
    Moment,
    PlaceRefused,
    PlaceResolved,
    PlaceSucceeded,
    PlaceUnanswered,
)
from dsec_scheduler.state import SchedulerState

NODES = ("node-1", "node-2", "node-3")
CAPACITY = Resources(cpus=4.0, memory_bytes=4000, sandboxes=4)


class Node:
    """A node with the last word: it admits what fits and nothing else."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.epoch = 1
        self.held: dict[str, Limits] = {}

    def admits(self, limits: Limits) -> bool:
        taken = sum(one.memory_bytes for one in self.held.values())
        return taken + limits.memory_bytes <= CAPACITY.memory_bytes and len(self.held) < 4

    def heartbeat(self, now: float) -> NodeHeartbeat:
        return NodeHeartbeat(
            node=self.name,
            epoch=str(self.epoch),
            store_id=self.name,
            sent_at=now,
            capacity=CAPACITY,
            allocated=Resources(
                cpus=sum(limits.cpus for limits in self.held.values()),
                memory_bytes=sum(limits.memory_bytes for limits in self.held.values()),
                sandboxes=len(self.held),
            ),
        )


class Placement(RuleBasedStateMachine):
    """One core, three nodes, answers in any order."""

    @initialize(seed=st.integers(0, 1000))
    def begin(self, seed: int) -> None:
        self.config = SchedulerConfig()
        self.core = SchedulerState(self.config, random.Random(seed))  # noqa: S311  repeatable
        self.now = 1000.0
        self.nodes = {name: Node(name) for name in NODES}
        self.asked: dict[int, Limits] = {}
        self.places: dict[int, Place] = {}
        self.resolves: dict[int, Resolve] = {}
        self.ended: dict[int, Succeed | Refuse] = {}
        self.attempts: dict[int, list[str]] = {}
        for name in NODES:
            self.beat(name)

    def _handle(self, event: Event) -> None:
        for effect in self.core.handle(event):
            self._take(effect)

    def _take(self, effect: Effect) -> None:
        if isinstance(effect, Place):
            self.attempts.setdefault(effect.create_id, []).append(effect.node)
            self.places[effect.create_id] = effect
        elif isinstance(effect, Resolve):
            self.resolves[effect.create_id] = effect
        elif isinstance(effect, Succeed | Refuse):
            assert effect.create_id not in self.ended
            self.ended[effect.create_id] = effect

    @property
    def at(self) -> Moment:
        return Moment(self.now, self.now)

    @rule(name=st.sampled_from(NODES))
    def beat(self, name: str) -> None:
        self._handle(HeartbeatSeen(heartbeat=self.nodes[name].heartbeat(self.now), at=self.at))

    @rule(memory_bytes=st.sampled_from((500, 1000, 2500, 4000, 5000)))
    def ask(self, memory_bytes: int) -> None:
        create_id = len(self.asked) + 1
        limits = Limits(memory_bytes=memory_bytes)
        self.asked[create_id] = limits
        self._handle(
            CreateAsked(
                create_id=create_id,
                project="default",
                request=CreateSandbox(base="debian@12", limits=limits),
                local=str(create_id),
                timeout_s=30.0,
                at=self.at,
            )
        )

    @rule(data=st.data(), reply_lost=st.booleans())
    def node_answers(self, data: st.DataObject, reply_lost: bool) -> None:
        if not self.places:
            return
        place = self.places.pop(data.draw(st.sampled_from(sorted(self.places))))
        node, limits = self.nodes[place.node], self.asked[place.create_id]
        admitted = node.admits(limits)
        if admitted:
            node.held[place.local] = limits
        event: Event
        if reply_lost:
            lost = DsecError(ErrorCode.TIMEOUT, "lost")
            event = PlaceUnanswered(create_id=place.create_id, error=lost, at=self.at)
        elif admitted:
            event = PlaceSucceeded(
                create_id=place.create_id, created=self._created(place.node, place), at=self.at
            )
        else:
            full = DsecError(ErrorCode.EXHAUSTED, "full")
            event = PlaceRefused(create_id=place.create_id, error=full, at=self.at)
        self._handle(event)

    @rule(data=st.data())
    def node_is_asked_again(self, data: st.DataObject) -> None:
        if not self.resolves:
            return
        resolve = self.resolves.pop(data.draw(st.sampled_from(sorted(self.resolves))))
        there = resolve.local in self.nodes[resolve.node].held
        created = self._created(resolve.node, resolve) if there else None
        self._handle(PlaceResolved(create_id=resolve.create_id, created=created, at=self.at))

    def _created(self, node: str, asked: Place | Resolve) -> SandboxCreated:
        return SandboxCreated(
            sandbox_id=f"{node}.{asked.local}",
            node=node,
            created_at=self.now,
            sent_at=self.now,
            layers=(),
            limits=self.asked[asked.create_id],
        )

    @rule(name=st.sampled_from(NODES), data=st.data())
    def sandbox_ends(self, name: str, data: st.DataObject) -> None:
        unresolved = {resolve.local for resolve in self.resolves.values()}
        ending = sorted(set(self.nodes[name].held) - unresolved)
        if ending:
            del self.nodes[name].held[data.draw(st.sampled_from(ending))]

    @rule(seconds=st.sampled_from((0.01, 0.2, 1.0, 4.0)))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def the_core_is_in_order(self) -> None:
        self.core.validate_state()

    @invariant()
    def each_request_is_under_way_or_has_ended(self) -> None:
        for create_id in self.asked:
            states = (
                create_id in self.places,
                create_id in self.resolves,
                create_id in self.ended,
            )
            assert sum(states) == 1

    @invariant()
    def no_node_is_asked_twice_for_one_request_nor_too_many(self) -> None:
        for nodes in self.attempts.values():
            assert len(set(nodes)) == len(nodes) <= self.config.attempts_max

    @invariant()
    def each_sandbox_that_was_promised_exists_once(self) -> None:
        for create_id, outcome in self.ended.items():
            places = [name for name, node in self.nodes.items() if str(create_id) in node.held]
            allowed = 1 if isinstance(outcome, Succeed) else 0
            assert len(places) <= allowed


PlacementTest = Placement.TestCase
PlacementTest.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
