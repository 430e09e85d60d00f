"""The node's core: every sandbox has one life, and the node never hands out what it has not got."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from dsec_common.errors import DsecError, ErrorCode, unavailable
from dsec_common.wire.node import Resources
from dsec_common.wire.sandbox import EndCause, Limits, SandboxState
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
    TellTurn,
    UnmakeSandbox,
)
from dsec_sandboxd.events import (
    ClockTicked,
    DeletionAsked,
    DrainBegan,
    NodeRestarted,
    PlacementAsked,
    SandboxDied,
    SandboxMade,
    SandboxNotMade,
    SandboxNotUnmade,
    SandboxUnmade,
)
from dsec_sandboxd.state import NodeState
from sandbox_records import MIB, node_rules, record


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
    state.handle(SandboxMade(now=11.0, monotonic_s=11.0, local=local, create_ms=2.0))
    return state


def kinds(effects: list[Effect]) -> list[type[Effect]]:
    """Return what is to be done, but for the waking of who may wait."""
    return [type(effect) for effect in effects if not isinstance(effect, TellTurn)]


def refusal(effects: list[Effect]) -> DsecError:
    (effect,) = effects
    assert isinstance(effect, RefusePlacement)
    return effect.error


def test_the_intent_is_kept_before_the_kernel_acts() -> None:
    state = NodeState(node_rules())
    assert kinds(state.handle(placement())) == [SaveRecord, MakeSandbox]
    assert state.allocated == Resources(cpus=1.0, memory_bytes=256 * MIB, sandboxes=1)


def test_a_sandbox_that_runs_is_kept_before_its_caller_is_answered() -> None:
    state = NodeState(node_rules())
    state.handle(placement())
    effects = state.handle(SandboxMade(now=11.0, monotonic_s=11.0, local="s1", create_ms=2.0))
    assert kinds(effects) == [SaveRecord, ConfirmPlacement, AnnounceRunning]
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
    effects = state.handle(SandboxMade(now=15.1, monotonic_s=15.1, local="s1", create_ms=2.0))
    assert kinds(effects) == [RefusePlacement, SaveRecord, UnmakeSandbox]
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
    assert kinds(state.handle(DeletionAsked(now=12.0, local="s1"))) == [SaveRecord, UnmakeSandbox]
    assert state.allocated.sandboxes == 1
    effects = state.handle(SandboxUnmade(now=12.1, local="s1"))
    assert kinds(effects) == [SaveRecord, ConfirmDeletion, AnnounceEnded]
    assert state.allocated == Resources()


def test_a_deletion_while_creating_waits_for_the_creation() -> None:
    state = NodeState(node_rules())
    state.handle(placement())
    assert state.handle(DeletionAsked(now=10.5, local="s1")) == []
    effects = state.handle(SandboxMade(now=11.0, monotonic_s=11.0, local="s1", create_ms=2.0))
    assert kinds(effects) == [RefusePlacement, SaveRecord, UnmakeSandbox]
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
    effects = state.handle(SandboxMade(now=11.0, monotonic_s=11.0, local="s1", create_ms=2.0))
    assert kinds(effects) == [RefusePlacement, SaveRecord, ConfirmDeletion, AnnounceEnded]
    assert state.find("p", "s1").end_cause is EndCause.OOM


def test_a_time_to_live_runs_from_the_moment_the_sandbox_does() -> None:
    state = running(ttl_s=10.0)  # asked at 10 with 10 s to live, running at 11
    assert state.handle(ClockTicked(now=20.9, monotonic_s=20.9)) == []
    assert kinds(state.handle(ClockTicked(now=21.0, monotonic_s=21.0))) == [
        SaveRecord,
        UnmakeSandbox,
    ]
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
            now=20.0,
            monotonic_s=20.0,
            records=(record("a"), record("b", state=SandboxState.RUNNING), ended),
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
        state.handle(ClockTicked(now=0.0, monotonic_s=20.0 + number))
        state.handle(placement(f"s{number}"))
        forgotten += state.handle(
            SandboxNotMade(now=20.0 + number, local=f"s{number}", error=unavailable("no"))
        )
    assert [effect.local for effect in forgotten if isinstance(effect, ForgetRecord)] == [
        "s0",
        "s1",
    ]
    effects = state.handle(ClockTicked(now=83.5, monotonic_s=83.5))
    assert effects == [ForgetRecord("s2"), ForgetRecord("s3")]


def test_variables_are_not_kept_after_the_end() -> None:
    state = running(env={"TOKEN": "secret"})
    effects = state.handle(SandboxDied(now=12.0, local="s1", cause=EndCause.OOM, detail=""))
    assert isinstance(effects[0], SaveRecord)
    assert effects[0].record.env == {}
