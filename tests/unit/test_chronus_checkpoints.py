"""A rollout is kept, put back and branched whole, or not at all, whoever dies in between."""

from __future__ import annotations

import pytest

from chronus_world import GROUP, ROLLOUT, World
from dsec_chronus.acting import FENCED_NUMBERS, STATE_BYTES_MAX
from dsec_chronus.config import ChronusConfig
from dsec_chronus.effects import Collect
from dsec_chronus.kept import CHECKPOINTS_MAX
from dsec_chronus.records import ActionBegun, ActionKind, Child
from dsec_common.errors import DsecError, ErrorCode, unavailable
from dsec_common.wire.base import ErrorReply
from dsec_common.wire.checkpoint import CheckpointInfo, RolloutBranched, RolloutRolledBack
from dsec_common.wire.rollout import FeedbackState, RolloutInfo, StageBatch

CHECKPOINT, ROLLBACK, BRANCH = ActionKind.CHECKPOINT, ActionKind.ROLLBACK, ActionKind.BRANCH


def world_at(step: int, config: ChronusConfig | None = None) -> World:
    """Return a world whose rollout has so many answered steps, a reward of 1 each."""
    world = World(config)
    world.open()
    advance(world, 1, step)
    return world


def advance(world: World, first: int, last: int) -> None:
    for seq in range(first, last + 1):
        world.report(seq, seq)
        world.feedback(seq, reward=1.0)
    world.settle()


def inspected(world: World, local: str = ROLLOUT) -> RolloutInfo:
    request = world.inspect(local)
    info = world.answers[request]
    assert isinstance(info, RolloutInfo)
    return info


def kept_at(world: World, step: int, state: object) -> CheckpointInfo:
    world.put({"state": state})
    info = world.acted(CHECKPOINT, f"at {step}")
    assert isinstance(info, CheckpointInfo)
    assert info.step == step
    return info


def test_what_is_kept_is_read_again_by_any_owner() -> None:
    world = world_at(0)
    world.put({"a": 1, "b": [2]})
    world.put({"a": {"x": None}}, "b")
    world.settle()
    assert world.state() == {"a": {"x": None}}
    world.take()
    assert world.state() == {"a": {"x": None}}


def test_the_same_values_again_are_no_new_version() -> None:
    world = world_at(0)
    first = world.put({"a": 1})
    world.settle()
    again = world.put({"a": 1}, "unknown")
    assert world.answers[first].version == world.answers[again].version  # type: ignore[attr-defined]
    more = world.put({"a": 2})
    world.settle()
    assert world.answers[more].version > world.answers[first].version  # type: ignore[attr-defined]


