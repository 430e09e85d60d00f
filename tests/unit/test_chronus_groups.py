"""The rules of groups of rollouts, of steps, and of what is kept of a long rollout."""

from __future__ import annotations

from typing import TypeVar

import pytest

from chronus_world import GROUP, ROLLOUT, World
from dsec_chronus.config import ChronusConfig
from dsec_chronus.records import PAYLOAD_BYTES_MAX
from dsec_chronus.rollout import HISTORY_KEPT, UNANSWERED_MAX
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.wire.base import Message
from dsec_common.wire.rollout import FeedbackState, RolloutInfo, RolloutState, StageBatch
from dsec_common.wire.rollout_group import GroupLease, GroupOpened, StepBatch, StepsAnswered

M = TypeVar("M", bound=Message)

TASKS = {"a": {"goal": 1}, "b": {"goal": 2}, "c": {"goal": 3}}


def answer(world: World, request_id: int, kind: type[M]) -> M:
    assert request_id not in world.refusals, world.refusals[request_id]
    reply = world.answers[request_id]
    assert isinstance(reply, kind)
    return reply


def refused(world: World, request_id: int) -> DsecError:
    assert request_id not in world.answers
    return world.refusals[request_id]


def taken(world: World) -> int:
    """Become the group's trainer and open its rollouts; return the fencing number."""
    request = world.take_group()
    world.settle()
    fence = answer(world, request, GroupLease).fence
    world.open_group(fence, TASKS)
    world.settle()
    return fence


def steps_of(batch: StepBatch) -> list[tuple[str, int]]:
    return [(step.local, step.seq) for step in batch.steps]


@pytest.fixture
def world() -> World:
    return World()


# --- Steps of one rollout -------------------------------------------------------------------------


def opened(world: World) -> None:
    world.open()
    world.settle()


def test_a_step_is_answered_when_its_feedback_is_durable_and_not_before(world: World) -> None:
    opened(world)
    step = world.step(1, "saw")
    assert step not in world.answers
    world.settle()
    assert step not in world.answers
    world.feedback(1, "do")
    assert step not in world.answers
    world.settle()
    state = answer(world, step, FeedbackState)
    assert (state.ready, state.payload) == (True, "do")


def test_a_step_that_is_repeated_is_one_report_and_gets_the_same_feedback(world: World) -> None:
    opened(world)
    first = world.step(1, "saw")
    world.settle()
    again = world.step(1, "saw")
    world.feedback(1, "do")
    world.settle()
    late = world.step(1, "saw")
    payloads = [answer(world, one, FeedbackState).payload for one in (first, again, late)]
    assert payloads == ["do"] * 3
    assert answer(world, world.inspect(), RolloutInfo).last_seq == 1
    assert refused(world, world.step(1, "saw something else")).code is ErrorCode.CONFLICT


def test_a_step_that_waited_long_enough_is_durable_and_not_ready(world: World) -> None:
    opened(world)
    step = world.step(1, wait_s=2)
    world.settle()
    world.tick(2)
    assert not answer(world, step, FeedbackState).ready
    assert answer(world, world.inspect(), RolloutInfo).last_seq == 1


def test_a_step_in_a_refused_frame_did_not_happen(world: World) -> None:
    opened(world)
    step = world.step(1)
    world.refuse_frame()
    assert refused(world, step).code is ErrorCode.UNAVAILABLE
    assert answer(world, world.inspect(), RolloutInfo).last_seq == 0


def test_a_step_is_told_to_ask_again_when_its_shard_is_lost_at_either_half(world: World) -> None:
    opened(world)
    waiting = world.step(1)
    world.settle()
    writing = world.step(2)
    world.lose()
    assert {refused(world, one).code for one in (waiting, writing)} == {ErrorCode.UNAVAILABLE}


# --- What is kept of a long rollout ---------------------------------------------------------------


def stepped(world: World, count: int, first: int = 1, *, reward: float = 1.0) -> None:
    for seq in range(first, first + count):
        step = world.step(seq, {"step": seq})
        world.settle()
        world.feedback(seq, {"to": seq}, reward=reward)
        world.settle()
        assert answer(world, step, FeedbackState).ready


def test_a_rollout_of_many_steps_keeps_only_the_last_of_them(world: World) -> None:
    opened(world)
    stepped(world, 500)
    kept = len(world.core.facts()[ROLLOUT])
    assert kept < 6 * HISTORY_KEPT
    info = answer(world, world.inspect(), RolloutInfo)
    assert (info.last_seq, info.answered_seq, info.total_reward) == (500, 500, 500.0)
    assert world.durable_facts() == world.core.facts()
    world.take()
    info = answer(world, world.inspect(), RolloutInfo)
    assert (info.last_seq, info.answered_seq, info.total_reward) == (500, 500, 500.0)
    stepped(world, 3, 501)


