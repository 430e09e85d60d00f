"""The queues for Compute Units: classes, turns, gangs, ageing, and what the starving get."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from dsec_common.compute.conservation import rank_of
from dsec_common.compute.model import Card, GpuDemand, ServiceClass, fit, part_of_card
from dsec_scheduler.asks import (
    Ask,
    Asked,
    HeldUnits,
    LeasesRefused,
    LeasesTaken,
    Part,
    RoundDue,
    Solve,
    Solved,
    TakeLeases,
    WaitingEffect,
    Withdrawn,
    World,
)
from dsec_scheduler.fair_share import Quota
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


def test_who_goes_before_nobody_is_granted_in_the_moment_it_comes() -> None:
    cluster = Cluster(node("n1"))
    first, second = ask(), ask()
    cluster.come(first, second)
    assert cluster.order == [first]
    assert not cluster.problems


def test_what_does_not_fit_waits_for_a_round_after_units_came_free() -> None:
    cluster = Cluster(node("n1"))
    first, second = ask(), ask()
    cluster.come(first, second)
    cluster.round()
    assert second not in cluster.granted
    cluster.end(first)
    cluster.round()
    assert cluster.order == [first, second]
    assert not len(cluster.room)


def test_a_newcomer_does_not_pass_those_who_wait() -> None:
    cluster = Cluster(node("n1", cards=2))
    blocked = ask(150.0, at=0.0)
    cluster.come(ask(100.0), blocked)
    newcomer = ask(10.0, at=1.0)
    cluster.come(newcomer, now=1.0)
    assert newcomer not in cluster.granted


def test_smaller_requests_use_what_a_larger_one_cannot() -> None:
    cluster = Cluster(node("n1", cards=2))
    cluster.come(ask(100.0), large := ask(150.0), small := ask(100.0))
    cluster.round(now=1.0)
    assert large not in cluster.granted
    assert small in cluster.granted


def test_projects_take_turns_however_much_one_of_them_asked_for_first() -> None:
    cluster = Cluster(node("n1", cards=4))
    cluster.come(running := gang(4))
    many = [ask(project="many") for _ in range(8)]
    few = [ask(project="few") for _ in range(2)]
    cluster.come(*many, *few)
    cluster.end(running)
    cluster.round()
    assert sorted(it.project for it in cluster.order[1:]) == ["few", "few", "many", "many"]


def test_a_project_over_its_quota_waits_though_units_are_free_and_is_told_so() -> None:
    cluster = Cluster(node("n1", cards=4), quotas=(Quota(name="a", cu_max=100.0),))
    first, second = ask(), ask()
    cluster.come(first, second)
    cluster.round()
    assert second not in cluster.granted
    assert cluster.room.limited == {second.ask_id: "a"}
    cluster.end(first)
    cluster.round()
    assert second in cluster.granted


def test_who_is_over_a_quota_keeps_no_nodes_from_others() -> None:
    cluster = Cluster(node("n1", cards=2), quotas=(Quota(name="a", cu_max=100.0),))
    cluster.come(ask(), ask())
    cluster.round(now=1000.0)
    other = ask(project="b", at=1000.0)
    cluster.come(other, now=1000.0)
    cluster.round(now=1000.2)
    assert other in cluster.granted


def test_higher_priority_goes_first_and_waiting_makes_up_for_it() -> None:
    cluster = Cluster(node("n1"), ageing_s=60.0, starving_s=1e9)
    cluster.come(running := ask())
    old, fresh = ask(at=0.0), ask(at=100.0, priority=1)
    very_urgent = ask(at=100.0, priority=2)
    cluster.come(old, fresh, very_urgent, now=100.0)
    for _ in range(3):
        cluster.end(running)
        cluster.round(now=100.0)
        running = cluster.order[-1]
    assert cluster.order[1:] == [very_urgent, old, fresh]


def test_standard_goes_before_batch_until_batch_has_waited_its_patience() -> None:
    cluster = Cluster(node("n1"), batch_patience_s=600.0, starving_s=1e9)
    cluster.come(running := ask())
    batch = ask(at=0.0, service_class=ServiceClass.BATCH)
    cluster.come(batch)
    for now in (1.0, 601.0):
        cluster.come(standard := ask(at=now), now=now)
        cluster.end(running)
        cluster.round(now=now)
        running = cluster.order[-1]
        assert running is (standard if now < 600 else batch)


def test_realtime_has_a_pool_that_others_do_not_use() -> None:
    cluster = Cluster(node("n1", cards=5), node("n2", cards=5), realtime_share=0.2)
    others = [ask() for _ in range(10)]
    cluster.come(*others)
    cluster.round()
    assert len(cluster.granted) == 8
    urgent = ask(service_class=ServiceClass.REALTIME)
    cluster.come(urgent)
    assert urgent in cluster.granted
    used = {card for one in others if one in cluster.granted for card in cluster.cards_of(one)}
    assert not used & set(cluster.cards_of(urgent))


def test_realtime_does_not_take_from_others_either() -> None:
    cluster = Cluster(node("n1", cards=10), realtime_share=0.2)
    cluster.come(large := gang(8), waits := ask(project="b"))
    urgent = [ask(service_class=ServiceClass.REALTIME) for _ in range(4)]
    cluster.come(*urgent)
    assert sum(it in cluster.granted for it in urgent) == 2
    cluster.end(large)
    cluster.round()
    # All who waited have a place now: what nobody else wants is realtime's, too.
    assert waits in cluster.granted
    assert all(it in cluster.granted for it in urgent)


def test_a_small_cluster_has_no_pool_and_serves_all() -> None:
    cluster = Cluster(node("n1"), realtime_share=0.1)
    cluster.come(one := ask())
    assert one in cluster.granted


def test_a_gang_gets_all_or_nothing() -> None:
    cluster = Cluster(node("n1"), node("n2"), node("n3"))
    cluster.come(first := ask())
    together = gang(3)
    cluster.come(together)
    cluster.round()
    assert together not in cluster.granted
    cluster.end(first)
    cluster.round()
    assert len(cluster.granted[together]) == 3
    assert {part.node for part in cluster.granted[together]} == {"n1", "n2", "n3"}


def test_the_members_of_a_gang_keep_their_order() -> None:
    cluster = Cluster(*(node(f"n{at:02}", cu=10.0 * at) for at in range(1, 13)))
    sizes = [10.0 * at for at in range(1, 13)]
    demands = tuple(GpuDemand(min_cu=cu, max_cu=cu) for cu in sizes)
    cluster.come(blocker := gang(12, 10.0))
    cluster.come(mixed := ask(demands=demands))
    cluster.end(blocker)
    cluster.round()
    got = [sum(it.cu for it in part.slices) for part in cluster.granted[mixed]]
    assert got == pytest.approx(sizes)


def test_what_starves_has_nodes_kept_for_it_until_it_fits() -> None:
    cluster = Cluster(node("n1", cards=4), node("n2", cards=4), starving_s=60.0)
    running = [ask(at=0.0) for _ in range(8)]
    cluster.come(*running)
    large = ask(400.0, project="large", at=0.0)
    cluster.come(large)
    now = 60.0
    # Small ones keep coming; two cards come free at a time.
    for _ in range(20):
        if large in cluster.granted:
            break
        for one in list(cluster.granted)[:2]:
            cluster.end(one)
        cluster.come(*(ask(at=now) for _ in range(2)), now=now)
        cluster.round(now=now)
        now += 1.0
    assert large in cluster.granted
    assert cluster.room.kept_nodes(large.ask_id) == frozenset()


def test_nothing_is_kept_for_what_could_never_fit() -> None:
    cluster = Cluster(node("n1"), starving_s=60.0)
    cluster.come(ask(10_000.0), small := ask(project="b"))
    cluster.round(now=100.0)
    assert small in cluster.granted


def test_what_the_broker_refuses_keeps_its_place() -> None:
    cluster = Cluster(node("n1"))
    first, second = ask(at=0.0), ask(at=1.0)
    cluster.refuse = lambda _: True
    cluster.come(first, second)
    cluster.round()
    assert not cluster.granted
    cluster.refuse = lambda _: False
    cluster.round()
    assert cluster.order == [first]


def test_who_leaves_while_the_solver_works_is_not_granted() -> None:
    cluster = Cluster(node("n1"))
    cluster.come(running := ask(), leaver := ask())
    cluster.end(running)
    (solve,) = cluster.room.handle(RoundDue(cluster.world(), 0.0))
    assert isinstance(solve, Solve)
    assert not cluster.room.handle(Withdrawn(leaver.ask_id))
    assert not cluster.room.handle(Solved(first_fit(solve.problem), 0.0))
    assert not cluster.room.in_round


def test_a_solver_that_fails_ends_the_round_and_nothing_else() -> None:
    cluster = Cluster(node("n1"))
    cluster.come(running := ask(), waits := ask())
    cluster.end(running)
    assert cluster.room.handle(RoundDue(cluster.world(), 0.0))
    assert not cluster.room.handle(Solved(None, 0.0))
    cluster.round()
    assert waits in cluster.granted


def test_who_waits_at_another_scheduler_keeps_its_turn_and_is_not_granted_here() -> None:
    cluster = Cluster(node("n1"))
    cluster.come(running := ask(project="here"))
    cluster.foreign = (ask(project="there", at=-10.0, foreign=True, ask_id=-1),)
    own = ask(project="there")
    cluster.come(own)
    cluster.end(running)
    cluster.round()
    assert not cluster.granted
    cluster.foreign = ()
    cluster.round()
    assert own in cluster.granted


def test_an_ask_goes_only_to_nodes_that_it_may_use() -> None:
    cluster = Cluster(node("n1"), node("n2"))
    one = ask(may_use=lambda name: name == "n2", needs="n2")
    cluster.come(one)
    assert [part.node for part in cluster.granted[one]] == ["n2"]
    cluster.come(two := ask(may_use=lambda name: name == "n2", needs="n2"))
    cluster.round()
    assert two not in cluster.granted


def test_ten_thousand_that_wait_cost_the_solver_no_more_than_what_is_free() -> None:
    cluster = Cluster(node("n1", cards=8))
    cluster.come(running := gang(8))
    waiting = [ask(project=f"p{at % 100}", at=float(at)) for at in range(10_000)]
    cluster.come(*waiting)
    cluster.round(now=1.0)
    assert not cluster.problems
    cluster.end(running)
    cluster.round(now=1.0)
    assert len(cluster.granted) == 8
    assert sum(len(it.waiting) for it in cluster.problems) == 8


# --- Other capacity ---------------------------------------------------------------------------


class Bursting(Cluster):
    """Four cards of the cluster's own, dearer ones, and two of other capacity."""

    def __init__(self, *used: float) -> None:
        super().__init__(node("own", cards=4), node("zother", cards=2, cu=65.0, model="L40"))
        for cu in used:
            self.come(ask(cu, project="before", may_use=lambda name: name == "own", needs="own"))

    def world(self) -> World:
        prices = {"A100": 1.8, "L40": 1.0}
        return replace(super().world(), others=frozenset({"zother"}), prices=prices)

    def nodes_of(self, one: Ask) -> list[str]:
        return [part.node for part in self.granted.get(one, ())]


