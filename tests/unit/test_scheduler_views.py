"""Which node is drawn, with few nodes and with many, roomy and full."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from dsec_common.wire.node import NodeHeartbeat, Resources
from dsec_common.wire.sandbox import Limits
from dsec_scheduler.views import NodeView, Views

MANY = 200
NODES = st.integers(0, 39).map("node-{}".format)
SMALL, LARGE = Limits(memory_bytes=1000), Limits(memory_bytes=3000)


BURST = {"capacity": "burst"}


def beat(
    views: Views,
    node: str,
    now: float,
    *,
    free: int,
    draining: bool = False,
    labels: dict[str, str] | None = None,
) -> None:
    """Have a node say that so many bytes of its 4,000 are free."""
    views.observe(
        NodeHeartbeat(
            node=node,
            epoch="1",
            draining=draining,
            labels=labels or {},
            sent_at=now,
            capacity=Resources(cpus=1000.0, memory_bytes=4000, sandboxes=100),
            allocated=Resources(memory_bytes=4000 - free),
        ),
        now,
        now,
    )


class Looked:
    """Any node will do; counts how many were asked about."""

    def __init__(self) -> None:
        self.at = 0

    def __call__(self, view: NodeView) -> bool:
        self.at += 1
        return bool(view.name)


def many(free: int) -> Views:
    views = Views(3.0, 600.0)
    for number in range(MANY):
        beat(views, f"node-{number}", 0.0, free=free)
    return views


def test_a_choice_among_full_nodes_looks_at_a_few_of_them() -> None:
    views, looked, randomness = many(free=0), Looked(), random.Random(1)  # noqa: S311  repeatable
    views.choose(SMALL, looked, 2, 0.0, randomness)
    for number in range(100):
        beat(views, f"node-{number}", 0.0, free=0)
        looked.at = 0
        assert views.choose(SMALL, looked, 2, 0.0, randomness) is not None
        assert looked.at <= 16


def test_the_only_nodes_with_room_are_found_at_once_among_full_ones() -> None:
    views, looked, randomness = many(free=0), Looked(), random.Random(1)  # noqa: S311  repeatable
    views.choose(SMALL, looked, 2, 0.0, randomness)
    for node in ("node-7", "node-9"):
        beat(views, node, 0.0, free=1000)
    looked.at = 0
    drawn = []
    for create_id in range(2):
        found = views.choose(SMALL, looked, 2, 0.0, randomness)
        assert found is not None
        views.grant(found, create_id, SMALL)
        drawn.append(found)
    assert sorted(drawn) == ["node-7", "node-9"]
    assert looked.at <= 4


def test_what_a_refusal_frees_is_drawn_again() -> None:
    views, looked, randomness = many(free=0), Looked(), random.Random(1)  # noqa: S311  repeatable
    views.choose(SMALL, looked, 2, 0.0, randomness)
    beat(views, "node-7", 0.0, free=1000)
    for create_id in range(3):
        assert views.choose(SMALL, looked, 2, 0.0, randomness) == "node-7"
        views.grant("node-7", create_id, SMALL)
        views.take_back("node-7", create_id)


def test_what_a_heartbeat_had_counted_already_is_free_once_the_answer_comes() -> None:
    views, looked, randomness = many(free=0), Looked(), random.Random(1)  # noqa: S311  repeatable
    views.choose(SMALL, looked, 2, 0.0, randomness)
    beat(views, "node-7", 0.0, free=2000)
    views.grant("node-7", 1, SMALL)
    beat(views, "node-7", 1.0, free=1000)
    assert views.choose(SMALL, looked, 2, 1.0, randomness) is not None
    assert not views.has_room("node-7", SMALL, 1.0)
    views.settle("node-7", 1, 0.5)
    assert views.choose(SMALL, looked, 2, 1.0, randomness) == "node-7"


def test_few_nodes_with_room_are_drawn_equally_often() -> None:
    views, looked, randomness = many(free=0), Looked(), random.Random(1)  # noqa: S311  repeatable
    views.choose(SMALL, looked, 2, 0.0, randomness)
    for number in range(10):
        beat(views, f"node-{number}", 0.0, free=4000)
    drawn = Counter(views.choose(SMALL, looked, 1, 0.0, randomness) for _ in range(1000))
    assert len(drawn) == 10
    assert min(drawn.values()) > 50


def test_sizes_that_nobody_asks_for_any_more_are_forgotten() -> None:
    views, looked, randomness = many(free=0), Looked(), random.Random(1)  # noqa: S311  repeatable
    for more in range(1000):
        views.choose(Limits(memory_bytes=1000 + more), looked, 2, 0.0, randomness)
    assert views._own.sizes <= 64


def mixed(own_free: int, other_free: int = 4000, count: int = 30) -> Views:
    """Return nodes of the cluster's own, and half as many for bursts and of a provider each."""
    views = Views(3.0, 600.0)
    for number in range(count):
        beat(views, f"own-{number}", 0.0, free=own_free)
        labels = BURST if number % 2 else {"provider": "local"}
        beat(views, f"other-{number}", 0.0, free=other_free, labels=labels)
    return views


