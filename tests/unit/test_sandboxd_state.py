"""The node's core: every sandbox has one life, and the node never hands out what it has not got."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dsec_common.errors import DsecError, ErrorCode, unavailable
from dsec_common.wire.node import Resources
from dsec_common.wire.sandbox import EndCause, Limits, SandboxState
from dsec_sandboxd.admission import NodeRules
from dsec_sandboxd.effects import (
    AnnounceEnded,
    AnnounceRunning,
    ConfirmDeletion,
    ConfirmPlacement,
    Effect,
    FailDeletion,
    ForgetRecord,
    MakeSandbox,
    RefusePlacement,
    SaveRecord,
    UnmakeSandbox,
)
from dsec_sandboxd.events import (
    ClockTicked,
    DeletionAsked,
    DrainBegan,
    EvacuationBegan,
    NodeRestarted,
    PlacementAsked,
    SandboxDied,
    SandboxMade,
    SandboxNotMade,
    SandboxNotUnmade,
    SandboxUnmade,
)
from dsec_sandboxd.records import SandboxRecord
from dsec_sandboxd.state import NodeState

MIB = 1024 * 1024


def node_rules(**changes: Any) -> NodeRules:
    rules = NodeRules(
        node="n1",
        physical=Resources(cpus=2.0, memory_bytes=1024 * MIB, sandboxes=4),
        capacity=Resources(cpus=4.0, memory_bytes=2048 * MIB, sandboxes=4),
        memory_reserve_bytes=100 * MIB,
        ended_kept_s=60.0,
        ended_kept_max=3,
    )
    return msgspec.structs.replace(rules, **changes)


def record(local: str = "s1", **changes: Any) -> SandboxRecord:
    made = SandboxRecord(
        local=local,
        project="p",
        placement_id=f"place-{local}",
        request_id=f"request-{local}",
        state=SandboxState.CREATING,
        created_at=10.0,
        layer_references=("base@1",),
        layer_digests=("sha256:00",),
        limits=Limits(),
    )
    return msgspec.structs.replace(made, **changes)


def placement(local: str = "s1", *, now: float = 10.0, **changes: Any) -> PlacementAsked:
    return PlacementAsked(
        now=now,
        record=record(local, **changes),
        valid_until=now + 5,
        memory_bytes_available=500 * MIB,
    )


def running(local: str = "s1", **changes: Any) -> NodeState:
    state = NodeState(node_rules())
    state.handle(placement(local, **changes))
    state.handle(SandboxMade(now=11.0, local=local, create_ms=2.0))
    return state


def kinds(effects: list[Effect]) -> list[type[Effect]]:
    return [type(effect) for effect in effects]


def refusal(effects: list[Effect]) -> DsecError:
    (effect,) = effects
    assert isinstance(effect, RefusePlacement)
    return effect.error


def test_the_intent_is_kept_before_the_kernel_acts() -> None:
    state = NodeState(node_rules())
    assert kinds(state.handle(placement())) == [SaveRecord, MakeSandbox]
    assert state.allocated == Resources(cpus=1.0, memory_bytes=256 * MIB, sandboxes=1)


def test_the_caller_is_answered_before_anything_else_when_a_sandbox_runs() -> None:
    state = NodeState(node_rules())
    state.handle(placement())
    effects = state.handle(SandboxMade(now=11.0, local="s1", create_ms=2.0))
    assert kinds(effects) == [ConfirmPlacement, SaveRecord, AnnounceRunning]
    assert state.running("p", "s1").created_at == 11.0


def test_a_failed_creation_is_refused_and_gives_back_what_it_was_given() -> None:
    state = NodeState(node_rules())
    state.handle(placement())
    effects = state.handle(SandboxNotMade(now=11.0, local="s1", error=unavailable("no")))
    assert isinstance(effects[0], RefusePlacement)
    assert state.allocated == Resources()
    assert state.find("p", "s1").end_cause is EndCause.CREATE_FAILED


def test_a_sandbox_that_is_ready_too_late_is_removed() -> None:
    state = NodeState(node_rules())
    state.handle(placement())
    effects = state.handle(SandboxMade(now=15.1, local="s1", create_ms=2.0))
    assert kinds(effects) == [RefusePlacement, UnmakeSandbox]
    assert refusal(effects[:1]).code is ErrorCode.TIMEOUT


def test_a_placement_that_nobody_waits_for_any_more_is_not_begun() -> None:
    state = NodeState(node_rules())
    event = msgspec.structs.replace(placement(now=10.0), now=15.1)
    assert refusal(state.handle(event)).code is ErrorCode.TIMEOUT
    assert state.allocated == Resources()


def test_the_same_placement_again_is_answered_again_with_the_same_sandbox() -> None:
    state = running()
    (effect,) = state.handle(placement())
    assert isinstance(effect, ConfirmPlacement)
    assert effect.record.created_at == 11.0


def test_another_placement_under_a_taken_id_is_a_conflict() -> None:
    state = running()
    error = refusal(state.handle(placement(placement_id="another")))
    assert error.code is ErrorCode.CONFLICT
    assert state.allocated.sandboxes == 1


@pytest.mark.parametrize(
    ("changes", "code", "retryable"),
    [
        ({"limits": Limits(memory_bytes=2000 * MIB)}, ErrorCode.EXHAUSTED, False),
        ({"limits": Limits(cpus=3)}, ErrorCode.EXHAUSTED, False),
    ],
)
def test_what_the_node_could_never_hold_is_refused_for_good(
    changes: dict[str, Any], code: ErrorCode, retryable: bool
) -> None:
    error = refusal(NodeState(node_rules()).handle(placement(**changes)))
    assert (error.code, error.retryable) == (code, retryable)


def test_a_full_node_refuses_until_something_is_given_back() -> None:
    state = NodeState(node_rules())
    for number in range(2):
        state.handle(placement(f"s{number}", limits=Limits(cpus=2)))
    error = refusal(state.handle(placement("s9")))
    assert (error.code, error.retryable) == (ErrorCode.EXHAUSTED, True)
    state.handle(SandboxNotMade(now=11.0, local="s0", error=unavailable("no")))
    assert kinds(state.handle(placement("s9"))) == [SaveRecord, MakeSandbox]


def test_the_machine_has_a_veto_over_the_books() -> None:
    event = msgspec.structs.replace(placement(), memory_bytes_available=50 * MIB)
    assert refusal(NodeState(node_rules()).handle(event)).code is ErrorCode.EXHAUSTED


def test_a_draining_node_takes_no_placement_and_no_command() -> None:
    state = running()
    state.handle(DrainBegan(now=12.0))
    assert refusal(state.handle(placement("s2"))).code is ErrorCode.UNAVAILABLE
    with pytest.raises(DsecError) as caught:
        state.running("p", "s1")
    assert caught.value.code is ErrorCode.UNAVAILABLE


def test_a_sandbox_holds_its_share_until_nothing_of_it_is_left() -> None:
    state = running()
    assert kinds(state.handle(DeletionAsked(now=12.0, local="s1"))) == [UnmakeSandbox]
    assert state.allocated.sandboxes == 1
    effects = state.handle(SandboxUnmade(now=12.1, local="s1"))
    assert kinds(effects) == [SaveRecord, ConfirmDeletion, AnnounceEnded]
    assert state.allocated == Resources()


def test_a_deletion_while_creating_waits_for_the_creation() -> None:
    state = NodeState(node_rules())
    state.handle(placement())
    assert state.handle(DeletionAsked(now=10.5, local="s1")) == []
    effects = state.handle(SandboxMade(now=11.0, local="s1", create_ms=2.0))
    assert kinds(effects) == [RefusePlacement, UnmakeSandbox]
    state.handle(SandboxUnmade(now=11.1, local="s1"))
    assert state.find("p", "s1").end_cause is EndCause.DELETED


def test_an_end_that_fails_is_tried_again_with_growing_pauses() -> None:
    state = running()
    state.handle(DeletionAsked(now=12.0, local="s1"))
    delays = []
    for _ in range(10):
        told, again = state.handle(
            SandboxNotUnmade(now=12.0, local="s1", error=unavailable("busy"))
        )
        assert isinstance(told, FailDeletion)
        assert isinstance(again, UnmakeSandbox)
        delays.append(again.delay_s)
    assert delays == sorted(delays)
    assert delays[-1] == 10.0
    assert state.allocated.sandboxes == 1


def test_deleting_an_ended_sandbox_is_confirmed_at_once() -> None:
    state = running()
    state.handle(DeletionAsked(now=12.0, local="s1"))
    state.handle(SandboxUnmade(now=12.1, local="s1"))
    assert kinds(state.handle(DeletionAsked(now=13.0, local="s1"))) == [ConfirmDeletion]


def test_a_sandbox_that_dies_keeps_its_cause() -> None:
    state = running()
    state.handle(SandboxDied(now=12.0, local="s1", cause=EndCause.OOM, detail="out of memory"))
    with pytest.raises(DsecError) as caught:
        state.running("p", "s1")
    assert caught.value.code is ErrorCode.EXPIRED
    assert caught.value.details["end_cause"] == "oom"


def test_a_sandbox_that_dies_before_it_is_known_to_run_is_refused() -> None:
    state = NodeState(node_rules())
    state.handle(placement())
    assert not state.handle(SandboxDied(now=10.9, local="s1", cause=EndCause.OOM, detail="oom"))
    effects = state.handle(SandboxMade(now=11.0, local="s1", create_ms=2.0))
    assert kinds(effects) == [RefusePlacement, SaveRecord, ConfirmDeletion, AnnounceEnded]
    assert state.find("p", "s1").end_cause is EndCause.OOM


def test_a_time_to_live_runs_from_the_moment_the_sandbox_does() -> None:
    state = running(expires_at=20.0)  # asked at 10 with 10 s to live, running at 11
    assert state.handle(ClockTicked(now=20.9)) == []
    assert kinds(state.handle(ClockTicked(now=21.0))) == [UnmakeSandbox]
    state.handle(SandboxUnmade(now=21.1, local="s1"))
    assert state.find("p", "s1").end_cause is EndCause.EXPIRED


def test_another_project_cannot_tell_that_a_sandbox_exists() -> None:
    state = running()
    seen = []
    for project, local in (("other", "s1"), ("p", "nothing")):
        with pytest.raises(DsecError) as caught:
            state.running(project, local)
        seen.append((caught.value.code, caught.value.message.replace(local, "ID")))
    assert seen[0] == seen[1]
    assert state.records("other", include_ended=True) == []


def test_a_restart_ends_what_was_alive_and_keeps_what_had_ended() -> None:
    ended = record("old", state=SandboxState.ENDED, ended_at=5.0, end_cause=EndCause.OOM)
    state = NodeState(node_rules())
    effects = state.handle(
        NodeRestarted(
            now=20.0, records=(record("a"), record("b", state=SandboxState.RUNNING), ended)
        )
    )
    assert [effect.record.local for effect in effects if isinstance(effect, AnnounceEnded)] == [
        "a",
        "b",
    ]
    assert state.find("p", "b").end_cause is EndCause.NODE_RESTARTED
    assert state.find("p", "old").end_cause is EndCause.OOM
    assert state.allocated == Resources()
    state.validate_state()


def test_records_of_ended_sandboxes_go_by_age_and_by_number() -> None:
    state = NodeState(node_rules())
    forgotten = []
    for number in range(5):
        state.handle(placement(f"s{number}"))
        forgotten += state.handle(
            SandboxNotMade(now=20.0 + number, local=f"s{number}", error=unavailable("no"))
        )
    assert [effect.local for effect in forgotten if isinstance(effect, ForgetRecord)] == [
        "s0",
        "s1",
    ]
    effects = state.handle(ClockTicked(now=83.5))
    assert effects == [ForgetRecord("s2"), ForgetRecord("s3")]


def test_variables_are_not_kept_after_the_end() -> None:
    state = running(env={"TOKEN": "secret"})
    effects = state.handle(SandboxDied(now=12.0, local="s1", cause=EndCause.OOM, detail=""))
    assert isinstance(effects[0], SaveRecord)
    assert effects[0].record.env == {}


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

    def run(self, event: Any) -> None:
        self.now += 0.5
        for effect in self.state.handle(msgspec.structs.replace(event, now=self.now)):
            match effect:
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
        cpus=st.sampled_from([0.1, 0.3, 1.0, 2.0]),
        memory=st.integers(4, 1200),
        ttl=st.sampled_from([0.0, 3.0]),
        patience=st.sampled_from([0.1, 100.0]),
    )
    def place(self, cpus: float, memory: int, ttl: float, patience: float) -> None:
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
                    expires_at=self.now + ttl if ttl else 0.0,
                ),
                valid_until=self.now + patience,
                memory_bytes_available=500 * MIB,
            )
        )

    @precondition(lambda self: self.making)
    @rule(data=st.data(), works=st.booleans())
    def finish_making(self, data: st.DataObject, works: bool) -> None:
        local = data.draw(st.sampled_from(sorted(self.making)))
        self.making.remove(local)
        if works:
            self.run(SandboxMade(now=0.0, local=local, create_ms=1.0))
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

    @rule()
    def tick(self) -> None:
        self.run(ClockTicked(now=0.0))

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
            self.run(SandboxMade(now=0.0, local=local, create_ms=1.0))
        for local in sorted(self.unmaking):
            self.run(SandboxUnmade(now=0.0, local=local))
        assert not self.waiting
        assert self.state.allocated == Resources()


TestNodeMachine = NodeMachine.TestCase
TestNodeMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