def test_units_are_of_the_own_nodes_first_though_others_are_cheaper() -> None:
    cluster = Bursting(100.0, 100.0, 100.0)
    cluster.come(below := ask(30.0), above := ask(30.0), urgent := realtime(30.0))
    assert cluster.nodes_of(below) == ["own"]
    assert cluster.nodes_of(above) == ["zother"]
    assert cluster.nodes_of(urgent) == ["own"]


def test_above_the_burst_line_other_capacity_takes_work_first_in_rounds_too() -> None:
    cluster = Bursting(100.0, 100.0, 100.0, 25.0)
    blocked = ask(1000.0)
    cluster.come(blocked, one := ask(60.0), two := ask(70.0), urgent := realtime(5.0))
    assert cluster.nodes_of(urgent) == ["own"]
    cluster.round()
    assert cluster.nodes_of(one) == ["zother"]
    # What does not fit there has the cluster's own.
    assert cluster.nodes_of(two) == ["own"]


def test_what_finds_no_room_on_the_own_nodes_has_other_capacity_below_the_line() -> None:
    cluster = Bursting(90.0, 90.0, 60.0, 60.0)
    blocked = ask(1000.0)
    on_one_card = GpuDemand(min_cu=50.0, max_cu=50.0, count=1)
    cluster.come(blocked, one := ask(demands=(on_one_card,)))
    cluster.round()
    assert cluster.nodes_of(one) == ["zother"]


