"""The queues for Compute Units: classes, turns, gangs, ageing, and what the starving get."""

from __future__ import annotations

import pytest

from dsec_common.compute.model import GpuDemand, ServiceClass
from dsec_scheduler.asks import (
    LeasesRefused,
    LeasesTaken,
    RoundDue,
    Solve,
    Solved,
    Withdrawn,
)
from dsec_scheduler.fair_share import Quota
from dsec_scheduler.queues import QueueRules, WaitingRoom
from waiting_room import Cluster, ask, first_fit, gang, node, realtime


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


@pytest.mark.parametrize("later", [ServiceClass.STANDARD, ServiceClass.BATCH])
def test_a_quota_is_for_all_classes_of_one_round_together(later: ServiceClass) -> None:
    cluster = Cluster(
        node("n1", cards=4), realtime_share=0.25, quotas=(Quota(name="a", cu_max=150.0),)
    )
    cluster.come(realtime(151.0))  # over the quota alone; who comes after it waits for a round
    urgent, other = realtime(75.0), ask(79.0, service_class=later)
    cluster.come(urgent, other)
    assert not cluster.granted
    cluster.round()
    assert list(cluster.granted) == [urgent]
    assert cluster.room.limited[other.ask_id] == "a"
    cluster.end(urgent)
    cluster.round()
    assert list(cluster.granted) == [other]


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


def test_an_event_of_an_unknown_ask_has_no_effect() -> None:
    room = WaitingRoom(QueueRules())
    for event in (Withdrawn(1), LeasesTaken(1), LeasesRefused(1), Solved(None, 0.0)):
        assert room.handle(event) == []
