"""The rules of a rollout, and of the shard that holds it."""

from __future__ import annotations

from typing import TypeVar

import pytest

from chronus_world import ROLLOUT, World
from dsec_chronus.config import ChronusConfig
from dsec_chronus.records import PAYLOAD_BYTES_MAX, PAYLOAD_DEPTH_MAX, pack, unpack
from dsec_chronus.state import WAITING_BYTES_MAX
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.wire.base import Message
from dsec_common.wire.rollout import (
    FeedbackAccepted,
    FeedbackState,
    RolloutInfo,
    RolloutOpened,
    RolloutState,
    StageAccepted,
    StageBatch,
)

M = TypeVar("M", bound=Message)


def nested(depth: int) -> object:
    value: object = []
    for _ in range(depth - 1):
        value = [value]
    return value


def answer(world: World, request_id: int, kind: type[M]) -> M:
    assert request_id not in world.refusals, world.refusals[request_id]
    reply = world.answers[request_id]
    assert isinstance(reply, kind)
    return reply


def refused(world: World, request_id: int) -> DsecError:
    assert request_id not in world.answers
    return world.refusals[request_id]


@pytest.fixture
def world() -> World:
    world = World()
    world.open()
    world.settle()
    return world


def reported(world: World, count: int) -> None:
    for seq in range(1, count + 1):
        world.report(seq, {"step": seq})
    world.settle()


def test_nothing_is_answered_or_delivered_before_it_is_durable(world: World) -> None:
    waiting = world.next()
    report = world.report(1, {"saw": "a traceback"})
    assert report not in world.answers
    assert waiting not in world.answers
    world.append()
    assert answer(world, report, StageAccepted).seq == 1
    batch = answer(world, waiting, StageBatch)
    assert [(one.seq, one.payload) for one in batch.reports] == [(1, {"saw": "a traceback"})]


def test_changes_that_arrive_during_a_write_go_together_into_the_next(world: World) -> None:
    requests = [world.report(seq) for seq in range(1, 11)]
    assert len(world.to_write[0].records) == 1
    world.append()
    assert len(world.to_write[0].records) == 9
    world.append()
    assert all(request in world.answers for request in requests)


def test_the_same_report_twice_is_accepted_once_and_answered_twice(world: World) -> None:
    first, second = world.report(1, {"a": 1, "b": 2}), world.report(1, {"b": 2, "a": 1})
    world.settle()
    third = world.report(1, {"a": 1, "b": 2})
    assert not answer(world, first, StageAccepted).duplicate
    assert answer(world, second, StageAccepted).duplicate
    assert answer(world, third, StageAccepted).duplicate
    assert len(answer(world, world.next(), StageBatch).reports) == 1


def test_a_duplicate_of_what_is_being_written_waits_for_it(world: World) -> None:
    world.report(1)
    duplicate = world.report(1)
    assert duplicate not in world.answers
    world.settle()
    assert answer(world, duplicate, StageAccepted).duplicate


def test_another_report_under_a_known_number_is_a_conflict(world: World) -> None:
    reported(world, 1)
    for request in (world.report(1, "other"), world.report(1, {"step": 1}, stage="other")):
        error = refused(world, request)
        assert (error.code, error.details["expected_seq"]) == (ErrorCode.CONFLICT, 2)


def test_a_gap_is_refused_and_names_the_number_that_is_expected(world: World) -> None:
    reported(world, 2)
    error = refused(world, world.report(5))
    assert (error.code, error.details["expected_seq"]) == (ErrorCode.INVALID, 3)
    assert refused(world, world.report(0)).code is ErrorCode.INVALID


def test_feedback_reaches_the_sandbox_that_waits_for_it(world: World) -> None:
    reported(world, 1)
    waiting = world.await_feedback(1)
    given = world.feedback(1, {"edit": "line 3"}, reward=0.5)
    assert waiting not in world.answers
    world.settle()
    assert answer(world, given, FeedbackAccepted).seq == 1
    state = answer(world, waiting, FeedbackState)
    assert (state.ready, state.payload, state.reward) == (True, {"edit": "line 3"}, 0.5)
    again = answer(world, world.await_feedback(1), FeedbackState)
    assert again.payload == state.payload