# --- Leases that yield ------------------------------------------------------------------------


def elastic(
    least: float, cu: float = 100.0, service_class: ServiceClass = ServiceClass.BATCH
) -> HeldUnits:
    """Return a lease on the first card of n1 that agreed to have as little as ``least``."""
    card = node("n1").cards[0]
    return HeldUnits(
        cu=cu,
        since=0.0,
        slices=(part_of_card(card, int(cu)),),
        demand=GpuDemand(min_cu=least, max_cu=cu),
        rank=rank_of(service_class, 0),
    )


def full_world(*leases: HeldUnits) -> World:
    """Return a world of two cards of which the second is held by what gives nothing."""
    of_two = node("n1", cards=2)
    other = HeldUnits(cu=100.0, since=0.0, slices=(part_of_card(of_two.cards[1], 100),))
    held = tuple(it for lease in (*leases, other) for it in lease.slices)
    return World(
        nodes=(NodeCapacity(of_two.node, of_two.cards, held),), leases={"n1": (*leases, other)}
    )


def taken(effects: Sequence[WaitingEffect]) -> list[TakeLeases]:
    return [effect for effect in effects if isinstance(effect, TakeLeases)]


def realtime(cu: float, **changes: Any) -> Ask:
    return ask(cu, service_class=ServiceClass.REALTIME, **changes)


