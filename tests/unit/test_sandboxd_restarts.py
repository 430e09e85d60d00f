"""What a restart of the daemon means for each sandbox: the core's part."""

from __future__ import annotations

import pytest

from dsec_common.wire.sandbox import EndCause, SandboxState
from dsec_sandboxd.effects import AnnounceEnded, ResumeSandbox, SaveRecord, UnmakeSandbox
from dsec_sandboxd.events import (
    ClockTicked,
    DeletionAsked,
    NodeRestarted,
    PlacementAsked,
    ResumeSucceeded,
    SandboxMade,
)
from dsec_sandboxd.kernel.interface import SandboxIdentity
from dsec_sandboxd.records import SandboxRecord
from dsec_sandboxd.restarts import may_live_on
from dsec_sandboxd.state import NodeState
from sandbox_records import MIB, node_rules, record

IDENTITY = SandboxIdentity(init_inode=7, slot=0, base_id=1 << 24)


def restarted(
    *records: SandboxRecord, adopted: tuple[str, ...] = (), lost: dict[str, str] | None = None
) -> tuple[NodeState, list[object]]:
    state = NodeState(node_rules())
    effects = state.handle(
        NodeRestarted(
            now=20.0,
            monotonic_s=5.0,
            records=records,
            adopted=frozenset(adopted),
            lost=lost or {},
        )
    )
    state.validate_state()
    return state, list(effects)


def test_an_adopted_sandbox_goes_on_as_it_was() -> None:
    kept = record("a", state=SandboxState.RUNNING, identity=IDENTITY, lease_id="lease")
    state, effects = restarted(kept, adopted=("a",))
    assert effects == []
    assert state.running("p", "a") == kept
    assert list(state.leases) == ["lease"]
    assert state.allocated.memory_bytes == kept.limits.memory_bytes
    assert state.handle(DeletionAsked(now=21.0, local="a"))


def test_the_time_to_live_of_an_adopted_sandbox_ends_when_it_was_going_to() -> None:
    kept = record("a", state=SandboxState.RUNNING, ttl_s=10.0, expires_at=23.0)
    state, _ = restarted(kept, adopted=("a",))
    assert state.handle(ClockTicked(now=22.9, monotonic_s=7.9)) == []
    effects = state.handle(ClockTicked(now=23.0, monotonic_s=8.0))
    assert UnmakeSandbox in {type(effect) for effect in effects}


def test_a_time_to_live_that_ran_out_meanwhile_ends_the_sandbox_at_once() -> None:
    kept = record("a", state=SandboxState.RUNNING, ttl_s=10.0, expires_at=13.0)
    state, _ = restarted(kept, adopted=("a",))
    effects = state.handle(ClockTicked(now=20.0, monotonic_s=5.0))
    assert UnmakeSandbox in {type(effect) for effect in effects}


@pytest.mark.parametrize("between", [SandboxState.PAUSING, SandboxState.RESUMING])
def test_a_sandbox_between_two_states_runs_again(between: SandboxState) -> None:
    state, effects = restarted(record("a", state=between), adopted=("a",))
    assert [type(effect) for effect in effects] == [SaveRecord, ResumeSandbox]
    state.handle(ResumeSucceeded(now=6.0, monotonic_s=6.0, local="a"))
    assert state.running("p", "a").state is SandboxState.RUNNING
    state.validate_state()


def test_a_paused_sandbox_stays_paused() -> None:
    state, effects = restarted(
        record("a", state=SandboxState.PAUSED, paused_at=3.0), adopted=("a",)
    )
    assert effects == []
    assert state.find("p", "a").state is SandboxState.PAUSED


def test_who_could_not_be_adopted_ends_and_says_why() -> None:
    state, _ = restarted(
        record("a", state=SandboxState.RUNNING), lost={"a": "its PID 1 ended meanwhile"}
    )
    ended = state.find("p", "a")
    assert ended.end_cause is EndCause.NODE_RESTARTED
    assert "its PID 1 ended meanwhile" in ended.end_detail


def test_a_half_made_sandbox_is_finished_off() -> None:
    half = record("a", state=SandboxState.CREATING)
    assert not may_live_on(half)
    state, effects = restarted(half, adopted=("a",))
    assert any(isinstance(effect, AnnounceEnded) for effect in effects)
    assert "being made" in state.find("p", "a").end_detail
    assert state.living_count == 0


def test_a_half_removed_sandbox_ends_for_the_reason_that_was_given() -> None:
    half = record("a", state=SandboxState.DELETING, end_cause=EndCause.DELETED)
    assert not may_live_on(half)
    state, _ = restarted(half)
    assert state.find("p", "a").end_cause is EndCause.DELETED


def test_what_an_end_was_decided_for_is_kept_before_it_begins() -> None:
    state = NodeState(node_rules())
    state.handle(
        PlacementAsked(
            now=10.0, record=record("a"), valid_until=15.0, memory_bytes_available=500 * MIB
        )
    )
    made = state.handle(
        SandboxMade(now=11.0, monotonic_s=1.0, local="a", create_ms=2.0, identity=IDENTITY)
    )
    saved = [effect.record for effect in made if isinstance(effect, SaveRecord)]
    assert [kept.identity for kept in saved] == [IDENTITY]
    effects = state.handle(DeletionAsked(now=12.0, local="a"))
    saved = [effect.record for effect in effects if isinstance(effect, SaveRecord)]
    assert [(kept.state, kept.end_cause) for kept in saved] == [
        (SandboxState.DELETING, EndCause.DELETED)
    ]
    order = [type(effect) for effect in effects]
    assert order.index(SaveRecord) < order.index(UnmakeSandbox)