def test_what_a_long_rollout_takes_of_its_shard_does_not_grow() -> None:
    world = World(ChronusConfig(shard_bytes_max=256 * 1024))
    opened(world)
    stepped(world, 500)


def test_an_old_number_is_expired_and_says_where_to_go_on(world: World) -> None:
    opened(world)
    stepped(world, 300)
    requests = [
        world.report(1, {"step": 1}),
        world.step(1, {"step": 1}),
        world.feedback(1, {"to": 1}),
        world.await_feedback(1),
        world.next(5),
    ]
    for request in requests:
        error = refused(world, request)
        assert (error.code, error.details["expected_seq"]) == (ErrorCode.EXPIRED, 301)
    oldest = error.details["oldest_seq"]
    batch = answer(world, world.next(0), StageBatch)
    assert batch.reports[0].seq == oldest
    assert batch.reports[-1].seq <= 300


def test_what_is_not_answered_or_not_fetched_by_steps_is_kept(world: World) -> None:
    opened(world)
    for seq in range(1, 301):
        world.report(seq)
        world.feedback(seq)
    world.settle()
    world.open("other")
    world.report(1, local="other")
    world.settle()
    for seq in range(2, 300):
        world.step(seq, local="other")
        world.feedback(seq, local="other")
        world.settle()
    facts = world.core.facts()
    assert len(facts[ROLLOUT]) == 601
    assert len(facts["other"]) > 590


def test_a_rollout_goes_on_forgetting_under_a_new_owner(world: World) -> None:
    opened(world)
    stepped(world, 200)
    world.take()
    stepped(world, 400, 201)
    assert len(world.core.facts()[ROLLOUT]) < 6 * HISTORY_KEPT
    assert answer(world, world.inspect(), RolloutInfo).total_reward == 600.0


# --- Groups ---------------------------------------------------------------------------------------


def test_a_trainer_gets_the_steps_of_all_its_rollouts_in_one_answer(world: World) -> None:
    fence = taken(world)
    waiting = world.steps(fence)
    assert waiting not in world.answers
    world.step(1, "a1", local="a")
    world.step(1, "b1", local="b")
    world.settle()
    first = answer(world, waiting, StepBatch)
    second = answer(world, world.steps(fence, epoch=first.epoch, after=first.after), StepBatch)
    assert steps_of(first) + steps_of(second) == [("a", 1), ("b", 1)]
    assert [step.index for step in (*first.steps, *second.steps)] == [0, 1]
    assert first.open_rollouts == 3


def test_answers_come_back_one_by_one_each_with_its_own_outcome(world: World) -> None:
    fence = taken(world)
    steps = {local: world.step(1, local=local) for local in "ab"}
    world.settle()
    request = world.answer_steps(
        fence, ("a", 1, "to a"), ("c", 1, "nothing"), ("b", 1, "to b"), ("z", 1, "nobody")
    )
    world.settle()
    outcomes = answer(world, request, StepsAnswered).outcomes
    codes = [outcome.error.code if outcome.error else None for outcome in outcomes]
    assert codes == [None, ErrorCode.INVALID, None, ErrorCode.NOT_FOUND]
    for local, step in steps.items():
        assert answer(world, step, FeedbackState).payload == f"to {local}"
    again = world.answer_steps(fence, ("a", 1, "to a"), ("b", 1, "something else"))
    outcomes = answer(world, again, StepsAnswered).outcomes
    assert outcomes[0].duplicate
    assert outcomes[1].error is not None
    assert outcomes[1].error.code is ErrorCode.CONFLICT


def test_what_is_answered_never_comes_again_and_what_is_not_does(world: World) -> None:
    fence = taken(world)
    for local in "abc":
        world.step(1, local=local)
    world.settle()
    world.answer_steps(fence, ("b", 1, None))
    world.settle()
    batch = answer(world, world.steps(fence), StepBatch)
    assert steps_of(batch) == [("a", 1), ("c", 1)]
    newer = taken(world)
    assert steps_of(answer(world, world.steps(newer), StepBatch)) == [("a", 1), ("c", 1)]
    world.take()
    unheard = world.steps(newer, epoch=batch.epoch, after=batch.after)
    assert steps_of(answer(world, unheard, StepBatch)) == [("a", 1), ("c", 1)]