def test_leases_yield_to_a_realtime_ask_in_the_moment_it_comes() -> None:
    room = WaitingRoom(QueueRules(realtime_share=0.0))
    one = realtime(60.0)
    (effect,) = taken(room.handle(Asked(one, full_world(elastic(40.0)), 0.0)))
    assert effect.makes_room
    assert [part.node for part in effect.parts] == ["n1"]
    assert [it.percent for part in effect.parts for it in part.slices] == [60]


@pytest.mark.parametrize(
    ("one", "lease"),
    [
        (realtime(61.0), elastic(40.0)),
        (realtime(10.0), elastic(100.0)),
        (ask(60.0), elastic(40.0)),
        (ask(60.0, service_class=ServiceClass.BATCH, priority=9), elastic(40.0)),
        (realtime(60.0), elastic(40.0, service_class=ServiceClass.REALTIME)),
        (realtime(60.0, may_use=lambda _: False, needs="other"), elastic(40.0)),
    ],
    ids=["below its promise", "all promised", "standard", "batch", "an equal", "another node"],
)
def test_no_lease_yields_more_than_it_agreed_to_nor_to_anybody_else(
    one: Ask, lease: HeldUnits
) -> None:
    room = WaitingRoom(QueueRules(realtime_share=0.0))
    world = full_world(lease)
    assert not taken(room.handle(Asked(one, world, 0.0)))
    assert not taken(room.handle(RoundDue(world, 1.0)))