def test_a_sandbox_may_wait_for_feedback_to_a_report_that_is_still_on_its_way(
    world: World,
) -> None:
    waiting = world.await_feedback(1)
    world.report(1)
    world.settle()
    world.feedback(1, "go on")
    world.settle()
    assert answer(world, waiting, FeedbackState).payload == "go on"


def test_feedback_twice_is_one_and_other_feedback_a_conflict(world: World) -> None:
    reported(world, 1)
    world.feedback(1, "edit", reward=1.0)
    world.settle()
    assert answer(world, world.feedback(1, "edit", reward=1.0), FeedbackAccepted).duplicate
    assert refused(world, world.feedback(1, "edit", reward=2.0)).code is ErrorCode.CONFLICT
    assert refused(world, world.feedback(1, "else", reward=1.0)).code is ErrorCode.CONFLICT
    assert answer(world, world.inspect(), RolloutInfo).total_reward == 1.0


def test_feedback_to_no_report_is_refused_and_names_the_last(world: World) -> None:
    reported(world, 2)
    error = refused(world, world.feedback(3))
    assert (error.code, error.details["last_seq"]) == (ErrorCode.INVALID, 2)


def test_reports_may_be_answered_in_any_order_or_not_at_all(world: World) -> None:
    reported(world, 3)
    world.feedback(3)
    world.feedback(1)
    world.settle()
    assert answer(world, world.inspect(), RolloutInfo).answered_seq == 3


def test_waiting_ends_with_an_empty_answer_at_its_deadline(world: World) -> None:
    stages, feedback = world.next(wait_s=5), world.await_feedback(1, wait_s=10)
    assert world.core.next_deadline_s == pytest.approx(5)
    world.tick(5)
    assert answer(world, stages, StageBatch).reports == ()
    assert world.core.next_deadline_s == pytest.approx(10)
    world.tick(5)
    assert not answer(world, feedback, FeedbackState).ready
    assert world.core.next_deadline_s is None


@pytest.mark.parametrize("wait_s", [0.0, -1.0, float("nan"), float("-inf")])
def test_who_does_not_want_to_wait_is_answered_at_once(world: World, wait_s: float) -> None:
    assert answer(world, world.next(wait_s=wait_s), StageBatch).reports == ()


def test_nobody_waits_longer_than_the_limit(world: World) -> None:
    waiting = world.next(after_seq=-3, wait_s=float("inf"))
    world.tick(world.config.poll_max_s)
    assert answer(world, waiting, StageBatch).reports == ()


def test_the_oldest_gives_way_when_too_many_wait_on_one_rollout(world: World) -> None:
    requests = [world.next() for _ in range(65)]
    assert answer(world, requests[0], StageBatch).reports == ()
    world.report(1)
    world.settle()
    assert all(len(answer(world, one, StageBatch).reports) == 1 for one in requests[1:])


def test_more_than_the_limit_may_not_wait_on_a_shard() -> None:
    world = World(ChronusConfig(polls_max=2, waiting_max=2))
    world.open()
    world.settle()
    for _ in range(2):
        world.next()
    assert refused(world, world.next()).code is ErrorCode.EXHAUSTED
    for seq in range(1, 4):
        world.report(seq)
    assert refused(world, world.report(4)).code is ErrorCode.EXHAUSTED
    world.settle()
    assert answer(world, world.inspect(), RolloutInfo).last_seq == 3


