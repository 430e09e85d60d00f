"""Whatever comes, leaves and ends in whatever order: quotas hold and nobody is lost."""

from __future__ import annotations

import itertools

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from dsec_common.compute.model import GpuDemand, ServiceClass
from dsec_scheduler.asks import (
    Ask,
    Withdrawn,
)
from dsec_scheduler.fair_share import Quota
from waiting_room import Cluster, ask, node


class Queueing(RuleBasedStateMachine):
    """Asks come, leave, are granted and end in any order; the rules hold all the time."""

    asks = Bundle("asks")

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.ids = itertools.count(1)  # of this machine: the same choices have to repeat
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
            ask_id=next(self.ids),
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