def test_leases_yield_in_a_round_before_others_have_their_turn() -> None:
    room = WaitingRoom(QueueRules(realtime_share=0.0))
    world = full_world(elastic(40.0))
    room.handle(Asked(first := realtime(90.0), world, 0.0))
    room.handle(Asked(second := realtime(50.0), world, 1.0))
    room.handle(Asked(ask(5.0), world, 1.0))
    (effect,) = room.handle(RoundDue(world, 2.0))
    assert isinstance(effect, TakeLeases)
    assert effect.makes_room
    assert effect.ask_id == second.ask_id
    assert room.get(first.ask_id)


def test_a_node_yields_to_one_ask_in_a_round() -> None:
    room = WaitingRoom(QueueRules(realtime_share=0.0))
    world = full_world(elastic(100.0))
    pair = [realtime(20.0), realtime(20.0)]
    for one in pair:
        assert not taken(room.handle(Asked(one, world, 0.0)))
    effects = taken(room.handle(RoundDue(full_world(elastic(40.0)), 2.0)))
    assert [it.ask_id for it in effects] == [pair[0].ask_id]


def test_what_is_free_for_others_turn_is_not_taken_by_having_leases_yield() -> None:
    pool_and_common = [node("n1"), node("n2")]
    lease = elastic(20.0, cu=50.0)
    pool = part_of_card(pool_and_common[1].cards[0], 100)
    world = World(
        nodes=(
            NodeCapacity("n1", pool_and_common[0].cards, lease.slices),
            NodeCapacity("n2", pool_and_common[1].cards, (pool,)),
        ),
        leases={"n1": (lease,)},
    )
    room = WaitingRoom(QueueRules(realtime_share=0.5))
    room.handle(Asked(ask(90.0), world, 0.0))
    assert not taken(room.handle(Asked(realtime(40.0), world, 0.0)))


def test_an_event_of_an_unknown_ask_has_no_effect() -> None:
    room = WaitingRoom(QueueRules())
    for event in (Withdrawn(1), LeasesTaken(1), LeasesRefused(1), Solved(None, 0.0)):
        assert room.handle(event) == []


class Queueing(RuleBasedStateMachine):
    """Asks come, leave, are granted and end in any order; the rules hold all the time."""

    asks = Bundle("asks")

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.cluster = Cluster(
            node("n1", cards=2),
            node("n2", cards=3, model="L40", cu=65.0),
            realtime_share=0.25,
            quotas=(Quota(name="a", cu_max=150.0), Quota(name="b", weight=3.0)),
        )

    @rule(
        target=asks,
        cus=st.lists(st.integers(1, 220), min_size=1, max_size=3),
        project=st.sampled_from("abc"),
        service_class=st.sampled_from(ServiceClass),
        priority=st.integers(-3, 3),
    )
    def come(self, cus: list[int], project: str, service_class: ServiceClass, priority: int) -> Ask:
        one = ask(
            project=project,
            at=self.now,
            demands=tuple(GpuDemand(min_cu=cu, max_cu=cu) for cu in cus),
            service_class=service_class,
            priority=priority,
        )
        self.cluster.come(one, now=self.now)
        return one

    @rule(one=consumes(asks))
    def leave(self, one: Ask) -> None:
        if self.cluster.granted.pop(one, None) is None:
            self.cluster.room.handle(Withdrawn(one.ask_id))

    @rule(seconds=st.sampled_from([0.2, 30.0, 700.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(refuses=st.booleans())
    def round(self, refuses: bool) -> None:
        self.cluster.refuse = lambda it: refuses and it.ask_id % 2 == 0
        self.cluster.round(self.now)
        self.cluster.refuse = lambda _: False

    @invariant()
    def quotas_hold(self) -> None:
        assert self.cluster.world().held_cu.get("a", 0.0) <= 150.0 + 3  # percents round up

    @invariant()
    def nobody_is_lost(self) -> None:
        assert not self.cluster.room.in_round
        self.cluster.room.validate_state()


TestQueueing = Queueing.TestCase
TestQueueing.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
