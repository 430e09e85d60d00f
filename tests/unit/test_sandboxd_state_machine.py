"""Any order of events keeps the node's invariants, whatever clocks do and whatever fails."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dsec_common.errors import unavailable
from dsec_common.wire.node import Resources
from dsec_common.wire.sandbox import EndCause, IdleAction, Limits, SandboxState
from dsec_sandboxd.effects import (
    AnnounceEnded,
    ConfirmPlacement,
    MakeSandbox,
    PauseSandbox,
    RefusePlacement,
    ResumeSandbox,
    SaveRecord,
    UnmakeSandbox,
)
from dsec_sandboxd.events import (
    ClockTicked,
    DeletionAsked,
    EvacuationBegan,
    PauseAsked,
    PauseFailed,
    PauseSucceeded,
    PlacementAsked,
    ResumeAsked,
    ResumeFailed,
    ResumeSucceeded,
    SandboxDied,
    SandboxMade,
    SandboxNotMade,
    SandboxNotUnmade,
    SandboxUnmade,
    TouchAsked,
    VisitBegan,
    VisitEnded,
)
from dsec_sandboxd.state import NodeState
from dsec_sandboxd.states import facts_of
from sandbox_records import MIB, node_rules, record


def can_follow(before: SandboxState, after: SandboxState) -> bool:
    """Return whether the table of states knows a way; what is not saved may lie between."""
    reached, waiting = {before}, [before]
    while waiting:
        for state in facts_of(waiting.pop()).following:
            if state not in reached:
                reached.add(state)
                waiting.append(state)
    return after in reached


class NodeMachine(RuleBasedStateMachine):
    """Any order of events keeps the invariants, and every placement is answered exactly once."""

    def __init__(self) -> None:
        super().__init__()
        self.state = NodeState(node_rules())
        self.now = 0.0
        self.count = 0
        self.making: set[str] = set()
        self.unmaking: set[str] = set()
        self.waiting: set[str] = set()
        self.announced: set[str] = set()
        self.pausing: set[str] = set()
        self.resuming: set[str] = set()
        self.inside: list[str] = []
        self.jumped_s = 0.0
        self.saved: dict[str, SandboxState] = {}

    def run(self, event: Any) -> None:
        """Handle an event at the next moment; the wall clock may have jumped, the other has not."""
        self.now += 0.5
        moments = {"now": self.now + self.jumped_s, "monotonic_s": self.now}
        dated = {name: at for name, at in moments.items() if name in event.__struct_fields__}
        for effect in self.state.handle(msgspec.structs.replace(event, **dated)):
            match effect:
                case SaveRecord(kept):
                    before = self.saved.get(kept.local, SandboxState.CREATING)
                    assert can_follow(before, kept.state), (before, kept.state)
                    self.saved[kept.local] = kept.state
                case PauseSandbox(made):
                    self.pausing.add(made.local)
                case ResumeSandbox(made):
                    self.resuming.add(made.local)
                case MakeSandbox(made):
                    self.making.add(made.local)
                case UnmakeSandbox(made, _):
                    assert made.local not in self.making
                    self.unmaking.add(made.local)
                case ConfirmPlacement(placement_id, _) | RefusePlacement(placement_id, _):
                    self.waiting.remove(placement_id)
                case AnnounceEnded(made):
                    assert made.local not in self.announced
                    self.announced.add(made.local)
                case _:
                    pass

    @rule(
        room=st.tuples(st.sampled_from([0.1, 0.3, 1.0, 2.0]), st.integers(4, 1200)),
        times=st.tuples(st.sampled_from([0.0, 3.0]), st.sampled_from([0.0, 2.0])),
        action=st.sampled_from(IdleAction),
        patience=st.sampled_from([0.1, 100.0]),
    )
    def place(
        self,
        room: tuple[float, int],
        times: tuple[float, float],
        action: IdleAction,
        patience: float,
    ) -> None:
        (cpus, memory), (ttl, idle) = room, times
        self.count += 1
        local = f"s{self.count}"
        self.waiting.add(f"place-{local}")
        self.run(
            PlacementAsked(
                now=0.0,
                record=record(
                    local,
                    limits=Limits(cpus=cpus, memory_bytes=memory * MIB),
                    created_at=self.now,
                    ttl_s=ttl,
                    idle_ttl_s=idle,
                    idle_action=action,
                ),
                valid_until=self.now + self.jumped_s + patience,
                memory_bytes_available=500 * MIB,
            )
        )

    @precondition(lambda self: self.making)
    @rule(data=st.data(), works=st.booleans())
    def finish_making(self, data: st.DataObject, works: bool) -> None:
        local = data.draw(st.sampled_from(sorted(self.making)))
        self.making.remove(local)
        if works:
            self.run(SandboxMade(now=0.0, monotonic_s=0.0, local=local, create_ms=1.0))
        else:
            self.run(SandboxNotMade(now=0.0, local=local, error=unavailable("no")))

    @precondition(lambda self: self.unmaking)
    @rule(data=st.data(), works=st.booleans())
    def finish_unmaking(self, data: st.DataObject, works: bool) -> None:
        local = data.draw(st.sampled_from(sorted(self.unmaking)))
        self.unmaking.remove(local)
        if works:
            self.run(SandboxUnmade(now=0.0, local=local))
        else:
            self.run(SandboxNotUnmade(now=0.0, local=local, error=unavailable("no")))

    @precondition(lambda self: self.count)
    @rule(data=st.data(), dies=st.booleans())
    def disturb(self, data: st.DataObject, dies: bool) -> None:
        local = f"s{data.draw(st.integers(1, self.count + 1))}"
        if dies:
            self.run(SandboxDied(now=0.0, local=local, cause=EndCause.OOM, detail=""))
        else:
            self.run(DeletionAsked(now=0.0, local=local))

    @precondition(lambda self: self.count)
    @rule(data=st.data(), goes_on=st.booleans())
    def ask_turn(self, data: st.DataObject, goes_on: bool) -> None:
        local = f"s{data.draw(st.integers(1, self.count + 1))}"
        self.run(ResumeAsked(local=local) if goes_on else PauseAsked(local=local))

    @precondition(lambda self: self.pausing)
    @rule(data=st.data(), works=st.booleans())
    def finish_pausing(self, data: st.DataObject, works: bool) -> None:
        local = data.draw(st.sampled_from(sorted(self.pausing)))
        self.pausing.remove(local)
        if works:
            self.run(PauseSucceeded(now=0.0, local=local))
        else:
            self.run(PauseFailed(monotonic_s=0.0, local=local, error=unavailable("no")))

    @precondition(lambda self: self.resuming)
    @rule(data=st.data(), works=st.booleans())
    def finish_resuming(self, data: st.DataObject, works: bool) -> None:
        local = data.draw(st.sampled_from(sorted(self.resuming)))
        self.resuming.remove(local)
        if works:
            self.run(ResumeSucceeded(now=0.0, monotonic_s=0.0, local=local))
        else:
            self.run(ResumeFailed(local=local, error=unavailable("no")))

    @precondition(lambda self: self.count)
    @rule(data=st.data())
    def go_in(self, data: st.DataObject) -> None:
        local = f"s{data.draw(st.integers(1, self.count))}"
        self.inside.append(local)
        self.run(VisitBegan(monotonic_s=0.0, local=local))

    @precondition(lambda self: self.inside)
    @rule()
    def come_out(self) -> None:
        self.run(VisitEnded(monotonic_s=0.0, local=self.inside.pop(0)))

    @precondition(lambda self: self.count)
    @rule(data=st.data(), ttl=st.sampled_from([None, 0.0, 4.0]))
    def touch(self, data: st.DataObject, ttl: float | None) -> None:
        local = f"s{data.draw(st.integers(1, self.count))}"
        self.run(TouchAsked(now=0.0, monotonic_s=0.0, local=local, ttl_s=ttl))

    @rule(seconds=st.sampled_from([-1000.0, 1000.0]))
    def jump(self, seconds: float) -> None:
        self.jumped_s += seconds

    @rule()
    def tick(self) -> None:
        self.run(ClockTicked(now=0.0, monotonic_s=0.0))

    @rule()
    def evacuate(self) -> None:
        self.run(EvacuationBegan(now=0.0, detail="stopping"))
        self.state.draining = False

    @invariant()
    def holds(self) -> None:
        self.state.validate_state()

    def teardown(self) -> None:
        self.run(EvacuationBegan(now=0.0, detail="stopping"))
        for local in sorted(self.making):
            self.making.remove(local)
            self.run(SandboxMade(now=0.0, monotonic_s=0.0, local=local, create_ms=1.0))
        for local in sorted(self.unmaking):
            self.run(SandboxUnmade(now=0.0, local=local))
        assert not self.waiting
        assert all(state is SandboxState.ENDED for state in self.saved.values())
        assert self.state.allocated == Resources()


TestNodeMachine = NodeMachine.TestCase
TestNodeMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
