"""How schedulers spread pools over nodes and find what waits; whose doing a call's end is."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec_common.errors import DsecError, ErrorCode, not_found, unavailable
from dsec_common.wire.base import ErrorReply
from dsec_common.wire.node import NodeHeartbeat, Resources
from dsec_common.wire.pool import CallFunction, CallStatus, pool_key
from dsec_common.wire.sandbox import (
    CpuClass,
    CreateSandbox,
    ExecCommand,
    ExecResult,
    Limits,
    SandboxCreated,
)
from dsec_common.wire.task import WarmUse
from dsec_scheduler.calls import request_of, result_of
from dsec_scheduler.config import SchedulerConfig
from dsec_scheduler.effects import Place
from dsec_scheduler.events import CreateAsked, HeartbeatSeen, Moment
from dsec_scheduler.state import SchedulerState
from dsec_scheduler.warm_nodes import WarmNodes, spread

ROOM = Resources(cpus=64, memory_bytes=1 << 36, sandboxes=100)
KEY = pool_key("p", "base@1", "", (), Limits())


def beat(node: str, warm: dict[str, int] | None = None, **changes: Any) -> NodeHeartbeat:
    return NodeHeartbeat(node=node, epoch="e", capacity=ROOM, warm=warm or {}, **changes)


@given(
    key=st.text(min_size=1),
    size=st.integers(0, 1000),
    nodes=st.lists(st.text(min_size=1), unique=True, max_size=20),
)
def test_a_pool_is_spread_evenly_whatever_the_order_of_nodes(
    key: str, size: int, nodes: list[str]
) -> None:
    shares = spread(key, size, nodes)
    assert shares == spread(key, size, nodes[::-1])
    assert set(shares) == set(nodes)
    if nodes:
        assert sum(shares.values()) == size
        assert max(shares.values()) - min(shares.values()) <= 1


def test_pools_of_one_do_not_all_go_to_the_same_node() -> None:
    nodes = ["a", "b", "c", "d"]
    holders = {
        max(shares, key=shares.__getitem__)
        for shares in (spread(f"pool {n}", 1, nodes) for n in range(50))
    }
    assert holders == set(nodes)


def test_what_waits_is_counted_down_until_the_next_heartbeat() -> None:
    warm = WarmNodes()
    warm.observe(beat("a", {KEY: 2}))
    warm.observe(beat("b", {KEY: 1}))
    taken = [warm.take(KEY, lambda _: True) for _ in range(4)]
    assert sorted(node for node in taken if node) == ["a", "a", "b"]
    assert taken[-1] is None
    assert not warm
    warm.observe(beat("a", {KEY: 1}))
    assert warm.take(KEY, lambda node: node != "a") is None
    assert warm.take(KEY, lambda _: True) == "a"


def test_a_node_that_holds_none_any_more_is_forgotten() -> None:
    warm = WarmNodes()
    warm.observe(beat("a", {KEY: 2, "other": 1}))
    warm.observe(beat("a"))
    assert not warm


def placed(state: SchedulerState, request: CreateSandbox, create_id: int = 1) -> str:
    at = Moment(100.0, 100.0)
    effects = state.handle(
        CreateAsked(
            create_id=create_id, project="p", request=request, local="x", timeout_s=5, at=at
        )
    )
    (place,) = effects
    assert isinstance(place, Place)
    return place.node


def cluster(*beats: NodeHeartbeat) -> SchedulerState:
    state = SchedulerState(SchedulerConfig(), random.Random(1))  # noqa: S311  a test
    for heartbeat in beats:
        state.handle(HeartbeatSeen(heartbeat=heartbeat, at=Moment(100.0, 100.0)))
    return state


BUSY = {"allocated": Resources(cpus=60, memory_bytes=1 << 35, sandboxes=90)}


def test_a_node_that_holds_one_ready_is_preferred_over_an_idle_one() -> None:
    state = cluster(beat("idle"), beat("warm", {KEY: 1}, **BUSY))
    assert placed(state, CreateSandbox(base="base@1"), 1) == "warm"
    assert placed(state, CreateSandbox(base="base@1"), 2) == "idle"  # that one is taken


@pytest.mark.parametrize(
    "request_",
    [
        CreateSandbox(base="base@1", warm=WarmUse.BYPASS),
        CreateSandbox(base="base@2"),
        CreateSandbox(base="base@1", toolkits=("tool@1",)),
        CreateSandbox(base="base@1", limits=Limits(cpu_class=CpuClass.BEST_EFFORT)),
    ],
)
def test_a_pool_of_other_sandboxes_attracts_nothing(request_: CreateSandbox) -> None:
    state = cluster(beat("idle"), beat("warm", {KEY: 1}, **BUSY))
    assert placed(state, request_) == "idle"


def test_other_limits_are_no_other_pool() -> None:
    limits = Limits(memory_bytes=1 << 30, cpus=2, pids=9, disk_bytes=1 << 20, inodes=99)
    assert pool_key("p", "base@1", "", (), limits) == KEY


def test_a_warm_node_without_room_or_that_drains_is_passed_over() -> None:
    full = {"allocated": ROOM}
    for changes in (full, {"draining": True}):
        state = cluster(beat("idle"), beat("warm", {KEY: 1}, **changes))
        assert placed(state, CreateSandbox(base="base@1")) == "idle"


def created(**changes: Any) -> SandboxCreated:
    return SandboxCreated(
        sandbox_id="n.x", node="n", created_at=0.0, layers=(), limits=Limits(), **changes
    )


def told(error: DsecError) -> ErrorReply:
    return ErrorReply.of(error)


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        (created(result=ExecResult(exit_code=0)), CallStatus.SUCCESS),
        (created(result=ExecResult(exit_code=3)), CallStatus.FAILED),
        (created(result=ExecResult(signal=9, oom=True)), CallStatus.FAILED),
        (created(result=ExecResult(exit_code=0, timed_out=True)), CallStatus.FAILED),
        (created(error=told(not_found("no such command", what="command"))), CallStatus.FAILED),
        (created(error=told(DsecError(ErrorCode.OOM, "it died"))), CallStatus.FAILED),
        (
            created(result=ExecResult(exit_code=0), error=told(not_found("no /out", what="path"))),
            CallStatus.FAILED,
        ),
        (
            created(
                error=told(DsecError(ErrorCode.EXHAUSTED, "disk full", details={"what": "path"}))
            ),
            CallStatus.FAILED,
        ),
        (created(error=told(unavailable("the node stops"))), CallStatus.SANDBOX_ERROR),
        (created(error=told(DsecError(ErrorCode.INTERNAL, "?"))), CallStatus.SANDBOX_ERROR),
        (created(), CallStatus.FAILED),
    ],
)
def test_an_end_is_told_as_whose_doing_it_is(answer: SandboxCreated, status: CallStatus) -> None:
    assert result_of(answer).status is status


def test_a_call_is_a_creation_that_goes_when_its_command_has_ended() -> None:
    call = CallFunction(
        base="base@1", command=ExecCommand(argv=("x",)), files={"/a": b"1"}, collect=("/b",)
    )
    request = request_of(call)
    assert request.delete_after
    assert request.message_id == call.message_id
    assert request.task is not None
    assert (request.task.write, request.task.read) == ({"/a": b"1"}, ("/b",))