def test_only_so_many_bytes_may_wait_for_the_journal(world: World) -> None:
    large = "x" * (PAYLOAD_BYTES_MAX - 2)
    for seq in range(1, WAITING_BYTES_MAX // PAYLOAD_BYTES_MAX + 2):
        world.report(seq, large)
    assert refused(world, world.report(200)).code is ErrorCode.EXHAUSTED
    world.append()
    world.report(130)
    world.settle()
    assert answer(world, world.inspect(), RolloutInfo).last_seq == 130


def test_a_batch_holds_what_fits_a_message_and_the_rest_comes_next(world: World) -> None:
    large = "x" * (PAYLOAD_BYTES_MAX // 2)
    for seq in range(1, 4):
        world.report(seq, large)
    world.settle()
    assert [one.seq for one in answer(world, world.next(), StageBatch).reports] == [1]
    assert [one.seq for one in answer(world, world.next(2, limit=0), StageBatch).reports] == [3]


def test_a_batch_holds_no_more_than_the_limit(world: World) -> None:
    reported(world, 9)
    batch = answer(world, world.next(3, limit=2), StageBatch)
    assert [one.seq for one in batch.reports] == [4, 5]


def test_a_closed_rollout_is_read_but_takes_nothing_more(world: World) -> None:
    reported(world, 1)
    stages, feedback = world.next(after_seq=1), world.await_feedback(1)
    closing = world.close()
    late = world.report(2)
    world.settle()
    assert answer(world, closing, RolloutInfo).state is RolloutState.CLOSED
    assert answer(world, stages, StageBatch).state is RolloutState.CLOSED
    assert refused(world, feedback).code is ErrorCode.EXPIRED
    assert refused(world, late).code is ErrorCode.EXPIRED
    assert refused(world, world.feedback(1)).code is ErrorCode.EXPIRED
    assert answer(world, world.report(1, {"step": 1}), StageAccepted).duplicate
    assert answer(world, world.close(), RolloutInfo).last_seq == 1
    assert len(answer(world, world.next(), StageBatch).reports) == 1


def test_opening_with_the_same_key_returns_the_same_rollout(world: World) -> None:
    assert answer(world, world.open(), RolloutOpened).rollout_id == f"s0.{ROLLOUT}"
    assert refused(world, world.open(labels={"task": "other"})).code is ErrorCode.CONFLICT


def test_another_projects_rollout_looks_like_none(world: World) -> None:
    reported(world, 1)
    requests = [
        world.inspect(project="other"),
        world.next(project="other"),
        world.await_feedback(1, project="other"),
        world.report(2, project="other"),
        world.feedback(1, project="other"),
        world.close(project="other"),
        world.open(project="other"),
    ]
    errors = [refused(world, request) for request in requests]
    missing = refused(world, world.inspect("r2"))
    assert {error.code for error in errors} == {missing.code} == {ErrorCode.NOT_FOUND}
    assert errors[0].message == missing.message.replace("r2", ROLLOUT)


def test_a_closed_rollout_is_forgotten_after_a_while() -> None:
    world = World(ChronusConfig(closed_keep_s=100, idle_keep_s=1000))
    world.open()
    world.open("idle")
    world.close()
    world.settle()
    world.now += 101
    world.sweep()
    assert refused(world, world.inspect()).code is ErrorCode.NOT_FOUND
    assert answer(world, world.inspect("idle"), RolloutInfo)
    waiting = world.next(local="idle")
    world.now += 1000
    world.sweep()
    assert refused(world, waiting).code is ErrorCode.NOT_FOUND


def test_a_full_shard_refuses_more_and_takes_again_what_is_closed() -> None:
    world = World(ChronusConfig(shard_bytes_max=10_000, closed_keep_s=1))
    world.open()
    world.report(1, "x" * 10_000)
    world.settle()
    assert refused(world, world.report(2)).code is ErrorCode.EXHAUSTED
    assert refused(world, world.open("other")).retryable
    world.close()
    world.settle()
    world.now += 2
    world.sweep()
    request = world.open("other")
    world.settle()
    assert answer(world, request, RolloutOpened)


def test_no_project_takes_all_the_room_of_a_shard() -> None:
    world = World(ChronusConfig(shard_bytes_max=20_000))
    world.open()
    world.settle()
    for seq in range(1, 20):
        world.report(seq, "x" * 1000)
        world.settle()
    assert refused(world, world.report(20, "x" * 1000)).code is ErrorCode.EXHAUSTED
    other = world.open("other", project="other")
    world.settle()
    answer(world, other, RolloutOpened)
    report = world.report(1, "x" * 1000, local="other", project="other")
    world.settle()
    assert answer(world, report, StageAccepted)


def test_no_project_takes_every_place_to_wait() -> None:
    world = World(ChronusConfig(polls_max=8))
    world.open()
    world.open("other", project="other")
    world.settle()
    mine = [world.next() for _ in range(7)]
    assert refused(world, mine[-1]).code is ErrorCode.EXHAUSTED
    theirs = [world.next(local="other", project="other") for _ in range(3)]
    assert theirs[0] not in world.refusals
    assert refused(world, theirs[-1]).code is ErrorCode.EXHAUSTED


def test_a_refused_frame_leaves_nothing_behind(world: World) -> None:
    first = world.report(1, "one")
    duplicate = world.report(1, "one")
    world.refuse_frame()
    assert refused(world, first).code is ErrorCode.UNAVAILABLE
    world.settle()
    assert not answer(world, duplicate, StageAccepted).duplicate
    assert answer(world, world.inspect(), RolloutInfo).last_seq == 1


def test_whoever_waits_is_told_when_the_shard_is_lost(world: World) -> None:
    requests = [world.report(1), world.report(2), world.next(), world.await_feedback(1)]
    world.lose()
    assert {refused(world, one).code for one in requests} == {ErrorCode.UNAVAILABLE}


def test_a_snapshot_shortens_the_journal_and_says_the_same() -> None:
    world = World(ChronusConfig(snapshot_after_frames=50))
    world.open()
    world.settle()
    for seq in range(1, 200):
        world.report(seq, {"step": seq})
        world.settle()
    assert len(world.journal.frames) < 120
    before = world.core.facts()
    assert len(before[ROLLOUT]) == 200
    world.take()
    assert world.core.facts() == before


def test_a_large_snapshot_comes_in_parts_with_nothing_between_them() -> None:
    world = World(ChronusConfig(snapshot_after_frames=4))
    world.open()
    for seq in range(1, 6):
        world.report(seq, "x" * 200_000)
    seen = []
    while world.to_write:
        seen.append(world.to_write[0].snapshot_part)
        world.report(6, "late")
        world.append()
    first = seen.index(1)
    assert seen[first : first + 3] == [1, 2, 3]
    assert len(world.journal.frames) < len(seen)
    assert world.durable_facts() == world.core.facts()


def test_an_incomplete_snapshot_is_passed_over() -> None:
    world = World(ChronusConfig(snapshot_after_frames=3, snapshot_after_bytes=1 << 40))
    world.open()
    for seq in range(1, 6):
        world.report(seq, "x" * 200_000)
    while not world.to_write[0].snapshot_part:
        world.append()
    before = world.core.facts()
    world.append(acknowledged=False)
    assert not max(world.journal.frames.items())[1].snapshot_complete
    world.take()
    assert world.core.facts() == before


def test_a_refused_snapshot_costs_nothing_but_the_attempt() -> None:
    world = World(ChronusConfig(snapshot_after_frames=3))
    world.open()
    world.settle()
    for seq in range(1, 4):
        world.report(seq)
        while world.to_write and not world.to_write[0].snapshot_part:
            world.append()
        if world.to_write:
            world.refuse_frame()
    assert answer(world, world.inspect(), RolloutInfo).last_seq == 3
    assert world.durable_facts() == world.core.facts()


@pytest.mark.parametrize(
    "payload",
    [
        object(),
        {("a", 1): 2},
        2**64,
        "\ud800",
        "x" * PAYLOAD_BYTES_MAX,
        nested(PAYLOAD_DEPTH_MAX + 1),
        nested(5000),
    ],
    ids=["object", "tuple", "integer", "surrogate", "large", "deep", "very deep"],
)
def test_a_payload_that_is_no_json_or_too_large_is_refused(payload: object) -> None:
    with pytest.raises(DsecError) as caught:
        pack(payload)
    assert caught.value.code is ErrorCode.INVALID


def test_brackets_in_texts_and_side_by_side_are_not_depth() -> None:
    payloads: list[object] = ["[" * 1000, ['"[' * 500, {"\\": "{" * 500}], [[]] * 1000]
    for payload in payloads:
        assert unpack(pack(payload)) == payload
    assert unpack(pack(nested(PAYLOAD_DEPTH_MAX))) == nested(PAYLOAD_DEPTH_MAX)


def test_the_limit_on_payloads_is_named() -> None:
    assert len(pack("x" * (PAYLOAD_BYTES_MAX - 2))) == PAYLOAD_BYTES_MAX
    with pytest.raises(DsecError, match=str(PAYLOAD_BYTES_MAX)):
        pack("x" * (PAYLOAD_BYTES_MAX - 1))
