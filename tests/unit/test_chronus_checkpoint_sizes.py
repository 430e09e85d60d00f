"""Whatever is kept with rollouts fits the messages that carry it, and no key is anybody else's."""

from __future__ import annotations

from typing import Any

import pytest

from chronus_world import PROJECT, ROLLOUT, World
from dsec_chronus.config import ChronusConfig
from dsec_chronus.records import ActionKind, Frame
from dsec_chronus.shard import LABELS_BYTES_MAX
from dsec_common.errors import DsecError, ErrorCode, unavailable
from dsec_common.wire.base import encode
from dsec_common.wire.checkpoint import RolloutBranched, RolloutStateValues

MESSAGE_BYTES_MAX = 1024 * 1024
"""What NATS carries, as this project's own server is set up."""


def test_a_key_of_an_action_under_way_is_a_conflict_for_one_of_another_kind() -> None:
    world = World()
    world.open()
    world.report(1)
    world.feedback(1)
    world.settle()
    world.acted(ActionKind.CHECKPOINT, "one")
    begun = world.act(ActionKind.CHECKPOINT, "two")
    other = world.act(ActionKind.ROLLBACK, "two")
    world.settle()
    late = world.act(ActionKind.BRANCH, "two", count=1)
    (it,) = world.performing()
    world.done(it)
    world.settle()
    assert begun in world.answers
    for refused in (other, late):
        assert world.refusals[refused].code is ErrorCode.CONFLICT


def test_the_end_of_many_branches_with_large_labels_fits_the_journal() -> None:
    world = World()
    world.open(labels={"label": "x" * (LABELS_BYTES_MAX - len("label"))})
    world.report(1)
    world.settle()
    world.acted(ActionKind.CHECKPOINT, "one")
    request = world.act(ActionKind.BRANCH, "tree", count=64)
    world.settle()
    for it in world.performing():
        world.done(it)
    for frame in world.to_write:
        whole = Frame(epoch="e", number=1, records=frame.records)
        assert len(encode(whole)) < MESSAGE_BYTES_MAX
    world.settle()
    assert world.refusals[request].code is ErrorCode.INVALID
    assert "31 are the most at once" in world.refusals[request].message
    assert isinstance(world.acted(ActionKind.BRANCH, "smaller", count=31), RolloutBranched)


def test_what_a_rollout_was_opened_for_does_not_bound_its_branches() -> None:
    world = World()
    lease = world.take_group()
    world.settle()
    fence = world.answers[lease].fence  # type: ignore[attr-defined]
    world.open_group(fence, {"t1": "x" * 200_000})
    world.settle()
    world.report(1, local="t1")
    world.settle()
    world.acted(ActionKind.CHECKPOINT, "one", local="t1", fence=fence)
    reply = world.acted(ActionKind.BRANCH, "tree", local="t1", count=64, fence=fence)
    assert isinstance(reply, RolloutBranched)


def with_state(config: ChronusConfig, size: int, *rollouts: str) -> World:
    """Return a world whose rollouts have a checkpoint with a state of about so many bytes."""
    world = World(config)
    for local in rollouts:
        world.open(local)
        world.report(1, local=local)
        for at in range(0, size, 100_000):
            world.put({str(at): "x" * min(100_000, size - at)}, local=local)
        world.settle()
        world.acted(ActionKind.CHECKPOINT, "one", local=local)
    return world


def room_of(refusal: DsecError) -> int:
    return int(str(refusal.details["room_bytes"]))


SMALL = ChronusConfig(shard_bytes_max=16 * 1024 * 1024)
"""A project may take 10.5 MiB of it: three quarters of what is not for answers alone."""


def test_branches_for_whose_state_there_is_no_room_are_refused_before_they_begin() -> None:
    world = with_state(SMALL, 400_000, ROLLOUT)
    request = world.act(ActionKind.BRANCH, "tree", count=64)
    world.settle()
    assert world.performing() == []
    refusal = world.refusals[request]
    assert refusal.code is ErrorCode.EXHAUSTED
    room = room_of(refusal)
    assert isinstance(world.acted(ActionKind.BRANCH, "tree", count=20), RolloutBranched)
    late = world.act(ActionKind.BRANCH, "more", count=20)
    world.settle()
    assert 0 < room_of(world.refusals[late]) < room