def test_a_batch_whose_answer_got_lost_is_sent_again_and_the_next_only_when_it_is_had(
    world: World,
) -> None:
    fence = taken(world)
    for seq in (1, 2, 3):
        world.report(seq, local="a")
    world.settle()
    lost = answer(world, world.steps(fence, limit=2), StepBatch)
    again = answer(world, world.steps(fence, limit=2), StepBatch)
    assert steps_of(lost) == steps_of(again) == [("a", 1), ("a", 2)]
    rest = world.steps(fence, epoch=again.epoch, after=again.after)
    assert steps_of(answer(world, rest, StepBatch)) == [("a", 3)]


def test_large_steps_come_in_several_batches(world: World) -> None:
    fence = taken(world)
    for seq in (1, 2, 3):
        world.report(seq, "x" * (PAYLOAD_BYTES_MAX // 2), local="a")
    world.settle()
    assert steps_of(answer(world, world.steps(fence), StepBatch)) == [("a", 1)]


def test_the_newer_trainer_takes_over_and_the_older_is_told_so(world: World) -> None:
    older = taken(world)
    world.step(1, local="a")
    world.settle()
    batch = answer(world, world.steps(older), StepBatch)
    waiting = world.steps(older, epoch=batch.epoch, after=batch.after)
    newer = taken(world)
    assert newer > older
    for request in (
        waiting,
        world.steps(older),
        world.answer_steps(older, ("a", 1, "mine")),
        world.open_group(older, TASKS),
    ):
        error = refused(world, request)
        assert error.code is ErrorCode.CONFLICT
        assert (error.details["reason"], error.details["newest_fence"]) == ("fenced", newer)
    request = world.answer_steps(newer, ("a", 1, "ours"))
    world.settle()
    assert not answer(world, request, StepsAnswered).outcomes[0].duplicate


def test_an_answer_on_its_way_with_a_take_over_counts_by_who_was_first(world: World) -> None:
    older = taken(world)
    world.step(1, local="a")
    world.step(1, local="b")
    world.settle()
    world.report(1, local="c")  # so that what follows is decided in one frame
    before = world.answer_steps(older, ("a", 1, None))
    world.take_group()
    after = world.answer_steps(older, ("b", 1, None))
    world.settle()
    assert answer(world, before, StepsAnswered).outcomes[0].error is None
    assert refused(world, after).code is ErrorCode.CONFLICT


def test_a_fence_holds_under_a_new_owner(world: World) -> None:
    older = taken(world)
    newer = taken(world)
    world.take()
    assert refused(world, world.steps(older)).code is ErrorCode.CONFLICT
    waiting = world.steps(newer, wait_s=1)
    world.tick(1)
    assert answer(world, waiting, StepBatch).open_rollouts == 3


def test_fences_grow_even_past_what_the_shard_has_forgotten() -> None:
    world = World(ChronusConfig(idle_keep_s=10, closed_keep_s=10))
    older = taken(world)
    world.now += 100
    world.sweep()
    assert world.core.facts() == {}
    assert refused(world, world.steps(older)).code is ErrorCode.NOT_FOUND
    assert taken(world) > older


def test_the_same_tasks_again_are_the_same_rollouts(world: World) -> None:
    fence = taken(world)
    before = world.core.facts()
    again = answer(world, world.open_group(fence, TASKS), GroupOpened)
    assert again.rollouts == ("s0.a", "s0.b", "s0.c")
    assert world.core.facts() == before
    other = refused(world, world.open_group(fence, {**TASKS, "b": {"goal": 9}}))
    assert (other.code, other.details["index"]) == (ErrorCode.CONFLICT, 1)
    labels = refused(world, world.open_group(fence, TASKS, labels={"run": "2"}))
    assert labels.code is ErrorCode.CONFLICT
    assert world.core.facts() == before


def test_who_only_opens_tasks_takes_no_group_away(world: World) -> None:
    opening = world.open_group(0, TASKS)
    world.settle()
    assert answer(world, opening, GroupOpened).rollouts == ("s0.a", "s0.b", "s0.c")
    assert refused(world, world.steps(0)).code is ErrorCode.CONFLICT
    fence = taken(world)
    waiting = world.steps(fence)
    assert refused(world, world.open_group(0, {"a": "other"})).code is ErrorCode.CONFLICT
    world.open_group(0, {**TASKS, "d": {"goal": 4}})
    world.step(1, local="d")
    world.settle()
    assert steps_of(answer(world, waiting, StepBatch)) == [("d", 1)]
    assert world.durable_facts() == world.core.facts()


def test_a_list_of_tasks_may_grow(world: World) -> None:
    fence = taken(world)
    world.open_group(fence, {**TASKS, "d": {"goal": 4}})
    world.settle()
    assert answer(world, world.inspect("d"), RolloutInfo).last_seq == 0


def test_done_closes_the_rollout_and_the_stream_ends_with_the_last(world: World) -> None:
    fence = taken(world)
    steps = {local: world.step(1, local=local) for local in TASKS}
    world.settle()
    waiting = world.steps(fence, epoch="none", after=99)
    batch = answer(world, waiting, StepBatch)
    waiting = world.steps(fence, epoch=batch.epoch, after=batch.after)
    world.answer_steps(fence, *((local, 1, None) for local in TASKS), done=True)
    world.settle()
    assert all(answer(world, step, FeedbackState).done for step in steps.values())
    assert answer(world, waiting, StepBatch).open_rollouts == 0
    assert answer(world, world.inspect("a"), RolloutInfo).state is RolloutState.CLOSED
    again = world.answer_steps(fence, ("a", 1, None), done=True)
    assert answer(world, again, StepsAnswered).outcomes[0].duplicate


def test_the_steps_of_a_closed_rollout_do_not_come_any_more(world: World) -> None:
    fence = taken(world)
    world.report(1, local="a")
    world.report(1, local="b")
    world.close("a")
    world.settle()
    assert steps_of(answer(world, world.steps(fence), StepBatch)) == [("b", 1)]


def test_only_the_groups_trainer_answers_its_rollouts(world: World) -> None:
    taken(world)
    world.step(1, local="a")
    world.settle()
    error = refused(world, world.feedback(1, local="a"))
    assert (error.code, error.details["group"]) == (ErrorCode.CONFLICT, GROUP)


def test_another_projects_group_looks_like_none(world: World) -> None:
    fence = taken(world)
    world.step(1, local="a")
    world.settle()
    assert refused(world, world.steps(fence, project="other")).code is ErrorCode.NOT_FOUND
    stolen = world.answer_steps(fence, ("a", 1, None), project="other")
    assert refused(world, stolen).code is ErrorCode.NOT_FOUND
    theirs = world.take_group(project="other")
    world.settle()
    their_fence = answer(world, theirs, GroupLease).fence
    request = world.answer_steps(their_fence, ("a", 1, None), project="other")
    outcome = answer(world, request, StepsAnswered).outcomes[0]
    assert outcome.error is not None
    assert outcome.error.code is ErrorCode.NOT_FOUND


def test_an_agent_waits_when_it_is_too_far_ahead_of_its_trainer(world: World) -> None:
    fence = taken(world)
    for seq in range(1, UNANSWERED_MAX + 1):
        world.report(seq, local="a")
    world.settle()
    error = refused(world, world.report(UNANSWERED_MAX + 1, local="a"))
    assert (error.code, error.retryable) == (ErrorCode.EXHAUSTED, True)
    world.answer_steps(fence, ("a", 1, None))
    world.settle()
    world.report(UNANSWERED_MAX + 1, local="a")
    world.settle()
    assert answer(world, world.inspect("a"), RolloutInfo).last_seq == UNANSWERED_MAX + 1


def test_a_full_shard_still_takes_answers() -> None:
    world = World(ChronusConfig(shard_bytes_max=20_000))
    fence = taken(world)
    seq = 1
    while not world.refusals:
        world.report(seq, "x" * 1000, local="a")
        world.settle()
        seq += 1
    (error,) = world.refusals.values()
    assert error.code is ErrorCode.EXHAUSTED
    request = world.answer_steps(fence, ("a", 1, "go on"))
    world.settle()
    assert answer(world, request, StepsAnswered).outcomes[0].error is None


def test_one_trainer_waits_once_and_what_it_asked_before_is_answered_empty(world: World) -> None:
    fence = taken(world)
    first, second = world.steps(fence), world.steps(fence)
    assert answer(world, first, StepBatch).steps == ()
    world.step(1, local="a")
    world.settle()
    assert steps_of(answer(world, second, StepBatch)) == [("a", 1)]


def test_a_snapshot_holds_groups_with_their_fences_and_tasks() -> None:
    world = World(ChronusConfig(snapshot_after_frames=30))
    fence = taken(world)
    for seq in range(1, 60):
        world.step(seq, local="a")
        world.settle()
        if seq < 59:
            world.answer_steps(fence, ("a", seq, None))
            world.settle()
    assert any(frame.snapshot_complete for frame in world.journal.frames.values())
    assert world.durable_facts() == world.core.facts()
    world.take()
    assert steps_of(answer(world, world.steps(fence), StepBatch)) == [("a", 59)]
    assert refused(world, world.open_group(fence, {"a": "other"})).code is ErrorCode.CONFLICT
