"""A sandbox's life over real NATS on the real kernel: paused, woken, idle, kept, run once."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from dsec_common import subjects
from dsec_common.errors import ErrorCode
from dsec_common.wire.elastic import NodeRetired, RetireNode
from dsec_common.wire.exec import (
    ExecEvents,
    ExecInfo,
    ExecList,
    ExecState,
    InspectExec,
    ListExecs,
    ReadExec,
    StartExec,
)
from dsec_common.wire.life import (
    PatchSandbox,
    PauseSandbox,
    ResumeSandbox,
    SandboxPaused,
    SandboxResumed,
    TouchSandbox,
)
from dsec_common.wire.node import ListNodeSandboxes, NodeSandboxes
from dsec_common.wire.sandbox import (
    CreateSandbox,
    DeleteSandbox,
    EndCause,
    ExecCommand,
    ExecResult,
    IdleAction,
    InspectSandbox,
    SandboxDeleted,
    SandboxEnded,
    SandboxInfo,
    SandboxState,
)
from refusals import refused
from sandboxd_node import BASE, NODE, NodeForTests

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="sandboxes need root")


async def turn(node: NodeForTests, sandbox_id: str, verb: str, message: Any) -> SandboxInfo:
    return await node.ask(sandbox_id, verb, message, SandboxInfo)


def frozen(sandbox_id: str) -> bool:
    local = sandbox_id.partition(".")[2]
    for root in (Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup")):
        events = root / f"dsec-{NODE}" / local / "cgroup.events"
        if events.exists():
            return "frozen 1" in events.read_text()
    raise AssertionError(sandbox_id)


async def test_a_paused_sandbox_wakes_once_for_many_requests(node: NodeForTests) -> None:
    sandbox_id = (await node.place()).sandbox_id
    info = await turn(node, sandbox_id, "pause", PauseSandbox())
    assert info.state is SandboxState.PAUSED
    assert frozen(sandbox_id)
    results = await asyncio.gather(*(node.exec(sandbox_id, "echo", "hi") for _ in range(16)))
    assert {result.stdout for result in results} == {b"hi\n"}
    assert not frozen(sandbox_id)
    await node.event_of(sandbox_id, SandboxPaused)
    await node.event_of(sandbox_id, SandboxResumed)
    assert [isinstance(event, SandboxResumed) for event in node.events].count(True) == 1


async def test_inspecting_listing_touching_and_labelling_do_not_wake(node: NodeForTests) -> None:
    sandbox_id = (await node.place(CreateSandbox(base=BASE, ttl_s=60.0))).sandbox_id
    await turn(node, sandbox_id, "pause", PauseSandbox())
    await turn(node, sandbox_id, "inspect", InspectSandbox())
    touched = await turn(node, sandbox_id, "touch", TouchSandbox(ttl_s=90.0))
    assert touched.ttl_s == 90.0
    patched = await turn(node, sandbox_id, "patch", PatchSandbox(labels={"a": "1"}))
    assert (patched.labels, patched.state) == ({"a": "1"}, SandboxState.PAUSED)
    assert frozen(sandbox_id)


async def has_begun(node: NodeForTests, sandbox_id: str) -> None:
    """Return when a command runs that says so in a file: one that comes later would wake it."""
    looking = "until [ -e /tmp/begun ]; do sleep 0.01; done"
    assert (await node.exec(sandbox_id, "sh", "-c", looking, timeout_s=20.0)).exit_code == 0


async def test_a_command_survives_a_pause_and_its_time_limit_stands_still(
    node: NodeForTests,
) -> None:
    sandbox_id = (await node.place()).sandbox_id
    line = ": > /tmp/begun; sleep 0.5; echo done"
    running = asyncio.create_task(node.exec(sandbox_id, "sh", "-c", line, timeout_s=2.5))
    await has_begun(node, sandbox_id)
    await turn(node, sandbox_id, "pause", PauseSandbox())
    await asyncio.sleep(2.6)  # longer than the limit, which is what is tried
    assert not running.done()
    await turn(node, sandbox_id, "resume", ResumeSandbox())
    result = await running
    assert (result.timed_out, result.stdout) == (False, b"done\n")


async def test_what_a_paused_sandbox_uses_is_told_and_a_listing_tells_it_when_asked(
    node: NodeForTests,
) -> None:
    runs = (await node.place()).sandbox_id
    stands = (await node.place()).sandbox_id
    await turn(node, stands, "pause", PauseSandbox())
    told = await turn(node, stands, "inspect", InspectSandbox())
    assert told.memory_bytes_used
    assert told.pids_used
    assert told.cpu_seconds_used

    async def listed(*, usage: bool) -> dict[str, SandboxInfo]:
        question = ListNodeSandboxes(project="default", usage=usage)
        subject = subjects.node_request(NODE, "list")
        page = await node.scheduler.request(subject, question, NodeSandboxes, timeout_s=20.0)
        return {info.sandbox_id: info for info in page.sandboxes}

    with_usage, without = await listed(usage=True), await listed(usage=False)
    assert all(with_usage[each].memory_bytes_used for each in (runs, stands))
    assert all(with_usage[each].pids_used for each in (runs, stands))
    assert {info.memory_bytes_used for info in without.values()} == {None}
    await node.ask(runs, "delete", DeleteSandbox(), SandboxDeleted)
    assert (await turn(node, runs, "inspect", InspectSandbox())).memory_bytes_used is None


async def test_asking_for_the_result_of_a_command_that_runs_does_not_wake(
    node: NodeForTests,
) -> None:
    sandbox_id = (await node.place()).sandbox_id
    start = StartExec(argv=("sh", "-c", "echo begun; sleep 60; echo done"))
    started = await node.ask(sandbox_id, "start_exec", start, ExecInfo)
    command = ExecCommand(argv=("cat", "/proc/sys/kernel/random/uuid"))
    first = await node.ask(sandbox_id, "exec", command, ExecResult)
    await turn(node, sandbox_id, "pause", PauseSandbox())
    again = await node.ask(sandbox_id, "exec", command, ExecResult)
    assert again.stdout == first.stdout
    read = ReadExec(exec_id=started.exec_id, after=0, wait_s=0.0)
    await node.ask(sandbox_id, "read_exec", read, ExecEvents)
    look = InspectExec(exec_id=started.exec_id)
    assert (await node.ask(sandbox_id, "inspect_exec", look, ExecInfo)).state is ExecState.RUNNING
    assert len((await node.ask(sandbox_id, "list_execs", ListExecs(), ExecList)).execs) == 1
    assert frozen(sandbox_id)
    new = ExecCommand(argv=("true",))
    assert (await node.ask(sandbox_id, "exec", new, ExecResult)).exit_code == 0
    assert not frozen(sandbox_id)


async def test_reading_tells_how_long_the_sandbox_has_stood_still_in_all(
    node: NodeForTests,
) -> None:
    sandbox_id = (await node.place()).sandbox_id
    start = StartExec(argv=("sleep", "60"))
    started = await node.ask(sandbox_id, "start_exec", start, ExecInfo)
    read = ReadExec(exec_id=started.exec_id, after=0, wait_s=0.0)

    async def told() -> float:
        return (await node.ask(sandbox_id, "read_exec", read, ExecEvents)).paused_s

    assert await told() == 0.0
    await turn(node, sandbox_id, "pause", PauseSandbox())
    sooner, later = await told(), await told()
    assert 0.0 < sooner < later
    await turn(node, sandbox_id, "resume", ResumeSandbox())
    in_all = await told()
    assert in_all > later
    info = await turn(node, sandbox_id, "inspect", InspectSandbox())
    assert await told() == info.paused_s == in_all


async def test_a_paused_sandbox_is_deleted_with_the_command_that_runs_in_it(
    node: NodeForTests,
) -> None:
    sandbox_id = (await node.place()).sandbox_id
    line = ": > /tmp/begun; sleep 60"
    running = asyncio.create_task(refused(node.exec(sandbox_id, "sh", "-c", line)))
    await has_begun(node, sandbox_id)
    await turn(node, sandbox_id, "pause", PauseSandbox())
    deleted = await node.ask(sandbox_id, "delete", DeleteSandbox(), SandboxDeleted)
    assert deleted.end_cause is EndCause.DELETED
    assert (await running).code is ErrorCode.EXPIRED


async def test_an_idle_sandbox_ends_and_another_is_paused(node: NodeForTests) -> None:
    ends = await node.place(CreateSandbox(base=BASE, idle_ttl_s=0.5))
    rests = await node.place(CreateSandbox(base=BASE, idle_ttl_s=0.5, idle_action=IdleAction.PAUSE))
    ended = await node.event_of(ends.sandbox_id, SandboxEnded)
    assert ended.cause is EndCause.IDLE
    paused = await node.event_of(rests.sandbox_id, SandboxPaused)
    assert paused.reason == "idle"
    assert (await node.exec(rests.sandbox_id, "echo", "awake")).stdout == b"awake\n"


async def test_a_first_command_is_answered_with_its_sandbox(node: NodeForTests) -> None:
    command = ExecCommand(argv=("sh", "-c", "echo out; echo err >&2; exit 4"))
    created = await node.place(CreateSandbox(base=BASE, command=command))
    assert created.result is not None
    result = created.result
    assert (result.exit_code, result.stdout, result.stderr) == (4, b"out\n", b"err\n")
    assert (await node.exec(created.sandbox_id, "true")).exit_code == 0


async def test_a_first_command_that_is_not_there_leaves_the_sandbox(node: NodeForTests) -> None:
    created = await node.place(CreateSandbox(base=BASE, command=ExecCommand(argv=("nowhere",))))
    assert created.result is None
    assert created.error is not None
    assert created.error.code is ErrorCode.NOT_FOUND
    assert (await node.exec(created.sandbox_id, "true")).exit_code == 0


async def test_a_sandbox_made_for_one_command_goes_with_it(node: NodeForTests) -> None:
    command = ExecCommand(argv=("echo", "once"))
    created = await node.place(CreateSandbox(base=BASE, command=command, delete_after=True))
    assert isinstance(created.result, ExecResult)
    ended = await node.event_of(created.sandbox_id, SandboxEnded)
    assert ended.cause is EndCause.DELETED


async def test_another_project_can_turn_nothing(node: NodeForTests) -> None:
    sandbox_id = (await node.place()).sandbox_id
    for verb, message in (
        ("pause", PauseSandbox()),
        ("resume", ResumeSandbox()),
        ("touch", TouchSandbox(ttl_s=0.0)),
        ("patch", PatchSandbox(labels={"mine": "1"})),
    ):
        asking = node.ask(sandbox_id, verb, message, SandboxInfo, bus=node.other, project="other")
        assert (await refused(asking)).code is ErrorCode.NOT_FOUND
    info = await turn(node, sandbox_id, "inspect", InspectSandbox())
    assert (info.state, info.labels) == (SandboxState.RUNNING, {})


async def test_a_reason_for_a_pause_has_an_end(node: NodeForTests) -> None:
    sandbox_id = (await node.place()).sandbox_id
    error = await refused(turn(node, sandbox_id, "pause", PauseSandbox(reason="x" * 257)))
    assert error.code is ErrorCode.INVALID
    assert not frozen(sandbox_id)


async def test_an_idle_node_that_is_retired_takes_nothing_any_more(node: NodeForTests) -> None:
    subject = subjects.node_request(NODE, "retire")
    sandbox_id = (await node.place()).sandbox_id
    error = await refused(node.scheduler.request(subject, RetireNode(), NodeRetired))
    assert (error.code, error.details["sandboxes"]) == (ErrorCode.CONFLICT, 1)
    assert (await node.exec(sandbox_id, "true")).exit_code == 0
    await node.ask(sandbox_id, "delete", DeleteSandbox(), SandboxDeleted)
    for _ in range(2):
        told = await node.scheduler.request(subject, RetireNode(), NodeRetired)
        assert told.node == NODE
    await node.until(lambda: node.heartbeats[-1].draining)
    assert (await refused(node.place())).details["reason"] == "draining"
