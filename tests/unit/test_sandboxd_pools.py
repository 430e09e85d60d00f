"""The core of warm pools: never twice, never more than wanted, as many as the rate asks for."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from dsec_common.wire.sandbox import CpuClass, Limits
from dsec_sandboxd.pools import (
    RATE_MEMORY_S,
    RETRY_LONGEST_S,
    Kind,
    Pools,
    Rate,
    kind_of,
    size_for_rate,
)

KINDS = [Kind(project="p", digests=(f"sha256:{name}",)) for name in "abc"]
LIMITS = Limits()


def filled(size: int, kind: Kind = KINDS[0]) -> Pools:
    """Return pools of which one is full, with handles h0, h1 and so on."""
    pools = Pools()
    pools.ask({kind: (size, LIMITS)})
    for index in range(size):
        assert pools.begin(0.0) == kind
        assert pools.made(kind, f"h{index}")
    return pools


def test_a_pool_is_filled_to_its_size_and_no_further() -> None:
    pools = filled(3)
    assert pools.begin(0.0) is None
    assert pools.ready(KINDS[0]) == 3


def test_what_has_waited_longest_is_taken_first_and_is_replaced() -> None:
    pools = filled(2)
    assert pools.take(KINDS[0]) == "h0"
    assert not pools.knows("h0")
    assert pools.begin(0.0) == KINDS[0]


def test_what_is_put_back_is_the_next_to_be_taken() -> None:
    pools = filled(2)
    assert pools.take(KINDS[0]) == "h0"
    assert pools.put_back(KINDS[0], "h0")
    pools.validate_state()
    assert pools.take(KINDS[0]) == "h0"


def test_what_is_put_back_into_a_full_pool_or_none_is_to_be_dropped() -> None:
    pools = filled(1)
    assert pools.take(KINDS[0]) == "h0"
    pools.begin(0.0)
    assert pools.made(KINDS[0], "h1")
    assert not pools.put_back(KINDS[0], "h0")
    assert not pools.put_back(KINDS[1], "h0")
    assert not pools.knows("h0")


def test_they_are_as_full_as_the_emptiest_of_those_that_are_wanted() -> None:
    assert Pools().fullness == 1.0
    pools = filled(4)
    assert pools.fullness == 1.0
    pools.take(KINDS[0])
    assert pools.fullness == 0.75
    pools.ask({KINDS[0]: (4, LIMITS), KINDS[1]: (1, LIMITS)})
    assert pools.fullness == 0.0


def test_another_kind_gets_nothing() -> None:
    pools = filled(2)
    assert pools.take(KINDS[1]) is None
    other = kind_of("p", KINDS[0].digests, Limits(cpu_class=CpuClass.BEST_EFFORT))
    assert pools.take(other) is None
    assert pools.take(kind_of("q", KINDS[0].digests, LIMITS)) is None


def test_a_smaller_pool_drops_what_is_too_much() -> None:
    pools = filled(5)
    assert pools.ask({KINDS[0]: (2, LIMITS)}) == ["h0", "h1", "h2"]
    assert pools.ready(KINDS[0]) == 2


def test_a_removed_pool_drops_all_of_it_and_what_is_still_being_made() -> None:
    pools = filled(2)
    pools.take(KINDS[0])
    assert pools.begin(0.0) == KINDS[0]
    assert pools.ask({}) == ["h1"]
    assert not pools.made(KINDS[0], "late")
    assert pools.find(KINDS[0]) is None


def test_the_emptiest_pool_is_filled_first() -> None:
    pools = filled(4)
    pools.ask({KINDS[0]: (5, LIMITS), KINDS[1]: (2, LIMITS)})
    assert pools.begin(0.0) == KINDS[1]


def test_one_that_cannot_be_made_is_tried_again_later_and_holds_up_no_other() -> None:
    pools = Pools()
    pools.ask({KINDS[0]: (1, LIMITS), KINDS[1]: (1, LIMITS)})
    assert pools.begin(0.0) == KINDS[0]
    pools.not_made(KINDS[0], 0.0, "no room")
    pool = pools.find(KINDS[0])
    assert pool is not None
    assert pool.error == "no room"
    assert pools.begin(0.1) == KINDS[1]
    assert pools.begin(0.1) is None
    assert pools.begin(RETRY_LONGEST_S) == KINDS[0]
    assert pools.made(KINDS[0], "h")
    assert pool.error == ""


def test_the_fullest_pool_gives_way_first() -> None:
    pools = filled(3)
    pools.ask({KINDS[0]: (3, LIMITS), KINDS[1]: (1, LIMITS)})
    pools.begin(0.0)
    pools.made(KINDS[1], "other")
    assert pools.give_way(2) == ["h0", "h1"]
    assert len(pools.give_way(9)) == 2


def test_calls_keep_a_pool_beside_what_the_scheduler_wants() -> None:
    pools = filled(1)
    assert pools.adapt({KINDS[0]: (3, LIMITS)}) == []
    assert pools.begin(0.0) == KINDS[0]
    pools.made(KINDS[0], "for calls")
    assert pools.ask({}) == []
    assert pools.adapt({}) == ["h0", "for calls"]


def test_the_size_follows_the_rate_within_its_ceiling() -> None:
    assert size_for_rate(0.0, 0.01, 32) == 0
    assert size_for_rate(0.1, 0.01, 32) == 2
    sizes = [size_for_rate(rate, 0.02, 32) for rate in (1, 10, 100, 1000)]
    assert sizes == sorted(sizes)
    assert size_for_rate(100, 0.02, 32) == 1 + 7  # 2 on average, and three deviations more
    assert size_for_rate(1e9, 1.0, 32) == 32
    assert size_for_rate(10.0, 0.01, 0) == 0


def test_a_rate_rises_with_arrivals_and_is_forgotten() -> None:
    rate = Rate()
    for second in range(300):
        rate.count(float(second), 5)
    assert 4.5 < rate.per_s(299.0) < 5.5
    assert 1.6 < rate.per_s(299.0 + RATE_MEMORY_S) < 2.0
    assert size_for_rate(rate.per_s(299.0 + 10 * RATE_MEMORY_S), 0.01, 32) == 0


def test_one_call_is_remembered_for_about_a_minute() -> None:
    rate = Rate()
    rate.count(0.0)
    assert size_for_rate(rate.per_s(1.0), 0.01, 32) > 0
    assert size_for_rate(rate.per_s(59.0), 0.01, 32) > 0
    assert size_for_rate(rate.per_s(90.0), 0.01, 32) == 0


class PoolMachine(RuleBasedStateMachine):
    """Everything that can happen to pools, in any order, beside what must have come of it."""

    @initialize()
    def begin(self) -> None:
        self.pools = Pools()
        self.now_s = 0.0
        self.next = 0
        self.making: list[Kind] = []
        self.waiting: dict[str, Kind] = {}
        self.gone: set[str] = set()

    def dropped(self, handles: list[str]) -> None:
        for handle in handles:
            assert handle not in self.gone, "dropped after it was given away"
            del self.waiting[handle]
            self.gone.add(handle)

    @rule(sizes=st.dictionaries(st.sampled_from(KINDS), st.integers(0, 5)))
    def ask(self, sizes: dict[Kind, int]) -> None:
        self.dropped(self.pools.ask({kind: (size, LIMITS) for kind, size in sizes.items()}))

    @rule(sizes=st.dictionaries(st.sampled_from(KINDS), st.integers(1, 5)))
    def adapt(self, sizes: dict[Kind, int]) -> None:
        self.dropped(self.pools.adapt({kind: (size, LIMITS) for kind, size in sizes.items()}))

    @rule()
    def make(self) -> None:
        kind = self.pools.begin(self.now_s)
        if kind is not None:
            self.making.append(kind)

    @rule(index=st.integers(0, 20), works=st.booleans())
    def end_making(self, index: int, works: bool) -> None:
        if not self.making:
            return
        kind = self.making.pop(index % len(self.making))
        if not works:
            self.pools.not_made(kind, self.now_s, "refused")
            return
        handle, self.next = f"h{self.next}", self.next + 1
        if self.pools.made(kind, handle):
            self.waiting[handle] = kind
        else:
            self.gone.add(handle)

    @rule(kind=st.sampled_from(KINDS))
    def take(self, kind: Kind) -> None:
        handle = self.pools.take(kind)
        if handle is None:
            assert kind not in self.waiting.values()
            return
        assert handle not in self.gone, "handed out twice"
        assert self.waiting.pop(handle) == kind
        self.gone.add(handle)

    @rule(index=st.integers(0, 20))
    def die(self, index: int) -> None:
        if self.waiting:
            handle = list(self.waiting)[index % len(self.waiting)]
            assert self.pools.lost(handle)
            assert not self.pools.lost(handle)
            del self.waiting[handle]
            self.gone.add(handle)

    @rule(count=st.integers(0, 4))
    def give_way(self, count: int) -> None:
        before = len(self.waiting)
        handles = self.pools.give_way(count)
        assert len(handles) == min(count, before)
        self.dropped(handles)

    @rule(seconds=st.floats(0, 60))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "pools"):
            self.pools.validate_state()
            assert self.pools.waiting == len(self.waiting)
            assert all(self.pools.knows(handle) for handle in self.waiting)
            assert self.pools.held == len(self.waiting) + len(self.making)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
