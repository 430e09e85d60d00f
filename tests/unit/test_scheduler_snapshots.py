"""A sandbox made from a snapshot goes to the node that has it, or nowhere."""

from __future__ import annotations

import random

import pytest

from dsec_common.errors import DsecError, ErrorCode
from dsec_common.wire.node import NodeHeartbeat, Resources
from dsec_common.wire.sandbox import CreateSandbox
from dsec_scheduler.admission import check
from dsec_scheduler.config import SchedulerConfig
from dsec_scheduler.effects import Effect, Place, Refuse
from dsec_scheduler.events import CreateAsked, HeartbeatSeen, Moment, PlaceRefused
from dsec_scheduler.state import SchedulerState

AT = Moment(1_000_000.0, 10.0)


def core_with(*nodes: str) -> SchedulerState:
    core = SchedulerState(SchedulerConfig(), random.Random(3))  # noqa: S311  repeatable
    capacity = Resources(cpus=100.0, memory_bytes=1 << 40, sandboxes=100)
    for node in nodes:
        beat = NodeHeartbeat(node=node, epoch="1", store_id=node, capacity=capacity)
        core.handle(HeartbeatSeen(heartbeat=beat, at=AT))
    return core


def ask(core: SchedulerState, snapshot: str, create_id: int = 1) -> list[Effect]:
    return core.handle(
        CreateAsked(
            create_id=create_id,
            project="default",
            request=CreateSandbox(base="", snapshot=snapshot),
            local="local",
            timeout_s=30.0,
            at=AT,
        )
    )


def test_only_the_node_that_has_the_snapshot_is_asked() -> None:
    core = core_with("a", "b", "c", "d")
    for number in range(20):
        (effect,) = ask(core, "c.snap", number)
        assert isinstance(effect, Place)
        assert effect.node == "c"


def test_a_snapshot_of_a_node_that_is_away_is_refused_as_such() -> None:
    (effect,) = ask(core_with("a", "b"), "gone.snap")
    assert isinstance(effect, Refuse)
    assert (effect.error.code, effect.error.details["node"]) == (ErrorCode.UNAVAILABLE, "gone")


def test_a_snapshot_that_its_node_does_not_know_is_not_found() -> None:
    core = core_with("a", "b")
    (place,) = ask(core, "a.snap")
    assert isinstance(place, Place)
    refused = DsecError(ErrorCode.NOT_FOUND, "there is no snapshot a.snap", details={})
    (effect,) = core.handle(PlaceRefused(create_id=1, error=refused, at=AT))
    assert isinstance(effect, Refuse)
    assert effect.error.code is ErrorCode.NOT_FOUND


@pytest.mark.parametrize(
    "request_",
    [
        CreateSandbox(base="", snapshot="no-dot"),
        CreateSandbox(base="", snapshot="a.*"),
        CreateSandbox(base="base@1", snapshot="a.snap"),
        CreateSandbox(base="", toolkits=("tools@1",), snapshot="a.snap"),
        CreateSandbox(base=""),
    ],
)
def test_a_request_that_makes_no_sense_is_invalid(request_: CreateSandbox) -> None:
    with pytest.raises(DsecError) as caught:
        check(request_, 60.0)
    assert caught.value.code is ErrorCode.INVALID


def test_a_snapshot_needs_no_base() -> None:
    check(CreateSandbox(base="", snapshot="a.snap"), 60.0)