def kinds(views: Views, now: float = 0.0, *, own_first: bool = False) -> set[str]:
    """Return which kinds of nodes are drawn."""
    randomness = random.Random(1)  # noqa: S311  repeatable
    drawn = [
        views.choose(SMALL, lambda _: True, 2, now, randomness, own_first=own_first)
        for _ in range(50)
    ]
    return {(name or "").partition("-")[0] for name in drawn}


@pytest.mark.parametrize("count", [3, 30])
def test_other_capacity_is_drawn_above_the_burst_line_or_when_the_own_is_full(count: int) -> None:
    assert kinds(mixed(own_free=1000, count=count)) == {"own"}
    assert kinds(mixed(own_free=1000, other_free=0, count=count)) == {"own"}
    crowded = Limits(memory_bytes=2000)
    views = mixed(own_free=1000, count=count)
    randomness = random.Random(1)  # noqa: S311  repeatable
    drawn = views.choose(crowded, lambda _: True, 2, 0.0, randomness)
    assert drawn is not None
    assert drawn.startswith("other")
    above = mixed(own_free=500, count=count)
    beat(above, "own-0", 0.0, free=1000)
    assert kinds(above) == {"other"}
    assert kinds(above, own_first=True) == {"own"}
    # Where none has room for certain, those that may have it are asked in the same order.
    assert kinds(mixed(own_free=500, other_free=0, count=count)) == {"other"}


def test_the_burst_line_is_looked_at_again_and_a_node_may_change_sides() -> None:
    views = mixed(own_free=500)
    beat(views, "own-0", 0.0, free=4000)
    assert kinds(views) == {"other"}
    for number in range(30):
        beat(views, f"own-{number}", 1.0, free=4000)
    assert kinds(views, now=1.0) == {"own"}
    for number in range(30):
        beat(views, f"own-{number}", 2.0, free=4000, labels=BURST)
        beat(views, f"other-{number}", 2.0, free=4000)
    assert kinds(views, now=2.0) == {"other"}


class Cluster(RuleBasedStateMachine):
    """Forty nodes, most of them full, and a look at every one after each choice."""

    @initialize(seed=st.integers(0, 1000))
    def begin(self, seed: int) -> None:
        self.randomness = random.Random(seed)  # noqa: S311  repeatable
        self.views, self.now = Views(3.0, 600.0), 0.0
        self.granted: list[tuple[str, int]] = []
        self.asked = 0
        for number in range(40):
            beat(self.views, f"node-{number}", self.now, free=0)

    @rule(
        node=NODES,
        free=st.sampled_from((0, 0, 1000, 3000, 4000)),
        draining=st.booleans(),
        labels=st.sampled_from(({}, {}, BURST)),
    )
    def beat(self, node: str, free: int, draining: bool, labels: dict[str, str]) -> None:
        beat(self.views, node, self.now, free=free, draining=draining, labels=labels)

    @rule(node=NODES)
    def lose(self, node: str) -> None:
        self.views.unreachable(node)

    @rule(seconds=st.sampled_from((1.0, 4.0, 700.0)))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.views.forget_silent(self.now)

    @precondition(lambda self: self.granted)
    @rule(data=st.data(), ago_s=st.sampled_from((0.0, 1.0)))
    def settle(self, data: st.DataObject, ago_s: float) -> None:
        self.views.settle(*data.draw(st.sampled_from(self.granted)), self.now - ago_s)

    @precondition(lambda self: self.granted)
    @rule(data=st.data())
    def take_back(self, data: st.DataObject) -> None:
        self.views.take_back(*data.draw(st.sampled_from(self.granted)))

    @rule(limits=st.sampled_from((SMALL, LARGE)), even_only=st.booleans())
    def a_node_with_room_is_found_whenever_there_is_one(
        self, limits: Limits, even_only: bool
    ) -> None:
        def usable(view: NodeView) -> bool:
            return not even_only or int(view.name.removeprefix("node-")) % 2 == 0

        with_room = {
            view.name
            for view in self.views
            if usable(view) and self.views.has_room(view.name, limits, self.now)
        }
        drawn = self.views.choose(limits, usable, 2, self.now, self.randomness)
        if with_room:
            assert drawn in with_room
        if drawn is None:
            return
        view = self.views.get(drawn)
        assert view is not None
        assert usable(view)
        assert self.views.is_open(view, self.now)
        self.asked += 1
        self.views.grant(drawn, self.asked, limits)
        self.granted.append((drawn, self.asked))


ClusterTest = Cluster.TestCase
ClusterTest.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
