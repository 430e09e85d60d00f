"""Queues for Compute Units around a plain solver and a broker that grants what is free."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

from dsec_common.compute.model import Card, GpuDemand, ServiceClass, fit
from dsec_scheduler.asks import (
    Ask,
    Asked,
    LeasesRefused,
    LeasesTaken,
    Part,
    RoundDue,
    Solve,
    Solved,
    TakeLeases,
    WaitingEffect,
    World,
)
from dsec_scheduler.queues import QueueRules, WaitingRoom
from dsec_scheduler.solving.problem import Assignment, NodeCapacity, Problem, Solution

_ids = itertools.count(1)


def node(name: str, cards: int = 1, model: str = "A100", cu: float = 100.0) -> NodeCapacity:
    """Return a node whose cards are on one island."""
    return NodeCapacity(
        name,
        tuple(
            Card(uuid=f"{name}-{at}", model=model, cu=cu, memory_bytes=80 << 30, island="0")
            for at in range(cards)
        ),
    )


def ask(cu: float = 100.0, project: str = "a", at: float = 0.0, **changes: Any) -> Ask:
    """Return an ask for units on one node."""
    ask_id = next(_ids)
    fields: dict[str, Any] = {
        "ask_id": ask_id,
        "request_id": f"request-{ask_id}",
        "project": project,
        "demands": (GpuDemand(min_cu=cu, max_cu=cu),),
        "asked_at": at,
    }
    return Ask(**{**fields, **changes})


def realtime(cu: float, **changes: Any) -> Ask:
    """Return an ask of the real-time class."""
    return ask(cu, service_class=ServiceClass.REALTIME, **changes)


def gang(size: int, cu: float = 100.0, **changes: Any) -> Ask:
    """Return a gang of equal asks."""
    return ask(demands=(GpuDemand(min_cu=cu, max_cu=cu),) * size, **changes)


def first_fit(problem: Problem) -> Solution:
    """Solve in the plainest way: each in the order given, a gang when all of it fits."""
    held = {it.node: list(it.held) for it in problem.nodes}
    found: list[Assignment] = []
    groups = itertools.groupby(problem.waiting, key=lambda it: it.gang or it.request_id)
    for _, members in groups:
        placed: list[Assignment] = []
        for member in members:
            for it in problem.nodes:
                if member.nodes is not None and it.node not in member.nodes:
                    continue
                slices = fit(it.cards, held[it.node], member.demand)
                if slices is not None:
                    held[it.node] += slices
                    placed.append(Assignment(member.request_id, it.node, slices, 0.0))
                    break
            else:
                for back in placed:
                    held[back.node] = [s for s in held[back.node] if s not in back.slices]
                placed = []
                break
        found += placed
    return Solution(assignments=tuple(found))


class Cluster:
    """A waiting room, nodes, and a broker that grants what is free."""

    def __init__(self, *nodes: NodeCapacity, **rules: Any) -> None:
        self.room = WaitingRoom(QueueRules(**{"realtime_share": 0.0, **rules}))
        self.nodes = {it.node: it for it in nodes}
        self.granted: dict[Ask, tuple[Part, ...]] = {}
        self.order: list[Ask] = []
        self.problems: list[Problem] = []
        self.foreign: tuple[Ask, ...] = ()
        self.refuse: Callable[[Ask], bool] = lambda _: False

    def world(self) -> World:
        held_cu: dict[str, float] = {}
        for who, parts in self.granted.items():
            cu = math.fsum(it.cu for part in parts for it in part.slices)
            held_cu[who.project] = held_cu.get(who.project, 0.0) + cu
        nodes = [
            NodeCapacity(
                it.node,
                it.cards,
                tuple(
                    held
                    for parts in self.granted.values()
                    for part in parts
                    if part.node == it.node
                    for held in part.slices
                ),
            )
            for it in self.nodes.values()
        ]
        return World(nodes=tuple(nodes), held_cu=held_cu, foreign=self.foreign)

    def come(self, *asks: Ask, now: float = 0.0) -> None:
        for one in asks:
            self._do(self.room.handle(Asked(one, self.world(), now)), now)
        self.room.validate_state()

    def round(self, now: float = 0.0) -> None:
        self._do(self.room.handle(RoundDue(self.world(), now)), now)
        self.room.validate_state()

    def end(self, one: Ask) -> None:
        del self.granted[one]

    def _do(self, effects: Sequence[WaitingEffect], now: float) -> None:
        for effect in effects:
            if isinstance(effect, Solve):
                self.problems.append(effect.problem)
                self._do(self.room.handle(Solved(first_fit(effect.problem), now)), now)
            elif isinstance(effect, TakeLeases):
                self._grant(effect)

    def _grant(self, effect: TakeLeases) -> None:
        one = self.room.get(effect.ask_id)
        assert one is not None
        if self.refuse(one):
            assert not self.room.handle(LeasesRefused(one.ask_id))
            return
        assert one not in self.granted
        assert len(effect.parts) == len(one.demands)
        self.granted[one] = effect.parts
        self.order.append(one)
        held = [it for parts in self.granted.values() for part in parts for it in part.slices]
        for of_node in self.nodes.values():
            for card in of_node.cards:
                percent = sum(it.percent for it in held if it.card == card.uuid)
                assert percent <= 100, "a slice was granted twice"
        assert not self.room.handle(LeasesTaken(one.ask_id))

    def cards_of(self, one: Ask) -> list[str]:
        return [it.card for part in self.granted[one] for it in part.slices]