def test_state_has_a_limit_and_a_refusal_changes_nothing() -> None:
    world = world_at(0)
    for name in "abc":
        last = world.put({name: "x" * (STATE_BYTES_MAX // 2 - 1024)})
    world.settle()
    assert world.refusals[last].code is ErrorCode.EXHAUSTED
    assert sorted(world.state()) == ["a", "b"]


def test_a_checkpoint_has_the_state_of_its_beginning() -> None:
    world = world_at(3)
    world.put({"state": "before"})
    request = world.act(CHECKPOINT, "one")
    world.settle()
    (it,) = world.performing()
    world.put({"state": "after"})
    world.settle()
    assert request not in world.answers
    world.done(it)
    world.settle()
    info = world.answers[request]
    assert isinstance(info, CheckpointInfo)
    assert (info.step, info.snapshot_id, info.sandbox_id) == (3, "node-1.snap1", "node-1.a")
    assert world.state(checkpoint=info.checkpoint) == {"state": "before"}
    assert world.state() == {"state": "after"}


def test_the_intent_is_durable_before_a_node_is_asked() -> None:
    world = world_at(1)
    world.act(CHECKPOINT, "one")
    assert not world.performing()
    world.append()
    assert len(world.performing()) == 1


def test_the_same_key_is_the_same_checkpoint_for_who_asks_meanwhile_and_later() -> None:
    world = world_at(1)
    first, second = world.act(CHECKPOINT, "one"), world.act(CHECKPOINT, "one")
    world.settle()
    (it,) = world.performing()
    third = world.act(CHECKPOINT, "one")
    world.done(it)
    world.settle()
    fourth = world.act(CHECKPOINT, "one")
    assert not world.to_write
    numbers = {world.answers[it].checkpoint for it in (first, second, third, fourth)}  # type: ignore[attr-defined]
    assert numbers == {1}
    other = world.act(ROLLBACK, "one")
    world.settle()
    assert world.refusals[other].code is ErrorCode.CONFLICT


def test_one_action_at_a_time() -> None:
    world = world_at(1)
    world.act(CHECKPOINT, "one")
    world.settle()
    second = world.act(CHECKPOINT, "two")
    assert world.refusals[second].code is ErrorCode.UNAVAILABLE
    assert world.refusals[second].retryable


def test_an_action_that_failed_leaves_nothing_and_its_key_may_be_used_again() -> None:
    world = world_at(1)
    request = world.act(CHECKPOINT, "one")
    world.settle()
    (it,) = world.performing()
    world.done(it, unavailable("the node is silent"))
    world.settle()
    assert world.refusals[request].message == "the node is silent"
    world.sweep()
    assert [type(deed) for deed in world.deeds] == []  # no node is known to keep anything
    assert isinstance(world.acted(CHECKPOINT, "one"), CheckpointInfo)


@pytest.mark.parametrize("acknowledged", [True, False])
def test_a_new_owner_carries_to_its_end_what_was_begun(*, acknowledged: bool) -> None:
    world = world_at(2)
    world.put({"state": 1})
    world.settle()
    world.act(CHECKPOINT, "one")
    world.append(acknowledged=acknowledged)
    world.take()
    (it,) = world.performing()
    assert it.doubtful
    again = world.act(CHECKPOINT, "one")
    world.done(it)
    world.append(acknowledged=acknowledged)
    world.take()
    assert world.performing() == []
    if acknowledged:
        assert isinstance(world.answers[again], CheckpointInfo)
    once_more = world.act(CHECKPOINT, "one")
    assert world.answers[once_more].checkpoint == 1  # type: ignore[attr-defined]
    assert world.state(checkpoint=1) == {"state": 1}


def test_an_intent_that_is_not_durable_never_was() -> None:
    world = world_at(2)
    world.act(CHECKPOINT, "one")
    world.take()
    assert world.performing() == []
    assert isinstance(world.acted(CHECKPOINT, "one"), CheckpointInfo)


def test_an_end_that_the_journal_refuses_is_told_again() -> None:
    world = world_at(1)
    request = world.act(CHECKPOINT, "one")
    world.settle()
    (it,) = world.performing()
    world.done(it)
    world.refuse_frame()
    assert request not in world.answers
    world.sweep()
    world.settle()
    assert isinstance(world.answers[request], CheckpointInfo)


def test_feedback_waits_while_a_checkpoint_is_made() -> None:
    world = world_at(0)
    step = world.step(1)
    world.settle()
    world.act(CHECKPOINT, "one")
    world.settle()
    (it,) = world.performing()
    world.feedback(1, "go on")
    world.settle()
    assert step not in world.answers
    world.done(it)
    world.settle()
    state = world.answers[step]
    assert isinstance(state, FeedbackState)
    assert (state.ready, state.payload) == (True, "go on")


def test_a_wait_that_ends_while_a_checkpoint_is_made_ends_without_feedback() -> None:
    world = world_at(0)
    step = world.step(1, wait_s=5.0)
    world.act(CHECKPOINT, "one")
    world.feedback(1, "go on")
    world.settle()
    world.tick(6.0)
    state = world.answers[step]
    assert isinstance(state, FeedbackState)
    assert not state.ready


def test_a_rollback_puts_state_and_reports_back_and_numbers_never_come_again() -> None:
    world = world_at(3)
    kept_at(world, 3, "three")
    advance(world, 4, 6)
    kept_at(world, 6, "six")
    reply = world.acted(ROLLBACK, "back", step=5)
    assert isinstance(reply, RolloutRolledBack)
    assert (reply.step, reply.sandbox_id, reply.recreated) == (3, "node-1.a", False)
    assert world.state() == {"state": "three"}
    assert world.dropped() == ["node-1.snap2"]
    info = inspected(world)
    assert (info.last_seq, info.answered_seq, info.total_reward) == (6 + FENCED_NUMBERS, 3, 3.0)
    assert info.restoration is not None
    assert (info.restoration.step, info.restoration.reason) == (3, "rollback")
    stale = [world.report(seq, seq) for seq in (4, 6, 7)]
    answer = world.feedback(6, reward=1.0)
    world.settle()
    assert all(world.refusals[it].details["reason"] == "rolled_back" for it in [*stale, answer])
    advance(world, reply.last_seq + 1, reply.last_seq + 2)
    batch = world.answers[world.next(6)]
    assert isinstance(batch, StageBatch)
    assert [it.seq for it in batch.reports] == [reply.last_seq + 1, reply.last_seq + 2]
    before = inspected(world)
    world.take()
    assert inspected(world).total_reward == before.total_reward == 5.0
    assert world.state() == {"state": "three"}


def test_reports_are_not_taken_while_a_rollback_is_under_way() -> None:
    world = world_at(1)
    kept_at(world, 1, 1)
    world.act(ROLLBACK, "back")
    world.settle()
    refused = [world.report(2), world.put({"state": 2})]
    assert all(world.refusals[it].code is ErrorCode.UNAVAILABLE for it in refused)


def test_a_rollback_that_failed_changes_nothing() -> None:
    world = world_at(1)
    kept_at(world, 1, 1)
    advance(world, 2, 2)
    request = world.act(ROLLBACK, "back")
    world.settle()
    (it,) = world.performing()
    world.done(it, unavailable("no node"))
    world.settle()
    assert world.refusals[request].message == "no node"
    assert (inspected(world).last_seq, inspected(world).restoration) == (2, None)
    advance(world, 3, 3)


def test_a_step_that_waits_is_refused_once_it_is_void() -> None:
    world = world_at(1)
    kept_at(world, 1, 1)
    step = world.step(2)
    world.settle()
    world.acted(ROLLBACK, "back")
    assert world.refusals[step].details["reason"] == "rolled_back"


def test_a_step_without_an_answer_is_void_for_its_groups_trainer_too() -> None:
    world = World()
    world.take_group()
    world.settle()
    fence = world.answers[1].fence  # type: ignore[attr-defined]
    world.open_group(fence, {"t1": "task"})
    world.settle()
    world.report(1, local="t1")
    world.settle()
    world.acted(CHECKPOINT, "one", local="t1", fence=fence)
    world.report(2, local="t1")
    world.settle()
    world.acted(ROLLBACK, "back", local="t1", fence=fence)
    late = world.answer_steps(fence, ("t1", 1, "late"), ("t1", 2, "late"))
    world.settle()
    errors = [outcome.error for outcome in world.answers[late].outcomes]  # type: ignore[attr-defined]
    assert [error.details["reason"] for error in errors] == ["rolled_back", "rolled_back"]
    waiting = world.steps(fence, group=GROUP)
    assert waiting not in world.answers
    world.report(2 + FENCED_NUMBERS + 1, local="t1")
    world.settle()
    assert [it.seq for it in world.answers[waiting].steps] == [3 + FENCED_NUMBERS]  # type: ignore[attr-defined]


def test_a_replaced_sandbox_is_not_listened_to_any_more() -> None:
    world = world_at(1)
    world.acted(CHECKPOINT, "one", durable=True)
    assert world.core.actions.lost_with("node-1") == [("default", ROLLOUT, "node-1.a")]
    request = world.act(ROLLBACK, "lost", lost=True)
    world.settle()
    (it,) = world.performing()
    world.done(it, sandbox_id="node-2.b")
    world.settle()
    reply = world.answers[request]
    assert isinstance(reply, RolloutRolledBack)
    assert reply.recreated
    for owner in range(2):
        old = world.report(reply.last_seq + 1, sandbox_id="node-1.a")
        world.settle()
        assert world.refusals[old].details["reason"] == "replaced", owner
        world.take()
    info = inspected(world)
    assert info.sandbox_id == "node-2.b"
    assert info.restoration is not None
    assert info.restoration.reason == "node_lost"
    assert world.core.actions.lost_with("node-1") == []
    new = world.report(reply.last_seq + 1, sandbox_id="node-2.b")
    world.settle()
    assert new in world.answers


def test_a_sandbox_that_was_named_speaks_for_a_rollout_without_reports() -> None:
    world = world_at(0)
    world.acted(CHECKPOINT, "one", sandbox_id="node-1.x", durable=True)
    assert world.core.actions.lost_with("node-1") == [("default", ROLLOUT, "node-1.x")]
    request = world.act(ROLLBACK, "lost", lost=True)
    world.settle()
    (it,) = world.performing()
    world.done(it, sandbox_id="node-2.y")
    world.settle()
    reply = world.answers[request]
    assert isinstance(reply, RolloutRolledBack)
    assert (reply.step, reply.recreated) == (0, True)
    assert inspected(world).sandbox_id == "node-2.y"


def test_a_checkpoint_that_one_node_has_alone_does_not_go_on_without_it() -> None:
    world = world_at(1)
    world.acted(CHECKPOINT, "one")
    assert world.core.actions.lost_with("node-1") == []
    refused = world.act(ROLLBACK, "lost", lost=True)
    assert world.refusals[refused].code is ErrorCode.NOT_FOUND


def test_branches_begin_with_the_state_of_the_checkpoint() -> None:
    world = world_at(2)
    kept_at(world, 2, "two")
    world.put({"state": "later"})
    request = world.act(BRANCH, "tree", count=3, step=2)
    world.settle()
    (it,) = world.performing()
    refusal = ErrorReply.of(DsecError(ErrorCode.EXHAUSTED, "full"))
    children = (
        Child(local="c1", sandbox_id="node-1.c1"),
        Child(local="c2", error=refusal),
        Child(local="c3", sandbox_id="node-1.c3"),
    )
    world.done(it, children=children)
    world.settle()
    reply = world.answers[request]
    assert isinstance(reply, RolloutBranched)
    assert [one.rollout_id for one in reply.branches] == ["s0.c1", "", "s0.c3"]
    for _owner in range(2):
        for local in ("c1", "c3"):
            info = inspected(world, local)
            assert (info.parent, info.parent_step, info.last_seq) == ("s0.r1", 2, 0)
            assert info.restoration is not None
            assert info.restoration.reason == "branch"
            assert world.state(local) == {"state": "two"}
        assert world.inspect("c2") in world.refusals
        assert world.state() == {"state": "later"}
        world.take()


def test_a_checkpoint_is_made_after_every_so_many_reports_before_their_feedback() -> None:
    world = World()
    world.open(checkpoint_every=2)
    steps = []
    for seq in range(1, 5):
        steps.append(world.step(seq))
        world.feedback(seq)
        world.settle()
        due = world.performing()
        assert len(due) == (seq % 2 == 0)
        assert (steps[-1] in world.answers) == (not due)
        for it in due:
            world.done(it)
        world.settle()
        assert steps[-1] in world.answers
    reply = world.acted(ROLLBACK, "back", step=3)
    assert reply.step == 2  # type: ignore[attr-defined]


def test_the_oldest_checkpoint_makes_room_for_a_new_one() -> None:
    world = world_at(1)
    for number in range(CHECKPOINTS_MAX + 2):
        world.acted(CHECKPOINT, f"{number}")
    assert world.dropped() == ["node-1.snap1", "node-1.snap2"]
    world.take()
    assert any(isinstance(deed, Collect) for deed in world.deeds)
    assert not world.core.actions.needs(ROLLOUT, "node-1.snap2")
    assert world.core.actions.needs(ROLLOUT, "node-1.snap3")


def test_a_forgotten_rollout_drops_its_checkpoints() -> None:
    world = world_at(1)
    world.acted(CHECKPOINT, "one")
    world.close()
    world.settle()
    world.now += world.config.closed_keep_s + 1
    world.sweep()
    assert world.dropped() == ["node-1.snap1"]


def test_a_snapshot_of_the_journal_keeps_checkpoints_results_and_what_is_under_way() -> None:
    world = world_at(3, ChronusConfig(snapshot_after_frames=1))
    kept_at(world, 3, "three")
    advance(world, 4, 5)
    kept_at(world, 5, {"five": 5})
    reply = world.acted(ROLLBACK, "back", step=4)
    world.put({"more": 1, "state": "last"})
    world.settle()
    world.act(CHECKPOINT, "pending")
    world.put({"state": "during"})
    world.settle()
    before = world.durable_facts()
    assert any(isinstance(it, ActionBegun) for it in before[ROLLOUT])
    world.take()
    assert world.core.facts() == before
    (it,) = world.performing()
    world.done(it)
    world.settle()
    assert world.state() == {"more": 1, "state": "during"}
    assert world.state(checkpoint=it.begun.number) == {"more": 1, "state": "last"}
    assert world.state(checkpoint=1) == {"state": "three"}
    assert inspected(world).total_reward == 3.0
    again = world.act(ROLLBACK, "back", step=4)
    assert world.answers[again].last_seq == reply.last_seq  # type: ignore[attr-defined]
    assert not world.to_write


def test_rewards_that_come_after_a_checkpoint_count_for_its_steps() -> None:
    world = world_at(1)
    world.report(2)
    world.settle()
    world.acted(CHECKPOINT, "one")
    world.feedback(2, reward=5.0)
    world.settle()
    advance(world, 3, 3)
    world.acted(ROLLBACK, "back")
    assert inspected(world).total_reward == 6.0


def test_a_rollback_goes_back_behind_history_that_is_forgotten() -> None:
    world = world_at(0)
    for seq in range(1, 400):
        world.step(seq)
        world.feedback(seq, reward=1.0)
        world.settle()
        if seq == 5:
            world.acted(CHECKPOINT, "early")
    reply = world.acted(ROLLBACK, "back")
    info = inspected(world)
    assert (info.total_reward, info.answered_seq) == (5.0, 5)
    world.take()
    assert inspected(world) == info or inspected(world).total_reward == info.total_reward
    assert inspected(world).last_seq == reply.last_seq  # type: ignore[attr-defined]
    old = world.report(3, local=ROLLOUT)
    assert world.refusals[old].code is ErrorCode.EXPIRED
