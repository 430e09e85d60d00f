"""Whatever is kept with rollouts fits the messages that carry it, and no key is anybody else's."""

from __future__ import annotations

from typing import Any

import pytest

from chronus_world import PROJECT, ROLLOUT, World
from dsec_chronus.records import ActionKind, Frame
from dsec_chronus.shard import LABELS_BYTES_MAX
from dsec_common.errors import DsecError, ErrorCode
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
    world.open_group(world.answers[lease].fence, {"t1": "x" * 200_000})  # type: ignore[attr-defined]
    world.settle()
    world.report(1, local="t1")
    world.settle()
    world.acted(ActionKind.CHECKPOINT, "one", local="t1")
    reply = world.acted(ActionKind.BRANCH, "tree", local="t1", count=64)
    assert isinstance(reply, RolloutBranched)


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