@pytest.mark.parametrize("same_frame", [True, False])
def test_what_branches_are_going_to_take_is_counted_from_when_they_begin(
    same_frame: bool,
) -> None:
    world = with_state(SMALL, 400_000, "r1", "r2", "r3")
    world.open("r4")  # what follows goes into one frame
    first = world.act(ActionKind.BRANCH, "tree", local="r1", count=14)
    if not same_frame:
        world.settle()
        world.take()  # and by whoever owns the shard next
        world.open("r5")
    second = world.act(ActionKind.BRANCH, "tree", local="r2", count=14)
    world.settle()
    assert world.refusals[second].code is ErrorCode.EXHAUSTED
    for it in world.performing():
        world.done(it, error=unavailable("the node is gone"))
    world.settle()
    if same_frame:
        assert first in world.refusals
    # Nothing came of the others, so there is room again.
    reply = world.acted(ActionKind.BRANCH, "again", local="r3", count=14)
    assert isinstance(reply, RolloutBranched)


@pytest.mark.parametrize(
    ("kind", "first", "other"),
    [
        (ActionKind.BRANCH, {"count": 2}, {"count": 3}),
        (ActionKind.BRANCH, {"count": 2, "step": 1}, {"count": 2, "step": 2}),
        (ActionKind.BRANCH, {"count": 2, "step": 5}, {"count": 2}),
        (ActionKind.ROLLBACK, {}, {"step": 1}),
        (ActionKind.CHECKPOINT, {}, {"durable": True}),
        (ActionKind.CHECKPOINT, {"sandbox_id": "node-1.a"}, {"sandbox_id": "node-1.b"}),
    ],
)
def test_a_key_is_the_same_action_only_with_all_that_was_asked_with_it(
    kind: ActionKind, first: dict[str, Any], other: dict[str, Any]
) -> None:
    world = World()
    world.open()
    world.report(1)
    world.settle()
    world.acted(ActionKind.CHECKPOINT, "before")
    world.act(kind, "key", **first)
    world.settle()
    meanwhile = world.act(kind, "key", **other)
    for it in world.performing():
        world.done(it)
    world.settle()
    world.take()
    afterwards = world.act(kind, "key", **other)
    for refused in (meanwhile, afterwards):
        assert world.refusals[refused].code is ErrorCode.CONFLICT
        assert "'key'" in world.refusals[refused].message
    again = world.act(kind, "key", **first)
    assert again in world.answers
    assert world.performing() == []


@pytest.mark.parametrize(
    "values",
    [
        {str(part): [5.0] * 26_000 for part in range(6)},
        {f"{'🐢' * 250}{number:06}": 1 for number in range(1_500)},
    ],
    ids=["numbers", "names"],
)
def test_all_state_that_was_accepted_can_be_read_at_once(values: dict[str, Any]) -> None:
    world = World()
    world.open()
    refused: list[DsecError] = []
    for name, value in values.items():
        request = world.put({name: value})
        world.settle()
        if request in world.refusals:
            refused.append(world.refusals[request])
    kept = world.state()
    assert len(kept) == len(values) - len(refused)
    assert all(error.code is ErrorCode.EXHAUSTED for error in refused)
    assert len(encode(RolloutStateValues(version=1, values=kept))) < MESSAGE_BYTES_MAX


def test_only_names_that_were_there_are_recorded_as_gone() -> None:
    world = World()
    world.open()
    world.put({"there": 1})
    world.settle()
    world.put({}, "there", *(f"{number}{'x' * 250}" for number in range(1_000)))
    (frame,) = world.to_write
    assert len(encode(Frame(epoch="e", number=1, records=frame.records))) < 4096
    world.settle()
    assert world.state() == {}


def test_no_piece_of_an_answer_goes_out_while_a_checkpoint_is_made() -> None:
    world = World()
    world.open()
    world.report(1)
    world.settle()
    assert world.core.reporter(PROJECT, ROLLOUT, 1) == "node-1.a"
    world.act(ActionKind.CHECKPOINT, "one")
    world.settle()
    with pytest.raises(DsecError) as refusal:
        world.core.reporter(PROJECT, ROLLOUT, 1)
    assert refusal.value.code is ErrorCode.UNAVAILABLE
    assert refusal.value.retryable
    (it,) = world.performing()
    world.done(it)
    world.settle()
    assert world.core.reporter(PROJECT, ROLLOUT, 1) == "node-1.a"
